"""Fused log-softmax-gather in Triton: the log-probability of one token per row, and the entropy, in one pass.

For a row of logits x and its target t, with temperature T, c = log2(e) / T, and y_v = (x_v - m) c for a maximum m:

    d = sum_v 2^y_v        logp = ln2 (y_t - log2 d)        entropy = ln2 (log2 d - (sum_v 2^y_v y_v) / d)

The forward pass is an online softmax: it walks over the row in blocks, keeps m of the blocks seen so far, and when m
grows to m' multiplies d by 2^((m - m') c). With p_v = 2^y_v / d and upstream gradients g (of logp) and h (of the
entropy), each token has its own:

    dx_v = (g (1[v = t] - p_v) - h p_v (ln p_v + entropy)) / T

What moves (bf16 logits): forward reads 2 bytes a logit, backward reads 2 and writes 2, and nothing else of that size;
log_softmax and gather in eager PyTorch move 36. All arithmetic is float32, in registers.

Why so
- Base 2: the GPU's exponential is 2^x; e^x costs it a multiply by log2(e), which here is one factor with 1 / T.
- Subtract first, then scale: x_v - m is exact for close numbers, so logits around 1e8 lose nothing. x_v c - m c rounds
  twice, and loses 3e-4 of a log-prob at 8192 already.
- m starts at the lowest float32 and not at -inf: a first block that is all -inf would give -inf - (-inf) = NaN.
- m and d are saved for the backward pass, 8 bytes a row. Their usual sum lse = m/T + ln d would do with 4, but at 1e8 the
  ln d would be rounded off in it.
- Rows are padded to a multiple of 16 (gpt.py pads the head) and the true V is passed in: then a thread loads 16 bytes at
  a time. A row of 50257 makes it sixteen loads of 2, because a mask is only as aligned as its bound.
- The offset of a row is int64: row * 50304 passes 2^31 at row 42,691.

Sources: Milakov and Gimelshein 2018 (online softmax, arXiv:1805.02867). The plain twin is in plain.py; what the
functions promise, in __init__.py.
"""

import math

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
LN2 = tl.constexpr(math.log(2))

# Logits per block; with 4 warps that is 32 (16) logits a thread: enough for wide loads, few enough for its registers
WARPS, FORWARD_BLOCK, BACKWARD_BLOCK = 4, 4096, 2048


@triton.jit
def _add_block(x, m, d, s, c, ENTROPY: tl.constexpr):
    """Block x [BLOCK] joins the row: the maximum m, d = sum 2^y and s = sum 2^y y, with y = (x - m) c."""
    new_m = tl.maximum(m, tl.max(x, 0))
    y = (x - new_m) * c
    e = tl.exp2(y)
    shift = (m - new_m) * c  # what the y of earlier blocks change by
    scale = tl.exp2(shift)
    if ENTROPY:  # 0 log 0 = 0, although y or shift may be -inf; below -200 a float32 2^y is 0
        s = scale * (s + d * tl.maximum(shift, -200.0)) + tl.sum(e * tl.maximum(y, -200.0), 0)
    d = d * scale + tl.sum(e, 0)
    return new_m, d, s


@triton.jit
def _forward(logits, targets, logp, entropy, saved_m, saved_d, outer_stride, row_stride, inner, c,
             V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENTROPY: tl.constexpr):  # fmt: skip
    """One program per row. V true logits of WIDTH; row r of [.., inner, WIDTH] starts at r // inner * outer_stride +
    r % inner * row_stride."""
    row = tl.program_id(0).to(tl.int64)
    logits += row // inner * outer_stride + row % inner * row_stride
    block = tl.arange(0, BLOCK)
    m, d, s = LOWEST, 0.0, 0.0
    whole: tl.constexpr = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):  # no mask: the widest loads
        x = tl.load(logits + start + block).to(tl.float32)
        m, d, s = _add_block(x, m, d, s, c, ENTROPY)
    if whole < V:  # the tail; what is loaded beyond V is padding, and thrown away
        column = whole + block
        x = tl.load(logits + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        m, d, s = _add_block(tl.where(column < V, x, -float("inf")), m, d, s, c, ENTROPY)

    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    x_t = tl.load(logits + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(logp + row, tl.where(inside, ((x_t - m) * c - tl.log2(d)) * LN2, 0.0))
    tl.store(saved_m + row, m)
    tl.store(saved_d + row, d)
    if ENTROPY:
        tl.store(entropy + row, (tl.log2(d) - s / d) * LN2)


@triton.jit
def _backward(logits, targets, entropy, saved_m, saved_d, g_logp, g_entropy, gradient,
              outer_stride, row_stride, gradient_outer_stride, gradient_row_stride, inner, c,
              V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENTROPY: tl.constexpr):  # fmt: skip
    """One program per row and block, the blocks of a row one after the other. `gradient` may be the logits themselves:
    each is read by the thread that overwrites it."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    logits += row // inner * outer_stride + row % inner * row_stride
    gradient += row // inner * gradient_outer_stride + row % inner * gradient_row_stride

    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    d = tl.load(saved_d + row)
    g = tl.where(inside, tl.load(g_logp + row) * (c * LN2), 0.0)  # c ln2 = 1 / T
    x = tl.load(logits + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    y = tl.maximum((x - tl.load(saved_m + row)) * c, -200.0)
    factor = g / d  # of 2^y, so that it is g p
    limit = tl.where(inside, V, 0)  # all of an ignored row's gradient is 0, even if its logits are NaN
    if ENTROPY:  # ... and g p + h p (ln p + entropy), with ln p = ln2 (y - log2 d)
        h = tl.load(g_entropy + row) * (c * LN2)
        factor += h / d * (tl.load(entropy + row) - tl.log2(d) * LN2) + h / d * LN2 * y
        limit = V
    dx = tl.where(column == target, g, 0.0) - tl.exp2(y) * factor
    tl.store(
        gradient + column, tl.where(column < limit, dx, 0.0), mask=column < WIDTH
    )  # rounded to its dtype once, here


def rows_of(x):
    """x [..., W] as the kernels address it: (x, number of inner rows, outer stride, row stride). Copies only what no two
    strides can describe, such as a transposed matrix of logits."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)  # a view where the strides allow it
    outer, row = ([0, 0] + list(x.stride()))[-3:-1]
    return x, x.shape[-2] if x.dim() > 1 else 1, outer, row


def block_size(width, largest):
    return min(largest, max(128, triton.next_power_of_2(width)))


def logprob_forward(logits, targets, temperature, vocab_size, logp, entropy, saved):
    """logits [..., W], targets [...]: fills logp [...], entropy [...] (if it is not None), and saved [2, N] with m and d
    of each row, all float32."""
    x, inner, outer_stride, row_stride = rows_of(logits)
    block = block_size(vocab_size, FORWARD_BLOCK)
    if targets.numel():
        with torch.cuda.device_of(x):
            _forward[(targets.numel(),)](
                x, targets.contiguous(), logp, entropy, saved[0], saved[1], outer_stride, row_stride, inner,
                math.log2(math.e) / temperature, vocab_size, x.shape[-1], block, entropy is not None, num_warps=WARPS,
            )  # fmt: skip


def logprob_backward(logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, gradient):
    """Fills `gradient` [..., W], which may be the logits. g_logp [...]; g_entropy [...] or None."""
    x, inner, outer_stride, row_stride = rows_of(logits)
    dx, _, gradient_outer_stride, gradient_row_stride = rows_of(gradient)
    block = block_size(x.shape[-1], BACKWARD_BLOCK)
    if targets.numel():
        with torch.cuda.device_of(x):
            _backward[(targets.numel() * triton.cdiv(x.shape[-1], block),)](
                x, targets.contiguous(), entropy, saved[0], saved[1], g_logp.contiguous(),
                None if g_entropy is None else g_entropy.contiguous(), dx,
                outer_stride, row_stride, gradient_outer_stride, gradient_row_stride, inner,
                math.log2(math.e) / temperature, vocab_size, x.shape[-1], block, g_entropy is not None, num_warps=WARPS,
            )  # fmt: skip
    if dx.data_ptr() != gradient.data_ptr():  # rows_of had to copy
        gradient.copy_(dx.view(gradient.shape))
