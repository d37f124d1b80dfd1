"""The public functions of kernels/: gradients in float64, in-place backward, the choice of implementation, torch.compile,
memory. What the implementations compute is tested in test_kernel_maths.py."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import DEVICE, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import (
    kl_estimate,
    linear_logprob,
    linear_logprobs,
    linear_logprobs_and_entropy,
    token_kl,
    token_logprobs,
    token_logprobs_and_entropy,
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
BOTH = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"))]


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6), (torch.float16, 2e-6)]
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_against_float64(dtype, tolerance, temperature):
    g = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 5, 37, generator=g)).to(dtype)
    targets = torch.randint(0, 37, (3, 5), generator=g)
    exact = (logits.double() / temperature).log_softmax(-1)
    logp, entropy = token_logprobs_and_entropy(logits, targets, temperature)
    assert logp.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        logp.double(), exact.gather(-1, targets[..., None])[..., 0], rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=tolerance, atol=tolerance)
    assert torch.equal(token_logprobs(logits, targets, temperature), logp)


def test_gradients_in_closed_form():
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets, T = torch.randint(0, 11, (6,)), 0.7
    logp, entropy = token_logprobs_and_entropy(logits, targets, T)
    p = (logits / T).softmax(-1).detach()
    torch.testing.assert_close(
        torch.autograd.grad(logp.sum(), logits, retain_graph=True)[0],
        (torch.nn.functional.one_hot(targets, 11) - p) / T,
    )
    torch.testing.assert_close(
        torch.autograd.grad(entropy.sum(), logits)[0], -p * (p.log() + entropy.detach()[:, None]) / T
    )
    ref = torch.randn(6, 11, dtype=torch.float64)
    kl = token_kl(logits, ref, T)
    q = (ref / T).softmax(-1)
    torch.testing.assert_close(torch.autograd.grad(kl.sum(), logits)[0], p * ((p / q).log() - kl.detach()[:, None]) / T)


def test_padded_vocabulary_and_targets_outside():
    logits = torch.randn(4, 10, requires_grad=True)
    targets = torch.tensor([3, -100, 7, 2])
    logp, entropy = token_logprobs_and_entropy(logits, targets, vocab_size=7)
    short = token_logprobs(logits[:, :7].detach(), torch.tensor([3, 0, 0, 2]))
    assert torch.equal(logp[[0, 3]].detach(), short[[0, 3]]) and logp[[1, 2]].tolist() == [0, 0]
    gradient = torch.autograd.grad(logp.sum(), logits)[0]
    assert gradient[[1, 2]].eq(0).all() and gradient[:, 7:].eq(0).all() and gradient[0].abs().sum() > 0
    assert token_kl(logits, logits + 5, vocab_size=7).abs().max() < 1e-6


def test_infinite_logits():
    inf = float("inf")
    logp, entropy = token_logprobs_and_entropy(torch.tensor([[0.0, 0.0, -inf]], requires_grad=True), torch.tensor([0]))
    assert -logp.item() == entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert token_logprobs(torch.tensor([[1e8, 1e8]]), torch.tensor([0])).item() == pytest.approx(-0.693147, abs=1e-6)
    assert token_kl(torch.tensor([[0.0, 0.0, -inf]]), torch.tensor([[0.0, 0.0, 0.0]])).item() == pytest.approx(
        0.405465, abs=1e-6
    )
    assert token_kl(torch.tensor([[0.0, 0.0, -inf]]), torch.tensor([[0.0, 0.0, -inf]])).item() == 0
    assert token_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -inf]])).item() == inf


def exact_k3(d):
    """e^-d - 1 + d to the last digit, and its derivative, from Python's float64."""
    if abs(d) < 0.5:
        return sum((-d) ** k / math.factorial(k) for k in range(2, 22)), -math.expm1(-d)
    return math.expm1(-d) + d, -math.expm1(-d)


@settings(max_examples=200, deadline=None)
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_estimators(logp, ref):
    a, b = torch.tensor(logp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
    assert kl_estimate(a, b, "k3") >= 0 and kl_estimate(a, b, "k2") >= 0
    assert kl_estimate(a, b, "k1") == -kl_estimate(b, a, "k1")
    assert kl_estimate(a, a, "k3") == 0


@settings(max_examples=300, deadline=None)
@given(st.floats(-12, 1.9), st.sampled_from([-1, 1]), st.sampled_from([torch.float32, torch.float64]))
def test_k3_is_accurate_near_zero_and_far_out(exponent, sign, dtype):
    """|d| from 1e-12 to 79: k3 and its gradient to a relative 2^-19, where the textbook form in float32 returns 0 or
    noise below 1e-4."""
    d = torch.tensor(sign * 10.0**exponent, dtype=dtype, requires_grad=True)
    k3 = kl_estimate(d, torch.zeros_like(d))
    k3.backward()
    value, slope = exact_k3(d.item())
    assert k3.item() == pytest.approx(value, rel=2**-19) and d.grad.item() == pytest.approx(slope, rel=2**-19)


def test_k3_does_not_overflow():
    d = torch.tensor([-90.0, 90.0, -80.0, -1000.0, math.inf, 0.0], requires_grad=True)
    k3 = kl_estimate(d, torch.zeros(6))
    k3[:4].sum().backward()
    assert k3[:4].isfinite().all() and d.grad.isfinite().all()
    assert k3[0] > k3[2] > 1e34 and d.grad[0] <= d.grad[2] < -1e34  # still rising, and still pushing the right way
    assert k3[1].item() == pytest.approx(89.0) and k3[4] == math.inf and k3[5] == 0


def test_bad_calls():
    zeros, target = torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            token_logprobs(zeros, target, temperature)
    with pytest.raises(ValueError, match="one dtype"):
        linear_logprobs(zeros, zeros.T.double(), target)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    for size in (0, 3):
        with pytest.raises(ValueError, match="vocab_size"):
            token_logprobs(zeros, target, vocab_size=size)
        with pytest.raises(ValueError, match="vocab_size"):
            linear_logprobs(zeros, zeros.T, target, vocab_size=size)
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(zeros, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="ref_logits"):
        token_kl(zeros, torch.zeros(1, 3))


# ---- which implementation


@pytest.mark.parametrize("choice", BOTH)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_both_implementations_through_autograd(monkeypatch, choice):
    """The public functions reach either implementation with every argument in its place."""
    monkeypatch.setenv("KERNELS", choice)
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 40).to(DEVICE, torch.bfloat16).requires_grad_()
    ref = torch.randn(2, 3, 40).to(DEVICE)
    targets = torch.randint(0, 30, (2, 3)).to(DEVICE)
    weights = torch.randn(3, 2, 3).to(DEVICE)
    logp, entropy = token_logprobs_and_entropy(logits, targets, 0.7, 30)
    kl = token_kl(logits, ref, 0.7, 30)
    ((logp * weights[0]) + entropy * weights[1] + kl * weights[2]).sum().backward()
    exact = logits.detach().double().requires_grad_()
    log_p, log_q = (x[..., :30].div(0.7).log_softmax(-1) for x in (exact, ref.double()))
    exact_logp = log_p.gather(-1, targets[..., None])[..., 0]
    exact_entropy, exact_kl = -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
    ((exact_logp * weights[0]) + exact_entropy * weights[1] + exact_kl * weights[2]).sum().backward()
    for ours, theirs in ((logp, exact_logp), (entropy, exact_entropy), (kl, exact_kl)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-6)
    # two gradients, each rounded to bfloat16, and their sum
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2**-6, atol=2**-7)
    assert logits.grad[..., 30:].eq(0).all()
    # the same bits with and without entropy: the first ratio of policy optimisation is exactly 1
    assert torch.equal(token_logprobs(logits, targets, 0.7, 30), logp)
    # an output that is not used costs nothing and changes nothing
    logits.grad = None
    token_logprobs_and_entropy(logits, targets)[1].sum().backward()
    only_entropy = logits.grad.clone()
    logits.grad = None
    (token_logprobs_and_entropy(logits, torch.full_like(targets, -100))[1]).sum().backward()
    assert torch.equal(logits.grad, only_entropy)  # the entropy does not look at the target


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_environment_chooses(monkeypatch):
    from kernels import kl, logprob, plain

    x = torch.zeros(2, 3)
    monkeypatch.delenv("KERNELS", raising=False)
    assert kernels.implementation(x, "logprob") is plain
    monkeypatch.setenv("KERNELS", "triton")
    assert kernels.implementation(x, "logprob") is logprob and kernels.implementation(x, "kl") is kl
    assert kernels.implementation(x.double(), "logprob") is plain  # float64 is for checks
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"KERNELS=triton.*cpu.*TRITON_INTERPRET=1"):
        token_logprobs(x, torch.zeros(2, dtype=torch.long))
    monkeypatch.setenv("KERNELS", "torch")
    assert kernels.implementation(x, "logprob") is plain
    monkeypatch.setenv("KERNELS", "cuda")
    with pytest.raises(ValueError, match="KERNELS=cuda: must be torch or triton"):
        token_kl(x, x)


def test_without_triton():
    """As on macOS and Windows: everything works, and asking for Triton says what is missing."""
    program = """
import sys
sys.modules["triton"] = None  # import raises ImportError
import torch, kernels
x, t = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 2])
sum(y.sum() for y in kernels.token_logprobs_and_entropy(x, t)).backward()
kernels.token_kl(x, x.detach()).sum().backward()
assert x.grad.abs().sum() > 0

class OnGPU:  # what a CUDA tensor looks like to the choice
    is_cuda, dtype, numel = True, torch.float32, lambda self: 1

assert kernels.implementation(OnGPU(), "logprob") is kernels.plain
import os
os.environ["KERNELS"] = "triton"
try:
    kernels.token_logprobs(x, t)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "KERNELS=triton, but Triton cannot be imported" in done.stdout


# ---- in place


@pytest.mark.parametrize("choice", BOTH)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_inplace_backward(monkeypatch, choice):
    monkeypatch.setenv("KERNELS", choice)
    torch.manual_seed(0)
    leaf, targets = torch.randn(4, 70).to(DEVICE).requires_grad_(), torch.tensor([3, -100, 66, 0], device=DEVICE)

    def gradient(inplace):
        leaf.grad = None
        logits = leaf * 1.0
        logits.retain_grad()
        logp, entropy = token_logprobs_and_entropy(logits, targets, 0.5, 67, inplace_backward=inplace)
        (logp.sum() + entropy.square().sum()).backward()
        return logits, leaf.grad.clone()

    plain_logits, expected = gradient(False)
    logits, actual = gradient(True)
    assert torch.equal(actual, expected) and torch.equal(plain_logits, leaf)
    assert torch.equal(logits, expected)  # the gradient lies where the logits were: no second tensor of that size

    # whoever still needs the logits is told, and does not compute with a gradient in their place
    logits = leaf * 1.0
    twice = logits.square().sum(-1) + token_logprobs(logits, targets, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice.sum().backward()
    logits = leaf * 1.0
    logp = token_logprobs(logits, targets, inplace_backward=True).sum()
    logp.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.backward()
    # rows that are one and the same memory cannot hold a gradient each
    row = torch.randn(1, 70).to(DEVICE).requires_grad_()
    results = []
    for inplace in (False, True):
        row.grad = None
        token_logprobs((row * 1.0).expand(4, 70), targets, inplace_backward=inplace).sum().backward()
        results.append(row.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("choice", BOTH)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_second_derivatives_raise(monkeypatch, choice):
    """They are not there, and a wrong number would be worse than an error."""
    monkeypatch.setenv("KERNELS", choice)
    x, weight = torch.randn(3, 8).to(DEVICE).requires_grad_(), torch.randn(8, 8).to(DEVICE).requires_grad_()
    targets = torch.tensor([0, 1, 2], device=DEVICE)
    for values, variable in (
        (token_logprobs(x * 1.0, targets), x),
        (token_logprobs(x * 1.0, targets, inplace_backward=True), x),
        (token_kl(x * 1.0, weight[:3].detach()), x),
        (linear_logprobs(x, weight, targets), weight),
    ):
        (gradient,) = torch.autograd.grad(values.sum(), variable, create_graph=True)
        with pytest.raises(RuntimeError, match=r"no autograd formula|does not require grad"):
            torch.autograd.grad(gradient.square().sum(), variable)


@pytest.mark.parametrize("choice", BOTH)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_undefined_gradient_is_zero(monkeypatch, choice):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    monkeypatch.setenv("KERNELS", choice)
    monkeypatch.setattr(linear_logprob, "CHUNK_TOKENS", 2)
    x, weight = torch.randn(3, 8).to(DEVICE).requires_grad_(), torch.randn(8, 8).to(DEVICE)
    targets = torch.tensor([0, 1, 2], device=DEVICE)
    for values in (token_logprobs(x, targets), linear_logprobs(x, weight, targets)):
        x.grad = None
        Stop.apply(values).sum().backward()
        assert x.grad is None or x.grad.eq(0).all()


# ---- the chunked head


@pytest.mark.parametrize("chunk", [3, 4096])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunked_head_equals_the_head(monkeypatch, chunk, with_entropy):
    monkeypatch.setattr(linear_logprob, "CHUNK_TOKENS", chunk)
    rows, product = [], linear_logprob.product
    monkeypatch.setattr(linear_logprob, "product", lambda a, b: rows.append(product(a, b)) or rows[-1])
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 9, (2, 5))
    targets[0, 1] = -100
    g, h = torch.randn(2, 2, 5, dtype=torch.float64)

    def gradients(logp, entropy):
        loss = (logp * g).sum() + (0 if entropy is None else (entropy * h).sum())
        return logp, entropy, *torch.autograd.grad(loss, (hidden, weight))

    log_p = (hidden @ weight[:9].T / 0.7).log_softmax(-1)
    logp = torch.where(targets < 0, 0.0, log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0])
    expected = gradients(logp, -(log_p.exp() * log_p).sum(-1) if with_entropy else None)
    if with_entropy:
        actual = gradients(*linear_logprobs_and_entropy(hidden, weight, targets, 0.7, 9))
    else:
        actual = gradients(linear_logprobs(hidden, weight, targets, 0.7, 9), None)
    for ours, exact in zip(actual, expected):
        if exact is not None:
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    if chunk == 3:  # 10 tokens: logits exist for 3 at most
        assert rows and max(len(x) for x in rows if x.shape[-1] == 12) == 3
        # nobody wants the weight's gradient, or the hidden states'
        for wanted in (hidden, weight):
            alone = torch.autograd.grad((linear_logprobs(hidden, weight, targets, 0.7, 9) * g).sum(), wanted)[0]
            other = {id(hidden): weight, id(weight): hidden}[id(wanted)].detach()
            arguments = (hidden, other) if wanted is hidden else (other, weight)
            fixed = torch.autograd.grad((linear_logprobs(*arguments, targets, 0.7, 9) * g).sum(), wanted)[0]
            assert torch.equal(alone, fixed)


def test_chunked_head_in_bfloat16_sums_in_float32(monkeypatch):
    """1200 tokens in 300 chunks: the weight's gradient is as good as bfloat16's own rounding. Summed up in bfloat16, it
    would be off by several times that."""
    monkeypatch.setattr(linear_logprob, "CHUNK_TOKENS", 4)
    torch.manual_seed(0)
    hidden, weight = torch.randn(1200, 16).bfloat16(), torch.randn(64, 16).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (1200,))
    logp = linear_logprobs(hidden, weight, targets, vocab_size=50)
    exact_weight = weight.detach().double().requires_grad_()
    exact = (hidden.double() @ exact_weight[:50].T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact, rtol=0, atol=1e-5)  # bfloat16 logits would be off by 3e-2
    monkeypatch.setattr(linear_logprob, "CHUNK_TOKENS", 4096)  # also where one chunk holds all
    torch.testing.assert_close(
        linear_logprobs(hidden, weight, targets, vocab_size=50).double(), exact, rtol=0, atol=1e-5
    )
    monkeypatch.setattr(linear_logprob, "CHUNK_TOKENS", 4)
    logp.sum().backward()
    exact.sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    # each chunk's dlogits are rounded to bfloat16 for the product, the sum once more
    error = (weight.grad.double() - exact_weight.grad).abs().max() / exact_weight.grad.abs().max()
    assert error < 2**-8


# ---- torch.compile and memory


def operators(V=40):
    torch.manual_seed(0)
    logits, hidden, weight = (torch.randn(n).to(DEVICE).requires_grad_() for n in ((2, 3, V), (6, 8), (V, 8)))
    targets = torch.randint(0, 30, (2, 3)).to(DEVICE)
    plain, flat = logits.detach(), targets.flatten()
    logp, entropy, saved = kernels._logprob(plain, targets, 0.7, 30, True, False)
    kl, kl_saved = kernels._kl(plain, -plain, 0.7, 30)
    return {
        "logprob": (kernels._logprob, (logits, targets, 0.7, 30, True, False)),
        "logprob without entropy": (kernels._logprob, (logits, targets, 0.7, 30, False, False)),
        "logprob_backward": (kernels._logprob_backward, (plain, targets, 0.7, 30, entropy, saved, logp, entropy)),
        "logprob_backward_": (
            kernels._logprob_backward_,
            (plain.clone(), targets, 0.7, 30, entropy, saved, logp, None),
        ),
        "kl": (kernels._kl, (logits, -plain, 0.7, 30)),
        "kl_backward": (kernels._kl_backward, (plain, -plain, 0.7, 30, kl, kl_saved, kl)),
        "linear_logprob": (kernels._linear_logprob, (hidden, weight, flat, 0.7, 30, True)),
        "linear_logprob_backward": (
            kernels._linear_logprob_backward,
            (
                hidden.detach(),
                weight.detach(),
                flat,
                0.7,
                30,
                entropy.flatten(),
                saved,
                logp.flatten(),
                None,
                True,
                True,
            ),
        ),
    }


@pytest.mark.parametrize("choice", BOTH)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", operators())
def test_opcheck(monkeypatch, choice, name):
    monkeypatch.setenv("KERNELS", choice)
    operator, arguments = operators()[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("choice", BOTH)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("inplace", [False, True])
def test_torch_compile_takes_the_whole_graph(monkeypatch, choice, inplace):
    monkeypatch.setenv("KERNELS", choice)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 8).to(DEVICE), torch.randn(64, 8).to(DEVICE).requires_grad_()
    targets = torch.randint(0, 50, (2, 3)).to(DEVICE)

    def loss(hidden, weight):
        logits = hidden @ weight.T
        kl = token_kl(logits, -logits, 0.7, 50)
        logp, entropy = token_logprobs_and_entropy(logits * 2, targets, 0.7, 50, inplace_backward=inplace)
        return (logp + 0.1 * entropy - kl + linear_logprobs(hidden, weight, targets, 0.7, 50)).mean()

    expected = torch.autograd.grad(loss(hidden, weight), weight)[0]
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(hidden, weight), weight)[0]
    torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the pages of the process")
def test_peak_memory():
    """Forward and backward of [4096, 50257] float32 hold the logits, their gradient, and not a tenth more."""
    program = """
import resource, torch
from kernels import token_logprobs
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
now = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def run(n):
    logits = torch.zeros(n, 50257).uniform_(-4, 4).requires_grad_()
    token_logprobs(logits, torch.arange(n)).sum().backward()
    assert logits.grad[n - 1].abs().sum() > 0.5
run(4)  # what is loaded on the first call
before = now()
run(4096)
print((peak() - before) / (4096 * 50257 * 4))
"""
    environment = {**os.environ, "KERNELS": "torch"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert 1.98 < float(done.stdout) < 2.2, done.stdout


def test_bench_on_small_sizes(monkeypatch, capsys):
    """What the benchmark does on a GPU, on this machine and on hardly any data."""
    from kernels import bench

    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    bench.check("cpu", N=3)
    bench.table("cpu", [(5, 64, 50)])
    bench.head_table("cpu", 6, 8, 64)
    lines = capsys.readouterr().out.splitlines()
    assert sum("kernels" in line for line in lines) == 6 and sum("%" in line for line in lines) >= 11
    if not torch.cuda.is_available():
        bench.main()
        assert capsys.readouterr().out.startswith("No GPU here")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_compiled_for_four_gpus():
    """No spills, wide accesses, few instructions: the limits are in kernels/inspect.py, which exits with 1 beyond them."""
    done = subprocess.run([sys.executable, "-m", "kernels.inspect"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith(("logprob", "kl "))]) == 48


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_inspect_reports_what_is_broken():
    """Rows that are not padded cannot be read 128 bits at a time, and a limit of five instructions is too low."""
    program = """
from kernels import inspect
inspect.GPUS = {"sm90": inspect.GPUS["sm90"]}
inspect.KERNELS = {"logprob forward": ("logprob", "_forward", False, 1, 5.0), "logprob backward": ("logprob", "_backward", False, 2, 30.0)}
inspect.WIDTH = inspect.V
inspect.main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    broken = [line for line in done.stderr.splitlines() if line.startswith("broken: ")]
    assert done.returncode == 1
    assert any("logprob forward, bf16, sm90" in line and "limit 5.0" in line for line in broken)
    assert any("logprob backward, bf16, sm90: 0 accesses of 128 bits, 4 needed" in line for line in broken)
