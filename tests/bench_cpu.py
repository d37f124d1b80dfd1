"""How fast the parts are on a CPU, beside transformers, TRL and the bound: python tests/bench_cpu.py

Everything is timed in one run on the same machine, medians of several rounds; the table's ratios are what counts. The
bound is the time of the bare matrix multiplies and attention of the same shapes (forward, and for training also
backward), with nothing around them. Model: vocabulary 512, 4 layers, 4 heads, width 128, context 128, float32, two
threads, random weights; the same weights in every peer. "Random lengths": the weights are set so that a response ends
with the same chance at every token, 16 tokens on average of at most 32. Parts d and e time single functions, and measure
the memory they take at their peak; e needs 11 GB of it.
"""

import argparse
import contextlib
import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import grpo
from gpt import GPT, GPTConfig, to_slots

V, L, H, C, CONTEXT, PROMPT, NEW, EOS = 512, 4, 4, 128, 128, 16, 32, 0
ROWS, GROUP, WIDTH = 256, 8, 48


def median(f, rounds):
    f()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        f()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def make_model(mean_length=None):
    """Random weights. With `mean_length`, the final norm's bias points along EOS' embedding, so far that responses
    have this mean length."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(V, CONTEXT, L, H, C))
    prompts = torch.randint(1, V, (ROWS, PROMPT)).tolist()
    if mean_length is None:
        return model, prompts
    low, high = 0.0, 12.0
    direction = model.wte.weight[EOS].detach() / model.wte.weight[EOS].detach().square().sum()
    for _ in range(12):
        middle = (low + high) / 2
        model.ln_f.bias.data = middle * direction
        n = model.generate(prompts, NEW, eos=EOS, generator=torch.Generator().manual_seed(0)).mask.sum(1).float().mean()
        low, high = (middle, high) if n > mean_length else (low, middle)
    return model, prompts


def hf_gpt2(model):
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.GPT2Config(vocab_size=V, n_positions=CONTEXT, n_embd=C, n_layer=L, n_head=H, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                                     bos_token_id=EOS, eos_token_id=EOS, pad_token_id=EOS)  # fmt: skip
    hf = transformers.GPT2LMHeadModel(config)
    weights = model.state_dict()
    with torch.no_grad():
        for name, value in hf.state_dict().items():
            ours = weights[name.removeprefix("transformer.")]
            value.copy_(
                ours.T if name.endswith("weight") and any(x in name for x in ("c_attn", "c_proj", "c_fc")) else ours
            )
    return hf


def decode_bound(rounds):
    """Prefill of ROWS x PROMPT tokens and NEW - 1 steps of ROWS tokens: matmuls and attention alone."""
    weights = [torch.randn(o, i) for o, i in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C))]
    head = torch.randn(V, C)
    kv = torch.randn(L, 2, ROWS, H, PROMPT + NEW, C // H)

    def layer(x, x4, q, kv):
        for w, i in zip(weights, (x, x, x, x4)):
            F.linear(i, w)
        F.scaled_dot_product_attention(q, *kv, is_causal=q.shape[2] > 1)

    xs = {
        n: (torch.randn(ROWS * n, C), torch.randn(ROWS * n, 4 * C), torch.randn(ROWS, H, n, C // H))
        for n in (PROMPT, 1)
    }

    @torch.no_grad()
    def run():
        for one in kv:
            layer(*xs[PROMPT], one[:, :, :, :PROMPT])
        for t in range(1, NEW + 1):
            F.linear(xs[1][0], head)
            if t < NEW:
                for one in kv:
                    layer(*xs[1], one[:, :, :, : PROMPT + t])

    return median(run, rounds)


def train_bound(rows, width, rounds, head_tokens=None):
    """Forward and backward of rows x width tokens, matmuls and attention alone; the head on head_tokens of each row."""
    x, x4 = torch.randn(rows * width, C, requires_grad=True), torch.randn(rows * width, 4 * C, requires_grad=True)
    q, k, v = (torch.randn(rows, H, width, C // H, requires_grad=True) for _ in range(3))
    weights = [torch.randn(o, i, requires_grad=True) for o, i in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C))]
    head, xh = torch.randn(V, C, requires_grad=True), torch.randn(rows * (head_tokens or width), C, requires_grad=True)
    grads = [torch.randn(rows * width, w.shape[0]) for w in weights]
    grad_head, grad_q = torch.randn(len(xh), V), torch.randn(rows, H, width, C // H)

    def run():
        for _ in range(L):
            for w, i, g in zip(weights, (x, x, x, x4), grads):
                torch.autograd.grad(F.linear(i, w), (i, w), g)
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad_q)
        torch.autograd.grad(F.linear(xh, head), (xh, head), grad_head)

    return median(run, rounds)


def bench_decoding(rounds):
    rows = []
    for name, mean in (("32 tokens each", None), ("random lengths", NEW / 2)):
        model, prompts = make_model(mean)
        eos = EOS if mean else None
        count = []

        def ours(model=model, prompts=prompts, eos=eos, count=count):
            count.append(int(model.generate(prompts, NEW, eos=eos).mask.sum()))

        speed = {"this project": statistics.median(count) / t if (t := median(ours, rounds)) else 0}
        try:
            hf, ids = hf_gpt2(model).eval(), torch.tensor(prompts)
            got = []

            def theirs(hf=hf, ids=ids, eos=eos, got=got):
                out = hf.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW,
                    do_sample=True,
                    top_k=0,
                    eos_token_id=eos,
                    pad_token_id=EOS,
                )
                new = out[:, PROMPT:]
                got.append(
                    new.numel() if eos is None else int(((new == EOS).cumsum(1) - (new == EOS).int() == 0).sum())
                )

            speed["transformers generate"] = statistics.median(got) / t if (t := median(theirs, rounds)) else 0
        except ImportError:
            speed["transformers generate"] = None
        if mean is None:
            speed["bound"] = ROWS * NEW / decode_bound(rounds)
        rows += [
            (f"(a) decoding, {name}", who, s, "tokens/s", speed["this project"] / s if s else None)
            for who, s in speed.items()
        ]
    return rows


def our_grpo_step(model, prompts, eos, beta):
    """The same calls, in the same order, as grpo.py's loop makes for one rollout and one update."""
    import copy

    reference = copy.deepcopy(model) if beta else None
    optimizer = common.AdamW(model.parameters(), lr=1e-9)

    def step():
        rollout = model.generate(prompts, NEW, eos=eos)
        micro = rollout.attention_mask.sum(1).argsort(stable=True).split(64)
        ref_logp = reference.rollout_logprobs(rollout, micro) if beta else None
        advantages = grpo.group_advantages(torch.rand(ROWS // GROUP, GROUP)).view(-1)
        total = int(rollout.mask.sum())
        for rows in micro:
            logp, entropy = model.token_logprobs_and_entropy(*model.response_states(rollout, rows))
            logp = to_slots(logp, rollout.mask[rows])
            loss, _ = grpo.policy_loss(logp, logp.detach(), advantages[rows], rollout.mask[rows], ref_logp=ref_logp[rows] if beta else None,
                                       beta=beta, denominator=total)  # fmt: skip
            loss.backward()
        common.finish_gradients(optimizer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_grpo_step(model, prompts, beta, steps, folder):
    """Seconds of TRL's steps after the first two, or None where it is not installed."""
    try:
        from datasets import Dataset
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        return None
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(V)}, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOS}", pad_token=f"w{EOS}")
    texts = [" ".join(f"w{i}" for i in prompt) for prompt in prompts[::GROUP]]
    times = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kw):
            times.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=ROWS, num_generations=GROUP, max_completion_length=NEW, beta=beta, learning_rate=1e-9, max_steps=steps,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, temperature=1.0,
        top_k=0, model_init_kwargs=dict(dtype="float32"),
    )  # fmt: skip
    hf_gpt2(model).save_pretrained(folder + "/model")
    trainer = GRPOTrainer(
        model=folder + "/model", args=config, processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": texts}),
        reward_funcs=lambda completions, **kw: torch.rand(len(completions)).tolist(), callbacks=[Clock()],
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return statistics.median(b - a for a, b in itertools.pairwise(times[1:]))


def bench_grpo(rounds):
    rows = []
    for name, mean in (("32 tokens each", None), ("random lengths", NEW / 2)):
        for beta in (0.0, 0.04):
            model, prompts = make_model(mean)
            if mean is None:  # EOS practically never: its logit is pushed far down
                model.ln_f.bias.data = (
                    -20 * model.wte.weight[EOS].detach() / model.wte.weight[EOS].detach().square().sum()
                )
            prompts = [p for p in prompts[: ROWS // GROUP] for _ in range(GROUP)]
            seconds = {}
            with tempfile.TemporaryDirectory() as folder:
                seconds["TRL GRPOTrainer"] = trl_grpo_step(model, prompts, beta, rounds + 3, folder)
            seconds["this project"] = median(our_grpo_step(model, prompts, EOS, beta), rounds)
            if mean is None and not beta:
                seconds["bound"] = decode_bound(rounds) + train_bound(ROWS, PROMPT + NEW, rounds, NEW)
            ours = seconds["this project"]
            rows += [
                (f"(b) GRPO step, {name}, beta {beta}", who, s, "s", s / ours if s else None)
                for who, s in sorted(seconds.items(), reverse=True)
            ]
    return rows


def bench_training(rounds):
    model, _ = make_model()
    ids = torch.randint(0, V, (ROWS, WIDTH + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)

    def ours():
        for part in ids.split(32):
            (-model.token_logprobs(model.hidden(part[:, :-1]), part[:, 1:]).sum() / (ROWS * WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    speed = {"this project": ROWS * WIDTH / median(ours, rounds)}
    try:
        hf = hf_gpt2(model).train()
        hf_optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-9, fused=True)

        def theirs(size):
            for part in ids.split(size):
                logits = hf(part[:, :-1]).logits
                (
                    F.cross_entropy(logits.reshape(-1, V), part[:, 1:].reshape(-1), reduction="sum") / (ROWS * WIDTH)
                ).backward()
            hf_optimizer.step()
            hf_optimizer.zero_grad()

        speed["transformers GPT-2"] = (
            ROWS * WIDTH / min(median(lambda: theirs(ROWS), rounds), median(lambda: theirs(32), rounds))
        )
    except ImportError:
        speed["transformers GPT-2"] = None
    speed["bound"] = ROWS * WIDTH / min(train_bound(ROWS, WIDTH, rounds), train_bound(32, WIDTH, rounds) * ROWS / 32)
    return [
        ("(c) training, 256 x 48", who, s, "tokens/s", speed["this project"] / s if s else None)
        for who, s in speed.items()
    ]


# Each way runs in a process of its own, which prints seconds and how many bytes it took beyond what was there before
IN_A_PROCESS = """
import resource, sys, time, torch
sys.path.insert(0, {root!r})
from kernels import linear_logprobs, token_logprobs
torch.set_num_threads(2)
torch.manual_seed(0)
def now():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
{setup}
def step():
    for leaf in leaves:
        leaf.grad = None
    ({way}).sum().backward()
N, small = n, 4
n = small
make(); step()  # loads what the first call loads
before = now()
n = N
make(); step()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
times = []
for _ in range({rounds}):
    began = time.perf_counter(); step(); times.append(time.perf_counter() - began)
print(sorted(times)[len(times) // 2] if times else float("nan"), peak)
"""


def in_a_process(setup, way, rounds):
    root = str(Path(__file__).resolve().parent.parent)
    program = IN_A_PROCESS.format(root=root, setup=setup, way=way, rounds=rounds)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return map(float, done.stdout.split())


def bench_logprob(rounds):
    """Log-prob of a token, forward + backward, beside log_softmax and gather."""
    rows = []
    for n, vocabulary in ((4096, 50257), (576, 512)):
        setup = f"""
n = {n}
def make():
    global logits, targets, leaves
    logits = torch.zeros(n, {vocabulary}).uniform_(-4, 4).requires_grad_()
    targets, leaves = torch.arange(n) % {vocabulary}, [logits]
"""
        ways = {
            "this project": "token_logprobs(logits, targets)",
            "log_softmax, gather": "logits.log_softmax(-1).gather(-1, targets[:, None])",
        }
        seen = {name: tuple(in_a_process(setup, way, rounds)) for name, way in ways.items()}
        for name, (seconds, peak) in seen.items():
            what = f"(d) log-prob [{n}, {vocabulary}]"
            if n * vocabulary > 1e8:  # else the memory is lost among everything else
                what += f", {peak / (4 * n * vocabulary):.1f} x logits"
            rows.append((what, name, seconds, "s", seconds / seen["this project"][0]))
    return rows


def bench_head(rounds):
    """Head and log-prob of 8192 tokens and 151936 logits, forward + backward: in chunks, and as a whole."""
    setup = """
n = 8192
def make():
    global hidden, weight, targets, leaves
    hidden, weight = torch.randn(n, 64, requires_grad=True), torch.randn(151936, 64, requires_grad=True)
    targets, leaves = torch.arange(n), [hidden, weight]
"""
    ways = {
        "this project, chunks": "linear_logprobs(hidden, weight, targets)",
        "as a whole": "token_logprobs(hidden @ weight.T, targets)",
    }
    seen = {name: tuple(in_a_process(setup, way, 1)) for name, way in ways.items()}
    return [
        (f"(e) head, 8192 x 151936, {peak / 1e9:.1f} GB", name, seconds, "s", seconds / seen["this project, chunks"][0])
        for name, (seconds, peak) in seen.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of each measurement")
    parser.add_argument("--only", choices=["a", "b", "c", "d", "e"], help="one part of the table")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} before",
        flush=True,
    )
    print(f"{'':44}{'':24}{'':>17}{'this project is':>18}")
    parts = {"a": bench_decoding, "c": bench_training, "b": bench_grpo, "d": bench_logprob, "e": bench_head}
    for part, bench in parts.items():
        if args.only in (None, part):
            for what, who, value, unit, ratio in bench(args.rounds):
                shown = (
                    "not installed"
                    if value is None
                    else f"{value:,.0f} {unit}"
                    if value > 100
                    else f"{value:.3g} {unit}"
                )
                times = "" if ratio is None or who.startswith("this project") else f"{ratio:.2f} x as fast"
                print(f"{what:44}{who:24}{shown:>17}{times:>18}", flush=True)
    print(f"load {os.getloadavg()[0]:.2f} after")


if __name__ == "__main__":
    main()
