"""The chunked head: log-probabilities from hidden states, without ever holding the [N, V] logits.

    logits = hidden @ weight.T          [N, W] = [N, C] [C, W], W = the vocabulary V and its padding
    logp, entropy = those of softmax(logits / T)

The logits are the largest tensor of post-training: for 8192 tokens of a vocabulary of 151,936 they are 5 GB in float32,
and their gradient is as much again. Here they exist for one chunk of tokens at a time:

    forward     for each chunk: logits = hidden @ weight.T, reduced to logp and entropy (logprob.py), and forgotten
    backward    for each chunk: the logits again, their gradient dlogits in their place, then
                dhidden = dlogits @ weight          dweight += dlogits.T @ hidden, summed in float32

That is four matrix products of 2 N W C operations where the unfused head has three: a third more time in the head, for
memory that does not grow with N. (Up to one chunk of float32 tokens the caller, in __init__.py, keeps the logits
instead: the three products, and the same memory.) Chunks are large, because each adds a whole [W, C] matrix to dweight:
with chunks of 256 tokens, to read and write that takes a GPU as long as the products.

The logits are float32 whatever the dtype of the model: bfloat16 keeps 8 bits, which is an error of up to 3e-2 for a logit
of 8 to 16, and of the same size in its log-probability.

Source: Wijmans et al. 2024 (Cut Your Losses, arXiv:2411.09009), who fuse the matrix products as well; here those are the
vendor library's.
"""

import torch

CHUNK_TOKENS = 4096


def product(a, b):
    """a @ b in float32 (float64 if they are), with halves as input too."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def linear_logprob_forward(hidden, weight, targets, temperature, vocab_size, logp, entropy, saved, logprob_forward):
    """hidden [N, C], weight [W, C], targets [N]: fills logp [N], entropy [N] (or None) and saved [2, N].
    `logprob_forward` is that of logprob.py or plain.py."""
    for start in range(0, len(hidden), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        logits = product(hidden[rows], weight.T)  # [n, W]
        chunk_entropy = None if entropy is None else entropy[rows]
        logprob_forward(logits, targets[rows], temperature, vocab_size, logp[rows], chunk_entropy, saved[:, rows])
        del logits  # before the next chunk's are made


def linear_logprob_backward(hidden, weight, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy,
                            d_hidden, d_weight, logprob_backward):  # fmt: skip
    """Fills d_hidden [N, C], and d_weight [W, C] in float32; either may be None if nobody wants it. The rest as above."""
    if d_weight is not None:
        d_weight.zero_()
    for start in range(0, len(hidden), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        logits = product(hidden[rows], weight.T)  # [n, W]
        chunk_g_entropy = None if g_entropy is None else g_entropy[rows]
        logprob_backward(
            logits, targets[rows], temperature, vocab_size, entropy[rows], saved[:, rows], g_logp[rows], chunk_g_entropy,
            gradient=logits,
        )  # fmt: skip
        d_logits = logits.to(hidden.dtype)
        del logits  # overwritten with its gradient; in float32 d_logits is the same memory
        if d_hidden is not None:
            d_hidden[rows] = product(d_logits, weight)
        if d_weight is not None and d_weight.dtype == hidden.dtype:
            d_weight.addmm_(d_logits.T, hidden[rows])
        elif d_weight is not None:
            d_weight += product(d_logits.T, hidden[rows])
        del d_logits
