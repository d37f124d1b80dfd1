"""Log-probabilities, entropy and KL of tokens from logits: the hot loop of every loss here.

Plain PyTorch, in float32 (or float64) whatever the logits' dtype. Everywhere: logits [..., V] are divided by
`temperature`, `vocab_size` is the true vocabulary when the rows are padded beyond it (what lies beyond it never
enters a softmax), natural logarithms.
"""

import torch
import torch.nn.functional as F

__all__ = ["kl_estimate", "token_kl", "token_logprobs", "token_logprobs_and_entropy"]


def _log_softmax(logits, temperature, vocab_size):
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    logits = logits[..., :vocab_size]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def _gather(log_probs, targets):
    inside = (targets >= 0) & (targets < log_probs.shape[-1])
    logp = log_probs.gather(-1, torch.where(inside, targets, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, logp, torch.zeros_like(logp))


def token_logprobs(logits, targets, temperature=1.0, vocab_size=None, inplace_backward=False):
    """log softmax(logits / temperature)[targets], the log-probability of each target token.

    logits [..., V], targets [...] (integers) -> [...]. A target outside 0..V-1 (-100, say) gives 0 and no gradient.
    Gradient to the logits: (onehot(target) - softmax) / temperature. `inplace_backward` lets a fused kernel write it
    over the logits; here it has no effect.
    """
    return _gather(_log_softmax(logits, temperature, vocab_size), targets)


def token_logprobs_and_entropy(logits, targets, temperature=1.0, vocab_size=None, inplace_backward=False):
    """As `token_logprobs`, and beside it the entropy of each distribution: H = -sum_v p_v log p_v, in nats, with 0
    log 0 = 0.

    logits [..., V], targets [...] -> (logp [...], entropy [...]), both differentiable.
    """
    log_probs = _log_softmax(logits, temperature, vocab_size)
    entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)
    return _gather(log_probs, targets), entropy


def kl_estimate(logp, ref_logp, kind="k3"):
    """Estimates of KL(policy || reference) from tokens that this very policy sampled, with d = logp - ref_logp. Any
    shape in, the same out.

    k1 = d              unbiased, often negative, noisy
    k2 = d^2 / 2        biased, little noise; as a loss its gradient is the true one of KL(policy || reference)
    k3 = e^-d - 1 + d   unbiased, never negative; as a loss its gradient is that of KL(reference || policy)

    As a loss k1 has zero expected gradient (it never sees the reference): it belongs in the reward. Source: J.
    Schulman, "Approximating KL divergence", 2020.
    """
    d = logp - ref_logp
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2 or k3")


def token_kl(logits, ref_logits, temperature=1.0, vocab_size=None):
    """The exact KL(policy || reference) = sum_v p_v (log p_v - log q_v) of each position. logits, ref_logits [..., V]
    -> [...].

    p_v = 0 contributes 0; p_v > 0 where q_v = 0 is infinite. The gradient reaches the policy's logits: p_v (log
    p_v/q_v - KL) / temperature.
    """
    log_p = _log_softmax(logits, temperature, vocab_size)
    log_q = _log_softmax(ref_logits, temperature, vocab_size)
    p = log_p.exp()
    gap = torch.where(p > 0, log_p - log_q, 0.0)  # where p = 0 both may be -inf
    return (p * gap).sum(-1)
