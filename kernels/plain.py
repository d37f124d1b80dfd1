"""The plain-PyTorch twins of the kernels: the same maths on every device, for every dtype and platform.

They never hold more of the vocabulary's size than the gradient they fill and one chunk of rows, which stays in the
cache from its first operation to its last. They compute in float64 for float64 logits and in float32 otherwise. Like the
kernels they save m = max x and d = sum_v e^((x_v - m) / T) of each row for the backward pass.

(torch.log_softmax would be two lines shorter, but on a CPU it adds up the vocabulary one after the other: with 50257
tokens its float32 result is off by 2e-5. torch.sum adds pairwise.)
"""

import math

import torch

# Logits per chunk: small enough for a CPU's cache, large enough to keep a GPU busy
CHUNK = {"cpu": 2**20, "cuda": 2**25, "mps": 2**25}


def chunks(*rows):
    """(slice of the N rows, [n, W], [n, W], ...): the rows of tensors [..., W], a chunk at a time and without a copy."""
    try:
        flat = [x.view(-1, x.shape[-1]) for x in rows]
    except RuntimeError:  # no single stride leads from row to row, as in logits[:, :-1]
        first = 0
        for parts in zip(*rows):
            for where, *pieces in chunks(*parts):
                yield slice(first + where.start, first + where.stop), *pieces
            first += parts[0].numel() // parts[0].shape[-1]
        return
    n = _rows_per_chunk(flat[0])
    for start in range(0, len(flat[0]), n):
        pieces = [x[start : start + n] for x in flat]
        yield slice(start, start + len(pieces[0])), *pieces


def _rows_per_chunk(x):
    return max(1, CHUNK.get(x.device.type, 2**22) // x.shape[-1])


def _buffers(count, x, dtype, vocab_size):
    """Space for `count` chunks of x [..., W], [count, n, V]."""
    rows = min(x.numel() // x.shape[-1], _rows_per_chunk(x))
    return torch.empty(count, rows, vocab_size, dtype=dtype, device=x.device)


def _shifted(x, m, temperature, out):
    """(x - m) / T of rows [n, V] into `out`, which may be x: never above 0, and exact for close logits at any offset."""
    out = torch.sub(x, m, out=out) if x.dtype == out.dtype else out.copy_(x).sub_(m)
    return out if temperature == 1.0 else out.div_(temperature)


def _columns(targets, vocab_size):
    """Targets [...] -> which are inside the vocabulary [N], and a column to gather from [N, 1]."""
    targets = targets.reshape(-1)
    inside = (targets >= 0) & (targets < vocab_size)
    return inside, torch.where(inside, targets, 0).long()[:, None]


def logprob_forward(logits, targets, temperature, vocab_size, logp, entropy, saved):
    """logits [..., W], targets [...]: fills logp [...], entropy [...] (if it is not None), and saved [2, N] with m and d
    of each row."""
    inside, column = _columns(targets, vocab_size)
    buffers = _buffers(1 if entropy is None else 2, logits, logp.dtype, vocab_size)
    for rows, x in chunks(logits):
        x = x[:, :vocab_size]
        m = x.amax(-1, keepdim=True).to(logp.dtype)  # [n, 1]
        y = _shifted(x, m, temperature, buffers[0, : len(x)])  # [n, V]
        y_target = y.gather(1, column[rows])[:, 0]  # [n]
        if entropy is None:
            d = y.exp_().sum(-1)
        else:
            y.clamp_(min=-1e3)  # e^y is 0 there, and so is e^y y: not 0 * -inf
            e = torch.exp(y, out=buffers[1, : len(x)])
            d = e.sum(-1)
            entropy.view(-1)[rows] = d.log() - e.mul_(y).sum(-1) / d
        logp.view(-1)[rows] = torch.where(inside[rows], y_target - d.log(), 0.0)
        saved[0, rows], saved[1, rows] = m[:, 0], d


def logprob_backward(logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, gradient):
    """Fills `gradient` [..., W], which may be the logits. g_logp [...]; g_entropy [...] or None."""
    inside, column = _columns(targets, vocab_size)
    all_inside = bool(inside.all())
    m, d = saved[:, :, None]  # [N, 1] each
    g = torch.where(inside, g_logp.reshape(-1), 0.0)[:, None] / temperature  # [N, 1]
    if g_entropy is not None:
        h = g_entropy.reshape(-1, 1) / temperature
        offset = entropy.reshape(-1, 1) - d.log()
    own = gradient.dtype != saved.dtype or gradient.shape[-1] != vocab_size  # else the gradient itself is the buffer
    buffers = _buffers(own + (g_entropy is not None), logits, saved.dtype, vocab_size)
    for rows, x, dx in chunks(logits, gradient):
        y = _shifted(x[:, :vocab_size], m[rows], temperature, buffers[-1, : len(x)] if own else dx)  # [n, V]
        # dx = (g (1[v = target] - p) - h p (ln p + entropy)) / T, with p = e^y / d and ln p = y - ln d
        if g_entropy is None:
            y.exp_().mul_(-g[rows] / d[rows])
            if not all_inside:
                y[~inside[rows]] = 0.0  # even if the logits are NaN
        else:
            e = torch.exp(y.clamp_(min=-1e3), out=buffers[0, : len(x)])
            y.add_(offset[rows]).mul_(-h[rows] / d[rows]).sub_(g[rows] / d[rows]).mul_(e)
        y.scatter_add_(1, column[rows], g[rows])
        if own:
            dx[:, :vocab_size] = y  # rounded to the logits' dtype once
            dx[:, vocab_size:] = 0.0


def kl_forward(logits, ref_logits, temperature, vocab_size, kl, saved):
    """logits, ref_logits [..., W]: fills kl [...] and saved [4, N] with m, n, a, b of each row (see kl.py)."""
    buffers = _buffers(2, logits, kl.dtype, vocab_size)
    for rows, x, y in chunks(logits, ref_logits):
        x, y, buffer = x[:, :vocab_size], y[:, :vocab_size], buffers[:, : len(x)]
        m, n = (z.amax(-1, keepdim=True).to(kl.dtype) for z in (x, y))  # [n, 1]
        w = _shifted(y, n, temperature, buffer[1])  # [n, V]
        b = torch.exp(w, out=buffer[0]).sum(-1)  # [n]
        u = _shifted(x, m, temperature, buffer[0])
        log_ratio = torch.sub(u, w, out=w)  # ln(p / q), but for ln(b / a)
        e = u.exp_()
        a = e.sum(-1)
        log_ratio.masked_fill_(e == 0, 0.0)  # where both are -inf, or p is 0
        kl.view(-1)[rows] = log_ratio.mul_(e).sum(-1) / a - a.log() + b.log()
        saved[:, rows] = torch.stack([m[:, 0], n[:, 0], a, b])


def kl_backward(logits, ref_logits, temperature, vocab_size, kl, saved, g_kl, gradient):
    """Fills `gradient` [..., W] of the policy's logits: g p (ln(p / q) - KL) / T."""
    m, n, a, b = saved[:, :, None]  # [N, 1] each
    offset = b.log() - a.log() - kl.reshape(-1, 1)
    factor = g_kl.reshape(-1, 1) / temperature / a
    buffers = _buffers(2, logits, kl.dtype, vocab_size)
    for rows, x, y, dx in chunks(logits, ref_logits, gradient):
        u = _shifted(x[:, :vocab_size], m[rows], temperature, buffers[0, : len(x)])  # [n, V]
        w = _shifted(y[:, :vocab_size], n[rows], temperature, buffers[1, : len(x)])
        log_ratio = torch.sub(u, w, out=w)
        e = u.exp_()
        log_ratio.masked_fill_(e == 0, 0.0)
        dx[:, :vocab_size] = log_ratio.add_(offset[rows]).mul_(e).mul_(factor[rows])
        dx[:, vocab_size:] = 0.0


def kl_estimate(logp, ref_logp, kind="k3"):
    """k1, k2 or k3 of d = logp - ref_logp, any shape. See __init__.py for what they are good for."""
    d = logp - ref_logp
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        return _k3(-d)
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2 or k3")


def _k3(x):
    """e^x - 1 - x for any x: its Taylor series where |x| < 0.1, as expm1(x) - x would be mostly rounding errors near 0;
    beyond 80 its tangent there, because a float32 holds no e^89."""
    near = x.abs() < 0.1
    s = torch.where(near, x, 0.0)
    series = s * s * (1 / 2 + s * (1 / 6 + s * (1 / 24 + s * (1 / 120 + s * (1 / 720 + s / 5040)))))
    x = torch.where(near, 1.0, x)
    far = torch.expm1(x.clamp(max=80.0)) - x + torch.relu(x - 80.0) * math.exp(80.0)
    return torch.where(near, series, far)
