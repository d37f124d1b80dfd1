"""The exact KL(policy || reference) over the vocabulary in Triton, one pass over both rows.

For a row of policy logits x and one of reference logits y, with temperature T and c = log2(e) / T, in base 2:

    u_v = (x_v - m) c,  a = sum_v 2^u_v          p_v = 2^u_v / a        m, n: the rows' maxima
    w_v = (y_v - n) c,  b = sum_v 2^w_v          q_v = 2^w_v / b
    s   = sum_v 2^u_v (u_v - w_v)
    KL  = sum_v p_v ln(p_v / q_v) = ln2 (s / a - log2 a + log2 b)

Three sums, all of them online (see logprob.py): when m grows, every u of the blocks before shrinks by the same amount,
so a and s are scaled; when either maximum grows, every u - w changes by the same amount, times a. The gradient, with
the upstream gradient g of each token, is one more pass:

    dx_v = g p_v (ln(p_v / q_v) - KL) / T

p_v = 0 contributes 0, also where q_v = 0; p_v > 0 where q_v = 0 makes the KL infinite.

What moves (bf16 logits): forward reads 2 + 2 bytes a logit, backward reads 2 + 2 and writes 2. The reference gets no
gradient. Eager PyTorch moves 130. The KL is never computed as s / a from p and log p stored somewhere: there is nothing
of the rows' size but the rows.

The estimators k1, k2, k3 need two numbers a token and not the vocabulary; what they need is care with rounding, not a
kernel: they are plain PyTorch on every device (plain.py: kl_estimate).

Source: the definition; the gradient follows from sum_v p_v = 1. The plain twin is in plain.py.
"""

import math

import torch
import triton
import triton.language as tl

from .logprob import BACKWARD_BLOCK, FORWARD_BLOCK, LN2, LOWEST, WARPS, block_size, rows_of


@triton.jit
def _add_block(x, y, m, n, a, b, s, c):
    """Blocks x, y [BLOCK] join their rows: maxima m, n and the sums a, b, s of the docstring above."""
    new_m = tl.maximum(m, tl.max(x, 0))
    new_n = tl.maximum(n, tl.max(y, 0))
    u = (x - new_m) * c
    w = (y - new_n) * c
    e = tl.exp2(u)
    shift_u = (m - new_m) * c
    shift_w = (n - new_n) * c
    scale = tl.exp2(shift_u)
    s = tl.where(scale == 0, 0.0, scale * (s + a * (shift_u - shift_w))) + tl.sum(tl.where(e == 0, 0.0, e * (u - w)), 0)
    a = a * scale + tl.sum(e, 0)
    b = b * tl.exp2(shift_w) + tl.sum(tl.exp2(w), 0)
    return new_m, new_n, a, b, s


@triton.jit
def _forward(x_logits, y_logits, kl, saved_m, saved_n, saved_a, saved_b,
             x_outer_stride, x_row_stride, x_inner, y_outer_stride, y_row_stride, y_inner, c,
             V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    x_logits += row // x_inner * x_outer_stride + row % x_inner * x_row_stride
    y_logits += row // y_inner * y_outer_stride + row % y_inner * y_row_stride
    block = tl.arange(0, BLOCK)
    m, n, a, b, s = LOWEST, LOWEST, 0.0, 0.0, 0.0
    whole: tl.constexpr = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(x_logits + start + block).to(tl.float32)
        y = tl.load(y_logits + start + block).to(tl.float32)
        m, n, a, b, s = _add_block(x, y, m, n, a, b, s, c)
    if whole < V:
        column = whole + block
        x = tl.load(x_logits + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        y = tl.load(y_logits + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        x = tl.where(column < V, x, -float("inf"))
        y = tl.where(column < V, y, -float("inf"))
        m, n, a, b, s = _add_block(x, y, m, n, a, b, s, c)
    tl.store(kl + row, (s / a - tl.log2(a) + tl.log2(b)) * LN2)
    tl.store(saved_m + row, m)
    tl.store(saved_n + row, n)
    tl.store(saved_a + row, a)
    tl.store(saved_b + row, b)


@triton.jit
def _backward(x_logits, y_logits, kl, saved_m, saved_n, saved_a, saved_b, g_kl, gradient,
              x_outer_stride, x_row_stride, x_inner, y_outer_stride, y_row_stride, y_inner, c,
              V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program per row and block. `gradient` [N, WIDTH] is contiguous."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x_logits += row // x_inner * x_outer_stride + row % x_inner * x_row_stride
    y_logits += row // y_inner * y_outer_stride + row % y_inner * y_row_stride
    a = tl.load(saved_a + row)
    x = tl.load(x_logits + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    y = tl.load(y_logits + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    u = (x - tl.load(saved_m + row)) * c
    w = (y - tl.load(saved_n + row)) * c
    e = tl.exp2(u)
    log_ratio = (u - w - tl.log2(a) + tl.log2(tl.load(saved_b + row))) * LN2  # ln(p / q)
    g = tl.load(g_kl + row) * (c * LN2)  # c ln2 = 1 / T
    dx = tl.where(e == 0, 0.0, e * (g / a) * (log_ratio - tl.load(kl + row)))
    tl.store(gradient + row * WIDTH + column, tl.where(column < V, dx, 0.0), mask=column < WIDTH)


def kl_forward(logits, ref_logits, temperature, vocab_size, kl, saved):
    """logits, ref_logits [..., W]: fills kl [...] and saved [4, N] with m, n, a, b of each row, all float32."""
    x, x_inner, *x_strides = rows_of(logits)
    y, y_inner, *y_strides = rows_of(ref_logits)
    block = block_size(vocab_size, FORWARD_BLOCK)
    if kl.numel():
        with torch.cuda.device_of(x):
            _forward[(kl.numel(),)](
                x, y, kl, *saved, *x_strides, x_inner, *y_strides, y_inner,
                math.log2(math.e) / temperature, vocab_size, x.shape[-1], block, num_warps=WARPS,
            )  # fmt: skip


def kl_backward(logits, ref_logits, temperature, vocab_size, kl, saved, g_kl, gradient):
    """Fills `gradient` [..., W], contiguous, of the policy's logits."""
    x, x_inner, *x_strides = rows_of(logits)
    y, y_inner, *y_strides = rows_of(ref_logits)
    block = block_size(x.shape[-1], BACKWARD_BLOCK)
    if kl.numel():
        with torch.cuda.device_of(x):
            _backward[(kl.numel() * triton.cdiv(x.shape[-1], block),)](
                x, y, kl, *saved, g_kl.contiguous(), gradient, *x_strides, x_inner, *y_strides, y_inner,
                math.log2(math.e) / temperature, vocab_size, x.shape[-1], block, num_warps=WARPS,
            )  # fmt: skip
