"""The kernels against float64: the plain-PyTorch twins, and the Triton kernels on a GPU where there is one and in
Triton's interpreter elsewhere.

Each case below is run with each implementation as it is, and has to pass. Each mutant at the end is a Triton kernel with
one plausible mistake in it, and names the case that has to catch it.

Tolerances follow from rounding. The kernels compute in float32, whose unit is 2^-24: a log-probability is a difference of
two numbers of its own size or log V, each with a few roundings, so 2^-21 of it and 2^-20 of 1 are allowed; a gradient
is at most (|g| + |h| max(1, H)) / T, of which 2^-20 is allowed, and the rounding to its dtype: 2^-11 for float16, and
for bfloat16 2^-8, but 2^-7 in the interpreter, which cuts the bits off.
"""

import importlib.util
import mmap
from pathlib import Path

import pytest
import torch
from conftest import DEVICE

from kernels import plain

try:
    from kernels import kl, logprob
except ImportError:  # no Triton on this platform
    kl = logprob = None

INF = float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rounding(k, dtype):
    interpreted = DEVICE == "cpu" and k is not plain
    return {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-7 if interpreted else 2**-8}[dtype]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A row of a few hundred logits already has several blocks and a tail, and a few rows are several chunks."""
    monkeypatch.setitem(plain.CHUNK_LOGITS, DEVICE, 700)
    for module in (logprob, kl) if logprob else ():
        monkeypatch.setattr(module, "FORWARD_BLOCK", 256)
        monkeypatch.setattr(module, "BACKWARD_BLOCK", 128)


def random(*shape, dtype=torch.float32, scale=4.0, seed=0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def targets_for(logits, V):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, V, logits.shape[:-1], generator=generator).to(DEVICE)


def assert_near(actual, expected, allowed):
    """|actual - expected| <= allowed, with NaN and infinities in the same places."""
    actual, finite = actual.double(), expected.isfinite()
    assert torch.equal(actual.isfinite(), finite) and torch.equal(actual.isnan(), expected.isnan()), (actual, expected)
    assert torch.equal(actual[~finite].sign().nan_to_num(), expected[~finite].sign().nan_to_num())
    error = (actual - expected)[finite].abs()
    assert (error <= allowed[finite]).all(), f"off by {error.max():.3g}"


def log_softmax64(logits, T, V):
    return (logits[..., :V].double() / T).log_softmax(-1)


def check_logprob(k, logits, targets=None, T=1.0, V=None, entropy=True, in_place=False):
    """Forward and backward of the kernels in module k against float64, with another upstream gradient for each token."""
    V = V or logits.shape[-1]
    targets = targets_for(logits, V) if targets is None else targets
    g, h = (random(*targets.shape, scale=1.0, seed=seed) for seed in (2, 3))
    inside = (targets >= 0) & (targets < V)
    log_p = log_softmax64(logits, T, V)
    p, index = log_p.exp(), torch.where(inside, targets, 0)[..., None].long()
    p_log_p = torch.where(p == 0, 0.0, p * log_p)
    H = -p_log_p.sum(-1)
    exact_logp = torch.where(inside, log_p.gather(-1, index)[..., 0], 0.0)
    one_hot = torch.zeros_like(p).scatter_(-1, index, 1.0)
    exact_dx = torch.where(inside[..., None], g[..., None] * (one_hot - p), 0.0) / T
    if entropy:
        exact_dx -= h[..., None] * (p_log_p + p * H[..., None]) / T
    exact_dx = torch.nn.functional.pad(exact_dx, (0, logits.shape[-1] - V))

    logp = torch.full(targets.shape, 7.0, device=DEVICE)
    got_H, saved = (logp.clone() if entropy else None), logp.new_full((2, targets.numel()), 7.0)
    k.logprob_forward(logits, targets, T, V, logp, got_H, saved)
    assert_near(logp, exact_logp, 2**-21 * exact_logp.abs() + 2**-20)
    if entropy:
        assert_near(got_H, H, 2**-21 * H + 2**-20)
    dx = logits if in_place else torch.full(logits.shape, 7.0, dtype=logits.dtype, device=DEVICE)
    k.logprob_backward(logits, targets, T, V, logp if got_H is None else got_H, saved, g, h if entropy else None, dx)
    bound = (g.abs() + h.abs() * H.clamp(min=1) * entropy)[..., None] / T
    assert_near(dx, exact_dx, 2**-20 * bound + rounding(k, logits.dtype) * exact_dx.abs() + 2**-24)


def check_kl(k, x, y, T=1.0, V=None):
    V = V or x.shape[-1]
    g = random(*x.shape[:-1], scale=1.0, seed=2)
    log_p, log_q = log_softmax64(x, T, V), log_softmax64(y, T, V)
    p = log_p.exp()
    log_ratio = torch.where(p == 0, 0.0, log_p - log_q)
    exact = (p * log_ratio).sum(-1)
    kl = torch.full(x.shape[:-1], 7.0, device=DEVICE)
    saved = kl.new_full((4, kl.numel()), 7.0)
    k.kl_forward(x, y, T, V, kl, saved)
    size = (p * log_ratio.abs()).sum(-1)  # terms of both signs cancel in the sum
    assert_near(kl, exact, 2**-21 * size + 2**-20 * (1 + (log_p.amax(-1) - log_q.amax(-1)).abs()))
    dx = torch.full(x.shape, 7.0, dtype=x.dtype, device=DEVICE)
    k.kl_backward(x, y, T, V, kl, saved, g, dx)
    exact_dx = torch.nn.functional.pad(g[..., None] * p * (log_ratio - exact[..., None]) / T, (0, x.shape[-1] - V))
    finite = exact.isfinite()  # an infinite KL has no gradient
    bound = 2**-20 * (g.abs() * (1 + size))[..., None] / T + rounding(k, x.dtype) * exact_dx.abs() + 2**-24
    assert_near(dx[finite], exact_dx[finite], bound[finite])


# ---- cases


def sizes(k):
    for V in (1, 2, 7, 63, 64, 65, 257, 1000):
        for dtype in DTYPES:
            check_logprob(k, random(3, V, dtype=dtype), T=0.7)
        check_logprob(k, random(3, V), entropy=False)


def whole_vocabulary(k):
    for name, block in (("FORWARD_BLOCK", 4096), ("BACKWARD_BLOCK", 2048)):
        setattr(k, name, block)
    check_logprob(k, random(2, 50257, dtype=torch.bfloat16))


def temperatures(k):
    for T in (0.1, 0.5, 2.0, 10.0):
        check_logprob(k, random(4, 300), T=T)


def padded_rows(k):
    """What lies beyond V is NaN: in the row's own padding, in the buffer between rows, and in both."""
    for V, width in ((300, 320), (129, 192), (256, 320)):
        buffer = torch.full((4, 384), torch.nan, device=DEVICE)
        buffer[:, :V] = random(4, V)
        check_logprob(k, buffer[:, :V])
        check_logprob(k, buffer[:, :width], V=V)
        check_logprob(k, buffer[:, :width].to(torch.bfloat16), V=V, entropy=False)
        buffer[:, V:] = 50.0
        check_logprob(k, buffer[:, :width], V=V)


def strides(k):
    x = random(3, 5, 300)
    check_logprob(k, x[:, 1:])  # [3, 4, 300]: no single stride leads from row to row
    check_logprob(k, x.transpose(0, 1))
    check_logprob(k, random(300, 4).T)  # a stride between logits
    check_logprob(k, random(2, 2, 3, 200)[:, :, 1:])
    check_logprob(k, random(300))
    check_logprob(k, random(1, 300).expand(3, 300))


def minus_infinity(k):
    x = random(6, 600)
    x[0, :256] = -INF  # the first block
    x[1, 256:] = -INF  # all others
    x[2, :599] = -INF  # one token is left
    x[3, 17] = -INF  # the target
    x[4] = -INF  # nothing is left: NaN, as in torch
    x[5, ::2] = -INF
    targets = torch.tensor([300, 3, 599, 17, 5, 1], device=DEVICE)
    check_logprob(k, x, targets)
    check_logprob(k, x, targets, entropy=False)
    check_logprob(k, torch.tensor([[0.0, 0.0, -INF]], device=DEVICE), torch.tensor([0], device=DEVICE))


def extremes(k):
    lowest = torch.finfo(torch.float32).min
    check_logprob(k, torch.full((2, 300), lowest, device=DEVICE))  # masked with the lowest number: uniform
    x = random(3, 600)
    x[0, 5], x[1, :300], x[2, 7] = torch.nan, lowest, INF  # NaN, and NaN in its own row only
    check_logprob(k, x, torch.tensor([9, 400, 9], device=DEVICE))


def offsets(k):
    for offset in (-8192.0, 8192.0):
        for T in (0.1, 1.0, 10.0):
            check_logprob(k, random(3, 300) + offset, T=T)
    check_logprob(k, 1e8 + 8 * random(3, 300).round(), T=3.0)  # a float32 near 1e8 is a multiple of 8
    check_logprob(k, torch.full((1, 2), 1e8, device=DEVICE))  # log(1/2)


def rising(k):
    """A maximum that moves in every block."""
    check_logprob(k, random(3, 1000, scale=1.0) + torch.linspace(0, 40, 1000, device=DEVICE))
    check_logprob(k, random(3, 1000, scale=1.0) + torch.linspace(0, 4000, 1000, device=DEVICE))


def ignored_targets(k):
    buffer = torch.full((6, 320), torch.nan, device=DEVICE)
    buffer[:, :300] = random(6, 300)
    targets = torch.tensor([-100, 5, 300, 319, -1, 299], device=DEVICE)
    check_logprob(k, buffer, targets, V=300)
    buffer[0, 3] = torch.nan  # a row that is ignored may hold anything
    logp, saved = torch.ones(6, device=DEVICE), torch.ones(2, 6, device=DEVICE)
    k.logprob_forward(buffer, targets, 1.0, 300, logp, None, saved)
    dx = torch.ones_like(buffer)
    k.logprob_backward(buffer, targets, 1.0, 300, logp, saved, torch.ones(6, device=DEVICE), None, dx)
    assert logp[[0, 2, 3, 4]].eq(0).all() and dx[[0, 2, 3, 4]].eq(0).all() and dx[[1, 5]].isfinite().all()


def targets_in_memory(k):
    """Targets as they come: ids[:, 1:], every other one, 32-bit."""
    ids = torch.randint(0, 300, (3, 5), device=DEVICE)
    check_logprob(k, random(3, 4, 300), ids[:, 1:])
    check_logprob(k, random(3, 3, 300), ids[:, ::2])
    check_logprob(k, random(5, 3, 300), ids.T)
    check_logprob(k, random(3, 5, 300), ids.to(torch.int32))


def confident(k):
    """p of the target near 1: 1 - p must not be formed from a rounded p."""
    for dtype in (torch.float32, torch.float16):
        x = random(4, 300, scale=1.0, dtype=dtype)
        x[:, 5] += 14.0
        check_logprob(k, x, torch.full((4,), 5, device=DEVICE), entropy=False)


def in_place(k):
    for dtype in DTYPES:
        buffer = torch.full((4, 384), torch.nan, dtype=dtype, device=DEVICE)
        buffer[:, :300] = random(4, 300)
        check_logprob(k, buffer[:, :320], V=300, T=2.0, in_place=True)
        assert buffer[:, 320:].isnan().all()  # what is not ours
    check_logprob(k, random(300, 4).T, in_place=True)


def nothing(k):
    check_logprob(k, random(0, 300))


def far_rows(rows, V):
    """[rows, V] bfloat16, 2^30 elements from row to row: 4 GB, in the middle of twice that, of which hardly a page is
    touched. An offset that wraps around in int32 stays inside, and finds zeros."""
    n = 2**32 + V
    if DEVICE == "cuda":
        memory = torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        memory = torch.frombuffer(mmap.mmap(-1, 2 * n, flags=flags), dtype=torch.bfloat16)
    x = memory.as_strided((rows, V), (2**30, 1), 2**31)
    x.copy_(random(rows, V))
    return x


def beyond_int32(k):
    check_logprob(k, far_rows(3, 200))


def beyond_int32_gradient(k):
    check_logprob(k, far_rows(3, 200), in_place=True)


def kl_sizes(k):
    for V in (1, 2, 7, 63, 64, 65, 257, 1000):
        for dtype in DTYPES:
            check_kl(k, random(3, V, dtype=dtype), random(3, V, dtype=dtype, seed=5), T=0.7)
    for T in (0.1, 10.0):
        check_kl(k, random(3, 300), random(3, 300, seed=5), T)
    check_kl(k, random(0, 300), random(0, 300))


def kl_whole_vocabulary(k):
    for name, block in (("FORWARD_BLOCK", 4096), ("BACKWARD_BLOCK", 2048)):
        setattr(k, name, block)
    check_kl(k, random(2, 50257, dtype=torch.bfloat16), random(2, 50257, dtype=torch.bfloat16, seed=5))


def kl_near_zero(k):
    x = random(4, 300)
    check_kl(k, x, x.clone())
    check_kl(k, x, x + 100.0)
    check_kl(k, x, x + 1e-3 * random(4, 300, seed=5))


def kl_strides(k):
    buffer = torch.full((2, 4, 384), torch.nan, device=DEVICE)
    buffer[..., :300] = random(4, 300)
    other = torch.full((2, 3, 320), torch.nan, device=DEVICE)
    other[..., :300] = random(3, 300, seed=5)
    check_kl(k, buffer[:, 1:, :320], other, V=300)
    check_kl(k, buffer[:, 1:, :300], other[..., :300].contiguous())
    check_kl(k, random(300, 3).T, random(3, 300, seed=5))


def kl_rising(k):
    """Maxima that move at different blocks."""
    ramp = torch.linspace(0, 60, 1000, device=DEVICE)
    check_kl(k, random(3, 1000, scale=1.0) + ramp, random(3, 1000, scale=1.0, seed=5) + ramp.flip(0))
    check_kl(k, random(3, 1000, scale=1.0) + ramp, random(3, 1000, scale=1.0, seed=5))
    check_kl(k, random(3, 1000, scale=1.0), random(3, 1000, scale=1.0, seed=5) + ramp)
    check_kl(k, random(3, 300) + 8192.0, random(3, 300, seed=5) - 8192.0)
    check_kl(k, 1e8 + 8 * random(3, 300).round(), random(3, 300, seed=5))


def kl_minus_infinity(k):
    x, y = random(7, 600), random(7, 600, seed=5)
    x[0, :256] = -INF
    y[1, :256] = -INF  # the reference excludes what the policy may do: infinite
    x[2, :256] = y[2, :256] = -INF
    x[3, 5] = y[3, 5] = -INF
    x[4, 5] = -INF
    x[5] = -INF  # NaN
    y[6, 5], x[6, 5], x[6, 400] = -INF, -50.0, 90.0  # p = e^-140: 0 in float32, infinite all the same in float64
    check_kl(k, x[:6], y[:6])
    kl, saved = torch.ones(1, device=DEVICE), torch.ones(4, 1, device=DEVICE)
    k.kl_forward(x[6:], y[6:], 1.0, 600, kl, saved)
    assert not kl.isnan().any()


def kl_beyond_int32(k):
    check_kl(k, far_rows(3, 200), random(3, 200, seed=5))


LOGPROB_CASES = [sizes, whole_vocabulary, temperatures, padded_rows, strides, minus_infinity, extremes, offsets, rising,
                 ignored_targets, targets_in_memory, confident, in_place, nothing, beyond_int32, beyond_int32_gradient]  # fmt: skip
KL_CASES = [kl_sizes, kl_whole_vocabulary, kl_near_zero, kl_strides, kl_rising, kl_minus_infinity, kl_beyond_int32]


@pytest.mark.parametrize("V", [plain.SMALL, plain.SMALL + 1, 4096])
def test_plain_on_either_side_of_small(V):
    for seed in range(3):
        for entropy in (False, True):
            check_logprob(plain, random(64, V, seed=seed), entropy=entropy)
            check_logprob(plain, random(64, V, seed=seed), entropy=entropy, T=0.7)


@pytest.mark.parametrize("small", [plain.SMALL, 0])
@pytest.mark.parametrize("case", LOGPROB_CASES + KL_CASES, ids=lambda case: case.__name__)
def test_plain(monkeypatch, case, small):
    """As it is, and with the way for large vocabularies for all."""
    monkeypatch.setattr(plain, "SMALL", small)
    case(plain)


@pytest.mark.skipif(logprob is None, reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", LOGPROB_CASES + KL_CASES, ids=lambda case: case.__name__)
def test_triton(case):
    case(kl if case in KL_CASES else logprob)


# ---- mutants: what is wrong with it, the file, a piece of its text, what to write instead, and the case that catches it

MUTANTS = [
    ("row offset in int32", "logprob", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", beyond_int32),
    ("gradient's row offset in int32", "logprob", "blocks).to(tl.int64)", "blocks)", beyond_int32_gradient),
    ("maximum starts at -inf", "logprob", "m, Z, S = LOWEST,", 'm, Z, S = -float("inf"),', minus_infinity),
    ("tail not masked", "logprob", 'tl.where(columns < V, x, -float("inf"))', "x", padded_rows),
    ("sum not rescaled", "logprob", "Z = scale * Z +", "Z = Z +", rising),
    ("scaled before subtracting", "logprob", "u = (x - new_m) * c", "u = x * c - new_m * c", offsets),
    ("log-sum-exp rounded to one number", "logprob", "((x_target - m) * c - tl.log2(Z)) * LN2",
     "x_target * c * LN2 - (m * c + tl.log2(Z)) * LN2", offsets),
    ("0 log 0 in the entropy", "logprob", "e * tl.maximum(u, -200.0)", "e * u", minus_infinity),
    ("entropy's sum not shifted", "logprob", "(S + Z * tl.maximum(shift, -200.0))", "S", rising),
    ("padding is a valid target", "logprob", "(target < V)", "(target < WIDTH)", ignored_targets),
    ("ignored targets are trained on", "logprob", "trained = tl.where(inside, V, 0)", "trained = V", ignored_targets),
    ("gradient in the padding", "logprob", "tl.where(columns < trained, dx, 0.0)", "dx", padded_rows),
    ("gradient from a bfloat16 p", "logprob", "- tl.exp2(u) * factor",
     "- (tl.exp2(u) * factor).to(tl.bfloat16).to(tl.float32)", confident),
    ("first upstream gradient for all", "logprob", "tl.load(g_logp + row)", "tl.load(g_logp)", sizes),
    ("first entropy gradient for all", "logprob", "tl.load(g_entropy + row)", "tl.load(g_entropy)", sizes),
    ("gradient without 1 / T", "logprob", "tl.load(g_logp + row) * (c * LN2)", "tl.load(g_logp + row)", temperatures),
    ("entropy's gradient without the entropy", "logprob", "tl.load(entropy + row) - tl.log2(Z)", "-tl.log2(Z)", sizes),
    ("targets not contiguous", "logprob", "x, targets.contiguous(), logp", "x, targets, logp", targets_in_memory),
    ("one stride for [B, T, V]", "logprob", "row // inner * outer_stride + row % inner * row_stride",
     "row * row_stride", strides),
    ("kl: row offset in int32", "kl", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", kl_beyond_int32),
    ("kl: maxima start at -inf", "kl", "LOWEST, LOWEST, 0.0", '-float("inf"), -float("inf"), 0.0', kl_minus_infinity),
    ("kl: the reference's maximum does not count", "kl", "(du - dw)", "du", kl_rising),
    ("kl: 0 log 0", "kl", "tl.where(e == 0, 0.0, e * (u - w))", "e * (u - w)", kl_minus_infinity),
    ("kl: infinite times 0 when rescaled", "kl", "tl.where(scale == 0, 0.0, scale * (S + (du - dw) * Z_p))",
     "scale * (S + (du - dw) * Z_p)", kl_minus_infinity),
    ("kl: normalisers exchanged", "kl", "S / Z_p - tl.log2(Z_p) + tl.log2(Z_q)", "S / Z_p + tl.log2(Z_p) - tl.log2(Z_q)",
     kl_sizes),
    ("kl: the reference's tail not masked", "kl", 'y = tl.where(columns < V, y, -float("inf"))', "y = y", kl_strides),
    ("kl: one set of strides for both", "kl", "row // q_inner * q_outer_stride + row % q_inner * q_row_stride",
     "row // p_inner * p_outer_stride + row % p_inner * p_row_stride", kl_strides),
    ("kl: gradient without the KL", "kl", "(log_ratio - tl.load(kl + row))", "log_ratio", kl_sizes),
    ("kl: first upstream gradient for all", "kl", "tl.load(g_kl + row)", "tl.load(g_kl)", kl_sizes),
    ("kl: gradient without 1 / T", "kl", "tl.load(g_kl + row) * (c * LN2)", "tl.load(g_kl + row)", kl_sizes),
]  # fmt: skip


@pytest.mark.skipif(logprob is None, reason="Triton is not installed")
@pytest.mark.skipif(DEVICE == "cuda", reason="a mutant may read where it must not: only in the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake, file, old, new, case", MUTANTS, ids=[mutant[0] for mutant in MUTANTS])
def test_mutants_are_caught(tmp_path, mistake, file, old, new, case):
    text = Path({"logprob": logprob, "kl": kl}[file].__file__).read_text()
    assert old in text
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("kernels.mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    mutant.FORWARD_BLOCK, mutant.BACKWARD_BLOCK = 256, 128
    with pytest.raises(AssertionError):
        case(mutant)
