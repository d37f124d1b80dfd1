"""Preference losses against closed forms, TRL, and the policy that they are meant to find; the loop against the formulas
written out response by response; judges, iterations, the mass leak; learning itself."""

import dataclasses
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import close
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grpo import DIGITS, DigitWorld, babbler

import common
import dpo
from data import get_tokenizer, judges, preferences, stories
from data.preferences import read_preferences
from gpt import GPT, GPTConfig, Rollout

LOSSES = tuple(dpo.BETA)
E = 0.2  # of label smoothing
OPTIONS = dict(label_smoothing=E, gamma=0.7, nll_weight=0.6, desirable_weight=1.1, undesirable_weight=0.8)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def by_hand(loss, pc, pr, rc, rr, nc, nr, beta, z0=0.0, mean_length=None):
    """(loss, slope in pc, slope in pr) of one pair: summed log-probs of policy and reference, lengths; from the papers'
    formulas, with plain numbers. For kto the sum of its two losses."""
    a, b = pc - rc, pr - rr
    z = beta * (a - b)
    if loss == "dpo":
        return -math.log(sigmoid(z)), -beta * sigmoid(-z), beta * sigmoid(-z)
    if loss == "dpo_norm":
        z = beta * (a / nc - b / nr)
        return -math.log(sigmoid(z)), -beta * sigmoid(-z) / nc, beta * sigmoid(-z) / nr
    if loss in ("cdpo", "robust"):
        sign = 1 if loss == "cdpo" else -1
        scale = 1 if loss == "cdpo" else 1 / (1 - 2 * E)
        slope = scale * beta * (-(1 - E) * sigmoid(-z) + sign * E * sigmoid(z))
        value = scale * (-(1 - E) * math.log(sigmoid(z)) - sign * E * math.log(sigmoid(-z)))
        return value, slope, -slope
    if loss == "hinge":
        return (1 - z, -beta, beta) if z < 1 else (0.0, 0.0, 0.0)
    if loss == "ipo":
        off = a - b - 1 / (2 * beta)
        return off**2, 2 * off, -2 * off
    if loss == "ipo_avg":
        off = a / nc - b / nr - 1 / (2 * beta)
        return off**2, 2 * off / nc, -2 * off / nr
    if loss == "sppo":
        up, down = a - 1 / (2 * beta), b + 1 / (2 * beta)
        return up**2 + down**2, 2 * up, 2 * down
    if loss == "kto":
        good, bad = sigmoid(beta * (a - z0)), sigmoid(beta * (z0 - b))
        return 1.1 * (1 - good) + 0.8 * (1 - bad), -1.1 * beta * good * (1 - good), 0.8 * beta * bad * (1 - bad)
    if loss == "rpo":
        return (
            -math.log(sigmoid(z)) - 0.6 * pc / mean_length,
            -beta * sigmoid(-z) - 0.6 / mean_length,
            beta * sigmoid(-z),
        )
    if loss == "simpo":
        z = beta * (pc / nc - pr / nr) - 0.7
        return -math.log(sigmoid(z)), -beta * sigmoid(-z) / nc, beta * sigmoid(-z) / nr
    if loss == "orpo":
        p, q = math.exp(pc / nc), math.exp(pr / nr)
        z = math.log(p / (1 - p)) - math.log(q / (1 - q))
        value, slope = -pc / nc - beta * math.log(sigmoid(z)), beta * sigmoid(-z)
        return value, (-1 - slope / (1 - p)) / nc, slope / (1 - q) / nr
    raise AssertionError(loss)


def random_pairs(seed, B=5):
    g = torch.Generator().manual_seed(seed)
    logps = [-8 * torch.rand(B, generator=g, dtype=torch.float64) - 0.2 for _ in range(4)]
    lengths = [torch.randint(1, 9, (B,), generator=g) for _ in range(2)]
    kl = [-8 * torch.rand(4, generator=g, dtype=torch.float64) for _ in range(2)]
    return logps, dict(chosen_lengths=lengths[0], rejected_lengths=lengths[1], policy_kl=kl[0], ref_kl=kl[1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.1, 0.5, 2.5]))
def test_losses_and_gradients_are_those_of_the_papers(seed, beta):
    (pc, pr, rc, rr), options = random_pairs(seed)
    z0 = max(0.0, (options["policy_kl"] - options["ref_kl"]).mean().item())
    nc, nr = options["chosen_lengths"].tolist(), options["rejected_lengths"].tolist()
    for loss in LOSSES:
        chosen, rejected = pc.clone().requires_grad_(), pr.clone().requires_grad_()
        found, reward_w, reward_l = dpo.preference_loss(chosen, rejected, rc, rr, beta, loss, **OPTIONS, **options)
        assert not reward_w.requires_grad and not reward_l.requires_grad
        slopes = torch.autograd.grad(found.sum(), (chosen, rejected))
        found = found[:5] + found[5:] if loss == "kto" else found
        for i in range(5):
            numbers = (x[i].item() for x in (pc, pr, rc, rr))
            value, up, down = by_hand(loss, *numbers, nc[i], nr[i], beta, z0, sum(nc) / 5)
            assert found[i].item() == pytest.approx(value, rel=1e-9, abs=1e-12), loss
            assert slopes[0][i].item() == pytest.approx(up, rel=1e-7, abs=1e-12), loss
            assert slopes[1][i].item() == pytest.approx(down, rel=1e-7, abs=1e-12), loss


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_wants_the_chosen_one_and_not_the_rejected_one(loss):
    """Just off the reference, in float32."""
    logps, options = random_pairs(3)
    ref = [x.float() - 0.01 for x in logps[:2]]
    chosen, rejected = ((x + 0.01).clone().requires_grad_() for x in ref)
    found, _, _ = dpo.preference_loss(chosen, rejected, *ref, dpo.BETA[loss], loss, **{**options, "policy_kl": None})
    up, down = torch.autograd.grad(found.sum(), (chosen, rejected))
    assert found.dtype == torch.float32 and (up < 0).all() and (down > 0).all()


def test_at_the_reference_the_loss_is_log_2_and_no_reward_is_given():
    x = -30 * torch.rand(7, dtype=torch.float64)
    for beta in (0.01, 0.1, 1.0):
        for loss in ("dpo", "cdpo", "robust", "dpo_norm"):
            found, chosen, rejected = dpo.preference_loss(
                x, 2 * x, x, 2 * x, beta, loss, chosen_lengths=x.abs(), rejected_lengths=x.abs(), label_smoothing=0.1
            )
            close(found, [math.log(2)] * 7, atol=1e-12)
            assert chosen.eq(0).all() and rejected.eq(0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_log_probs_stay_finite(loss):
    """A response of thousands of tokens, in float32; and one that is certain."""
    chosen, rejected = (torch.tensor([-1e4, -1.0, 0.0, -5e-9], requires_grad=True) for _ in range(2))
    for low in (chosen, rejected):
        other = torch.tensor([-2.0, -1e4, -1.0, -1.0])
        pair = (low, other) if low is chosen else (other, low)
        found, _, _ = dpo.preference_loss(
            *pair, -torch.ones(4), -torch.ones(4), dpo.BETA[loss], loss, chosen_lengths=torch.ones(4), rejected_lengths=torch.ones(4)
        )  # fmt: skip
        assert found.isfinite().all() and torch.autograd.grad(found.sum(), low)[0].isfinite().all()


def test_robust_loss_is_unbiased_under_flips():
    """Labels that are flipped with chance e: the mean of the robust loss is dpo's loss of the true ones; cdpo's is not."""
    (pc, pr, rc, rr), _ = random_pairs(0)
    true, _, _ = dpo.preference_loss(pc, pr, rc, rr, 0.3)
    for loss, unbiased in (("robust", True), ("cdpo", False)):
        kept, _, _ = dpo.preference_loss(pc, pr, rc, rr, 0.3, loss, label_smoothing=E)
        flipped, _, _ = dpo.preference_loss(pr, pc, rr, rc, 0.3, loss, label_smoothing=E)
        assert torch.allclose((1 - E) * kept + E * flipped, true, atol=1e-9) == unbiased


def test_a_loss_that_nobody_knows_and_lengths_that_are_missing():
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="unknown loss 'dpoo'"):
        dpo.preference_loss(x, x, x, x, 0.1, "dpoo")
    for loss in ("simpo", "orpo", "ipo_avg", "dpo_norm", "rpo"):
        with pytest.raises(ValueError, match="lengths"):
            dpo.preference_loss(x, x, x, x, 0.1, loss)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_optimum_is_the_reference_tilted_by_the_reward(seed):
    """All pairs of four responses, labelled by Bradley and Terry's judge of a reward, each label with its exact weight:
    DPO's minimum is ref * exp(r / beta) / Z, and the implicit rewards differ from r by a constant."""
    g, beta = torch.Generator().manual_seed(seed), 0.5
    reward, ref = (
        torch.randn(4, generator=g, dtype=torch.float64),
        torch.randn(4, generator=g, dtype=torch.float64).log_softmax(0),
    )
    logits = ref.clone().requires_grad_()
    i, j = torch.tensor([(i, j) for i in range(4) for j in range(4) if i != j]).T
    weight = torch.sigmoid(reward[i] - reward[j])  # how often i is preferred to j
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16)

    def closure():
        optimizer.zero_grad()
        logp = logits.log_softmax(0)
        loss = (weight * dpo.preference_loss(logp[i], logp[j], ref[i], ref[j], beta)[0]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    logp = logits.detach().log_softmax(0)
    close(logp.exp(), (ref + reward / beta).softmax(0).tolist(), atol=1e-6)
    _, implicit, _ = dpo.preference_loss(logp, logp, ref, ref, beta)
    assert (implicit - reward).std() < 1e-5 and (logp - ref).abs().max() > 0.3


# ---- TRL, where it is installed


def trl_outputs(logps):
    """What TRL's trainers want to hear from a model: one response token per row, of the given log-probability."""
    n = len(logps)
    zero = torch.zeros(n, 1)
    return SimpleNamespace(log_probs=logps[:, None], entropy=zero, mean_logits=zero, is_top1=zero.bool())


@pytest.mark.parametrize(
    "ours, theirs",
    [("dpo", ["sigmoid"]), ("robust", ["robust"]), ("hinge", ["hinge"]), ("ipo_avg", ["ipo"]), ("sppo", ["sppo_hard"]), ("dpo_norm", ["sigmoid_norm"]), ("rpo", ["sigmoid", "sft"])],
)  # fmt: skip
def test_losses_agree_with_trl(ours, theirs):
    """TRL's own loss code, with T tokens per response."""
    trl = pytest.importorskip("trl")
    from collections import defaultdict

    g, T = torch.Generator().manual_seed(0), 6
    mask = (torch.arange(T) < torch.randint(1, T + 1, (8, 1), generator=g)).long()  # 4 chosen ones, 4 rejected ones
    logps = -3 * torch.rand(8, T, generator=g) * mask
    ref = -15 * torch.rand(8, generator=g)
    completion = F.pad(mask, (1, 0))  # in front, one prompt token
    zero = torch.zeros(8, T)
    model = lambda **_: SimpleNamespace(log_probs=logps, entropy=zero, mean_logits=zero, is_top1=zero.bool())  # noqa: E731
    same = lambda x: x  # noqa: E731
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=theirs,
        loss_weights=[1.0, 0.6][: len(theirs)], beta=0.1, label_smoothing=E, use_weighting=False, _total_train_tokens=0,
        _tp_size=1, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    inputs = dict(input_ids=torch.zeros(8, T + 1, dtype=torch.long), attention_mask=completion, completion_mask=completion,
                  ref_chosen_logps=ref[:4], ref_rejected_logps=ref[4:])  # fmt: skip
    expected = trl.DPOTrainer._compute_loss(trainer, model, inputs, False)
    sums, lengths = logps.sum(1), mask.sum(1)
    found, chosen, rejected = dpo.preference_loss(
        sums[:4],
        sums[4:],
        ref[:4],
        ref[4:],
        0.1,
        ours,
        chosen_lengths=lengths[:4],
        rejected_lengths=lengths[4:],
        **OPTIONS,
    )
    torch.testing.assert_close(found.mean(), expected, rtol=1e-6, atol=1e-6)
    if not ours.endswith(("avg", "norm")):
        logged = trainer._metrics["train"]
        assert chosen.mean().item() == pytest.approx(logged["rewards/chosen"][0], abs=1e-6)
        assert (chosen > rejected).float().mean().item() == pytest.approx(logged["rewards/accuracies"][0])


def test_losses_without_a_reference_agree_with_trl():
    orpo = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    (pc, pr, _, _), options = random_pairs(1)
    nc, nr = options["chosen_lengths"], options["rejected_lengths"]
    device = SimpleNamespace(device="cpu")
    trainer = SimpleNamespace(beta=0.1, accelerator=device)
    theirs, *_ = orpo.odds_ratio_loss(trainer, (pc / nc).float(), (pr / nr).float())
    found, _, _ = dpo.preference_loss(pc, pr, None, None, 0.1, "orpo", **options)
    torch.testing.assert_close(found.float(), (-pc / nc).float() - theirs, rtol=1e-5, atol=1e-6)
    trainer = SimpleNamespace(
        beta=2.5, alpha=0.0, loss_type="simpo", simpo_gamma=1.4, label_smoothing=0, accelerator=device
    )
    theirs, chosen, _ = cpo.cpo_loss(trainer, pc / nc, pr / nr)
    found, reward, _ = dpo.preference_loss(pc, pr, None, None, 2.5, "simpo", gamma=1.4, **options)
    torch.testing.assert_close(found, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(reward, chosen, rtol=1e-9, atol=1e-9)


# ---- one step, on responses of a real model


def digit_config(**options):
    return dpo.Config(**{**dict(device="cpu", max_new_tokens=4, micro_batch=4, label_smoothing=E, gamma=0.7, nll_weight=0.6,
                                desirable_weight=1.1, undesirable_weight=0.8), **options})  # fmt: skip


def digit_rows(n, seed=0):
    """Pairs of random digits as responses, of unequal lengths, to prompts of one to three digits."""
    rng, rows = random.Random(seed), []
    text = lambda low, high: "".join(rng.choice("012345") for _ in range(rng.randint(low, high)))  # noqa: E731
    while len(rows) < n:
        row = dict(prompt=text(1, 3), chosen=text(0, 4), rejected=text(0, 4))
        if row["chosen"] != row["rejected"]:
            rows.append(row)
    return rows


def digit_model(seed=0):
    torch.manual_seed(seed)
    return GPT(GPTConfig(7, 8, 1, 2, 32))


def response_ids(row, key):
    return DIGITS.encode(row[key]) + [6] * (key not in row.get("cut_off", ()))


def ids_logp(model, prompt, response):
    """log p(response | prompt) from the logits of the plain forward pass over one text of token ids."""
    ids = torch.tensor([prompt + response])
    logp = model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logp[len(prompt) - 1 :].sum()


def response_logp(model, row, key, of=None):
    """The same of the `key` response in a row, or, behind the prompt of this row, in the row `of`."""
    return ids_logp(model, DIGITS.encode(row["prompt"]), response_ids(of or row, key))


def z0_by_hand(policy, reference, rows, mine, seed=0):
    """kto's z0 for the step with rows[i], i in `mine`: how much likelier responses to other prompts have become."""
    data, gains = dpo.as_tensors(rows, DIGITS, digit_config()), []
    other = dpo.mismatch(data, 8, seed)
    for r in data.elements[list(mine)].flatten().tolist():
        ids, real = other.ids[r], other.attention_mask[r] > 0
        prompt, response = (
            ids[: other.prompt_len][real[: other.prompt_len]],
            ids[other.prompt_len :][real[other.prompt_len :]],
        )
        gains.append(
            (
                ids_logp(policy, prompt.tolist(), response.tolist())
                - ids_logp(reference, prompt.tolist(), response.tolist())
            ).item()
        )
    return max(0.0, sum(gains) / len(gains))


def step_by_hand(policy, reference, rows, config, z0=0.0):
    """The mean loss of one step over `rows` and its gradient, one pair at a time and without a batch."""
    mean_length = sum(len(response_ids(row, "chosen")) for row in rows) / len(rows)
    total, gradient = 0.0, [torch.zeros_like(p) for p in policy.parameters()]
    n = len(rows) * (2 if config.loss == "kto" else 1)
    for row in rows:
        logp = [response_logp(policy, row, key) for key in ("chosen", "rejected")]
        ref = [response_logp(reference, row, key).item() for key in ("chosen", "rejected")]
        lengths = [len(response_ids(row, key)) for key in ("chosen", "rejected")]
        value, *slopes = by_hand(config.loss, *(x.item() for x in logp), *ref, *lengths, config.beta, z0, mean_length)
        total += value / n
        grads = torch.autograd.grad(sum(s * x for s, x in zip(slopes, logp)), list(policy.parameters()))
        gradient = [g + d / n for g, d in zip(gradient, grads)]
    return total, gradient


class Catch:
    """Stands in for an optimizer: keeps the gradient in place of a step."""

    def __init__(self, policy):
        self.policy = policy

    def step(self):
        self.gradient = [p.grad.clone() for p in self.policy.parameters()]

    def zero_grad(self):
        self.policy.zero_grad()

    def parameters(self):
        return self.policy.parameters()


@pytest.fixture
def float64(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("micro_batch", [2, 6, 64])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_is_the_mean_over_pairs_however_it_is_cut_and_padded(float64, loss, micro_batch):
    rows, config = digit_rows(7), digit_config(loss=loss, batch=7, micro_batch=micro_batch, max_grad_norm=1e9)
    policy, reference = digit_model(2), digit_model(0)
    data = dpo.as_tensors(rows, DIGITS, config)
    dpo.ask_reference(reference, data, config)
    z0 = z0_by_hand(policy, reference, rows, range(7)) if loss == "kto" else 0.0
    assert loss != "kto" or z0 > 0.05
    catch = Catch(policy)
    stats, tokens = dpo.update(policy, catch, data, 0, ("order", 0, 0), config)
    total, gradient = step_by_hand(policy, reference, rows, config, z0)
    assert stats["loss"] == pytest.approx(total, rel=1e-9)
    for found, expected in zip(catch.gradient, gradient):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
    assert tokens == sum(2 * len(row["prompt"]) + len(row["chosen"] + row["rejected"]) + 2 for row in rows)
    assert stats["grad_norm"] == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in gradient)))


def test_responses_to_other_prompts():
    """For z0: each prompt with a response to another one, chosen where its own is chosen, within the context."""
    rows = digit_rows(12) + [dict(prompt="5", chosen="12345", rejected="0")] * 3
    data = dpo.as_tensors(rows, DIGITS, digit_config())
    other = dpo.mismatch(data, 8, 0)
    taken = set()
    for i, row in enumerate(rows):
        for k, key in enumerate(("chosen", "rejected")):
            ids, real = other.ids[2 * i + k], other.attention_mask[2 * i + k] > 0
            n = len(row["prompt"])
            assert ids[:3][real[:3]].tolist() == DIGITS.encode(row["prompt"])
            response = ids[3:][real[3:]].tolist()
            sources = [o for o in rows if o["prompt"] != row["prompt"] and response_ids(o, key)[: 8 - n] == response]
            assert sources
            taken.add(tuple(response))
    assert len(taken) > 8  # not always the same one
    assert torch.equal(dpo.mismatch(data, 8, 0).ids, other.ids) and not torch.equal(
        dpo.mismatch(data, 8, 1).ids, other.ids
    )


def test_single_responses_are_pairs_without_a_partner(float64):
    """kto on labelled responses, unequal in number: the sum over both kinds, each with its weight."""
    pairs, config = digit_rows(5), digit_config(loss="kto", batch=9, max_grad_norm=1e9)
    rows = [
        dict(prompt=row["prompt"], response=row[key], label=key == "chosen")
        for row in pairs
        for key in ("chosen", "rejected")
    ]
    rows.pop()  # five good ones and four bad ones
    policy, reference = digit_model(2), digit_model(0)
    data = dpo.as_tensors(rows, DIGITS, config)
    assert data.elements.shape == (9, 1) and data.chosen.tolist() == [True, False] * 4 + [True]
    dpo.ask_reference(reference, data, config)
    z0, losses = z0_by_hand(policy, reference, rows, range(9)), []
    for row in rows:
        gain = response_logp(policy, row, "response") - response_logp(reference, row, "response").item()
        losses.append(
            1.1 * (1 - torch.sigmoid(0.1 * (gain - z0)))
            if row["label"]
            else 0.8 * (1 - torch.sigmoid(0.1 * (z0 - gain)))
        )
    loss, catch = sum(losses) / 9, Catch(policy)
    stats, _ = dpo.update(policy, catch, data, 0, ("order", 0, 0), config)
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-9) and "margin" not in stats
    for found, expected in zip(catch.gradient, torch.autograd.grad(loss, list(policy.parameters()))):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


def test_every_pass_sees_each_pair_once_in_another_order(monkeypatch):
    seen, config, policy = [], digit_config(batch=4, micro_batch=64), digit_model()
    data = dpo.as_tensors(digit_rows(10), DIGITS, config)
    dpo.ask_reference(policy, data, config)
    plain = GPT.response_states
    monkeypatch.setattr(
        GPT, "response_states", lambda m, rollout, rows: (seen.append(rows.tolist()), plain(m, rollout, rows))[1]
    )
    for step in range(6):
        dpo.update(policy, Catch(policy), data, step, ("order", 0, 0), config)
    first, second = ([row for rows in part for row in rows] for part in (seen[:3], seen[3:]))
    assert [len(rows) for rows in seen] == [8, 8, 4] * 2
    assert sorted(first) == sorted(second) == list(range(20)) and first != second


def test_the_reference_is_asked_once_and_not_at_all_without_one(monkeypatch):
    asked, config, policy, reference = [], digit_config(batch=4), digit_model(0), digit_model(1)
    plain = GPT.response_states
    monkeypatch.setattr(GPT, "response_states", lambda m, *rest: (asked.append(m is reference), plain(m, *rest))[1])
    for loss in ("dpo", "simpo", "orpo"):
        config = digit_config(loss=loss, batch=4)
        data = dpo.as_tensors(digit_rows(10), DIGITS, config)
        asked.clear()
        dpo.ask_reference(reference, data, config)
        assert sum(asked) == (5 if loss == "dpo" else 0)  # 20 responses, 4 at a time
        for step in range(3):
            dpo.update(policy, common.AdamW(policy.parameters(), lr=0.01), data, step, ("order",), config)
        assert sum(asked) == (5 if loss == "dpo" else 0)


def test_what_is_dropped_and_why():
    rows = [
        dict(prompt="12", chosen="3", rejected="3"),
        dict(prompt="12", chosen="012345", rejected="3"),  # 2 + 6 + EOS > 8
        dict(prompt="12", chosen="01234", rejected="3"),  # just fits
        dict(prompt="12", chosen="4", rejected="3", probability=0.7),
        dict(prompt="12", chosen="4", rejected="4", cut_off=["rejected"]),  # the same text, as far as one can see
        dict(prompt="12", chosen="4", rejected="", cut_off=["rejected"]),  # no token at all
    ]
    kept, dropped = dpo.usable(rows, DIGITS, 8)
    assert dropped == {"equal": 3, "too long": 1} and kept == rows[2:4]
    data = dpo.as_tensors(kept, DIGITS, digit_config(loss="robust"))
    close(data.smoothing, [E] * 2)
    data = dpo.as_tensors(kept, DIGITS, digit_config(loss="cdpo"))
    close(data.smoothing, [E, 0.3])
    assert data.lengths.tolist() == [6, 2, 2, 2]
    assert data.elements.tolist() == [[0, 1], [2, 3]] and data.chosen.tolist() == [True, False] * 2


def test_given_texts_are_scored_like_sampled_ones(tiny_model):
    """Rollout.of puts a sampled rollout's own texts back where they were."""
    prompts = [[5, 6, 7], [8], [9, 9]] * 4
    rollout = tiny_model.generate(prompts, 9, eos=3, generator=torch.Generator().manual_seed(0))
    lengths = rollout.mask.sum(1).tolist()
    responses = [row[:n] for row, n in zip(rollout.ids[:, rollout.prompt_len :].tolist(), lengths)]
    again = Rollout.of(prompts, responses)
    for name in ("positions", "attention_mask", "mask"):
        assert torch.equal(getattr(again, name), getattr(rollout, name)), name
    assert torch.equal(again.ids * again.attention_mask, rollout.ids * rollout.attention_mask)
    torch.testing.assert_close(dpo.sequence_logprobs(tiny_model, again, 5), rollout.logp.sum(1), rtol=0, atol=1e-5)


# ---- the judges and the sampling


def stories_problem_and_answers():
    problem = stories.make_problem(random.Random(0))
    return problem, [stories.worked_answer(problem), stories.direct_answer(problem), " #### 0", ""]


@pytest.mark.parametrize("noise", [0.5, 1.5])
def test_the_noisy_judge_is_bradley_and_terrys(noise):
    """Of two responses it prefers the first with chance sigmoid(gold difference / noise), as the judge of
    data/stories.py does."""
    problem, texts = stories_problem_and_answers()
    rng, n = random.Random(0), 20_000
    config = digit_config(judge="noisy", noise=noise)
    for a, b in ((0, 1), (1, 0), (2, 0)):
        scores, _ = dpo.judge_scores([problem] * n, [[texts[a], texts[b]]] * n, rng, config, None, None, None)
        wins = (scores[:, 0] > scores[:, 1]).double().mean().item()
        expected = sigmoid((stories.gold_score(problem, texts[a]) - stories.gold_score(problem, texts[b])) / noise)
        assert abs(wins - expected) < 4 * math.sqrt(expected * (1 - expected) / n)
    scores, _ = dpo.judge_scores([problem], [texts], rng, digit_config(judge="gold"), None, None, None)
    close(scores[0], [stories.gold_score(problem, text) for text in texts])


def test_the_model_is_asked_in_both_orders(monkeypatch):
    """A judge that likes long answers, and, half as much, the one shown first."""
    problem, texts = stories_problem_and_answers()

    def ask(model, tokenizer, questions):
        assert model == "sft" and all(
            q.startswith(problem.prompt + "\n1") and q.endswith("\nBetter:") for q in questions
        )
        shown = [q[len(problem.prompt) + 2 : -len("\nBetter:")].split("\n2") for q in questions]
        return torch.tensor([sigmoid(0.1 * (len(first) - len(second)) + 0.5) for first, second in shown])

    monkeypatch.setattr(judges, "ask", ask)
    groups = [[texts[0], texts[1]], [texts[1], texts[0]], [texts[1], texts[2]]]
    scores, (ab, ba) = dpo.judge_scores([problem] * 3, groups, None, digit_config(judge="self"), None, "sft", None)
    gap = 0.1 * (len(texts[0]) - len(texts[1]))
    close(ab[:2], [sigmoid(gap + 0.5), sigmoid(-gap + 0.5)])
    close(
        scores[0],
        [(sigmoid(gap + 0.5) + 1 - sigmoid(-gap + 0.5)) / 2, (sigmoid(-gap + 0.5) + 1 - sigmoid(gap + 0.5)) / 2],
    )
    close(scores[1], scores[0].flip(0).tolist())
    bias = ((ab + ba) / 2 - 0.5).mean().item()
    rows = [dict(gold=g, asked=[a.item(), b.item()]) for g, a, b in zip((1.0, 0.5, -0.5), ab, ba)]
    report = judges.report(rows)
    assert "66.7%" in report and f"{bias:+.3f}" in report and bias > 0


def test_a_question_is_read_at_its_last_token(tiny_model):
    """Alone or in a batch with longer ones; and of what exceeds the context, the end."""
    tokenizer = SimpleNamespace(encode_ordinary=lambda text: [ord(c) - 32 for c in text])
    questions = ["ab?", "c" * 30 + "?", "?", "d" * 50]
    labels = [tokenizer.encode_ordinary(label)[0] for label in ("1", "2")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judges, "LABELS", ("1", "2"))
        patch.setattr(tiny_model.config, "context", 40)
        model = GPT(GPTConfig(128, 40, 2, 2, 32))
        found = judges.ask(model, tokenizer, questions, 3)
        for p, question in zip(found, questions):
            logits = model(torch.tensor([tokenizer.encode_ordinary(question)[-40:]]))[0, -1]
            assert p.item() == pytest.approx(logits[labels].softmax(0)[0].item(), abs=1e-5)
        patch.setattr(judges, "LABELS", ("10", "2"))
        with pytest.raises(SystemExit, match="one token each"):
            judges.ask(model, tokenizer, questions, 3)


class Told:
    """A model that says what it is told: `says(prompt, k)` is its k-th response to a prompt, None one that is cut off."""

    def __init__(self, says):
        self.says, self.tokenizer = says, get_tokenizer()

    def generate(self, prompts, max_new_tokens, eos, generator):
        counts, responses = {}, []
        for prompt in map(tuple, prompts):
            k = counts[prompt] = counts.get(prompt, -1) + 1
            text = self.says(self.tokenizer.decode(prompt), k)
            ids = [5] * max_new_tokens if text is None else [*self.tokenizer.encode_ordinary(text), eos]
            responses.append(ids[:max_new_tokens])
        return Rollout.of(prompts, responses)


def test_which_pairs_are_sampled_and_which_are_dropped():
    tokenizer, kinds = get_tokenizer(), []
    answers = ([" #### 7", " #### 7"], [" #### zwei", " #### drei"], [" #### -1", " #### seven"], [None, " #### -1"])

    def says(prompt, k):
        if k == 0:
            kinds.append(len(kinds) % 4)
        return answers[kinds[-1]][k]

    config = digit_config(judge="gold", max_new_tokens=16)
    rows, dropped = dpo.sample_pairs(Told(says), 20, ("x",), config, tokenizer, None, None)
    assert len(rows) == 20 and len({row["prompt"] for row in rows}) == 20
    # the proper ending, be the answer wrong, is worth something; two answers without it are tied
    ended, cut = rows[::2], rows[1::2]
    assert all((row["chosen"], row["rejected"]) == (" #### -1", " #### seven") and row["gold"] == 0.5 for row in ended)
    assert (
        all(row["chosen"] == " #### -1" and row["cut_off"] == ["rejected"] for row in cut) and "cut_off" not in ended[0]
    )
    assert all(9 <= dropped[why] <= 11 for why in ("equal", "tied"))
    # a response that was cut off has no EOS
    _, (chosen, rejected) = dpo.encode(cut[0], tokenizer)
    assert chosen[-1] == tokenizer.eot_token and tokenizer.eot_token not in rejected
    other, _ = dpo.sample_pairs(Told(says), 20, ("y",), config, tokenizer, None, None)
    assert {row["prompt"] for row in rows}.isdisjoint(row["prompt"] for row in other) and len(other) == 20
    none, dropped = dpo.sample_pairs(Told(lambda *_: " #### 7"), 20, ("x",), config, tokenizer, None, None)
    assert none == [] and dropped["equal"] > 100  # and it comes to an end


@pytest.mark.parametrize("held_out", [False, True])
def test_pairs_are_of_stories_of_the_right_side(monkeypatch, held_out):
    drawn, plain = [], stories.make_problem
    monkeypatch.setattr(stories, "make_problem", lambda *args: drawn.append(plain(*args)) or drawn[-1])
    model = Told(lambda prompt, k: f" #### {k}")
    dpo.sample_pairs(model, 30, ("x",), digit_config(max_new_tokens=16), get_tokenizer(), None, None, held_out=held_out)
    assert len(drawn) >= 30 and all(stories.is_held_out(p.start, p.events) == held_out for p in drawn)


def test_best_of_several_against_the_worst():
    model = Told(lambda prompt, k: (" #### x", " #### 3", " x", " -> 3 #### 3")[k])
    config = digit_config(judge="gold", samples=4, max_new_tokens=16)
    rows, _ = dpo.sample_pairs(model, 9, ("x",), config, get_tokenizer(), None, None)
    assert {row["rejected"] for row in rows} <= {" #### x", " x"} and {row["chosen"] for row in rows} <= {
        " #### 3",
        " -> 3 #### 3",
    }
    assert all(row["gold"] > 0 for row in rows)


def test_sign_test():
    assert dpo.sign_test(8, 8) == pytest.approx(0.0039, abs=1e-4) and dpo.sign_test(10, 10) == pytest.approx(
        0.001, abs=1e-4
    )
    assert dpo.sign_test(9, 10) == pytest.approx(0.011, abs=5e-4) and dpo.sign_test(15, 20) == pytest.approx(
        0.021, abs=5e-4
    )
    assert dpo.sign_test(0, 5) == 1.0 and dpo.sign_test(0, 0) == 1.0


# ---- the gauge


def test_what_is_measured_on_pairs(float64):
    rows, policy, reference = digit_rows(9), digit_model(1), digit_model(0)
    for i, row in enumerate(rows):
        row["gold"] = (0.0, 1.0, -1.0)[i % 3]
    del rows[4]["gold"]
    for loss in ("dpo", "simpo"):
        config = digit_config(loss=loss)
        data = dpo.as_tensors(rows, DIGITS, config)
        data.ref_logp = dpo.sequence_logprobs(reference, data.rollout, 4)
        data_of_dpo = data
        found = dpo.measure_pairs(policy, data, config)
        logp = {key: [response_logp(policy, row, key).item() for row in rows] for key in ("chosen", "rejected")}
        ref = {key: [response_logp(reference, row, key).item() for row in rows] for key in ("chosen", "rejected")}
        for key in logp:
            assert found[f"{key}_logp"] == pytest.approx(sum(logp[key]) / 9)
            assert found[f"{key}_logratio"] == pytest.approx((sum(logp[key]) - sum(ref[key])) / 9)
        implicit = lambda key, i: (  # noqa: E731
            logp[key][i] - ref[key][i] if loss == "dpo" else logp[key][i] / (len(rows[i][key]) + 1)  # noqa: B023
        )
        right = sum(implicit("chosen", i) > implicit("rejected", i) for i in range(9))
        assert found["preference_accuracy"] == pytest.approx(right / 9) and 0 < right < 9
        gaps = [implicit("chosen", i) - implicit("rejected", i) for i in range(9)]
        assert found["held_out_margin"] == pytest.approx(config.beta * sum(gaps) / 9)
        sides = [gaps[i] * rows[i]["gold"] > 0 for i in range(9) if rows[i].get("gold")]
        assert len(sides) == 5 and found["gold_accuracy"] == pytest.approx(sum(sides) / 5)
    assert "preference_accuracy" not in dpo.measure_pairs(reference, data_of_dpo, digit_config())  # all rewards are 0


def test_what_is_measured_on_samples(float64, monkeypatch):
    """KL, entropy and length of the responses drawn, from the full distributions at each of their positions."""
    policy, reference, drawn = digit_model(1), digit_model(0), []
    plain = GPT.generate
    monkeypatch.setattr(GPT, "generate", lambda *args, **kw: drawn.append(plain(*args, **kw)) or drawn[-1])
    prompts = [[1, 2], [3], [4, 5, 0]]
    found, texts = dpo.measure_samples(policy, reference, prompts, [], DIGITS, 5, digit_config())
    (rollout,) = drawn
    kl, entropy, lengths = [], [], rollout.mask.sum(1).tolist()
    for row, attention, n in zip(rollout.ids, rollout.attention_mask, lengths):
        ids = row[attention > 0][None]
        logp, ref = (model(ids)[0, -n - 1 : -1].log_softmax(-1) for model in (policy, reference))
        kl.append((logp.exp() * (logp - ref)).sum().item())
        entropy += (-logp.exp() * logp).sum(-1).tolist()
    assert found["kl"] == pytest.approx(sum(kl) / 15) and found["kl"] > 0.01
    assert found["entropy"] == pytest.approx(sum(entropy) / len(entropy))
    assert found["length"] == sum(lengths) / 15 and len(texts) == 15 and "gold" not in found


def test_where_the_mass_went(float64):
    rows, policy, reference = digit_rows(6), digit_model(1), digit_model(0)
    data = dpo.as_tensors(rows, DIGITS, digit_config())
    gain, n = torch.zeros(7), 0
    for row in rows:
        for key in ("chosen", "rejected"):
            ids = torch.tensor([[*DIGITS.encode(row["prompt"]), *DIGITS.encode(row[key]), 6]])
            p, q = (model(ids)[0, len(row["prompt"]) - 1 : -1].softmax(-1) for model in (policy, reference))
            gain, n = gain + (p - q).sum(0), n + len(p)
    found = dpo.where_the_mass_went(policy, reference, data.rollout, 5)
    torch.testing.assert_close(found, gain / n)
    assert abs(found.sum()) < 1e-9 and found.abs().max() > 0.01


# ---- the loop


class PairWorld(DigitWorld):
    """Digits as in DigitWorld; what a response is worth is 2 for the right digit and 1 for stopping after one."""

    make_problem = staticmethod(lambda rng, held_out=False: DigitWorld.make_problem(rng))

    @staticmethod
    def gold_score(problem, text):
        return 2.0 * (text[:1] == problem.answer) + (len(text) == 1)


def world(tmp_path, monkeypatch, seed, model=None, **options):
    """dpo.py on digits: the prompt is two of them, right is the larger one, then stop. The SFT model says anything."""
    PairWorld.in_place_of_stories(monkeypatch, dpo)
    model = model or digit_model(seed)
    checkpoint = dict(script="sft", step=1, steps=1, config={}, tokenizer=common.fingerprint(DIGITS),
                      model=model.state_dict(), model_config=dataclasses.asdict(model.config))  # fmt: skip
    torch.save(checkpoint, tmp_path / "sft.pt")
    options = {**dict(evaluate=36, log_every=1000, eval_every=1000, save_every=1000, judge="gold"), **options}
    dpo.main(
        dpo.Config(
            seed=seed, out=str(tmp_path), device="cpu", init=str(tmp_path / "sft.pt"), max_new_tokens=4, **options
        )
    )
    if options.get("compare"):
        return None
    lines = [json.loads(line) for line in (tmp_path / "dpo/metrics.jsonl").open()]
    return lines, torch.load(tmp_path / "dpo.pt", weights_only=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mutant", ["none", "chosen and rejected swapped", "labels drawn by lot"])
def test_learning(tmp_path, monkeypatch, mutant, seed):
    """The real loop raises the held-out accuracy from chance in six rounds; with the wrong sign, or labels that say
    nothing, it does not."""
    plain, rng = preferences.best_worst_pairs, random.Random(seed)
    swap = {"none": 0.0, "chosen and rejected swapped": 1.0, "labels drawn by lot": 0.5}[mutant]
    monkeypatch.setattr(
        preferences,
        "best_worst_pairs",
        lambda scores: [pair[::-1] if pair and rng.random() < swap else pair for pair in plain(scores)],
    )
    try:
        world(
            tmp_path, monkeypatch, seed, babbler(seed), rounds=6, pairs=6000, batch=50, lr=2e-3, beta=0.1, eval_every=20
        )
    except SystemExit as stop:  # it has learned to say always the same
        assert mutant != "none" and "nothing to learn from" in str(stop)
    lines = [json.loads(line) for line in (tmp_path / "dpo/metrics.jsonl").open()]
    print(f"{mutant}, seed {seed}: {lines[0]['accuracy']:.3f} -> {lines[-1]['accuracy']:.3f}, KL {lines[-1]['kl']:.2f}")
    assert lines[0]["accuracy"] < 0.15
    assert lines[-1]["accuracy"] > 0.5 if mutant == "none" else lines[-1]["accuracy"] < 0.25


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("loss", ["dpo", "kto", "rpo"])
def test_the_loop_is_the_textbook(float64, tmp_path, monkeypatch, loss, reset):
    """Two rounds of two steps of dpo.py's loop against the formulas written out response by response, in float64: the
    pairs come from the files that it wrote, the reference is the SFT model or the policy that the round begins with."""
    model = digit_model(0)
    o = dict(rounds=2, pairs=16, batch=5, steps=4, micro_batch=4, lr=1e-2, warmup=2, max_grad_norm=0.3, loss=loss, beta=0.2,
             nll_weight=0.6, desirable_weight=1.1, undesirable_weight=0.8, reset_reference=reset)  # fmt: skip
    lines, checkpoint = world(tmp_path, monkeypatch, 0, model, log_every=1, eval_every=1, **o)
    policy, reference = digit_model(0), digit_model(0)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    config = digit_config(**o)
    for r, name in enumerate(("preferences.jsonl", "preferences-2.jsonl")):
        rows = read_preferences(tmp_path / "dpo" / name)
        assert len(rows) == 8
        if reset:
            reference.load_state_dict(policy.state_dict())
        order = torch.randperm(8, generator=common.generator("cpu", "order", 0, r, 0)).tolist()
        for k, mine in enumerate((order[:5], order[5:])):
            z0 = z0_by_hand(policy, reference, rows, mine) if loss == "kto" else 0.0
            total, gradient = step_by_hand(policy, reference, [rows[i] for i in mine], config, z0)
            step = 2 * r + k
            assert lines[step + 1]["loss"] == pytest.approx(total, rel=1e-6)
            for p, g in zip(policy.parameters(), gradient):
                p.grad = g
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.3)
            for group in optimizer.param_groups:
                group["lr"] = common.cosine_lr(step, SimpleNamespace(lr=1e-2, warmup=2, steps=4))
            optimizer.step()
    for name, weight in policy.state_dict().items():
        torch.testing.assert_close(checkpoint["model"][name], weight, rtol=1e-6, atol=1e-9)
    # what is logged against the reference is against the SFT model, whatever the rounds start from
    held_out_kl = dpo.measure_samples(
        policy, digit_model(0), [DIGITS.encode(p.prompt) for p in PairWorld.held_out_problems(36)], [], DIGITS,
        dpo.FINAL_SAMPLES, dataclasses.replace(config, seed=0),
    )[0]["kl"]  # fmt: skip
    assert lines[-1]["kl"] == pytest.approx(held_out_kl, rel=1e-6) and lines[0]["kl"] == pytest.approx(0, abs=1e-12)


def test_labels_are_shared_by_the_rounds(tmp_path, monkeypatch, capsys):
    """As many in all as one-shot, and as many steps; each round's pairs are what the policy says by then."""
    one, _ = world(tmp_path, monkeypatch, 0, pairs=120, batch=10)
    shot = read_preferences(tmp_path / "dpo/preferences.jsonl")
    four, _ = world(tmp_path, monkeypatch, 0, pairs=120, batch=10, rounds=4, lr=1e-2)
    rounds = [read_preferences(tmp_path / f"dpo/preferences{n}.jsonl") for n in ("", "-2", "-3", "-4")]
    assert len(shot) == 120 and [len(rows) for rows in rounds] == [30] * 4
    assert one[-1]["step"] == four[-1]["step"] == 12
    stopped = [sum(len(row["chosen"]) == 1 for row in rows) / 30 for rows in rounds]
    assert stopped[3] > stopped[0]  # the policy has learned to stop after one digit, and says so
    assert "round 4 of 4: 30 pairs" in capsys.readouterr().out


def test_a_mass_leak_is_said(tmp_path, monkeypatch, capsys):
    """Once when it begins, and at the end; and not if it is not there."""
    lines, _ = world(tmp_path, monkeypatch, 0, pairs=300, batch=10, lr=1e-2, eval_every=5)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mass leak")]
    leaking = [line["step"] for line in lines if line.get("chosen_logratio", 0) < 0 and line["rejected_logratio"] < 0]
    assert leaking and [int(line.split()[4].rstrip(":")) for line in said] == [leaking[0], lines[-1]["step"]]
    assert f"{-lines[-1]['chosen_logratio']:.2f} nats" in said[1] and "'<|endoftext|>' +" in said[1]
    lines, _ = world(tmp_path, monkeypatch, 0, pairs=300, batch=10, lr=1e-2, loss="rpo", nll_weight=20.0)
    assert lines[-1]["chosen_logratio"] > 0 > lines[-1]["rejected_logratio"]
    assert "mass leak" not in capsys.readouterr().out


def test_the_table_of_losses(tmp_path, monkeypatch, capsys):
    """One line per loss, all from the same pairs."""
    monkeypatch.setattr(dpo, "FINAL_SAMPLES", 1)
    world(tmp_path, monkeypatch, 0, compare=True, seeds=2, pairs=30, batch=15, evaluate=12)
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert table[0].startswith("judge: gold") and [line.split()[0] for line in table[3:]] == [*LOSSES, "chosen"]
    for seed in (0, 1):
        files = {(tmp_path / f"compare/{loss}-{seed}/dpo/preferences.jsonl").read_text() for loss in LOSSES}
        assert len(files) == 1
    last = json.loads((tmp_path / "compare/ipo-1/dpo/metrics.jsonl").read_text().splitlines()[-1])
    row = next(line.split() for line in table if line.startswith("ipo "))
    assert row[1] == "0.1" and row[3] == f"{last['accuracy']:.3f}" and row[4] == "30"


def test_a_run_that_fails_is_a_gap_in_the_table(tmp_path, monkeypatch, capsys):
    plain = dpo.preference_loss

    def failing(*args, **kw):
        losses, *rewards = plain(*args, **kw)
        return (losses * float("nan") if args[5] == "hinge" else losses), *rewards

    monkeypatch.setattr(dpo, "preference_loss", failing)
    world(tmp_path, monkeypatch, 0, compare=True, pairs=30, batch=15, evaluate=12)
    printed = capsys.readouterr().out
    assert "hinge: failed: step 1: loss is nan" in printed and not any(
        line.startswith("hinge ") for line in printed.splitlines()
    )
    assert any(line.startswith("orpo ") for line in printed.splitlines())


def test_the_table_of_rounds(tmp_path, monkeypatch, capsys):
    """The same labels and steps, the reference kept or reset; and how sure the difference is."""
    world(tmp_path, monkeypatch, 0, compare=True, seeds=3, pairs=60, batch=10, rounds=2, lr=3e-3)
    printed = capsys.readouterr().out
    load = lambda name: torch.load(tmp_path / f"compare/{name}/dpo.pt", weights_only=True)  # noqa: E731
    for name, rounds, reset in (("one-shot", 1, False), ("kept", 2, False), ("reset", 2, True)):
        checkpoint = load(f"{name}-1")
        found = checkpoint["config"]
        assert (found["rounds"], found["reset_reference"], found["seed"], checkpoint["step"]) == (rounds, reset, 1, 6)
    last = {
        name: [
            json.loads((tmp_path / f"compare/{name}-{s}/dpo/metrics.jsonl").read_text().splitlines()[-1])
            for s in range(3)
        ]
        for name in ("one-shot", "kept", "reset")
    }
    for name, lines in last.items():
        row = next(line.split() for line in printed.splitlines() if line.startswith(f"{name} "))
        assert row[2:5] == [f"{line['accuracy']:.3f}" for line in lines]
        assert row[7] == f"{sum(line['kl'] for line in lines) / 3:.3f}"
    for name in ("kept", "reset"):
        pairs = [
            (a["accuracy"], b["accuracy"])
            for a, b in zip(last[name], last["one-shot"])
            if a["accuracy"] != b["accuracy"]
        ]
        wins = sum(a > b for a, b in pairs)
        said = f"reference {name}: better than one-shot with {wins} of {len(pairs)} seeds"
        assert said in printed and f"p = {dpo.sign_test(wins, len(pairs)):.4f}" in printed


def test_the_toy_prints_both_betas(capsys):
    dpo.main(dpo.Config(device="cpu", toy=True))
    printed = capsys.readouterr().out
    for number in (
        "+0.3964, -0.3964",
        "0.6884",
        "+2.6443, -2.6443",
        "0.9950",
        "0.63",
        "+-0.26",
        "4.0006",
        "0.4001",
        "-17.72",
        "-22.15",
    ):
        assert number in printed
