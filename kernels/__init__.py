"""Log-probabilities, entropy and KL of tokens from logits: the hot loop of every loss here.

    token_logprobs, token_logprobs_and_entropy      from logits           logprob.py (Triton)   plain.py (PyTorch)
    token_kl                                        from two logits       kl.py                 plain.py
    linear_logprobs, linear_logprobs_and_entropy    from hidden states    linear_logprob.py, on top of either
    kl_estimate                                     from log-probs        plain.py

CUDA tensors go to the Triton kernels. Plain PyTorch handles other devices, float64 (always), and machines without
Triton. KERNELS=torch or KERNELS=triton in the environment overrides the device; TRITON_INTERPRET=1 KERNELS=triton runs the
kernels on a CPU, in Triton's interpreter.

Everywhere: logits [..., W] have W columns, the first V = `vocab_size` of them true, the others padding, which never
enters a softmax and gets a zero gradient. They are divided by `temperature`. Results are float32 (float64 for float64
logits), in nats. Half-precision logits are never copied to float32 as a whole.

The functions are built of custom operators, so torch.compile(fullgraph=True) takes what calls them in one piece. To
differentiate their gradient once more (create_graph=True) raises an error: nobody has written second derivatives.
"""

import functools
import importlib
import math
import os

import torch
from torch import Tensor

from . import linear_logprob, plain
from .plain import kl_estimate

__all__ = [
    "kl_estimate",
    "linear_logprobs",
    "linear_logprobs_and_entropy",
    "token_kl",
    "token_logprobs",
    "token_logprobs_and_entropy",
]


def token_logprobs(logits, targets, temperature=1.0, vocab_size=None, inplace_backward=False):
    """log softmax(logits / temperature)[targets], the log-probability of each target token.

    logits [..., W], targets [...] (integers) -> [...]. A target outside 0..V-1 (-100, say) gives 0 and no gradient.
    Gradient to the logits: (onehot(target) - softmax) / temperature.

    `inplace_backward` overwrites the logits with their gradient, which saves their size in memory; do not use them
    after the backward pass. Whatever else needs them, such as a second backward pass, raises, as after any in-place
    change. It is meant for logits that a head has just computed, not for a leaf, and not for rows that overlap in memory.

    Raises ValueError for a temperature that is not above 0 and finite, a vocab_size beyond the rows, or targets of
    another shape.
    """
    V = _checked(logits.shape, targets, temperature, vocab_size)
    return _logprob(logits, targets, temperature, V, False, inplace_backward)[0]


def token_logprobs_and_entropy(logits, targets, temperature=1.0, vocab_size=None, inplace_backward=False):
    """As `token_logprobs`, and beside it the entropy of each distribution: H = -sum_v p_v log p_v, in nats, with 0
    log 0 = 0, whatever the target.

    logits [..., W], targets [...] -> (logp [...], entropy [...]), both differentiable. Gradient of H to the logits:
    -p (log p + H) / temperature.
    """
    V = _checked(logits.shape, targets, temperature, vocab_size)
    return _logprob(logits, targets, temperature, V, True, inplace_backward)[:2]


def token_kl(logits, ref_logits, temperature=1.0, vocab_size=None):
    """The exact KL(policy || reference) = sum_v p_v (log p_v - log q_v) of each position. logits, ref_logits [..., W]
    -> [...].

    p_v = 0 contributes 0; p_v > 0 where q_v = 0 is infinite. The reference is a constant: only the policy's logits get a
    gradient, p_v (log p_v/q_v - KL) / temperature.
    """
    V = _checked(logits.shape, None, temperature, vocab_size)
    if ref_logits.shape != logits.shape:
        raise ValueError(f"ref_logits {list(ref_logits.shape)} must have the shape of logits {list(logits.shape)}")
    return _kl(logits, ref_logits.detach(), temperature, V)[0]


def linear_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=None):
    """`token_logprobs` of the logits hidden @ weight.T, of which a call never holds more than one chunk, 4096 tokens.

    hidden [..., C], weight [W, C] (a head without bias) of the same dtype, targets [...] -> [...]. Both get their gradient;
    the weight's is summed in float32. See linear_logprob.py. The backward pass can run once: a second one may raise.
    """
    return _linear(hidden, weight, targets, temperature, vocab_size, False)[0]


def linear_logprobs_and_entropy(hidden, weight, targets, temperature=1.0, vocab_size=None):
    """`token_logprobs_and_entropy` of the logits hidden @ weight.T, in chunks like `linear_logprobs`.
    -> (logp [...], entropy [...])"""
    return _linear(hidden, weight, targets, temperature, vocab_size, True)


def _linear(hidden, weight, targets, temperature, vocab_size, with_entropy):
    V = _checked((*hidden.shape[:-1], len(weight)), targets, temperature, vocab_size)
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: they must be of one dtype")
    flat_hidden, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)  # [N, C], [N]
    if len(flat_hidden) <= linear_logprob.CHUNK_TOKENS and hidden.dtype in (torch.float32, torch.float64):
        # One chunk, whose logits may stay until the backward pass: nothing is computed twice. (Halves take the other way,
        # because this product would round their logits.)
        logp, entropy, _ = _logprob(flat_hidden @ weight.T, flat_targets, temperature, V, with_entropy, True)
    else:
        logp, entropy, _ = _linear_logprob(flat_hidden, weight, flat_targets, temperature, V, with_entropy)
    return logp.view(targets.shape), entropy.view(targets.shape) if with_entropy else None


def _checked(shape, targets, temperature, vocab_size):
    """The true vocabulary size V of logits of this shape, or ValueError."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    V = shape[-1] if vocab_size is None else vocab_size
    if not 0 < V <= shape[-1]:
        raise ValueError(f"vocab_size {V} does not fit rows of {shape[-1]} logits")
    if targets is not None and targets.shape != shape[:-1]:
        raise ValueError(f"targets {list(targets.shape)} do not fit logits {list(shape)}")
    return V


# ---- which implementation


@functools.cache
def _why_no_triton():
    """Why Triton cannot be imported, or None."""
    try:
        importlib.import_module("triton")
    except ImportError as error:  # macOS, Windows
        return str(error)
    return None


def implementation(x, name="logprob"):
    """The module that computes with a tensor like x: kernels.logprob or kernels.kl (Triton), or kernels.plain (PyTorch).
    Raises ValueError if KERNELS in the environment asks for what is not there."""
    choice = os.environ.get("KERNELS", "")
    if choice not in ("", "torch", "triton"):
        raise ValueError(f"KERNELS={choice}: must be torch or triton, or not be set")
    if choice == "torch" or x.dtype == torch.float64 or (choice == "" and not x.is_cuda):
        return plain
    if choice == "triton":
        if _why_no_triton():
            raise ValueError(f"KERNELS=triton, but Triton cannot be imported: {_why_no_triton()}")
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET", "").lower() not in ("1", "true", "yes", "on", "y"):
            raise ValueError(f"KERNELS=triton with a tensor on {x.device.type}: needs TRITON_INTERPRET=1 as well")
    elif _why_no_triton():
        return plain
    return importlib.import_module(f"{__name__}.{name}")


# ---- the operators
#
# custom_op hides a function from torch.compile, which then need not understand it; its annotations are the operator's
# signature. register_fake says which shapes come out, without computing. register_autograd gives the backward function,
# and setup_context what to keep for it. (A plain autograd.Function would do without torch.compile, which traces into it
# and breaks on the kernels.) Backward functions are operators as well, for the same reason.
#
# `saved` holds the maximum and the normaliser of each row, for the backward function (zeros where plain.py does without);
# it has no gradient of its own.


def _float(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("kernels::logprob", mutates_args=())
def _logprob(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, with_entropy: bool, inplace_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy, saved = _logprob_shapes(logits, targets, temperature, vocab_size, with_entropy, inplace_backward)
    implementation(logits, "logprob").logprob_forward(
        logits, targets, temperature, vocab_size, logp, entropy if with_entropy else None, saved
    )
    return logp, entropy, saved


@_logprob.register_fake
def _logprob_shapes(logits, targets, temperature, vocab_size, with_entropy, inplace_backward):
    logp = logits.new_empty(targets.shape, dtype=_float(logits))
    return logp, logp.new_empty(targets.shape if with_entropy else 0), logp.new_zeros(2, targets.numel())


@torch.library.custom_op("kernels::logprob_backward", mutates_args=())
def _logprob_backward(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int,
    entropy: Tensor, saved: Tensor, g_logp: Tensor, g_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    implementation(logits, "logprob").logprob_backward(
        logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, gradient
    )
    return gradient


@_logprob_backward.register_fake
def _(logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("kernels::logprob_backward_", mutates_args=("logits",))
def _logprob_backward_(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int,
    entropy: Tensor, saved: Tensor, g_logp: Tensor, g_entropy: Tensor | None,
) -> None:  # fmt: skip
    # mutates_args raises the version of the logits, as torch's own in-place operators do
    implementation(logits, "logprob").logprob_backward(
        logits, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, logits
    )


def _save_logprob(ctx, inputs, output):
    logits, targets, ctx.temperature, ctx.vocab_size, _, ctx.inplace = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # an unused output has the gradient None and costs nothing
    ctx.save_for_backward(logits, targets, *output[1:])


def _logprob_gradients(ctx, g_logp, g_entropy, _):
    logits, targets, entropy, saved = ctx.saved_tensors
    if not entropy.numel():
        g_entropy = None
    if g_logp is None:
        g_logp = saved.new_zeros(targets.shape)
    arguments = logits, targets, ctx.temperature, ctx.vocab_size, entropy, saved, g_logp, g_entropy
    # Not in place with create_graph=True, so that to differentiate the result raises; nor where expand() made rows share
    # their memory
    if ctx.inplace and not torch.is_grad_enabled() and 0 not in logits.stride():
        _logprob_backward_(*arguments)
        gradient = logits
    else:
        gradient = _logprob_backward(*arguments)
    return gradient, None, None, None, None, None


_logprob.register_autograd(_logprob_gradients, setup_context=_save_logprob)


@torch.library.custom_op("kernels::kl", mutates_args=())
def _kl(logits: Tensor, ref_logits: Tensor, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    kl, saved = _kl_shapes(logits, ref_logits, temperature, vocab_size)
    implementation(logits, "kl").kl_forward(logits, ref_logits, temperature, vocab_size, kl, saved)
    return kl, saved


@_kl.register_fake
def _kl_shapes(logits, ref_logits, temperature, vocab_size):
    kl = logits.new_empty(logits.shape[:-1], dtype=_float(logits))
    return kl, kl.new_zeros(4, kl.numel())


@torch.library.custom_op("kernels::kl_backward", mutates_args=())
def _kl_backward(
    logits: Tensor, ref_logits: Tensor, temperature: float, vocab_size: int, kl: Tensor, saved: Tensor, g_kl: Tensor
) -> Tensor:
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    implementation(logits, "kl").kl_backward(logits, ref_logits, temperature, vocab_size, kl, saved, g_kl, gradient)
    return gradient


@_kl_backward.register_fake
def _(logits, ref_logits, temperature, vocab_size, kl, saved, g_kl):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save_kl(ctx, inputs, output):
    logits, ref_logits, ctx.temperature, ctx.vocab_size = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, ref_logits, *output)


def _kl_gradients(ctx, g_kl, _):
    logits, ref_logits, kl, saved = ctx.saved_tensors
    gradient = _kl_backward(logits, ref_logits, ctx.temperature, ctx.vocab_size, kl, saved, g_kl)
    return gradient, None, None, None


_kl.register_autograd(_kl_gradients, setup_context=_save_kl)


@torch.library.custom_op("kernels::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy, saved = _linear_logprob_shapes(hidden, weight, targets, temperature, vocab_size, with_entropy)
    linear_logprob.linear_logprob_forward(
        hidden, weight, targets, temperature, vocab_size, logp, entropy if with_entropy else None, saved,
        implementation(hidden, "logprob").logprob_forward,
    )  # fmt: skip
    return logp, entropy, saved


@_linear_logprob.register_fake
def _linear_logprob_shapes(hidden, weight, targets, temperature, vocab_size, with_entropy):
    return _logprob_shapes(hidden, targets, temperature, vocab_size, with_entropy, False)


@torch.library.custom_op("kernels::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int, entropy: Tensor, saved: Tensor,
    g_logp: Tensor, g_entropy: Tensor | None, want_hidden: bool, want_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    d_hidden = torch.empty_like(hidden) if want_hidden else hidden.new_empty(0)
    d_weight = torch.empty_like(weight, dtype=_float(weight)) if want_weight else weight.new_empty(0)
    linear_logprob.linear_logprob_backward(
        hidden, weight, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy,
        d_hidden if want_hidden else None, d_weight if want_weight else None,
        implementation(hidden, "logprob").logprob_backward,
    )  # fmt: skip
    return d_hidden, d_weight.to(weight.dtype)


@_linear_logprob_backward.register_fake
def _(hidden, weight, targets, temperature, vocab_size, entropy, saved, g_logp, g_entropy, want_hidden, want_weight):
    d_hidden = torch.empty_like(hidden) if want_hidden else hidden.new_empty(0)
    return d_hidden, torch.empty_like(weight) if want_weight else weight.new_empty(0)


def _save_linear_logprob(ctx, inputs, output):
    hidden, weight, targets, ctx.temperature, ctx.vocab_size, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, targets, *output[1:])


def _linear_logprob_gradients(ctx, g_logp, g_entropy, _):
    hidden, weight, targets, entropy, saved = ctx.saved_tensors
    if not entropy.numel():
        g_entropy = None
    if g_logp is None:
        g_logp = saved.new_zeros(targets.shape)
    want_hidden, want_weight, *_ = ctx.needs_input_grad
    d_hidden, d_weight = _linear_logprob_backward(
        hidden, weight, targets, ctx.temperature, ctx.vocab_size, entropy, saved, g_logp, g_entropy,
        want_hidden, want_weight,
    )  # fmt: skip
    return d_hidden if want_hidden else None, d_weight if want_weight else None, None, None, None, None


_linear_logprob.register_autograd(_linear_logprob_gradients, setup_context=_save_linear_logprob)
