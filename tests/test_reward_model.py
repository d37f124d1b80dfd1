"""Reward models: where the reward is read, whatever the padding; the loss of all pairs of a prompt under any split;
what is dropped; and learning itself."""

import itertools
import json
import math
import random
import re

import pytest
import torch
from conftest import ROOT

import common
import reward_model
from data import get_tokenizer, preferences, stories
from gpt import GPT, GPTConfig
from reward_model import Comparisons, RewardModel

GSM8K = ROOT.parent / "shared/data/gsm8k/example_model_solutions.jsonl"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return RewardModel(GPTConfig(vocab_size=61, context=40, n_layer=2, n_head=2, n_embd=32), ensemble=2).double()


def padded(texts, left, right, fill):
    """The texts in rows with `left` and `right` more columns of padding than they need."""
    width = left + max(map(len, texts)) + right
    ids, mask = torch.full((len(texts), width), fill), torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        start = left if right else width - len(text)
        ids[row, start : start + len(text)] = torch.tensor(text)
        mask[row, start : start + len(text)] = 1
    return ids, mask


def test_reward_does_not_depend_on_padding(model):
    """Each text alone, against a batch padded left, right or on both sides, also with the end token, which stands in the
    texts too."""
    texts = [[5, 6, 7, 3], [8, 3, 9, 10, 11, 12, 3], [4, 3]]
    alone = torch.cat([model(torch.tensor([text]), torch.ones(1, len(text))) for text in texts], 1)  # [2, 3]
    assert len(alone.flatten().unique()) == 6
    for left, right, fill in itertools.product((0, 5), (0, 4), (0, 3)):
        torch.testing.assert_close(model(*padded(texts, left, right, fill)), alone)


def elements(n=7, seed=0):
    """Comparisons of random texts: up to four responses a prompt, not all pairs judged."""
    rng, made = random.Random(seed), []
    for _ in range(n):
        prompt = [rng.randrange(4, 61) for _ in range(rng.randint(1, 6))]
        texts = [prompt + [rng.randrange(4, 61) for _ in range(rng.randint(1, 9))] + [3] for _ in range(4)]
        pairs = rng.sample(list(itertools.combinations(range(4), 2)), rng.randint(1, 6))
        made.append(
            Comparisons(
                texts,
                [a for a, _ in pairs],
                [b for _, b in pairs],
                [rng.choice([1.0, 0.7]) for _ in pairs],
                [rng.choice([0.0, 0.5]) for _ in pairs],
                [float("nan")] * len(pairs),
            )
        )
    return made


@pytest.mark.parametrize("micro_batch", [1, 4, 9, 1000])
def test_a_step_is_the_mean_over_pairs_however_it_is_cut(model, micro_batch):
    """Against the definition, pair by pair, each text in a forward pass of its own: loss, and the gradient that reaches
    the optimizer."""
    batch, config = elements(), reward_model.Config(micro_batch=micro_batch, centering=0.01, max_grad_norm=1e9)
    losses = []
    for element in batch:
        for c, r, p, m in zip(element.chosen, element.rejected, element.probability, element.margin):
            one = lambda i: model.member(0, torch.tensor([element.texts[i]]), torch.ones(1, len(element.texts[i])))  # noqa: E731, B023
            chosen, rejected = one(c)[0], one(r)[0]
            d = chosen - rejected - m
            losses.append(
                p * torch.log1p(torch.exp(-d)) + (1 - p) * torch.log1p(torch.exp(d)) + 0.01 * (chosen + rejected) ** 2
            )
    expected = torch.stack(losses).mean()
    expected.backward()
    parameters = [*model.trunks[0].parameters(), *model.heads[0].parameters()]
    gradients = [p.grad.clone() for p in parameters]
    model.zero_grad()

    class Look(torch.optim.SGD):
        def step(self):
            self.seen = [p.grad.clone() for p in parameters]

    optimizer = Look(model.parameters(), lr=0.0)
    stats = reward_model.update(model, optimizer, [batch], 0.0, config)
    assert stats["loss"] == pytest.approx(expected.item(), abs=1e-12)
    for seen, gradient in zip(optimizer.seen, gradients):
        torch.testing.assert_close(seen, gradient)


def test_members_learn_apart(model):
    """Each member's gradient is that of its own batch, and its clipping its own."""
    a, b = elements(3, 1), elements(3, 2)
    config, seen = reward_model.Config(), []

    class Look(torch.optim.SGD):
        def step(self):
            seen.append([p.grad.clone() for p in (*model.trunks[1].parameters(), *model.heads[1].parameters())])

    for first in (a, b):
        members = [[*trunk.parameters(), *head.parameters()] for trunk, head in zip(model.trunks, model.heads)]
        reward_model.update(model, Look([dict(params=m) for m in members], lr=0.0), [first, b], 0.0, config)
    assert all(torch.equal(x, y) for x, y in zip(*seen)) and any(x.ne(0).any() for x in seen[0])


def test_every_pass_sees_each_prompt_once_in_another_order():
    data = list(range(10))
    passes = {}
    for member, epoch in itertools.product((0, 1), (0, 1)):
        batches = [reward_model.batch_of(data, 4 * epoch + i, 3, 0, member) for i in range(4)]
        passes[member, epoch] = [item for batch in batches for item in batch]
    assert all(sorted(order) == data for order in passes.values()) and len(set(map(tuple, passes.values()))) == 4


def test_what_is_dropped_and_what_is_cut():
    tokenizer = get_tokenizer()
    row = lambda chosen, rejected, **more: dict(prompt="How many?", chosen=chosen, rejected=rejected, **more)  # noqa: E731
    rows = [
        row(" #### 13", " #### 12", gold=2.0),
        row(" #### 13", " #### 14", probability=0.8, margin=0.3),
        row(" #### 1", " #### 1"),
        row(" -> 1" * 30 + " #### 1", " -> 1" * 30 + " #### 2"),  # equal in what is left of them
        dict(prompt=" How many?" * 30, chosen="a", rejected="b"),
        dict(prompt="Yes", chosen=" #### 1", rejected=" -> 1" * 30),
    ]
    found, dropped = reward_model.comparisons(rows, tokenizer, context=20)
    assert dropped == {"equal": 2, "too long": 1} and len(found) == 2
    first, second = found
    assert len(first.texts) == 3 and first.chosen == [0, 0] and first.rejected == [1, 2]  # each text once
    assert first.probability == [1.0, 0.8] and first.margin == [0.0, 0.3] and first.gold[0] == 2.0
    assert math.isnan(first.gold[1])
    prompt = tokenizer.encode_ordinary("How many?")
    assert first.texts[0] == prompt + tokenizer.encode_ordinary(" #### 13") + [tokenizer.eot_token]
    assert len(second.texts[1]) == 20 and tokenizer.eot_token not in second.texts[1]  # cut off: no end


def test_gain_and_bias_make_mean_0_and_std_1(model):
    torch.manual_seed(1)
    policy = GPT(GPTConfig(vocab_size=61, context=40, n_layer=1, n_head=2, n_embd=32)).double()
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12]] * 20
    generator = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    for _ in range(2):  # the second time it starts from other gains, and ends with the same
        reward_model.normalise(model, policy, prompts, 12, 3, generator())
        rollout = policy.generate(prompts, 12, eos=3, generator=generator())
        rewards = model(rollout.ids, rollout.attention_mask)
        torch.testing.assert_close(rewards.mean(1), torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(rewards.std(1, correction=0), torch.ones(2, dtype=torch.float64))
    gain, bias = reward_model.gain_and_bias(torch.full((1, 4), 3.0))
    assert gain.item() == 1.0 and bias.item() == -3.0
    assert reward_model.gain_and_bias(torch.full((500,), 0.1))[0] == 1.0  # whatever the rounding of their mean


def test_combinations():
    rewards = torch.tensor([[1.0, -2.0], [3.0, -2.0]])
    assert reward_model.combine(rewards).tolist() == [2.0, -2.0]
    assert reward_model.combine(rewards, "min").tolist() == [1.0, -2.0]
    assert reward_model.combine(rewards, "mean-std").tolist() == [1.0, -2.0]
    with pytest.raises(ValueError, match="median"):
        reward_model.combine(rewards, "median")


def test_reliability_of_a_judge_who_is_as_unsure_as_it_says():
    generator = torch.Generator().manual_seed(0)
    gaps = 4 * torch.rand(200_000, generator=generator)  # the model prefers by this much, the judge agrees as often
    agrees = torch.rand(200_000, generator=generator) < torch.sigmoid(gaps)
    rows = reward_model.reliability(torch.where(agrees, gaps, -gaps))
    assert len(rows) == 5 and sum(row[2] for row in rows) == 200_000
    for low, high, n, said, seen in rows:
        assert low <= said <= high and abs(said - seen) < 4 * (0.25 / n) ** 0.5
    overconfident = reward_model.reliability(torch.where(agrees, 3 * gaps, -3 * gaps))
    assert overconfident[-1][3] - overconfident[-1][4] > 0.05


# ---- the data


def test_the_judge_agrees_with_gold_as_often_as_bradley_and_terry_say():
    rng, problem = random.Random(0), stories.make_problem(random.Random(1))
    right, wrong = stories.worked_answer(problem), stories.direct_answer(problem).replace("####", "#### 9")
    gap = stories.gold_score(problem, right) - stories.gold_score(problem, wrong)
    rows = [row for _ in range(4000) for row in preferences.judge_pairs(problem, [wrong, right], rng, noise=2.0)]
    assert gap > 0 and all(abs(row["gold"]) == pytest.approx(gap, abs=1e-3) for row in rows)
    share = sum(row["chosen"] == right for row in rows) / len(rows)
    expected = 1 / (1 + math.exp(-gap / 2.0))
    assert abs(share - expected) < 4 * (0.25 / len(rows)) ** 0.5
    gold = preferences.judge_pairs(problem, [wrong, right, right], rng, noise=0)
    assert [row["chosen"] for row in gold] == [right] * 3 and len(gold) == 3  # all pairs of three


def test_sampling_ends_though_a_model_always_says_the_same(monkeypatch):
    same = lambda model, tokenizer, problems, *args, **kw: ([" #### 1"] * len(problems), None)  # noqa: E731
    monkeypatch.setattr(preferences, "sample_responses", same)
    rows, dropped = preferences.sample_preferences(None, None, 50, 4, 1.0, 0, 16, None)
    assert rows == [] and dropped > 50


def test_sampled_pairs_are_all_pairs_of_stories_of_the_right_side(monkeypatch):
    rng = random.Random(0)
    say = lambda model, tokenizer, problems, *args, **kw: ([f" #### {rng.randrange(99)}" for _ in problems], None)  # noqa: E731
    monkeypatch.setattr(preferences, "sample_responses", say)
    for side in (False, True):
        rows, dropped = preferences.sample_preferences(None, None, 600, 4, 1.0, 0, 16, None, held_out=side)
        assert len(rows) == 600 and all(row["chosen"] != row["rejected"] for row in rows)
        groups = [len(list(group)) for _, group in itertools.groupby(rows, key=lambda row: row["prompt"])]
        assert sum(groups) + dropped >= 6 * (len(groups) - 1) and max(groups) == 6
        for prompt in {row["prompt"] for row in rows}:
            start, events = re.search(r" has (\d+) ", prompt)[1], re.findall(r" It [^.]+\.", prompt)
            assert stories.is_held_out(int(start), events) == side


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "a", "chosen": "b"}', '"rejected" is missing'),
        ('{"prompt": "a", "chosen": "b", "rejected": 3}', '"rejected" is missing, empty, or not a string'),
        ('{"prompt": "", "chosen": "b", "rejected": "c"}', '"prompt" is missing, empty'),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "probability": 1.2}', '"probability" is 1.2'),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "probability": 0.2}', '"probability" is 0.2'),
        ('{"prompt": "a", "chosen": "\\ud83d", "rejected": "c"}', "half a character"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "probability": NaN}', '"probability" is nan'),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}', "\"margin\" is 'big'"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "cut_off": "chosen"}', "\"cut_off\" is 'chosen'"),
        ('{"prompt": "a", "response": "b", "label": true}', '"chosen" is missing'),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, words):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n\n' + line + "\n")
    with pytest.raises(SystemExit) as stop:
        preferences.read_preferences(path)
    text = stop.value.code
    assert text.startswith(f"{path}, line 3: ") and words in text and "\n" not in text


def test_a_bad_file_is_named(tmp_path):
    for make, words in (
        (lambda path: None, "No such file"),
        (lambda path: path.write_text(" \n"), "no preferences"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
    ):
        make(tmp_path / "pairs.jsonl")
        with pytest.raises(SystemExit, match=words) as stop:
            preferences.read_preferences(tmp_path / "pairs.jsonl")
        assert str(tmp_path) in stop.value.code and "\n" not in stop.value.code


def test_preferences_survive_the_file(tmp_path):
    rows = [dict(prompt="Käse\n", chosen='"', rejected="\u2028", gold=1.5), dict(prompt="a", chosen="b", rejected="c")]
    preferences.write_preferences(tmp_path / "pairs.jsonl", rows)
    assert preferences.read_preferences(tmp_path / "pairs.jsonl") == rows


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K's model solutions are not here")
def test_gsm8k_solutions_become_pairs():
    rows = preferences.gsm8k_preferences(GSM8K)
    marked, expected = {}, 0
    for line in GSM8K.open(encoding="utf-8"):
        problem = json.loads(line)
        four = [problem[f"{size}_{how}"] for size in ("6b", "175b") for how in ("finetuning", "verification")]
        right = sum(solution["is_correct"] for solution in four)
        expected += right * (4 - right)
        marked.update({(problem["question"] + "\n", s["solution"]): s["is_correct"] for s in four})
    assert len(rows) == expected == 2429
    assert all(marked[row["prompt"], row["chosen"]] and not marked[row["prompt"], row["rejected"]] for row in rows)


def test_what_is_assessed(model, monkeypatch):
    """The members' mean decides; a tie is no agreement; equal or unknown gold scores do not count."""
    chosen = {0: [3.0, 0.0, 1.0, 0.0], 1: [-1.0, 0.0, 1.0, -3.0]}
    rewards = lambda model, k, elements: (torch.tensor(chosen[k]), torch.zeros(4))  # noqa: E731
    monkeypatch.setattr(reward_model, "pair_rewards", rewards)
    element = Comparisons([[1, 2], [1, 3]], [0] * 4, [1] * 4, [1.0] * 4, [0.0] * 4, [2.0, -1.0, 0.0, -1.0])
    found = reward_model.assess(model, [element])
    assert found["difference"].tolist() == [1.0, 0.0, 1.0, -1.5] and found["preference_accuracy"] == 0.5
    assert found["gold_accuracy"] == pytest.approx(2 / 3)  # right, tie, not counted, right


def test_the_script_trains_on_training_stories_and_tests_on_held_out_ones(tmp_path, monkeypatch, capsys):
    calls, (start, made) = [], (random.Random(0), [])
    for gold in [1.0] * 20 + [1.0, 1.0, 0.0, -1.0]:
        problem = stories.make_problem(start)
        made.append(dict(prompt=problem.prompt, chosen=f" #### {len(made)}", rejected=" -> 1", gold=gold))

    def sampled(model, tokenizer, pairs, samples, noise, seed, max_new_tokens, generator, held_out, *rest):
        calls.append((pairs, samples, noise, held_out))
        return (made[20:], 7) if held_out else (made[:20], 5)

    monkeypatch.setattr(reward_model, "sample_preferences", sampled)
    options = dict(pairs=20, samples=3, evaluate=4, data="")
    for judge, noise in (("gold", 0.0), ("noisy", 1.5)):
        reward_run(tmp_path, 0, judge=judge, **options)
        assert calls == [(20, 3, noise, False), (4, 3, noise, True)]
        calls.clear()
    written = [json.loads(line) for line in (tmp_path / "reward_model/preferences.jsonl").open()]
    out = capsys.readouterr().out
    assert written == made[:20] and "dropped 5 pairs of equal texts" in out
    assert "20 pairs of responses to 20 prompts, and 4 held out" in out and "sides with gold in  62.5%" in out


def test_prompts_of_a_file_are_on_one_side_only(tmp_path, capsys):
    """A tenth of the prompts, with all their pairs, is held out."""
    rows = [dict(prompt=f"{i % 30} buttons.", chosen=f" #### {i}", rejected=" -> 1") for i in range(90)]
    preferences.write_preferences(tmp_path / "mine.jsonl", rows)
    reward_run(tmp_path, 0, data=str(tmp_path / "mine.jsonl"))
    assert "81 pairs of responses to 27 prompts, and 9 held out" in capsys.readouterr().out
    assert not (tmp_path / "reward_model/preferences.jsonl").exists()  # they have theirs


# ---- learning, by the real loop, from a file


def reward_run(tmp_path, seed, flip=False, **options):
    """A reward model on a small random transformer; the judge likes answers that are worked out."""
    torch.manual_seed(seed)
    tokenizer, rng = get_tokenizer(), random.Random(seed)
    model = GPT(GPTConfig(tokenizer.n_vocab, 48, 1, 2, 32))
    checkpoint = dict(script="sft", step=1, steps=1, config={}, tokenizer=common.fingerprint(tokenizer), model=model.state_dict(),
                      model_config=vars(model.config))  # fmt: skip
    torch.save(checkpoint, tmp_path / "init.pt")
    rows = []
    for _ in range(400):
        problem = stories.make_problem(rng)
        pair = [stories.worked_answer(problem), stories.direct_answer(problem)]
        chosen, rejected = reversed(pair) if flip else pair
        rows.append(dict(prompt=problem.prompt, chosen=chosen, rejected=rejected, gold=-1.0 if flip else 1.0))
    preferences.write_preferences(tmp_path / "pairs.jsonl", rows)
    options = {"data": str(tmp_path / "pairs.jsonl"), **options}
    config = reward_model.Config(
        seed=seed, out=str(tmp_path), device="cpu", init=str(tmp_path / "init.pt"), lr=3e-3, **options
    )
    reward_model.main(config)
    return [json.loads(line) for line in (tmp_path / "reward_model/metrics.jsonl").open()]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learning(tmp_path, seed, capsys):
    lines = reward_run(tmp_path, seed, ensemble=2)
    assert lines[-1]["preference_accuracy"] == lines[-1]["gold_accuracy"] > 0.95
    assert lines[-1]["step"] == 23  # 360 prompts, 16 a step: one pass
    assert "360 pairs of responses to 360 prompts, and 40 held out" in capsys.readouterr().out
    checkpoint = torch.load(tmp_path / "reward_model.pt", weights_only=True)
    assert checkpoint["model"]["gain"].shape == (2,) and checkpoint["model"]["gain"].ne(1).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_wrong_sign_does_not_learn(tmp_path, seed, monkeypatch):
    right = reward_model.bradley_terry_loss
    monkeypatch.setattr(
        reward_model, "bradley_terry_loss", lambda chosen, rejected, *rest: right(rejected, chosen, *rest)
    )
    assert reward_run(tmp_path, seed)[-1]["preference_accuracy"] < 0.05


def test_the_judge_decides_and_not_the_gold_score(tmp_path):
    line = reward_run(tmp_path, 0, flip=True)[-1]
    assert line["preference_accuracy"] > 0.95 and line["gold_accuracy"] < 0.05


def test_curve_prints_a_table_and_saves_nothing(tmp_path, capsys):
    with pytest.raises(FileNotFoundError):
        reward_run(tmp_path, 0, curve=True)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [int(row[0]) for row in rows] == [20, 100, 360] and float(rows[-1][2]) > 0.95
    assert not (tmp_path / "reward_model").exists() and not (tmp_path / "reward_model.pt").exists()
