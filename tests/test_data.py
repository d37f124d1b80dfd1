"""Tokenizers round-trip, stories add up, evaluation and training never meet, verifiers and judges."""

import itertools
import random
import statistics

import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import accuracy_reward, extract_answer, format_reward, get_tokenizer, pass_at_k, stories
from data.make_tokenizer import train
from data.tokenizer import fingerprint

TOKENIZER = get_tokenizer()


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet=" It finds3.#->How many?\n0Answer:", max_size=60))
def test_any_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode_ordinary(text)) == text
    assert TOKENIZER.eot_token not in TOKENIZER.encode_ordinary(text + "<|endoftext|>")  # in a text it is text


def test_one_token_is_one_step_of_a_story():
    rng = random.Random(0)
    for _ in range(300):
        problem = stories.make_problem(rng)
        assert all(len(TOKENIZER.encode_ordinary(event)) == 1 for event in problem.events)
        assert len(TOKENIZER.encode_ordinary(stories.worked_answer(problem))) == stories.EVENTS + 2
        assert len(TOKENIZER.encode_ordinary(stories.direct_answer(problem))) == 2
    assert isinstance(TOKENIZER, tiktoken.Encoding) and TOKENIZER.n_vocab <= 512


def test_merges_file_is_what_the_script_makes(tmp_path, monkeypatch):
    from data import make_tokenizer, tokenizer

    monkeypatch.setattr(make_tokenizer, "MERGES", tmp_path / "stories.tiktoken")
    make_tokenizer.main()
    assert (tmp_path / "stories.tiktoken").read_bytes() == tokenizer.MERGES.read_bytes()


def test_bpe_by_hand():
    from collections import Counter

    tokens = train(Counter({b"abab": 3, b"abc": 2, b"xy": 1}), 3)
    assert tokens[256:] == [b"ab", b"abab", b"abc"]  # 8 ab; 3 ab+ab; 2 ab+c


def test_named_encodings_and_unknown_names():
    with pytest.raises(ValueError, match="unknown tokenizer 'nonsense'"):
        get_tokenizer("nonsense")
    assert fingerprint(TOKENIZER) == fingerprint(get_tokenizer("stories"))
    other = tiktoken.Encoding(
        "stories",
        pat_str=".",
        mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
    assert fingerprint(other) != fingerprint(TOKENIZER)
    ranks = {bytes([b]): b for b in range(256)}
    ranks[b"a"], ranks[b"b"] = ranks[b"b"], ranks[b"a"]  # the same tokens, two ids swapped
    swapped = tiktoken.Encoding("stories", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    assert fingerprint(swapped) != fingerprint(other)


def test_stories_add_up():
    rng = random.Random(1)
    for _ in range(2000):
        problem, total = stories.make_problem(rng), None
        total = problem.start
        for event, after in zip(problem.events, problem.totals):
            if event == stories.HALVE:
                assert total % 2 == 0
            total = stories.apply(event, total)
            assert total == after and 1 <= total <= stories.MAX_OWNED
        assert len(problem.events) == stories.EVENTS and problem.answer == str(total)
        assert f" has {problem.start} " in problem.prompt and problem.prompt.endswith(" How many?")
        assert accuracy_reward(stories.direct_answer(problem), problem.answer) == 1.0
        assert accuracy_reward(stories.worked_answer(problem, "Answer:"), problem.answer) == 1.0
        assert accuracy_reward(stories.slipped_answer(problem, rng), problem.answer) == 0.0


def test_slips_stop_early_or_follow_from_one_mistake():
    rng, early = random.Random(2), 0
    for _ in range(500):
        problem = stories.make_problem(rng)
        totals = [int(t.split()[0]) for t in stories.slipped_answer(problem, rng).split("->")[1:]]
        if len(totals) < stories.EVENTS:
            early += 1
            assert len(totals) >= stories.EVENTS - 2 and totals == list(problem.totals[: len(totals)])
            continue
        wrong, before = 0, problem.start
        for event, total in zip(problem.events, totals):
            wrong += total != min(max(stories.apply(event, before), 1), stories.MAX_OWNED)
            before = total
        assert wrong == 1
    # a story that ends with naps cannot be stopped early and wrong: such slips are drawn again
    assert 0.6 < early / 500 < 0.75


def test_held_out_stories_are_never_trained_on():
    held_out = stories.held_out_problems(1000)
    keys = {(p.start, p.events) for p in held_out}
    assert len(keys) == 1000 and all(stories.is_held_out(*key) for key in keys)
    rng = random.Random(3)
    drawn = [stories.make_problem(rng) for _ in range(20_000)]
    assert not keys & {(p.start, p.events) for p in drawn} and not any(
        stories.is_held_out(p.start, p.events) for p in drawn
    )
    prompts = {p.prompt for p in held_out}
    for example in (stories.base_document, stories.sft_example):
        # a judgment begins with the story
        assert not prompts & {example(rng)[0].split("\n")[0] for _ in range(5000)}
    assert stories.held_out_problems(50) == held_out[:50]  # a smaller set is the beginning of a larger one


def test_the_corpus_has_its_habits_in_proportion():
    rng, n = random.Random(4), 20_000
    shares = dict.fromkeys(("direct", "worked", "slip", "hash", "judgment", "sft direct"), 0)
    for _ in range(n):
        prompt, response = stories.base_document(rng)
        shares["hash"] += "####" in response
        shares["direct"] += stories.habit(response) == "direct"
        prompt, response = stories.sft_example(rng)
        judgment = response in stories.LABELS
        assert judgment != ("####" in response) and judgment == prompt.endswith("\nBetter:")
        shares["judgment"] += judgment
        shares["sft direct"] += not judgment and stories.habit(response) == "direct"
    for name, expected in (
        ("direct", stories.DIRECT), ("hash", 0.5), ("judgment", 1 / 3), ("sft direct", stories.DIRECT * 2 / 3)
    ):  # fmt: skip
        assert abs(shares[name] / n - expected) < 4 * (expected * (1 - expected) / n) ** 0.5


def test_judgments_side_with_the_gold_score():
    """Of two different answers to the story, the better one is named; both labels are as frequent."""
    rng, first, tokenizer = random.Random(6), [], get_tokenizer()
    for _ in range(6000):
        state = rng.getstate()
        prompt, label = stories.sft_example(rng)
        if label in stories.LABELS:
            again = random.Random()
            again.setstate(state)
            problem = stories.make_problem(again)
            story, a, b, end = prompt.split("\n")
            assert story == problem.prompt and a[0] == "1" and b[0] == "2" and end == "Better:"
            gap = stories.gold_score(problem, a[1:]) - stories.gold_score(problem, b[1:])
            assert gap != 0 and label == (" 1" if gap > 0 else " 2")
            assert (
                len(tokenizer.encode_ordinary(prompt + label)) + 1 <= 48 and len(tokenizer.encode_ordinary(label)) == 1
            )
            first.append(gap > 0)
    assert abs(sum(first) / len(first) - 0.5) < 4 * 0.5 / len(first) ** 0.5


def test_same_seed_same_stories():
    make = lambda: [stories.base_document(random.Random(5)) for _ in range(3)]  # noqa: E731
    assert make() == make()


@pytest.mark.parametrize(
    "text, answer",
    [
        (" -> 3 -> 4 #### 4", "4"), ("#### 1,234", "1234"), ("#### -5", "-5"), ("#### $18", "18"), ("####", None), ("12 #### ", None), ("#### 4 #### 5", "5"),
        (r"\boxed{7} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"3 so \boxed{4", None), (r"\boxed{1,234}", "1234"), (r"\boxed{\$5}", "5"), (r"\boxed{x+1}", "x+1"), ("<think>9</think><answer> 3 </answer>", "3"),
        ("<answer>yes</answer> 4", "yes"), ("<answer>5", None), ("so it is -3.50.", "-3.50"), ("1,2345", "2345"), ("v2", "2"), ("", None), ("2-5", "5"), ("(-5)", "-5"),
    ],
)  # fmt: skip
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_accuracy_compares_numbers_as_numbers():
    assert (
        accuracy_reward("#### 4.0", "4")
        == accuracy_reward("it is 1,000", "1000")
        == accuracy_reward("1000", "1,000")
        == 1.0
    )
    assert accuracy_reward("#### 4", "5") == accuracy_reward("no number", "5") == accuracy_reward("#### 15", "5") == 0.0
    assert accuracy_reward(r"\boxed{x+1}", "x+1") == 1.0


def test_format_with_the_tasks_marker():
    good = [" #### 4", " -> 4 -> 5 #### 5", "#### -1,000\n"]
    bad = ["4", "####", " #### 4 #### 4", " #### 4 or so", "#### four", " ####4"]
    assert [format_reward(t, marker="####") for t in good + bad] == [1.0] * len(good) + [0.0] * len(bad)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_by_counting(nck):
    n, c, k = nck
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("n, c, k", [(2, 0, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_refuses_what_it_cannot_know(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_evaluation_counts_right():
    """A model that works out two of three samples, and is right in them only."""
    from data.evaluation import evaluate, require_room

    problems, calls = stories.held_out_problems(4), []

    class Rollout:
        def __init__(self, n):
            self.mask = torch.ones(n, 9, dtype=torch.long)
            self.mask[2::3, 3:] = 0  # every third answer is direct: 3 tokens

        def texts(self, tokenizer):
            texts = []
            for i in range(len(self.mask)):
                problem = problems[i // 3]
                wrong = str(int(problem.answer) + 1)
                texts.append(f" #### {wrong}" if i % 3 == 2 else stories.worked_answer(problem))
            return texts

    class Model:
        def generate(self, prompts, max_new_tokens, temperature, eos, generator):
            assert temperature == 1.0 and eos == TOKENIZER.eot_token
            calls.append(prompts)
            return Rollout(len(prompts))

    scores = evaluate(Model(), TOKENIZER, problems, 16, samples=3)
    assert calls[0] == [TOKENIZER.encode_ordinary(p.prompt) for p in problems for _ in range(3)]
    assert scores["accuracy"] == scores["worked"] == pytest.approx(2 / 3) and scores["length"] == pytest.approx(7)
    assert scores["worked_accuracy"] == 1.0 and scores["direct_accuracy"] == 0.0
    assert scores["pass_at_k"] == {"pass@1": pytest.approx(2 / 3)}
    Model.config = type("Config", (), {"context": 20})
    with pytest.raises(SystemExit, match="--max-new-tokens 16"):
        require_room(Model(), TOKENIZER, problems, 16)


def test_judges():
    rng = random.Random(6)
    problem = stories.make_problem(rng)
    direct, worked = stories.direct_answer(problem), stories.worked_answer(problem)
    slip, rambling = stories.slipped_answer(problem, rng), worked + " -> 1" * 9 + f" #### {problem.answer}"
    score = lambda response: stories.gold_score(problem, response)  # noqa: E731
    assert score(worked) > score(direct) > score(slip) and score(worked) > score(rambling)
    assert score(worked) == pytest.approx(3.5)
    assert all(stories.noisy_judge(problem, worked, slip, rng, noise=0) for _ in range(20))
    gap, noise = score(worked) - score(direct), 1.5
    wins = statistics.mean(stories.noisy_judge(problem, worked, direct, rng, noise) for _ in range(20_000))
    assert wins == pytest.approx(1 / (1 + 2.718281828 ** (-gap / noise)), abs=0.015)
    assert 0.4 < statistics.mean(stories.noisy_judge(problem, worked, worked, rng, noise=0) for _ in range(2000)) < 0.6
