"""Fused log-softmax-gather in Triton: the log-probability of one token per row, and the entropy, in one pass.

For a row of logits x with target t, temperature T and c = log2(e) / T, let m be the maximum of x and u_v = (x_v - m) c:

    Z       = sum_v 2^u_v                          the normaliser; p_v = 2^u_v / Z
    logp    = ln2 (u_t - log2 Z)
    entropy = ln2 (log2 Z - S / Z)                 with S = sum_v 2^u_v u_v

One pass (online softmax): the row comes in blocks, m is the maximum so far, and when a block raises it to m', every u so
far changes by the same shift = (m - m') c:      Z -> 2^shift Z      S -> 2^shift (S + shift Z)

    x = [1, 3 | 5, 4] in two blocks, c = 1:   m = 3, Z = 2^-2 + 2^0 = 1.25;   then m = 5, Z = 2^-2 1.25 + 2^0 + 2^-1

Gradient, with upstream gradients g of the row's logp and h of its entropy (from dp_v/dx_w = p_v (1[v = w] - p_w) / T):

    dx_v = (g (1[v = t] - p_v) - h p_v (ln p_v + entropy)) / T

What moves (bfloat16 logits): forward reads 2 bytes a logit, backward reads 2 and writes 2, and nothing else of that size.
Eager PyTorch moves 36 (see bench.py). All arithmetic is float32, in registers.

Why so
- Base 2: the GPU's exponential is 2^x. e^x costs it a multiplication by log2(e), which here is one factor with 1 / T.
- Subtract first, then scale: x_v - m is exact for close numbers, so logits around 1e8 lose nothing. x_v c - m c, each
  product rounded, is off by up to 6e-4 at 8192 already.
- m starts at the lowest float32 and not at -inf: a first block that is all -inf would give -inf - (-inf) = NaN.
  (LOWEST - m) c may overflow to -inf; then 2^-inf = 0 drops the empty sum. Triton's interpreter warns of it.
- m and Z are saved for the backward pass, 8 bytes a row. lse = m / T + ln Z would be 4 bytes, but at 1e8 float32 rounds
  ln Z away.
- Rows are padded to a multiple of 64 (gpt.py), and the true V is passed in. Then a thread moves 8 bfloat16 logits with one
  access of 16 bytes; rows of 50257 make it 8 accesses of 2, as not every row starts at a multiple of 16 bytes.
- The offset of a row is int64: row * 50304 passes 2^31 at row 42,691.
- Forward is one program per row, for its sums; backward one per row and block, as its blocks need nothing of each other.

Source: Milakov and Gimelshein 2018 (online softmax, arXiv:1805.02867). The plain twin is in plain.py; what the functions
promise, in __init__.py.
"""

import math

import torch
import triton
import triton.language as tl

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest float32

# Logits per block. Four warps are 128 threads: 32 logits a thread (16 in the backward pass), enough for wide accesses and
# few enough for its registers, of which a GPU has a fixed number: the fewer, the more programs run at once.
WARPS, FORWARD_BLOCK, BACKWARD_BLOCK = 4, 4096, 2048

# How to read a kernel. It is written for one program: _forward[(N,)](...) starts N of them, and tl.program_id(0) says which
# one this is. A tensor argument is a pointer to its first element. tl.load(pointer + tl.arange(0, BLOCK)) reads a block of
# them into the registers of the program's threads; `mask` says which of them exist, and `other` what stands for the rest.
# A tl.constexpr is known when the kernel is compiled: another V, another kernel.


@triton.jit
def _add_block(x, m, Z, S, c, ENTROPY: tl.constexpr):
    """The logits x [BLOCK] of one block join the row's m, Z and S."""
    new_m = tl.maximum(m, tl.max(x, 0))
    u = (x - new_m) * c
    e = tl.exp2(u)
    shift = (m - new_m) * c
    scale = tl.exp2(shift)
    if ENTROPY:  # 0 log 0 = 0, although u and shift may be -inf: below -200, 2^u is 0 in float32
        S = scale * (S + Z * tl.maximum(shift, -200.0)) + tl.sum(e * tl.maximum(u, -200.0), 0)
    Z = scale * Z + tl.sum(e, 0)
    return new_m, Z, S


@triton.jit
def _forward(logits, targets, logp, entropy, saved_m, saved_Z, outer_stride, row_stride, inner, c,
             V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENTROPY: tl.constexpr):  # fmt: skip
    """One program per row of WIDTH logits, V of them true. Where a row starts: see rows_of."""
    row = tl.program_id(0).to(tl.int64)
    logits += row // inner * outer_stride + row % inner * row_stride
    lanes = tl.arange(0, BLOCK)
    m, Z, S = LOWEST, 0.0, 0.0
    whole: tl.constexpr = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):  # no mask: the widest accesses
        x = tl.load(logits + start + lanes).to(tl.float32)
        m, Z, S = _add_block(x, m, Z, S, c, ENTROPY)
    if whole < V:  # the tail; what is loaded beyond V is padding, and thrown away
        columns = whole + lanes
        x = tl.load(logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        m, Z, S = _add_block(tl.where(columns < V, x, -float("inf")), m, Z, S, c, ENTROPY)

    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    x_target = tl.load(logits + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(logp + row, tl.where(inside, ((x_target - m) * c - tl.log2(Z)) * LN2, 0.0))
    tl.store(saved_m + row, m)
    tl.store(saved_Z + row, Z)
    if ENTROPY:
        tl.store(entropy + row, (tl.log2(Z) - S / Z) * LN2)


@triton.jit
def _backward(logits, targets, entropy, saved_m, saved_Z, g_logp, g_entropy, gradient,
              outer_stride, row_stride, gradient_outer_stride, gradient_row_stride, inner, c,
              V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENTROPY: tl.constexpr):  # fmt: skip
    """One program per row and block. `gradient` may be the logits: the thread that overwrites one has read it before."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    logits += row // inner * outer_stride + row % inner * row_stride
    gradient += row // inner * gradient_outer_stride + row % inner * gradient_row_stride

    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    m, Z = tl.load(saved_m + row), tl.load(saved_Z + row)
    g_over_T = tl.where(inside, tl.load(g_logp + row) * (c * LN2), 0.0)  # c ln2 = 1 / T
    x = tl.load(logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    u = tl.maximum((x - m) * c, -200.0)
    factor = g_over_T / Z  # 2^u factor = g p / T
    trained = tl.where(inside, V, 0)  # an ignored row's gradient is 0, even if its logits are NaN
    if ENTROPY:  # 2^u factor = (g p + h p (ln p + entropy)) / T, where ln p = ln2 (u - log2 Z)
        h_over_T = tl.load(g_entropy + row) * (c * LN2)
        factor += h_over_T / Z * (tl.load(entropy + row) - tl.log2(Z) * LN2) + h_over_T / Z * LN2 * u
        trained = V
    dx = tl.where(columns == target, g_over_T, 0.0) - tl.exp2(u) * factor
    # rounded to the logits' dtype once, here
    tl.store(gradient + columns, tl.where(columns < trained, dx, 0.0), mask=columns < WIDTH)


def rows_of(x):
    """x [..., W] as the kernels address it: (x, inner, outer stride, row stride), where row r starts at
    r // inner * outer_stride + r % inner * row_stride. Two strides, because there is no single one from row to row in
    logits[:, :-1] of [B, T, W]. Copies x only where no two can describe it, or its columns are not next to each other."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)  # a view where the strides allow it
    outer_stride, row_stride, _ = [0] * (3 - x.dim()) + list(x.stride())  # 0 for a dimension that is not there
    return x, x.shape[-2] if x.dim() > 1 else 1, outer_stride, row_stride


def block_size(width, largest):
    return min(largest, max(128, triton.next_power_of_2(width)))


def logprob_forward(logits, targets, temperature, vocab_size, logp, entropy, saved):
    """logits [..., W], targets [...]: fills logp [...], entropy [...] (if it is not None), and saved [2, N] with m and Z
    of each row, all float32."""
    if not targets.numel():
        return
    x, inner, outer_stride, row_stride = rows_of(logits)
    with torch.cuda.device_of(x):
        _forward[(targets.numel(),)](
            x, targets.contiguous(), logp, entropy, saved[0], saved[1], outer_stride, row_stride, inner,
            LOG2E / temperature, V=vocab_size, WIDTH=x.shape[-1], BLOCK=block_size(vocab_size, FORWARD_BLOCK),
            ENTROPY=entropy is not None, num_warps=WARPS,
        )  # fmt: skip


def logprob_backward(logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, gradient):
    """Fills `gradient` [..., W], which may be the logits. g_logp [...]; g_entropy [...] or None."""
    if not targets.numel():
        return
    x, inner, outer_stride, row_stride = rows_of(logits)
    dx, _, gradient_outer_stride, gradient_row_stride = rows_of(gradient)
    block = block_size(x.shape[-1], BACKWARD_BLOCK)
    with torch.cuda.device_of(x):
        _backward[(targets.numel() * triton.cdiv(x.shape[-1], block),)](
            x, targets.contiguous(), entropy, saved[0], saved[1], g_logp.contiguous(),
            None if g_entropy is None else g_entropy.contiguous(), dx,
            outer_stride, row_stride, gradient_outer_stride, gradient_row_stride, inner, LOG2E / temperature,
            V=vocab_size, WIDTH=x.shape[-1], BLOCK=block, ENTROPY=g_entropy is not None, num_warps=WARPS,
        )  # fmt: skip
    if dx.data_ptr() != gradient.data_ptr():  # rows_of had to copy
        gradient.copy_(dx.view(gradient.shape))
