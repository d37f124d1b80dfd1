"""Times the kernels on a GPU, beside what one would use instead:

    python -m kernels.bench       from the project's folder

First the results are checked against float64. Then, for forward + backward: milliseconds; GB/s by the bytes that have to
move (so a slower way shows a lower number, whatever it moves itself); percent of the rate at which this GPU copies
memory, measured in the same run; and the memory it takes at its peak beyond the logits.

Bytes per logit that have to move in bfloat16, and what the eager code below moves if every operator reads its inputs and
writes its outputs once, most of it in float32:

                         forward                  backward                                            eager
    log-prob             2 read                   2 read, 2 written                         6            36
    log-prob, entropy    2 read                   2 read, 2 written                         6           112
    exact KL             2 + 2 read               2 + 2 read, 2 written                    10           122

(Eager log-prob: forward casts, 2 + 4, and log_softmax, 4 + 4; backward fills gather's gradient with zeros, 4, log_softmax's
reads two and writes one, 12, and the cast back, 4 + 2. Where V < W, the backward of [:, :V] fills and copies, 6 more.)

Without a GPU nothing is timed; it prints the bytes that have to move for each size.
"""

import functools
import math
import statistics
import time

import torch

from . import linear_logprob, linear_logprobs, token_kl, token_logprobs, token_logprobs_and_entropy

SIZES = [(8192, 50304, 50257), (65536, 50304, 50257), (8192, 151936, 151936), (65536, 151936, 151936)]  # N, W, V
BYTES = {"log-prob": 6, "log-prob, entropy": 6, "exact KL": 10}
HEAD = (65536, 4096, 151936)  # N, C, V


# What one would write without kernels. Each takes logits [N, W] and returns [N] values to sum up.


def eager_logprob(logits, other, targets, V):
    return logits[:, :V].float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def eager_entropy(logits, other, targets, V):
    log_p = logits[:, :V].float().log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0] - (log_p.exp() * log_p).sum(-1)


def eager_kl(logits, other, targets, V):
    log_p, log_q = logits[:, :V].float().log_softmax(-1), other[:, :V].float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def our_logprob(logits, other, targets, V, inplace=False):
    return token_logprobs(logits, targets, vocab_size=V, inplace_backward=inplace)


def our_entropy(logits, other, targets, V, inplace=False):
    logp, entropy = token_logprobs_and_entropy(logits, targets, vocab_size=V, inplace_backward=inplace)
    return logp + entropy


def our_kl(logits, other, targets, V):
    return token_kl(logits, other, vocab_size=V)


def liger_logprob():
    """Liger's cross-entropy with a loss per token, or None if Liger is not installed."""
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss
    except ImportError:
        return None
    loss = LigerCrossEntropyLoss(reduction="none")
    return lambda logits, other, targets, V: -loss(logits, targets)


def implementations():
    """What is measured. The ways in place overwrite the logits, and so does Liger; a time does not depend on values."""
    return {
        "log-prob": {
            "kernels": our_logprob,
            "kernels, in place": functools.partial(our_logprob, inplace=True),
            "eager PyTorch": eager_logprob,
            "torch.compile": torch.compile(eager_logprob, fullgraph=True),
            "Liger": liger_logprob(),
        },
        "log-prob, entropy": {
            "kernels": our_entropy,
            "kernels, in place": functools.partial(our_entropy, inplace=True),
            "eager PyTorch": eager_entropy,
            "torch.compile": torch.compile(eager_entropy, fullgraph=True),
        },
        "exact KL": {
            "kernels": our_kl,
            "eager PyTorch": eager_kl,
            "torch.compile": torch.compile(eager_kl, fullgraph=True),
        },
    }


def seconds(function, device, rounds=10):
    """Median time of one call. On a GPU all rounds are queued before the first is waited for, so that it never idles while
    Python prepares the next."""
    for _ in range(3):
        function()
    if device != "cuda":
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def peak_memory(function, device):
    """GB that a call takes at its peak, beyond what is there already."""
    if device != "cuda":
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def forward_backward(function, logits, other, targets, V):
    values = function(logits, other, targets, V)
    (gradient,) = torch.autograd.grad(values, logits, torch.ones_like(values))
    return values, gradient


def copy_rate(device, size=2**31):
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def data(N, W, V, device):
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(N, W, dtype=torch.bfloat16, device=device).normal_(0, 3, generator=generator)
    return logits, torch.randint(0, V, (N,), device=device, generator=generator)


def check(device, N=64):
    """What is timed, on `device` and against float64; raises if they differ by more than rounding."""
    for W, V in {(W, V) for _, W, V in SIZES}:
        logits, targets = data(N, W, V, device)
        other, exact = logits.flip(0), logits.double().requires_grad_()
        logits.requires_grad_()
        log_p, log_q = exact[:, :V].log_softmax(-1), other[:, :V].double().log_softmax(-1)
        logp, p = log_p.gather(-1, targets[:, None])[:, 0], log_p.exp()
        for ours, expected in (
            (our_logprob, logp),
            (our_entropy, logp - (p * log_p).sum(-1)),
            (our_kl, (p * (log_p - log_q)).sum(-1)),
            (lambda *arguments: our_logprob(*arguments, inplace=True), logp),  # the last: it overwrites the logits
        ):
            values, gradient = forward_backward(ours, logits, other, targets, V)
            torch.testing.assert_close(values.double(), expected, rtol=2e-6, atol=4e-6)
            (exact_gradient,) = torch.autograd.grad(expected.sum(), exact, retain_graph=True)
            torch.testing.assert_close(gradient.double(), exact_gradient, rtol=2**-7, atol=1e-6)
    # the chunked head, in two chunks, at another temperature
    N, C, V = linear_logprob.CHUNK_TOKENS + 100, 64, 500
    hidden, weight = (torch.randn(n, C, dtype=torch.bfloat16, device=device).requires_grad_() for n in (N, 512))
    targets = torch.randint(0, V, (N,), device=device)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = linear_logprobs(hidden, weight, targets, 2.0, V)
    expected = (exact[0] @ exact[1][:V].T / 2.0).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), expected, rtol=2e-6, atol=2e-5)
    for ours, theirs in zip(
        torch.autograd.grad(logp.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), exact), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-6, atol=2**-6 * theirs.abs().max().item())


def table(device, sizes):
    rate = copy_rate(device, 2**31 if device == "cuda" else 2**24)
    print(f"copying memory: {rate / 1e9:.0f} GB/s\n")
    print(f"{'':18}{'V':>8}{'N':>7}  {'':18}{'ms':>9}{'GB/s':>8}{'of copy':>9}{'peak GB':>9}")
    ways, compiled_for = {}, None
    for N, W, V in sizes:
        if V != compiled_for:  # each vocabulary is compiled for itself, as it is by the kernels
            torch._dynamo.reset()
            ways, compiled_for = implementations(), V
        try:
            time_size(device, N, W, V, ways, rate)
        except torch.OutOfMemoryError:
            print("  no room for the logits")


def time_size(device, N, W, V, ways, rate):
    logits, targets = data(N, W, V, device)
    other = torch.empty_like(logits).normal_(0, 3)
    for tensor in (logits, other, targets):
        torch._dynamo.mark_dynamic(tensor, 0)  # no compilation for each N
    logits.requires_grad_()
    for operation in ways:
        for name, function in ways[operation].items():
            print(f"{operation:18}{V:>8}{N:>7}  {name:18}", end="", flush=True)
            if function is None:
                print("  not installed")
                continue
            call = functools.partial(forward_backward, function, logits, other, targets, V)
            try:
                call()  # compiles
                memory, t = peak_memory(call, device), seconds(call, device)
            except torch.OutOfMemoryError:
                print("  out of memory")
                continue
            moved = BYTES[operation] * N * V / t
            print(f"{t * 1e3:9.2f}{moved / 1e9:8.0f}{moved / rate:9.0%}{memory:9.1f}")


def head_table(device, N, C, V):
    """The chunked head beside head and log-prob one after the other."""
    hidden = torch.randn(N, C, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = torch.randn(V, C, dtype=torch.bfloat16, device=device).mul_(C**-0.5).requires_grad_()
    targets = torch.randint(0, V, (N,), device=device)

    def gradients(function):
        return torch.autograd.grad(function(hidden, weight).sum(), (hidden, weight))

    print(f"\nhead and log-prob of {N} tokens, width {C}, {V} logits, forward + backward{'ms':>15}{'peak GB':>9}")
    for name, function in (
        ("in chunks of 4096, float32 logits", lambda hidden, weight: linear_logprobs(hidden, weight, targets)),
        ("bfloat16 logits, then the kernels", lambda hidden, weight: token_logprobs(hidden @ weight.T, targets)),
        ("bfloat16 logits, then eager", lambda hidden, weight: eager_logprob(hidden @ weight.T, None, targets, V)),
    ):
        call = functools.partial(gradients, function)
        try:
            memory, t = peak_memory(call, device), seconds(call, device, 3)
            print(f"{name:77}{t * 1e3:9.1f}{memory:9.1f}")
        except torch.OutOfMemoryError:
            print(f"{name:77}  out of memory")


def main():
    if not torch.cuda.is_available():
        print(
            "No GPU here: nothing is timed. What forward + backward have to move for N tokens x V logits in bfloat16:\n"
        )
        print(f"{'':18}{'bytes/logit':>13}" + "".join(f"{f'{N} x {V}':>17}" for N, _, V in SIZES))
        for operation, size in BYTES.items():
            print(f"{operation:18}{size:>13}" + "".join(f"{size * N * V / 1e9:>14.1f} GB" for N, _, V in SIZES))
        return
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    check("cuda")
    print("results checked against float64")
    table("cuda", SIZES)
    head_table("cuda", *HEAD)


if __name__ == "__main__":
    main()
