"""The losses against finite differences and closed forms, the gradient of a step under any split, and learning
itself."""

import dataclasses
import itertools
import json
import random

import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import gpt
import grpo
from gpt import GPT, GPTConfig


def random_batch(seed, B=5, T=6):
    """Log-probs of a policy that has moved, its old and reference ones, advantages, ragged masks with one empty row."""
    g = torch.Generator().manual_seed(seed)
    logp, old, ref = (-2 * torch.rand(B, T, generator=g, dtype=torch.float64) for _ in range(3))
    old = logp + 0.5 * (old + 1)  # ratios on both sides of the clip range
    mask = (torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=g)).double()
    mask[0] = 0
    mask[1] = 1
    return logp, old, ref, torch.randn(B, generator=g, dtype=torch.float64), mask


OPTIONS = [
    dict(aggregate=aggregate, ratio=ratio, surrogate=surrogate, kl=kl, beta=beta)
    for aggregate, ratio, surrogate, (kl, beta) in itertools.product(
        ("sequence", "token", "constant"),
        ("token", "sequence"),
        ("clip", "cispo"),
        (("k1", 0.1), ("k2", 0.1), ("k3", 0.1), ("k3", 0.0)),
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_gradient_equals_finite_differences(options):
    logp, old, ref, A, mask = random_batch(1)
    weight = None
    if options["surrogate"] == "cispo":  # its ratio is a constant: the finite difference must hold it still
        log_ratio = (logp - old) * mask
        if options["ratio"] == "sequence":
            log_ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(logp)
        weight = log_ratio.exp().clamp(0.8, 1.28)

    def loss(x):
        value, _ = grpo.policy_loss(x, old, A, mask, 0.2, 0.28, max_tokens=6, ref_logp=ref, **options)
        return value

    def smooth(x):
        if weight is None:
            return loss(x)
        extra = options["beta"] * grpo.kl_estimate(x, ref, options["kl"])
        return grpo.aggregate_loss(-weight * A[:, None] * x + extra, mask, options["aggregate"], 6)

    x = logp.clone().requires_grad_()
    gradient = torch.autograd.grad(loss(x), x)[0]
    h = 1e-6
    for i, t in itertools.product(range(len(logp)), range(logp.shape[1])):
        e = torch.zeros_like(logp)
        e[i, t] = h
        assert ((smooth(logp + e) - smooth(logp - e)) / (2 * h)).item() == pytest.approx(
            gradient[i, t].item(), abs=1e-7
        )


@pytest.mark.parametrize("options", OPTIONS[::3], ids=lambda o: "-".join(map(str, o.values())))
def test_what_stands_in_masked_slots_does_not_matter(options):
    logp, old, ref, A, mask = random_batch(2)
    results = []
    for garbage in (0.0, 50.0, -torch.inf, torch.nan):
        fill = lambda x: torch.where(mask > 0, x, garbage)  # noqa: E731, B023
        x = fill(logp).requires_grad_()
        loss, stats = grpo.policy_loss(x, fill(old), A, mask, max_tokens=6, ref_logp=fill(ref), **options)
        results.append((loss, torch.autograd.grad(loss, x)[0], *stats.values()))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b) and a.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from(["sequence", "token", "constant"]), st.sampled_from(["token", "sequence"])
)
def test_any_split_of_a_step_gives_the_same_loss(seed, aggregate, ratio):
    logp, old, ref, A, mask = random_batch(seed, B=7)
    whole, _ = grpo.policy_loss(
        logp, old, A, mask, aggregate=aggregate, max_tokens=6, ratio=ratio, ref_logp=ref, beta=0.1
    )
    denominator = {"sequence": 7, "token": mask.sum(), "constant": 7 * 6}[aggregate]
    order, parts = random.Random(seed).sample(range(7), 7), 0.0
    while order:
        n = random.Random(seed + len(order)).randint(1, len(order))
        rows, order = order[:n], order[n:]
        T = max(1, int(mask[rows].sum(1).max()))  # a micro-batch is only as wide as its longest row
        part, _ = grpo.policy_loss(logp[rows, :T], old[rows, :T], A[rows], mask[rows, :T], aggregate=aggregate, ratio=ratio, ref_logp=ref[rows, :T],
                                   beta=0.1, denominator=denominator)  # fmt: skip
        parts += part
    assert parts.item() == pytest.approx(whole.item(), abs=1e-12)


def test_clipping_stops_only_what_would_go_further():
    """With A > 0 only a ratio above 1 + clip_high has no gradient, with A < 0 only one below 1 - clip_low; CISPO
    keeps all."""
    old = torch.zeros(1, 3, dtype=torch.float64)
    for A, expected in ((1.0, [True, True, False]), (-1.0, [False, True, True])):
        logp = torch.tensor([[0.5, 1.0, 1.5]], dtype=torch.float64).log().requires_grad_()
        loss, stats = grpo.policy_loss(logp, old, torch.tensor([A]), torch.ones(1, 3), 0.2, 0.28)
        assert torch.autograd.grad(loss, logp)[0][0].ne(0).tolist() == expected
        assert stats["clip_fraction"].item() == pytest.approx(1 / 3)
        loss, _ = grpo.policy_loss(logp, old, torch.tensor([A]), torch.ones(1, 3), 0.2, 0.28, surrogate="cispo")
        assert torch.autograd.grad(loss, logp)[0].ne(0).all()
    # separate bounds
    for ratio, A, inside in ((1.25, 1.0, True), (1.3, 1.0, False), (0.85, -1.0, True), (0.75, -1.0, False)):
        logp = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
        loss, _ = grpo.policy_loss(logp, torch.zeros(1, 1), torch.tensor([A]), torch.ones(1, 1), 0.2, 0.28)
        assert bool(torch.autograd.grad(loss, logp)[0].ne(0).all()) == inside


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0]), min_size=4, max_size=4), min_size=2, max_size=5),
    st.floats(-100, 100),
)
def test_advantages_properties(rewards, shift):
    r = torch.tensor(rewards, dtype=torch.float64)
    for baseline, scale in itertools.product(("mean", "leave_one_out"), ("std", "none", "batch")):
        A = grpo.group_advantages(r, baseline, scale)
        assert A.isfinite().all() and A.sum(1).abs().max() < 1e-9
        torch.testing.assert_close(grpo.group_advantages(r + shift, baseline, scale), A, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(
            grpo.group_advantages(r[:, [2, 0, 3, 1]], baseline, scale), A[:, [2, 0, 3, 1]], rtol=1e-6, atol=1e-9
        )
        equal = r.amax(1) == r.amin(1)
        assert A[equal].eq(0).all() and A[~equal].ne(0).any(1).all()
        if scale != "batch":
            torch.testing.assert_close(
                grpo.group_advantages(r[1:], baseline, scale), A[1:]
            )  # groups do not see each other


def test_bad_calls():
    r = torch.rand(2, 1)
    for options in ({}, dict(baseline="leave_one_out", scale="none")):
        with pytest.raises(ValueError, match="at least 2"):
            grpo.group_advantages(r, **options)
    assert grpo.group_advantages(r, scale="none").eq(0).all()
    assert grpo.group_advantages(torch.tensor([[1, 0]]), scale="none").tolist() == [[0.5, -0.5]]  # integers will do
    for scale in ("std", "none", "batch"):  # nothing scored, nothing said
        assert grpo.group_advantages(torch.full((2, 3), torch.nan), scale=scale).eq(0).all()
    x = torch.zeros(1, 1)
    for options in (
        dict(aggregate="mean"),
        dict(ratio="row"),
        dict(surrogate="ppo"),
        dict(aggregate="constant"),
        dict(beta=1.0, ref_logp=x, kl="k4"),
    ):
        with pytest.raises(ValueError):
            grpo.policy_loss(x, x, torch.zeros(1), torch.ones(1, 1), **options)


# ---- with a model


def step_gradient(model, rollout, advantages, micro_batches, aggregate):
    model.zero_grad()
    B = len(advantages)
    denominator = {"sequence": B, "token": int(rollout.mask.sum()), "constant": B * 12}[aggregate]
    for rows in micro_batches:
        logp = gpt.to_slots(model.token_logprobs(*model.response_states(rollout, rows)), rollout.mask[rows])
        loss, _ = grpo.policy_loss(
            logp, logp.detach(), advantages[rows], rollout.mask[rows], aggregate=aggregate, denominator=denominator
        )
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
def test_micro_batches_never_change_the_gradient(tiny_model, aggregate):
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [15, 16]] * 4
    rollout = tiny_model.generate(prompts, 12, eos=3, generator=torch.Generator().manual_seed(0))
    A = torch.randn(16, generator=torch.Generator().manual_seed(0))
    whole = step_gradient(tiny_model, rollout, A, [list(range(16))], aggregate)
    assert whole.norm() > 1e-3
    lengths = rollout.attention_mask.sum(1).tolist()
    for size in (1, 3, 8):
        split = step_gradient(tiny_model, rollout, A, common.by_length(lengths, size), aggregate)
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


def test_equal_groups_give_exactly_zero_gradient(tiny_model):
    rollout = tiny_model.generate([[5, 6, 7]] * 8, 12, eos=3, generator=torch.Generator().manual_seed(0))
    A = grpo.group_advantages(torch.full((1, 8), 0.1)).view(-1)
    for aggregate in ("sequence", "token", "constant"):
        assert step_gradient(tiny_model, rollout, A, [list(range(8))], aggregate).eq(0).all()


def test_rollout_logprobs_agree_with_the_sampler(tiny_model):
    rollout = tiny_model.generate([[5, 6, 7], [8]] * 10, 12, 0.7, eos=3, generator=torch.Generator().manual_seed(0))
    micro = common.by_length(rollout.attention_mask.sum(1).tolist(), 6)
    logp = tiny_model.rollout_logprobs(rollout, micro, 0.7)
    torch.testing.assert_close(logp, rollout.logp, rtol=0, atol=1e-5)
    # the training pass over the same micro-batches gives the same bits: the first ratio is exactly 1
    for rows in micro:
        hidden, targets = tiny_model.response_states(rollout, rows)
        again, _ = tiny_model.token_logprobs_and_entropy(hidden, targets, 0.7)
        assert torch.equal(gpt.to_slots(again, rollout.mask[rows]), logp[rows])


# ---- learning, on a world small enough to learn from nothing: the prompt is two digits, the answer their larger one, then stop

DIGITS = tiktoken.Encoding(
    "digits", pat_str=r".", mergeable_ranks={str(d).encode(): d for d in range(6)}, special_tokens={"<|endoftext|>": 6}
)


@dataclasses.dataclass
class Pair:
    prompt: str

    @property
    def answer(self):
        return max(self.prompt)


class DigitWorld:
    """Stands in for data/stories.py."""

    NAME = "digits"

    @staticmethod
    def make_problem(rng):
        return Pair(f"{rng.randrange(6)}{rng.randrange(6)}")

    @classmethod
    def training_problems(cls):
        return [cls.make_problem(random.Random(i)) for i in range(500)]

    @staticmethod
    def gold_score(problem, text):
        return float(text == problem.answer)

    @staticmethod
    def held_out_problems(n):
        return [Pair(f"{i % 6}{i // 6 % 6}") for i in range(n)]

    @classmethod
    def in_place_of_stories(cls, monkeypatch, script):
        """The script works on digits."""
        monkeypatch.setattr(gpt, "get_tokenizer", lambda name, chat="": DIGITS)
        monkeypatch.setattr(script, "get_task", lambda *args: cls)
        monkeypatch.setattr(script, "drop_long_prompts", lambda *args: None)
        exact = lambda text, answer: float(text == answer)  # noqa: E731
        monkeypatch.setattr("data.evaluation.accuracy_reward", exact)
        if hasattr(script, "accuracy_reward"):
            monkeypatch.setattr(script, "accuracy_reward", exact)


def babbler(seed):
    """A model trained for two seconds on digits without sense, that stop after each with a chance of six in a
    hundred."""
    torch.manual_seed(seed)
    rng, model = random.Random(seed), GPT(GPTConfig(7, 8, 1, 2, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        texts = []
        for _ in range(64):
            texts.append([rng.randrange(6) for _ in range(3)])
            while len(texts[-1]) < 7:
                texts[-1].append(6 if rng.random() < 0.06 else rng.randrange(6))
                if texts[-1][-1] == 6:
                    break
        ids, mask = gpt.right_pad(texts)
        logp = model.token_logprobs(model.hidden(ids[:, :-1]), ids[:, 1:])
        (-(logp * mask[:, 1:]).sum() / mask[:, 1:].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def no_eos_in_mask(generate):
    def mutant(*args, **kw):
        rollout = generate(*args, **kw)
        return dataclasses.replace(
            rollout, mask=rollout.mask * (rollout.ids[:, rollout.prompt_len :] != DIGITS.eot_token)
        )

    return mutant


def shifted_by_one(response_states):
    def mutant(model, rollout, rows):  # logits[t] scored against the token before the one that they predict
        hidden, _ = response_states(model, rollout, rows)
        return hidden, rollout.ids[rows, rollout.prompt_len - 1 : -1][rollout.mask[rows].bool()]

    return mutant


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mutant", ["none", "sign flipped", "EOS not in the mask", "log-probs shifted by one"])
def test_learning(tmp_path, monkeypatch, mutant, seed):
    """The real loop raises the held-out accuracy from chance; with a classic mistake in it, it does not.

    Without EOS in the mask a policy can still learn to stop, by being pushed away from everything else, but that is a
    weak force: under a leash (beta * KL) it stays near the reference, where the real loop reaches the tilted optimum
    ref * exp(r / beta)."""
    model = babbler(seed)
    config = grpo.Config(seed=seed, steps=120, out=str(tmp_path), device="cpu", init=str(tmp_path / "init.pt"), max_new_tokens=4, lr=2e-3, minibatches=1,
                         evaluate=36, pass_k=16, eval_every=1000, log_every=1000, save_every=1000, variant="dr_grpo", beta=0.1, kl="exact")  # fmt: skip
    DigitWorld.in_place_of_stories(monkeypatch, grpo)
    if mutant == "sign flipped":
        right = grpo.group_advantages
        monkeypatch.setattr(grpo, "group_advantages", lambda *args, **kw: -right(*args, **kw))
    elif mutant == "log-probs shifted by one":
        monkeypatch.setattr(GPT, "response_states", shifted_by_one(GPT.response_states))
    checkpoint = dict(script="sft", step=1, steps=1, config={}, tokenizer=common.fingerprint(DIGITS), model=model.state_dict(),
                      model_config=dataclasses.asdict(model.config))  # fmt: skip
    torch.save(checkpoint, tmp_path / "init.pt")
    if mutant == "EOS not in the mask":
        plain = gpt.GPT.generate
        monkeypatch.setattr(gpt.GPT, "generate", lambda self, *args, **kw: no_eos_in_mask(plain)(self, *args, **kw))
    grpo.main(config)
    lines = [json.loads(line) for line in (tmp_path / "grpo/metrics.jsonl").open()]
    print(f"{mutant}, seed {seed}: {lines[0]['accuracy']:.3f} -> {lines[-1]['accuracy']:.3f}")
    assert lines[0]["accuracy"] < 0.15
    if mutant == "none":
        assert lines[-1]["accuracy"] > 0.5
    else:
        assert lines[-1]["accuracy"] < 0.25
