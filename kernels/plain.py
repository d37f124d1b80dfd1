"""The plain-PyTorch twins of the kernels: the same maths on every device, for every dtype and platform.

They never hold more of the vocabulary's size than the gradient they fill and one chunk of rows, which stays in the
cache from its first operation to its last. They compute in float64 for float64 logits and in float32 otherwise. With
u_v = (x_v - m) / T they save, like the kernels, m = max x and Z = sum_v e^u_v of each row for the backward pass.

For vocabularies up to SMALL they call torch.log_softmax and torch.softmax instead, which are the fastest on a CPU and need
nothing saved. But those add up the vocabulary one after the other: for 50257 logits of standard deviation 4 the float32
result is off by up to 2e-5, five times as far as with torch.sum, which adds in a tree; and so are entropy and gradient.
"""

import math

import torch

# Logits per chunk: small enough for a CPU's cache, large enough to keep a GPU busy
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**25, "mps": 2**25}

SMALL = 1024  # vocabularies up to here are left to torch's own softmax


def chunks(*tensors):
    """(which of the N rows, [n, W], [n, W], ...): the rows of tensors [..., W], a chunk at a time and without a copy."""
    try:
        flat = [x.view(-1, x.shape[-1]) for x in tensors]
    except RuntimeError:  # no single stride leads from row to row, as in logits[:, :-1]: take its parts one by one
        first = 0
        for parts in zip(*tensors):
            for rows, *pieces in chunks(*parts):
                yield slice(first + rows.start, first + rows.stop), *pieces
            first += parts[0].numel() // parts[0].shape[-1]
        return
    n = _rows_per_chunk(flat[0])
    for start in range(0, len(flat[0]), n):
        pieces = [x[start : start + n] for x in flat]
        yield slice(start, start + len(pieces[0])), *pieces


def _rows_per_chunk(x):
    return max(1, CHUNK_LOGITS.get(x.device.type, 2**22) // x.shape[-1])


def _buffers(count, x, dtype, vocab_size):
    """Space for `count` chunks of x [..., W], [count, n, V]."""
    rows = min(x.numel() // x.shape[-1], _rows_per_chunk(x))
    return torch.empty(count, rows, vocab_size, dtype=dtype, device=x.device)


def _scaled(x, m, temperature, out):
    """u = (x - m) / T of rows [n, V] into `out`, which may be x: at most 0, and exact for close logits at any offset."""
    u = torch.sub(x, m, out=out) if x.dtype == out.dtype else out.copy_(x).sub_(m)
    return u if temperature == 1.0 else u.div_(temperature)


def _softmax(function, x, temperature, out):
    """torch.softmax or torch.log_softmax of x / T, rows [n, V], into `out`, which may be x. By way of `_scaled` where torch
    would make a copy of its own, and for a temperature: x / T would round off the differences of large logits."""
    if temperature != 1.0 or x.dtype != out.dtype or not x.is_contiguous():
        x = _scaled(x, x.amax(-1, keepdim=True).to(out.dtype), temperature, out)
    return function(x, -1, out=out)


def _inside(targets, vocab_size):
    """Targets [...] -> which of them are in the vocabulary [N], and a column for each [N, 1], 0 for those that are not."""
    targets = targets.reshape(-1)
    inside = (targets >= 0) & (targets < vocab_size)
    return inside, torch.where(inside, targets, 0).long()[:, None]


def logprob_forward(logits, targets, temperature, vocab_size, logp, entropy, saved):
    """logits [..., W], targets [...]: fills logp [...], entropy [...] (if it is not None), and saved [2, N] with m and Z
    of each row (not for a small vocabulary: there the backward function does without)."""
    inside, column = _inside(targets, vocab_size)
    small = vocab_size <= SMALL
    buffers = _buffers(1 if entropy is None else 2, logits, logp.dtype, vocab_size)
    for rows, x in chunks(logits):
        x, buffer = x[:, :vocab_size], buffers[:, : len(x)]
        if small:  # u = ln p, and the formulas below hold with Z = 1
            u, log_Z = _softmax(torch.log_softmax, x, temperature, buffer[0]), 0.0  # [n, V]
        else:
            m = x.amax(-1, keepdim=True).to(logp.dtype)  # [n, 1]
            u = _scaled(x, m, temperature, buffer[0])
        u_target = u.gather(1, column[rows])[:, 0]  # [n]
        if entropy is not None:
            u.clamp_(min=-1e3)  # e^u is 0 there, and so is e^u u: not 0 * -inf
            e = torch.exp(u, out=buffer[1])
        elif not small:
            e = u.exp_()
        if not small:
            Z = e.sum(-1)  # [n]
            log_Z, saved[0, rows], saved[1, rows] = Z.log(), m[:, 0], Z
        logp.view(-1)[rows] = torch.where(inside[rows], u_target - log_Z, 0.0)
        if entropy is not None:
            mean_u = e.mul_(u).sum(-1) if small else e.mul_(u).sum(-1) / Z
            entropy.view(-1)[rows] = log_Z - mean_u


def logprob_backward(logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, gradient):
    """Fills `gradient` [..., W], which may be the logits. g_logp [...]; g_entropy [...] or None."""
    inside, column = _inside(targets, vocab_size)
    all_inside, small = bool(inside.all()), vocab_size <= SMALL
    g_over_T = torch.where(inside, g_logp.reshape(-1), 0.0)[:, None] / temperature  # [N, 1]
    # With p = e^u / Z and ln p = u - ln Z, dx = g/T 1[v = target] - g/T p - h/T p (ln p + entropy)
    #                                          = g/T 1[v = target] - e^u (slope u + constant)
    m, Z = saved[:, :, None] if not small else (None, torch.ones_like(g_over_T))  # [N, 1] each; small: u = ln p
    constant = g_over_T / Z
    if g_entropy is not None:
        slope = g_entropy.reshape(-1, 1) / temperature / Z
        constant = constant + slope * (entropy.reshape(-1, 1) - Z.log())
    own_buffer = gradient.dtype != saved.dtype or gradient.shape[-1] != vocab_size  # else work in the gradient itself
    count = 2 if g_entropy is not None else int(own_buffer)
    buffers = _buffers(count, logits, saved.dtype, vocab_size)
    for rows, x, dx in chunks(logits, gradient):
        x, out = x[:, :vocab_size], buffers[0, : len(x)] if own_buffer else dx  # [n, V]
        if g_entropy is not None:
            u = _softmax(torch.log_softmax, x, temperature, out) if small else _scaled(x, m[rows], temperature, out)
            e = torch.exp(u.clamp_(min=-1e3), out=buffers[1, : len(x)])
            u.mul_(-slope[rows]).sub_(constant[rows]).mul_(e)
        else:
            e = _softmax(torch.softmax, x, temperature, out) if small else _scaled(x, m[rows], temperature, out).exp_()
            e.mul_(-constant[rows])
            if not all_inside:
                e[~inside[rows]] = 0.0  # even if the logits are NaN
        out.scatter_add_(1, column[rows], g_over_T[rows])
        if own_buffer:
            dx[:, :vocab_size] = out  # rounded to the logits' dtype once
            dx[:, vocab_size:] = 0.0


def kl_forward(logits, ref_logits, temperature, vocab_size, kl, saved):
    """logits, ref_logits [..., W]: fills kl [...] and saved [4, N] with m_p, m_q, Z_p, Z_q of each row (see kl.py)."""
    buffers = _buffers(2, logits, kl.dtype, vocab_size)
    for rows, x, y in chunks(logits, ref_logits):
        x, y, buffer = x[:, :vocab_size], y[:, :vocab_size], buffers[:, : len(x)]
        m_p, m_q = (logit.amax(-1, keepdim=True).to(kl.dtype) for logit in (x, y))  # [n, 1]
        w = _scaled(y, m_q, temperature, buffer[1])  # [n, V]
        Z_q = torch.exp(w, out=buffer[0]).sum(-1)  # [n]
        u = _scaled(x, m_p, temperature, buffer[0])
        u_minus_w = torch.sub(u, w, out=w)
        e = u.exp_()
        Z_p = e.sum(-1)
        u_minus_w.masked_fill_(e == 0, 0.0)  # p = 0 contributes 0, also where q = 0
        kl.view(-1)[rows] = u_minus_w.mul_(e).sum(-1) / Z_p - Z_p.log() + Z_q.log()
        saved[:, rows] = torch.stack([m_p[:, 0], m_q[:, 0], Z_p, Z_q])


def kl_backward(logits, ref_logits, temperature, vocab_size, kl, saved, g_kl, gradient):
    """Fills `gradient` [..., W] of the policy's logits: g p (ln(p / q) - KL) / T."""
    m_p, m_q, Z_p, Z_q = saved[:, :, None]  # [N, 1] each
    constant = Z_q.log() - Z_p.log() - kl.reshape(-1, 1)  # ln(p / q) - KL = u - w + constant
    g_over_T_Z = g_kl.reshape(-1, 1) / temperature / Z_p
    buffers = _buffers(2, logits, kl.dtype, vocab_size)
    for rows, x, y, dx in chunks(logits, ref_logits, gradient):
        u = _scaled(x[:, :vocab_size], m_p[rows], temperature, buffers[0, : len(x)])  # [n, V]
        w = _scaled(y[:, :vocab_size], m_q[rows], temperature, buffers[1, : len(x)])
        u_minus_w = torch.sub(u, w, out=w)
        e = u.exp_()
        u_minus_w.masked_fill_(e == 0, 0.0)
        dx[:, :vocab_size] = u_minus_w.add_(constant[rows]).mul_(e).mul_(g_over_T_Z[rows])
        dx[:, vocab_size:] = 0.0


def kl_estimate(logp, ref_logp, kind="k3"):
    """Estimates of KL(policy || reference) from tokens that this very policy sampled, with d = logp - ref_logp. Any
    shape in, the same out.

    k1 = d              unbiased, often negative, noisy
    k2 = d^2 / 2        biased, little noise; as a loss its gradient is the true one of KL(policy || reference)
    k3 = e^-d - 1 + d   unbiased, never negative; as a loss its gradient is that of KL(reference || policy)

    As a loss k1 has zero expected gradient (it never sees the reference): it belongs in the reward. k3 is accurate for
    any d, see below. Source: J. Schulman, "Approximating KL divergence", 2020.
    """
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
