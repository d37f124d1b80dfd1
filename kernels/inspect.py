"""Compiles the kernels for GPUs that are not there, and looks at the machine code:

    python -m kernels.inspect       from the project's folder; half a minute, a line per kernel, dtype and GPU

No driver is needed: Triton carries NVIDIA's assembler and disassembler, and LLVM for AMD. What can be known without
running anything:

- registers per thread and shared memory per program: how many programs fit on the GPU at once
- spills, registers that did not fit and went to memory: there must be none
- the width of memory accesses: all logits must move 128 bits at a time, the most that one instruction can
- instructions per logit, in the loop over the vocabulary (or in the whole program, where it has none). They count
  because the memory is so fast: an H200, of 4.8 TB/s by its data sheet, copies 4.3 TB/s in practice, which is 2.15e12
  bfloat16 logits a second; its 132 x 4 schedulers issue 1.75e9 instructions a second for 32 threads each. That is 13.8
  instructions for each 2 bytes; a kernel with more of them waits for its arithmetic and not for memory. The plain
  forward pass, the commonest, is held to 9.

Exits with status 1 and names the kernel if one of these does not hold.
"""

import os
import re
import subprocess
import sys
import tempfile

V, WIDTH = 50257, 50304  # GPT-2's vocabulary, padded as gpt.py does
# backend, architecture, threads per warp, and the limits: registers per thread, bytes of shared memory per program
GPUS = {
    "sm80": ("cuda", 80, 32, 255, 163 * 1024),
    "sm90": ("cuda", 90, 32, 255, 227 * 1024),
    "sm100": ("cuda", 100, 32, 255, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 512, 64 * 1024),
}
# name: file, function, with entropy, rows of logits read and written, most instructions per logit (bfloat16, sm90)
KERNELS = {
    "logprob forward": ("logprob", "_forward", False, 1, 9.0),
    "logprob forward, entropy": ("logprob", "_forward", True, 1, 13.8),
    "logprob backward": ("logprob", "_backward", False, 2, 2 * 13.8),
    "logprob backward, entropy": ("logprob", "_backward", True, 2, 2 * 13.8),
    "kl forward": ("kl", "_forward", False, 2, 2 * 13.8),
    "kl backward": ("kl", "_backward", False, 3, 3 * 13.8),
}


def compile_for(kernel, block, entropy, dtype, gpu):
    """Compiles a kernel as it is launched on aligned rows of V logits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .logprob import WARPS

    constants = {"V": V, "WIDTH": WIDTH, "BLOCK": block, "ENTROPY": entropy}
    if not entropy:
        constants["g_entropy" if "g_entropy" in kernel.arg_names else "entropy"] = None
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "c":
            signature[name] = "fp32"
        elif name.endswith(("stride", "inner")):
            signature[name] = "i32"
        elif name == "targets":
            signature[name] = "*i64"
        else:
            signature[name] = f"*{dtype}" if "logits" in name or name == "gradient" else "*fp32"
        if signature[name].startswith("*") or name.endswith("stride"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget(*GPUS[gpu][:3])
    return triton.compile(source, target=target, options=dict(num_warps=WARPS, enable_fp_fusion=True))


def cuobjdump(flag, cubin):
    import triton

    program = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, flag, file.name], capture_output=True, text=True, check=True).stdout


def count_instructions(sass):
    """Instructions of the longest loop; of the whole program if it has none."""
    code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)]
    loops = []
    for address, text in code:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:  # backwards
            loops.append(sum(int(jump[1], 16) <= other <= address for other, _ in code))
    return max(loops, default=sum("NOP" not in text for _, text in code))


def look(compiled, gpu):
    """-> registers, spills, accesses of 128 bits (of 256: two), of 16 bits, and instructions (None on AMD)."""
    if GPUS[gpu][0] == "hip":
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        spills = sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text))
        wide = len(re.findall(r"(?:global|buffer)_(?:load|store)_dwordx4", text))
        narrow = len(re.findall(r"(?:global|buffer)_(?:load|store)_\w*(?:short|16)", text))
        return registers, spills, wide, narrow, None
    usage = cuobjdump("-res-usage", compiled.asm["cubin"])
    registers, spills = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfu](\d+)\s", compiled.asm["ptx"])
    widths = [int(count or 1) * int(bits) for count, bits in accesses]
    instructions = count_instructions(cuobjdump("-sass", compiled.asm["cubin"]))
    return registers, spills, sum(width // 128 for width in widths), widths.count(16), instructions


def main():
    os.environ.pop("TRITON_INTERPRET", None)  # one process cannot both interpret and compile
    cache = tempfile.TemporaryDirectory()
    os.environ["TRITON_CACHE_DIR"] = cache.name
    try:
        import triton
    except ImportError as error:
        sys.exit(f"nothing to compile with, Triton cannot be imported: {error}")
    from . import kl, logprob

    print(f"Triton {triton.__version__}; rows of {V} logits, padded to {WIDTH}; {logprob.WARPS} warps\n")
    print(
        "128-bit, 16-bit: how many instructions in the program access memory that widely. The one of 16 bits reads the target's"
    )
    print("logit. Instructions per logit are not counted on AMD's gfx942.\n")
    print("kernel                     logits    GPU  registers  spills  shared  128-bit  16-bit  instructions/logit")
    broken = []
    for name, (file, function, entropy, streams, limit) in KERNELS.items():
        kernel = getattr({"kl": kl, "logprob": logprob}[file], function)
        block = logprob.FORWARD_BLOCK if function == "_forward" else logprob.BACKWARD_BLOCK
        for dtype, size in (("bf16", 2), ("fp32", 4)):
            for gpu, (_, _, warp, max_registers, max_shared) in GPUS.items():
                compiled = compile_for(kernel, block, entropy, dtype, gpu)
                registers, spills, wide, narrow, instructions = look(compiled, gpu)
                shared, per_thread = compiled.metadata.shared, block / (logprob.WARPS * warp)
                places = 2 if function == "_forward" else 1  # where logits are read: in the loop and in the tail
                needed = places * streams * per_thread * size / 16
                per_logit = None if instructions is None else instructions / per_thread
                shown = "" if per_logit is None else f"{per_logit:.1f}"
                print(
                    f"{name:<27}{dtype:>6}{gpu:>7}{registers:>11}{spills:>8}{shared:>8}{wide:>9}{narrow:>8}{shown:>20}"
                )
                checks = {
                    f"{spills} bytes or registers spilled": spills == 0,
                    f"{registers} registers, {max_registers} are there": registers <= max_registers,
                    f"{shared} bytes of shared memory, {max_shared} are there": shared <= max_shared,
                    # at each place, all of a thread's logits (fewer in the tail on AMD, where lanes beyond the row drop out)
                    f"{wide} accesses of 128 bits, {needed:.0f} needed": (
                        wide == needed if gpu.startswith("sm") else wide >= needed / places
                    ),
                    # one logit alone is read by 16: the target's, in the forward pass
                    f"{narrow} accesses of 16 bits": narrow <= (name.startswith("logprob forward") and size == 2),
                    f"{shown} instructions per logit, limit {limit}": (
                        gpu != "sm90" or dtype != "bf16" or per_logit <= limit
                    ),
                }
                broken += [f"{name}, {dtype}, {gpu}: {what}" for what, holds in checks.items() if not holds]
    if broken:
        sys.exit("\nbroken: " + "\nbroken: ".join(broken))
    print("\nno spills, all logits in accesses of 128 bits, everything within the limits")


if __name__ == "__main__":
    main()
