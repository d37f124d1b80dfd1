"""The log-probability functions against float64, at the edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import kl_estimate, token_kl, token_logprobs, token_logprobs_and_entropy


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6), (torch.float16, 2e-6)]
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_against_float64(dtype, tolerance, temperature):
    g = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 5, 37, generator=g)).to(dtype)
    targets = torch.randint(0, 37, (3, 5), generator=g)
    exact = (logits.double() / temperature).log_softmax(-1)
    logp, entropy = token_logprobs_and_entropy(logits, targets, temperature)
    assert logp.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        logp.double(), exact.gather(-1, targets[..., None])[..., 0], rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=tolerance, atol=tolerance)
    assert torch.equal(token_logprobs(logits, targets, temperature), logp)


def test_gradients_in_closed_form():
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets, T = torch.randint(0, 11, (6,)), 0.7
    logp, entropy = token_logprobs_and_entropy(logits, targets, T)
    p = (logits / T).softmax(-1).detach()
    torch.testing.assert_close(
        torch.autograd.grad(logp.sum(), logits, retain_graph=True)[0],
        (torch.nn.functional.one_hot(targets, 11) - p) / T,
    )
    torch.testing.assert_close(
        torch.autograd.grad(entropy.sum(), logits)[0], -p * (p.log() + entropy.detach()[:, None]) / T
    )
    ref = torch.randn(6, 11, dtype=torch.float64)
    kl = token_kl(logits, ref, T)
    q = (ref / T).softmax(-1)
    torch.testing.assert_close(torch.autograd.grad(kl.sum(), logits)[0], p * ((p / q).log() - kl.detach()[:, None]) / T)


def test_padded_vocabulary_and_targets_outside():
    logits = torch.randn(4, 10, requires_grad=True)
    targets = torch.tensor([3, -100, 7, 2])
    logp, entropy = token_logprobs_and_entropy(logits, targets, vocab_size=7)
    short = token_logprobs(logits[:, :7].detach(), torch.tensor([3, 0, 0, 2]))
    assert torch.equal(logp[[0, 3]].detach(), short[[0, 3]]) and logp[[1, 2]].tolist() == [0, 0]
    gradient = torch.autograd.grad(logp.sum(), logits)[0]
    assert gradient[[1, 2]].eq(0).all() and gradient[:, 7:].eq(0).all() and gradient[0].abs().sum() > 0
    assert token_kl(logits, logits + 5, vocab_size=7).abs().max() < 1e-6


def test_infinite_logits():
    inf = float("inf")
    logp, entropy = token_logprobs_and_entropy(torch.tensor([[0.0, 0.0, -inf]], requires_grad=True), torch.tensor([0]))
    assert -logp.item() == entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert token_logprobs(torch.tensor([[1e8, 1e8]]), torch.tensor([0])).item() == pytest.approx(-0.693147, abs=1e-6)
    assert token_kl(torch.tensor([[0.0, 0.0, -inf]]), torch.tensor([[0.0, 0.0, 0.0]])).item() == pytest.approx(
        0.405465, abs=1e-6
    )
    assert token_kl(torch.tensor([[0.0, 0.0, -inf]]), torch.tensor([[0.0, 0.0, -inf]])).item() == 0
    assert token_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -inf]])).item() == inf


@settings(max_examples=50, deadline=None)
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_estimators(logp, ref):
    a, b = torch.tensor(logp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64)
    assert kl_estimate(a, b, "k3") >= 0 and kl_estimate(a, b, "k2") >= 0
    assert kl_estimate(a, b, "k1") == -kl_estimate(b, a, "k1")
    assert kl_estimate(a, a, "k3") == 0


def test_bad_calls():
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), 0.0)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
