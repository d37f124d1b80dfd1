"""The plain-PyTorch twins of the kernels: the same maths on every device, for every dtype and platform.

They never hold more of the vocabulary's size than the gradient they fill and one chunk of rows, which stays in the
cache from its first operation to its last. They compute in float64 for float64 logits and in float32 otherwise, and
recompute the softmax in the backward pass: that is as fast as reading it, and needs nothing saved.
"""

import math

import torch

# Logits per chunk: small enough for a CPU's cache, large enough to keep a GPU busy
CHUNK = {"cpu": 2**19, "cuda": 2**25, "mps": 2**25}


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


def _softmax(x, temperature, out, function=torch.softmax):
    """softmax or log_softmax of x / temperature, [n, V], into `out` (which may be x)."""
    if temperature != 1.0 or x.dtype != out.dtype or not x.is_contiguous():
        x = out.copy_(x)
    if temperature != 1.0:  # the maximum goes first: dividing logits around 1e8 would round off their differences
        x.sub_(x.amax(-1, keepdim=True)).div_(temperature)
    return function(x, -1, out=out)


def _columns(targets, vocab_size):
    """Targets [...] -> which are inside the vocabulary [N], and a column to gather from [N, 1]."""
    targets = targets.reshape(-1)
    inside = (targets >= 0) & (targets < vocab_size)
    return inside, torch.where(inside, targets, 0).long()[:, None]


def logprob_forward(logits, targets, temperature, vocab_size, logp, entropy, saved):
    """logits [..., W], targets [...]: fills logp [...] and, if it is not None, entropy [...]. `saved` stays as it is."""
    logp = logp.view(-1)  # [N]
    inside, column = _columns(targets, vocab_size)
    buffers = _buffers(1 if entropy is None else 2, logits, logp.dtype, vocab_size)
    for rows, x in chunks(logits):
        log_p = _softmax(x[:, :vocab_size], temperature, buffers[0, : len(x)], torch.log_softmax)  # [n, V]
        logp[rows] = torch.where(inside[rows], log_p.gather(1, column[rows])[:, 0], 0.0)
        if entropy is not None:
            log_p.clamp_(min=-1e3)  # p is 0 there, and so is p log p: not 0 * -inf
            p = torch.exp(log_p, out=buffers[1, : len(x)])
            entropy.view(-1)[rows] = p.mul_(log_p).sum(-1).neg_()


def logprob_backward(logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, gradient):
    """Fills `gradient` [..., W], which may be the logits. g_logp [...]; g_entropy [...] or None."""
    dtype = g_logp.dtype
    inside, column = _columns(targets, vocab_size)
    g = torch.where(inside, g_logp.reshape(-1), 0.0)[:, None] / temperature  # [N, 1]
    own = gradient.dtype != dtype or gradient.shape[-1] != vocab_size  # else the gradient itself is the buffer
    buffers = _buffers(own + (g_entropy is not None), logits, dtype, vocab_size)
    for rows, x, dx in chunks(logits, gradient):
        x, out = x[:, :vocab_size], buffers[-1, : len(x)] if own else dx  # [n, V]
        # dx = (g (1[v = target] - p) - h p (ln p + entropy)) / T
        if g_entropy is None:
            _softmax(x, temperature, out).mul_(-g[rows]).masked_fill_(~inside[rows, None], 0.0)
        else:
            h = g_entropy.reshape(-1, 1)[rows] / temperature  # [n, 1]
            log_p = _softmax(x, temperature, out, torch.log_softmax).clamp_(min=-1e3)
            p = torch.exp(log_p, out=buffers[0, : len(x)])
            log_p.mul_(-h).sub_(g[rows] + h * entropy.reshape(-1, 1)[rows]).mul_(p)
        out.scatter_add_(1, column[rows], g[rows])
        if own:
            dx[:, :vocab_size] = out  # rounded to the logits' dtype once
            dx[:, vocab_size:] = 0.0


def _p_and_log_ratio(x, y, temperature, buffers):
    """x, y [n, V] -> p and log(p / q), both [n, V], in the two buffers; the latter is 0 where p is 0."""
    log_p, log_q = buffers[:, : len(x)]
    _softmax(x, temperature, log_p, torch.log_softmax)
    _softmax(y, temperature, log_q, torch.log_softmax)
    log_ratio = torch.sub(log_p, log_q, out=log_q)
    p = log_p.exp_()
    return p, log_ratio.masked_fill_(p == 0, 0.0)


def kl_forward(logits, ref_logits, temperature, vocab_size, kl, saved):
    """logits, ref_logits [..., W]: fills kl [...]. `saved` stays as it is."""
    buffers = _buffers(2, logits, kl.dtype, vocab_size)
    for rows, x, y in chunks(logits, ref_logits):
        p, log_ratio = _p_and_log_ratio(x[:, :vocab_size], y[:, :vocab_size], temperature, buffers)
        kl.view(-1)[rows] = p.mul_(log_ratio).sum(-1)


def kl_backward(logits, ref_logits, temperature, vocab_size, kl, saved, g_kl, gradient):
    """Fills `gradient` [..., W] of the policy's logits: g p (ln(p / q) - KL) / T."""
    kl, g = kl.reshape(-1, 1), g_kl.reshape(-1, 1) / temperature  # [N, 1]
    buffers = _buffers(2, logits, kl.dtype, vocab_size)
    for rows, x, y, dx in chunks(logits, ref_logits, gradient):
        p, log_ratio = _p_and_log_ratio(x[:, :vocab_size], y[:, :vocab_size], temperature, buffers)
        dx[:, :vocab_size] = log_ratio.sub_(kl[rows]).mul_(p).mul_(g[rows])
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
    far = torch.expm1(x.clamp(max=80.0)) - x + (x - 80.0).clamp(min=0.0) * math.exp(80.0)
    return torch.where(near, series, far)
