"""Rewards, advantages and losses against definitions and finite differences, what masked slots may hold, REINFORCE as
PPO's simplest case, the optimum of a policy small enough to know it, and learning itself."""

import dataclasses
import itertools
import json
import random

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grpo import DIGITS, DigitWorld, babbler

import common
import gpt
import ppo
from gpt import GPT, GPTConfig
from kernels import token_kl
from reward_model import RewardModel, comparisons, pair_rewards


def random_batch(seed, B=5, T=6):
    """Log-probs of a policy that has moved, values, rewards, and masks with a hole, an empty row and a full one."""
    g = torch.Generator().manual_seed(seed)
    logp, old, ref = (-2 * torch.rand(B, T, generator=g, dtype=torch.float64) for _ in range(3))
    rewards, values, old_values, returns, A = (torch.randn(B, T, generator=g, dtype=torch.float64) for _ in range(5))
    mask = (torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=g)).double()
    mask[0], mask[1] = 0, 1
    mask[1, 2] = 0
    return dict(logp=logp, old_logp=logp + 0.5 * (old + 1), ref_logp=ref, rewards=rewards, values=values,
                old_values=values + 0.3 * old_values, returns=returns, A=A, mask=mask)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_gae_is_the_sum_of_discounted_errors(seed, gamma, lam, truncated):
    """Against the definition: A_t = sum_l (gamma lam)^l delta_{t+l} over the valid slots of a row."""
    x = random_batch(seed)
    bootstrap = torch.randn(5, dtype=torch.float64) if truncated else None
    advantages, returns = ppo.gae(x["rewards"], x["values"], x["mask"], gamma, lam, bootstrap)
    for i, row in enumerate(x["mask"]):
        slots = row.nonzero()[:, 0].tolist()
        V = [x["values"][i, t].item() for t in slots] + [bootstrap[i].item() if truncated else 0.0]
        delta = [x["rewards"][i, t].item() + gamma * V[k + 1] - V[k] for k, t in enumerate(slots)]
        for k, t in enumerate(slots):
            expected = sum((gamma * lam) ** n * d for n, d in enumerate(delta[k:]))
            assert advantages[i, t].item() == pytest.approx(expected, abs=1e-9)
            assert returns[i, t].item() == pytest.approx(expected + V[k], abs=1e-9)
        assert advantages[i, row == 0].eq(0).all() and returns[i, row == 0].eq(0).all()


@pytest.mark.parametrize("garbage", [50.0, -torch.inf, torch.nan])
def test_what_stands_in_masked_slots_does_not_matter(garbage):
    def everything(fill):
        x = {name: torch.where(mask > 0, value, fill) for name, value in plain.items() if name != "mask"}
        logp, values = x["logp"].requires_grad_(), x["values"].requires_grad_()
        scores = torch.arange(5.0, dtype=torch.float64)
        rewards = ppo.kl_penalised_rewards(scores, x["logp"].detach(), x["ref_logp"], mask, 0.3)
        policy, p_stats = ppo.policy_loss(logp, x["old_logp"], x["A"], mask, dual_clip=3.0)
        value, v_stats = ppo.value_loss(values, x["old_values"], x["returns"], mask)
        return (
            rewards, ppo.whiten(x["rewards"], mask), ppo.whiten(x["rewards"], mask, shift_mean=False),
            *ppo.gae(torch.where(mask > 0, rewards, fill), x["values"].detach(), mask), policy, value,
            *p_stats.values(), *v_stats.values(), *torch.autograd.grad(policy + value, (logp, values)),
        )  # fmt: skip

    plain = random_batch(3)
    mask = plain["mask"]
    for a, b in zip(everything(0.0), everything(garbage)):
        assert torch.equal(a, b) and a.isfinite().all()


def test_a_row_without_tokens_gets_no_reward():
    zero = torch.zeros(1, 3)
    assert ppo.kl_penalised_rewards(torch.tensor([5.0]), zero, zero, torch.zeros(1, 3), 0.1).eq(0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-50, 50), st.floats(0.1, 10))
def test_whitening(seed, shift, scale):
    x = random_batch(seed)
    mask = x["mask"]
    white = ppo.whiten(x["rewards"], mask)
    valid = white[mask > 0]
    assert abs(valid.mean()) < 1e-9 and valid.var(correction=0).item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(ppo.whiten(scale * x["rewards"] + shift, mask), white, rtol=1e-4, atol=1e-5)
    unshifted = ppo.whiten(x["rewards"], mask, shift_mean=False)[mask > 0]
    torch.testing.assert_close(unshifted - unshifted.mean(), valid, rtol=1e-6, atol=1e-7)
    assert unshifted.mean().item() == pytest.approx(x["rewards"][mask > 0].mean().item(), abs=1e-9)


@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_gradients_equal_finite_differences(dual_clip):
    x = random_batch(1)
    losses = {
        "logp": lambda logp: ppo.policy_loss(logp, x["old_logp"], x["A"], x["mask"], 0.2, dual_clip)[0],
        "values": lambda values: ppo.value_loss(values, x["old_values"], x["returns"], x["mask"])[0],
    }
    for name, loss in losses.items():
        at = x[name].clone().requires_grad_()
        gradient, h = torch.autograd.grad(loss(at), at)[0], 1e-6
        assert gradient.ne(0).sum() > 5
        for i, t in itertools.product(range(5), range(6)):
            e = torch.zeros_like(at)
            e[i, t] = h
            slope = (loss(x[name] + e) - loss(x[name] - e)) / (2 * h)
            assert slope.item() == pytest.approx(gradient[i, t].item(), abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_any_split_of_a_step_gives_the_same_losses(seed):
    x = random_batch(seed, B=7)
    n = int(x["mask"].sum())

    def losses(rows, **options):
        part = {name: value[rows] for name, value in x.items()}
        policy, p = ppo.policy_loss(part["logp"], part["old_logp"], part["A"], part["mask"], **options)
        value, v = ppo.value_loss(part["values"], part["old_values"], part["returns"], part["mask"], **options)
        return torch.stack([policy, value, *p.values(), *v.values()])

    order, parts, rng = random.Random(seed).sample(range(7), 7), 0.0, random.Random(seed)
    while order:
        cut = rng.randint(1, len(order))
        parts, order = parts + losses(order[:cut], denominator=n), order[cut:]
    torch.testing.assert_close(parts, losses(list(range(7))), rtol=0, atol=1e-12)


def test_where_the_clip_leaves_no_gradient():
    one = torch.ones(1, 1, dtype=torch.float64)
    for ratio, A, slope in (
        (1.1, 1, True), (1.3, 1, False), (0.7, 1, True), (0.9, -1, True), (0.7, -1, False), (1.3, -1, True),
    ):  # fmt: skip
        logp = (ratio * one).log().requires_grad_()
        loss, stats = ppo.policy_loss(logp, 0 * one, A * one, one)
        assert bool(torch.autograd.grad(loss, logp)[0].ne(0)) == slope == (stats["clip_fraction"].item() == 0)


def test_explained_variance():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[1, 1, 1, 0]])
    assert ppo.explained_variance(returns.clone(), returns, mask) == 1.0
    assert ppo.explained_variance(torch.full((1, 4), 7.0), returns, mask) == 0.0
    assert ppo.explained_variance(-returns, returns, mask) == pytest.approx(-3.0)


def test_zero_is_a_value_where_the_help_says_so():
    config = common.parse(ppo.Config, "", ["--beta", "0", "--lam", "0", "--gamma", "0", "--value-weight", "0"])
    assert config.beta == config.lam == config.gamma == config.value_weight == 0


# ---- against REINFORCE, and against the optimum


def test_ppo_without_its_parts_is_reinforce(tiny_model):
    """One epoch, lambda 1, a value function of zero, no whitening: the gradient is that of -mean_t (reward still to
    come at t) log pi(token_t), here from plain forward passes, one row at a time. Without a clip, and also with it, as
    the first ratio is 1."""
    tiny_model.double()
    prompts, beta = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]] * 3, 0.3
    rollout = tiny_model.generate(prompts, 10, eos=3, generator=torch.Generator().manual_seed(0))
    g, mask, B = torch.Generator().manual_seed(1), rollout.mask, len(prompts)
    scores = torch.randn(B, generator=g, dtype=torch.float64)
    ref_logp = rollout.logp.double() + 0.5 * torch.randn(mask.shape, generator=g, dtype=torch.float64)

    def gradient():
        found = torch.cat([p.grad.flatten() for p in tiny_model.parameters()])
        tiny_model.zero_grad()
        return found

    total = 0.0
    for i in range(B):
        n, P = int(mask[i].sum()), len(prompts[i])
        ids = torch.tensor([prompts[i] + rollout.ids[i, rollout.prompt_len :][:n].tolist()])
        logp = tiny_model(ids)[0].log_softmax(-1)[torch.arange(P - 1, P + n - 1), ids[0, P:]]  # [n]
        r = -beta * (logp.detach() - ref_logp[i, :n])
        r[-1] += scores[i]
        to_come = torch.stack([r[t:].sum() for t in range(n)])
        total = total - (to_come * logp).sum()
    (total / mask.sum()).backward()
    expected = gradient()

    logps = lambda: gpt.to_slots(tiny_model.token_logprobs(*tiny_model.response_states(rollout, list(range(B)))), mask)  # noqa: E731
    old_logp = logps().detach()
    rewards = ppo.kl_penalised_rewards(scores, old_logp, ref_logp, mask, beta)
    advantages, _ = ppo.gae(rewards, torch.zeros_like(rewards), mask, lam=1.0)
    for clip in (1e9, 0.2):
        ppo.policy_loss(logps(), old_logp, advantages, mask, clip)[0].backward()
        torch.testing.assert_close(gradient(), expected, rtol=1e-4, atol=1e-7)


def test_the_penalty_is_the_gradient_of_the_kl():
    """Scores of zero: in expectation over the policy's own samples the loss has the gradient of beta KL(policy ||
    reference), so that a step down it brings the policy back. A flipped sign would drive it away."""
    g, beta = torch.Generator().manual_seed(0), 0.3
    logits, ref = (torch.randn(1, 5, generator=g, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    expected, one, zero = 0.0, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.float64)
    for token in range(5):
        logp, ref_logp = logits.log_softmax(1)[:, [token]], ref.log_softmax(1)[:, [token]]
        rewards = ppo.kl_penalised_rewards(torch.zeros(1), logp.detach(), ref_logp, one, beta)
        advantages, _ = ppo.gae(rewards, zero, one)
        loss, _ = ppo.policy_loss(logp, logp.detach(), advantages, one)
        expected = expected + logp.detach().exp() * torch.autograd.grad(loss, logits)[0]
    kl = token_kl(logits, ref)
    torch.testing.assert_close(expected, beta * torch.autograd.grad(kl.sum(), logits)[0])
    assert token_kl(logits.detach() - expected, ref) < kl


V, LENGTH = 4, 2  # the toy language: two tokens out of four


def toy(seed, beta, sign=1.0, steps=600, B=512):
    """PPO as in ppo.py, on a table of logits: token 1 from first [V], token 2 from second[token 1] [V]; a random
    reference, and a random reward of each of the 16 texts. -> (pi [V, V], pi* = ref * exp(r / beta) / Z [V, V], and how
    much of the way from the reference to pi* is made, in score - beta KL, whose best is beta log Z)."""
    g = torch.Generator().manual_seed(seed)
    ref_first, ref_second, reward = (
        torch.randn(*size, generator=g, dtype=torch.float64) for size in ((V,), (V, V), (V, V))
    )
    first, second = ref_first.clone().requires_grad_(), ref_second.clone().requires_grad_()
    values = torch.zeros(1 + V, dtype=torch.float64, requires_grad=True)  # before token 1, and after each token 1
    optimizer = torch.optim.Adam([first, second, values], betas=(0.9, 0.99))
    log_joint = lambda a, b: a.log_softmax(0)[:, None] + b.log_softmax(1)  # noqa: E731
    target = log_joint(ref_first, ref_second) + reward / beta
    mask, average = torch.ones(B, LENGTH), 0.0
    for step in range(steps):
        x = torch.multinomial(first.detach().softmax(0), B, True, generator=g)  # [B]
        y = torch.multinomial(second.detach().softmax(1)[x], 1, generator=g)[:, 0]  # [B]
        logps = lambda a, b: torch.stack([a.log_softmax(0)[x], b.log_softmax(1)[x, y]], 1)  # noqa: E731, B023
        value = lambda: torch.stack([values[0].expand(B), values[1 + x]], 1)  # noqa: E731, B023
        old, old_values, ref = logps(first, second).detach(), value().detach(), logps(ref_first, ref_second)
        rewards = ppo.kl_penalised_rewards(reward[x, y], old, ref, mask, sign * beta)
        advantages, returns = ppo.gae(rewards, old_values, mask)
        advantages = ppo.whiten(advantages, mask)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / steps)
        for _ in range(2):
            loss = ppo.policy_loss(logps(first, second), old, advantages, mask)[0]
            loss = loss + 0.5 * ppo.value_loss(value(), old_values, returns, mask, clip=1e9)[0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step >= steps // 2:
            average = average + log_joint(first, second).exp().detach() / (steps - steps // 2)
    worth = lambda p: (p * (reward - beta * (p.log() - log_joint(ref_first, ref_second)))).sum()  # noqa: E731
    start, best = worth(log_joint(ref_first, ref_second).exp()), beta * target.logsumexp((0, 1))
    return average, (target - target.logsumexp((0, 1))).exp(), ((worth(average) - start) / (best - start)).item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_optimum_is_the_reference_tilted_by_the_reward(seed):
    """pi* = ref exp(r / beta) / Z: PPO gets within 2% of it, in every text's probability and in what it is after. With
    the KL's sign flipped it does not."""
    policy, best, reached = toy(seed, beta=1.0)
    assert (policy - best).abs().max() < 0.02 and 0.98 < reached <= 1
    policy, best, reached = toy(seed, beta=1.0, sign=-1.0, steps=150)
    assert (policy - best).abs().max() > 0.1 and reached < 0.5


# ---- the loop


def world(tmp_path, monkeypatch, seed, score=None, ensemble=1, **options):
    """ppo.py on digits: the prompt is two of them, right is the larger one, then stop. The reward model is either a real
    one, with random weights, or replaced by `score`."""
    DigitWorld.in_place_of_stories(monkeypatch, ppo)
    torch.manual_seed(seed)
    model = babbler(seed) if score else GPT(GPTConfig(7, 8, 1, 2, 32))
    rewards = RewardModel(model.config, ensemble)
    for script, net, config in (("sft", model, {}), ("reward_model", rewards, {"ensemble": ensemble})):
        checkpoint = dict(script=script, step=1, steps=1, config=config, tokenizer=common.fingerprint(DIGITS),
                          model=net.state_dict(), model_config=dataclasses.asdict(model.config))  # fmt: skip
        torch.save(checkpoint, tmp_path / f"{script}.pt")
    if score:
        monkeypatch.setattr(ppo, "score_responses", score)
    options = {**dict(evaluate=36, samples=16, log_every=1000, eval_every=1000, save_every=1000), **options}
    config = ppo.Config(seed=seed, out=str(tmp_path), device="cpu", init=str(tmp_path / "sft.pt"), max_new_tokens=4,
                        reward_model=str(tmp_path / "reward_model.pt"), **options)  # fmt: skip
    ppo.main(config)
    lines = [json.loads(line) for line in (tmp_path / "ppo/metrics.jsonl").open()]
    return lines, torch.load(tmp_path / "ppo.pt", weights_only=True)


def exact(sign=1.0):
    """Stands in for a reward model: 1 for the larger digit and then the end, else 0."""

    def score(reward_model, rollout, rows, eos, config):
        prompts = [
            [t for t, real in zip(ids, mask) if real][:2]
            for ids, mask in zip(rollout.ids[rows].tolist(), rollout.attention_mask[rows].tolist())
        ]
        said = [ids[:2] for ids in rollout.ids[rows, rollout.prompt_len :].tolist()]
        return sign * torch.tensor([float(answer == [max(prompt), eos]) for prompt, answer in zip(prompts, said)])

    return score


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mutant", ["none", "reward's sign flipped", "score one token early"])
def test_learning(tmp_path, monkeypatch, mutant, seed):
    """The real loop raises the held-out accuracy from chance; with a classic mistake in it, it does not."""
    sign, plain = -1.0 if mutant == "reward's sign flipped" else 1.0, ppo.kl_penalised_rewards

    def early(scores, logp, ref_logp, mask, beta):  # what leads to the end is praised, the end itself is not
        score = plain(scores, logp, ref_logp, mask, 0.0).roll(-1, 1) * mask
        return score + plain(0 * scores, logp, ref_logp, mask, beta)

    if mutant == "score one token early":
        monkeypatch.setattr(ppo, "kl_penalised_rewards", early)
    lines, _ = world(
        tmp_path, monkeypatch, seed, exact(sign), steps=120, prompts=256, minibatches=1, lr=2e-3, value_lr=1e-2, beta=0.1, lam=0.95,
    )  # fmt: skip
    print(
        f"{mutant}, seed {seed}: {lines[0]['accuracy']:.3f} -> {lines[-1]['accuracy']:.3f}, KL {lines[-1]['held_out_kl']:.2f}"
    )
    assert lines[0]["accuracy"] < 0.15
    if mutant == "none":
        assert lines[-1]["accuracy"] > 0.5
        # a policy that always says what is right is log 1 / ref(right) nats away, and this one nearly is
        ids = torch.tensor([[*map(int, pair.prompt), int(pair.answer), 6] for pair in DigitWorld.held_out_problems(36)])
        logp = babbler(seed)(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None])[:, 1:].sum((1, 2))
        assert lines[-1]["held_out_kl"] == pytest.approx(-logp.mean().item(), rel=0.1)
    else:
        assert lines[-1]["accuracy"] < 0.25


def test_the_loop_is_the_textbook(tmp_path, monkeypatch):
    """Two steps of ppo.py's loop, with every switch away from its default, against the formulas written out token by
    token, in float64: the same weights."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the sampler's log-probabilities too
    torch.set_default_dtype(torch.float64)
    try:
        o = dict(steps=2, prompts=6, minibatches=2, epochs=2, micro_batch=2, temperature=0.7, gamma=0.9, lam=0.8, beta=0.2,
                 whiten_rewards=True, clip=0.02, dual_clip=1.05, clip_value=0.005, value_weight=0.5, lr=1e-2, value_lr=3e-2,
                 warmup=2, max_grad_norm=0.3, missing_eos_score=-2.0, combine="min")  # fmt: skip
        lines, checkpoint = world(tmp_path, monkeypatch, 0, ensemble=2, log_every=1, **o)
        load = lambda name: torch.load(tmp_path / f"{name}.pt", weights_only=True)  # noqa: E731
        policy, reference, rewarder = (
            GPT(GPTConfig(7, 8, 1, 2, 32)),
            GPT(GPTConfig(7, 8, 1, 2, 32)),
            RewardModel(GPTConfig(7, 8, 1, 2, 32), 2),
        )
        policy.load_state_dict(load("sft")["model"])
        reference.load_state_dict(load("sft")["model"])
        rewarder.load_state_dict(load("reward_model")["model"])
        w, b = torch.zeros(32, requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.AdamW(
            [dict(params=policy.parameters()), dict(params=[w, b])], betas=(0.9, 0.99), weight_decay=0.0
        )

        def logps_and_values(model, text, P):
            hidden = model.hidden(text[None])[0, P - 1 : -1]  # what predicts the response
            logp = (hidden @ model.wte.weight[:7].T / o["temperature"]).log_softmax(-1)
            return logp[torch.arange(len(hidden)), text[P:]], hidden @ w + b

        for step in (1, 2):
            rng = random.Random(common.seed_of("problems", 0, step))
            prompts = [DIGITS.encode(DigitWorld.make_problem(rng).prompt) for _ in range(6)]
            rollout = policy.generate(prompts, 4, 0.7, eos=6, generator=common.generator("cpu", "sampling", 0, step))
            texts = [
                torch.tensor(p + rollout.ids[i, 2:][: rollout.mask[i].sum()].tolist()) for i, p in enumerate(prompts)
            ]
            with torch.no_grad():
                old = [logps_and_values(policy, text, 2) for text in texts]
                ref = [logps_and_values(reference, text, 2)[0] for text in texts]
                scores = [
                    min(rewarder.heads[k](rewarder.trunks[k].hidden(text[None])[0, -1]).item() for k in range(2))
                    for text in texts
                ]
            scores = [score if text[-1] == 6 else -2.0 for score, text in zip(scores, texts)]
            assert lines[step]["reward"] == pytest.approx(sum(scores) / 6)
            assert lines[step]["kl"] == pytest.approx(sum((a - r).sum().item() for (a, _), r in zip(old, ref)) / 6)
            rewards = [-0.2 * (logp - r) for (logp, _), r in zip(old, ref)]
            for r, score in zip(rewards, scores):
                r[-1] += score
            every = torch.cat(rewards)
            rewards = [(r - every.mean()) / (every.var(correction=0) + 1e-8).sqrt() + every.mean() for r in rewards]
            advantages = []
            for r, (_, V) in zip(rewards, old):
                after = torch.cat([V[1:], torch.zeros(1)])
                delta = r + 0.9 * after - V
                advantages.append(
                    torch.stack([sum((0.9 * 0.8) ** j * d for j, d in enumerate(delta[t:])) for t in range(len(r))])
                )
            returns = [A + V for A, (_, V) in zip(advantages, old)]
            every = torch.cat(advantages)
            advantages = [(A - every.mean()) / (every.var(correction=0) + 1e-8).sqrt() for A in advantages]
            order = torch.randperm(6, generator=common.generator("cpu", "minibatches", 0, step)).tolist()
            for minibatch in (order[:3], order[3:], order[:3], order[3:]):
                losses = []
                for i in minibatch:
                    logp, V = logps_and_values(policy, texts[i], 2)
                    for t, A in enumerate(advantages[i].tolist()):
                        rho, R, V_old = (logp[t] - old[i][0][t]).exp(), returns[i][t], old[i][1][t]
                        loss = torch.maximum(-rho * A, -rho.clamp(0.98, 1.02) * A)
                        loss = torch.minimum(loss, torch.tensor(-1.05 * A)) if A < 0 else loss
                        near = V_old + (V[t] - V_old).clamp(-0.005, 0.005)
                        losses.append(loss + 0.5 * 0.5 * torch.maximum((V[t] - R) ** 2, (near - R) ** 2))
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                torch.nn.utils.clip_grad_norm_([*policy.parameters(), w, b], 0.3)
                for group, lr in zip(optimizer.param_groups, (1e-2, 3e-2)):
                    group["lr"] = lr * (0.5 if step == 1 else 1.0) * (1.0 if step == 1 else 0.5)
                optimizer.step()
        assert lines[2]["clip_fraction"] > 0.1 and lines[2]["value_clip_fraction"] > 0.1  # the clips were at work
        for name, weight in policy.state_dict().items():
            torch.testing.assert_close(checkpoint["model"][name], weight, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(checkpoint["value_head"]["weight"][0], w.detach(), rtol=1e-7, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_lesson_teaches_the_reward_model_and_keeps_its_scale(tmp_path, monkeypatch):
    """--refresh: the reward model agrees more with the judge's fresh comparisons, and the reference's responses still
    have rewards of mean 0 and std 1."""
    rows = [
        dict(prompt=f"{a}{b}", chosen=str(max(a, b)), rejected=str(min(a, b)))
        for a in range(6)
        for b in range(6)
        if a != b
    ]
    asked = []
    monkeypatch.setattr(
        ppo, "sample_preferences", lambda policy, tokenizer, *args, **kw: asked.append((args, kw)) or (rows, 0)
    )
    _, checkpoint = world(tmp_path, monkeypatch, 0, steps=5, prompts=16, lr=1e-2, refresh=2, refresh_pairs=30)
    assert [args[:3] for args, _ in asked] == [(30, 4, 1.5)] * 2 and not any(
        args[6:] or kw.get("held_out") for args, kw in asked
    )  # before steps 3 and 5; samples and noise of the reward model's own training
    assert all(kw["task"] is DigitWorld for _, kw in asked)
    before, after = (RewardModel(GPTConfig(7, 8, 1, 2, 32)) for _ in range(2))
    before.load_state_dict(torch.load(tmp_path / "reward_model.pt", weights_only=True)["model"])
    after.load_state_dict(checkpoint["reward_model"])
    elements, _ = comparisons(rows, DIGITS, 8)
    margins = [torch.stack(pair_rewards(model, 0, elements)).diff(dim=0).mean().item() for model in (before, after)]
    assert margins[1] < margins[0] - 0.001  # rejected - chosen
    reference = GPT(GPTConfig(7, 8, 1, 2, 32))
    reference.load_state_dict(torch.load(tmp_path / "sft.pt", weights_only=True)["model"])
    prompts = [DIGITS.encode(DigitWorld.make_problem(random.Random(i)).prompt) for i in range(500)]
    rollout = reference.generate(prompts, 4, eos=6, generator=common.generator("cpu", "normalise", "refresh", 0, 5))
    rewards = after(rollout.ids, rollout.attention_mask)
    assert rewards.mean().item() == pytest.approx(0, abs=1e-3) and rewards.std().item() == pytest.approx(1, abs=1e-2)


def test_the_first_ratio_is_exactly_one(tmp_path, monkeypatch):
    first, plain = [], ppo.policy_loss

    def look(logp, old_logp, *rest):
        first.append(torch.equal(logp, old_logp))
        return plain(logp, old_logp, *rest)

    monkeypatch.setattr(ppo, "policy_loss", look)
    world(tmp_path, monkeypatch, 0, steps=3, prompts=16, minibatches=2, micro_batch=3, epochs=2, lr=1e-2)
    per_step = len(first) // 3
    assert all(
        all(first[i * per_step : i * per_step + 3]) for i in range(3)
    )  # the first minibatch: 8 rows, 3 at a time
    assert not any(first[i * per_step + 3] for i in range(3))


def test_a_value_head_without_weight_does_not_touch_the_policy(tmp_path, monkeypatch):
    """value_weight=0 gives, bit for bit, the policy of a run that has no value head."""
    options = dict(steps=4, prompts=16, minibatches=2, value_weight=0.0, lr=1e-2)
    with monkeypatch.context() as patch:
        _, with_head = world(tmp_path, patch, 0, **options)

    class NoHead(nn.Module):
        def __init__(self, width):
            super().__init__()

        def forward(self, hidden):
            return hidden.new_zeros(hidden.shape[:-1])

    (tmp_path / "b").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "ValueHead", NoHead)
        _, without = world(tmp_path / "b", patch, 0, **options)
    assert all(torch.equal(with_head["model"][name], without["model"][name]) for name in without["model"])
    start = torch.load(tmp_path / "sft.pt", weights_only=True)["model"]
    assert any(not torch.equal(without["model"][name], start[name]) for name in start)


def test_the_pretraining_mix_is_the_token_mean_over_documents(tmp_path, monkeypatch):
    """PPO-ptx: at the first update its loss is that of the initial model, and then it falls; all else being worthless."""
    documents = [("01", "2"), ("34", "")]
    monkeypatch.setattr(
        DigitWorld, "base_document", staticmethod(lambda rng: documents[rng.randrange(2)]), raising=False
    )
    worthless = lambda reward_model, rollout, rows, eos, config: torch.zeros(len(rows))  # noqa: E731
    lines, _ = world(tmp_path, monkeypatch, 0, worthless, steps=30, prompts=8, minibatches=1, log_every=1, ptx=0.3, lr=3e-3)  # fmt: skip
    model = babbler(0)
    rng, nll = random.Random(common.seed_of("ptx", 0, 1, 0)), []
    for _ in range(32):
        ids = torch.tensor([[int(c) for c in "".join(documents[rng.randrange(2)])] + [DIGITS.eot_token]])
        logp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None])
        nll += (-logp).flatten().tolist()
    assert lines[1]["ptx_loss"] == pytest.approx(sum(nll) / len(nll), abs=1e-5)
    assert lines[-1]["ptx_loss"] < 0.6 * lines[1]["ptx_loss"]
    assert lines[1]["loss"] == pytest.approx(
        0.3 * lines[1]["ptx_loss"], abs=1e-4
    )  # the other two are 0: no reward, no KL


def test_updates_stop_once_the_policy_has_moved_too_far(tmp_path, monkeypatch):
    calls, plain = [], ppo.policy_loss
    monkeypatch.setattr(ppo, "policy_loss", lambda *args: calls.append(1) or plain(*args))
    for stop_kl, updates in ((0.0, 3), (1e-9, 2)):  # of the second minibatch the ratio is not 1 any more
        calls.clear()
        world(tmp_path, monkeypatch, 0, steps=2, prompts=9, minibatches=3, stop_kl=stop_kl, lr=1e-2)
        assert len(calls) == 2 * updates


def test_the_leash_adapts(tmp_path, monkeypatch):
    lines, checkpoint = world(tmp_path, monkeypatch, 0, exact(), steps=30, prompts=64, kl_target=0.01, kl_horizon=1000.0, log_every=1)  # fmt: skip
    leash = ppo.AdaptiveKL(0.3, 0.01, 1000.0)
    betas = [line["beta"] for line in lines[1:]]  # with which the KL beside it was reached
    assert [*betas, checkpoint["beta"]] == [0.3] + [leash.update(line["kl"], 64) for line in lines[1:]]
    assert len(set(betas)) > 20


def test_the_best_by_gold_is_kept(tmp_path, monkeypatch):
    """A policy that is soon pushed away from what is right: the best one is an early one, and the run ends early."""
    calls, right, wrong = [], exact(), exact(-1.0)

    def turning(reward_model, rollout, rows, eos, config):
        calls.append(1)
        return (right if len(calls) < 120 else wrong)(reward_model, rollout, rows, eos, config)

    lines, last = world(tmp_path, monkeypatch, 0, turning, steps=60, prompts=64, eval_every=1, stop_on_gold=True, lr=1e-2, beta=0.0)  # fmt: skip
    measured = [line for line in lines if "gold" in line]
    best = max(measured, key=lambda line: line["gold"])
    assert last["step"] == lines[-1]["step"] < 60 and lines[-1]["step"] - best["step"] == 3
    assert best["gold"] > measured[0]["gold"] and best["step"] > 0
    assert torch.load(tmp_path / "ppo/best.pt", weights_only=True)["step"] == best["step"]
