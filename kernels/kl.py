"""The exact KL(policy || reference) over the vocabulary in Triton, one pass over both rows.

For a row x of policy logits and a row y of reference logits, with T and c = log2(e) / T as in logprob.py, in base 2:

    u_v = (x_v - m_p) c      Z_p = sum_v 2^u_v      p_v = 2^u_v / Z_p      m_p = max x
    w_v = (y_v - m_q) c      Z_q = sum_v 2^w_v      q_v = 2^w_v / Z_q      m_q = max y
    S   = sum_v 2^u_v (u_v - w_v)
    KL  = sum_v p_v ln(p_v / q_v) = ln2 (S / Z_p - log2 Z_p + log2 Z_q)

One pass: when a block raises the maxima to m_p' and m_q', with du = (m_p - m_p') c and dw = (m_q - m_q') c,

    Z_p -> 2^du Z_p      Z_q -> 2^dw Z_q      S -> 2^du (S + (du - dw) Z_p)

Gradient, with the upstream gradient g of the row's KL (dp_v/dx_w as in logprob.py; the 1 of d(p ln p) sums to nothing):

    dx_v = g p_v (ln(p_v / q_v) - KL) / T

p_v = 0 contributes 0, also where q_v = 0; p_v > 0 where q_v = 0 makes the KL infinite. The reference gets no gradient.

What moves (bfloat16 logits): forward reads 2 + 2 bytes a logit, backward reads 2 + 2 and writes 2. Eager PyTorch moves 122
(see bench.py).

The estimators k1, k2, k3 need two numbers a token and not the vocabulary. What they need is care with rounding, not a
kernel: they are plain PyTorch on every device (plain.py: kl_estimate).

Source: the definition. The plain twin is in plain.py.
"""

import torch
import triton
import triton.language as tl

from .logprob import BACKWARD_BLOCK, FORWARD_BLOCK, LN2, LOG2E, LOWEST, WARPS, block_size, rows_of


@triton.jit
def _add_block(x, y, m_p, m_q, Z_p, Z_q, S, c):
    """The logits x, y [BLOCK] of one block join the rows' maxima and sums."""
    new_m_p = tl.maximum(m_p, tl.max(x, 0))
    new_m_q = tl.maximum(m_q, tl.max(y, 0))
    u = (x - new_m_p) * c
    w = (y - new_m_q) * c
    e = tl.exp2(u)
    du = (m_p - new_m_p) * c
    dw = (m_q - new_m_q) * c
    scale = tl.exp2(du)
    # Where 2^u is 0 the term is 0, whatever u - w is; elsewhere u - w may rightly be +inf (so no clamp, as for the entropy)
    S = tl.where(scale == 0, 0.0, scale * (S + (du - dw) * Z_p)) + tl.sum(tl.where(e == 0, 0.0, e * (u - w)), 0)
    Z_p = scale * Z_p + tl.sum(e, 0)
    Z_q = tl.exp2(dw) * Z_q + tl.sum(tl.exp2(w), 0)
    return new_m_p, new_m_q, Z_p, Z_q, S


@triton.jit
def _forward(p_logits, q_logits, kl, saved_m_p, saved_m_q, saved_Z_p, saved_Z_q,
             p_outer_stride, p_row_stride, p_inner, q_outer_stride, q_row_stride, q_inner, c,
             V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    p_logits += row // p_inner * p_outer_stride + row % p_inner * p_row_stride
    q_logits += row // q_inner * q_outer_stride + row % q_inner * q_row_stride
    lanes = tl.arange(0, BLOCK)
    m_p, m_q, Z_p, Z_q, S = LOWEST, LOWEST, 0.0, 0.0, 0.0
    whole: tl.constexpr = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(p_logits + start + lanes).to(tl.float32)
        y = tl.load(q_logits + start + lanes).to(tl.float32)
        m_p, m_q, Z_p, Z_q, S = _add_block(x, y, m_p, m_q, Z_p, Z_q, S, c)
    if whole < V:
        columns = whole + lanes
        x = tl.load(p_logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        y = tl.load(q_logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        x = tl.where(columns < V, x, -float("inf"))
        y = tl.where(columns < V, y, -float("inf"))
        m_p, m_q, Z_p, Z_q, S = _add_block(x, y, m_p, m_q, Z_p, Z_q, S, c)
    tl.store(kl + row, (S / Z_p - tl.log2(Z_p) + tl.log2(Z_q)) * LN2)
    tl.store(saved_m_p + row, m_p)
    tl.store(saved_m_q + row, m_q)
    tl.store(saved_Z_p + row, Z_p)
    tl.store(saved_Z_q + row, Z_q)


@triton.jit
def _backward(p_logits, q_logits, kl, saved_m_p, saved_m_q, saved_Z_p, saved_Z_q, g_kl, gradient,
              p_outer_stride, p_row_stride, p_inner, q_outer_stride, q_row_stride, q_inner, c,
              V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program per row and block. `gradient` [N, WIDTH] is contiguous."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    p_logits += row // p_inner * p_outer_stride + row % p_inner * p_row_stride
    q_logits += row // q_inner * q_outer_stride + row % q_inner * q_row_stride
    Z_p = tl.load(saved_Z_p + row)
    x = tl.load(p_logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    y = tl.load(q_logits + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    u = (x - tl.load(saved_m_p + row)) * c
    w = (y - tl.load(saved_m_q + row)) * c
    e = tl.exp2(u)
    log_ratio = (u - w - tl.log2(Z_p) + tl.log2(tl.load(saved_Z_q + row))) * LN2  # ln(p / q)
    g_over_T = tl.load(g_kl + row) * (c * LN2)  # c ln2 = 1 / T
    dx = tl.where(e == 0, 0.0, e * (g_over_T / Z_p) * (log_ratio - tl.load(kl + row)))
    tl.store(gradient + row * WIDTH + columns, tl.where(columns < V, dx, 0.0), mask=columns < WIDTH)


def kl_forward(logits, ref_logits, temperature, vocab_size, kl, saved):
    """logits, ref_logits [..., W]: fills kl [...] and saved [4, N] with m_p, m_q, Z_p, Z_q of each row, all float32."""
    if not kl.numel():
        return
    x, p_inner, *p_strides = rows_of(logits)
    y, q_inner, *q_strides = rows_of(ref_logits)
    with torch.cuda.device_of(x):
        _forward[(kl.numel(),)](
            x, y, kl, *saved, *p_strides, p_inner, *q_strides, q_inner, LOG2E / temperature,
            V=vocab_size, WIDTH=x.shape[-1], BLOCK=block_size(vocab_size, FORWARD_BLOCK), num_warps=WARPS,
        )  # fmt: skip


def kl_backward(logits, ref_logits, temperature, vocab_size, kl, saved, g_kl, gradient):
    """Fills `gradient` [..., W], contiguous, of the policy's logits."""
    if not kl.numel():
        return
    x, p_inner, *p_strides = rows_of(logits)
    y, q_inner, *q_strides = rows_of(ref_logits)
    block = block_size(x.shape[-1], BACKWARD_BLOCK)
    with torch.cuda.device_of(x):
        _backward[(kl.numel() * triton.cdiv(x.shape[-1], block),)](
            x, y, kl, *saved, g_kl.contiguous(), gradient, *p_strides, p_inner, *q_strides, q_inner,
            LOG2E / temperature, V=vocab_size, WIDTH=x.shape[-1], BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
