"""Preference data: which of two responses to one prompt is the better.

A file of preferences has one JSON object a line, {"prompt": ..., "chosen": ..., "rejected": ...}, three strings. That
is what `python reward_model.py` writes for the stories (out/reward_model/preferences.jsonl), and reads with --data.
In place of "prompt" there may be "messages", those of a chat: [{"role": "user", "content": ...}, ...], the last one the
user's. More keys may be there: "probability" (how likely it is that `chosen` is the better one, 0.5 to 1; 1 if it is
not said), "margin" (how much better it has to score at least, 0 if it is not said), and, where it is exactly known,
"gold" (how much better it is by the gold score; nobody trains on it), "asked" (data/judges.py) and "cut_off" (which of
the two reached the longest length that was allowed, and so did not end there: ["chosen"], for example). dpo.py --loss
kto also reads responses that were judged alone: {"prompt": ..., "response": ..., "label": true}.

    python -m data.preferences example_model_solutions.jsonl pairs.jsonl

makes such a file from OpenAI's GSM8K release (github.com/openai/grade-school-math, grade_school_math/data), whose
solutions by four models are marked right or wrong: every right solution of a problem is preferred to every wrong one.
"""

import itertools
import json
import random
import sys

import torch

from data import stories
from data.evaluation import sample_responses
from data.stories import noisy_judge
from data.tasks import check_messages
from data.tokenizer import encode_prompt

KEYS = ("prompt", "chosen", "rejected")  # strings
OPTIONAL = {"probability": (0.5, 1.0), "margin": (0.0, 1e6), "gold": (-1e6, 1e6)}


def judge_pairs(problem, responses, rng, noise, task=stories):
    """All pairs of the responses to one problem, ordered by a judge who sees the gold score through Bradley-Terry
    noise (noise=0: the gold judge). -> rows as in a file of preferences, equal texts among them."""
    rows = []
    for a, b in itertools.combinations(responses, 2):
        chosen, rejected = (a, b) if noisy_judge(problem, a, b, rng, noise, task.gold_score) else (b, a)
        gold = task.gold_score(problem, chosen) - task.gold_score(problem, rejected)
        rows.append(dict(prompt=problem.prompt, chosen=chosen, rejected=rejected, gold=round(gold, 4)))
    return rows


def sample_preferences(model, tokenizer, pairs, samples, noise, seed, max_new_tokens, generator, held_out=False, task=stories, sample_rows=1024):
    """`pairs` comparisons of different texts that `model` says, all pairs of `samples` responses to each of so many new
    problems of `task`. -> (rows, number of pairs that were dropped because their texts are equal: nothing is to be learned from
    them). Fewer rows, even none, from a model that nearly always says the same. A gold judge (noise=0) of real data only
    tells right from wrong: what ties is dropped too. `held_out`: of evaluation problems."""
    rng, rows, dropped = random.Random(seed), [], 0
    for _ in range(20):  # rounds: some pairs of each turn out equal, of some models all of them
        if len(rows) >= pairs:
            break
        problems = [task.make_problem(rng, held_out) for _ in range(max(8, (pairs - len(rows)) // samples))]
        several = [problem for problem in problems for _ in range(samples)]
        texts, _ = sample_responses(model, tokenizer, several, max_new_tokens, generator=generator, rows=sample_rows)
        for i, problem in enumerate(problems):
            for row in judge_pairs(problem, texts[i * samples : (i + 1) * samples], rng, noise, task):
                tied = task is not stories and noise == 0 and row["gold"] == 0
                if len(rows) < pairs and row["chosen"] != row["rejected"] and not tied:
                    rows.append(row)
                elif len(rows) < pairs:
                    dropped += 1
    return rows, dropped


def best_worst_pairs(scores):
    """scores [P, n] of n responses to each of P prompts -> for each prompt (best, worst), of equal ones the first; None if
    all score the same."""
    return [None if row.max() == row.min() else (int(row.argmax()), int(row.argmin())) for row in scores]


@torch.no_grad()
def sample_best_worst(model, tokenizer, pairs, samples, judge, seed, max_new_tokens, generator, held_out=False,
                      task=stories, sample_rows=1024):  # fmt: skip
    """`pairs` comparisons of what `model` says: `samples` responses to each of so many new problems of `task`, the best and the worst
    by the scores of `judge(problems, groups of texts, rng)` (data/judges.py). -> (rows; how many stories gave none, because
    the two texts are equal, or tied). Fewer rows, even none, from a model that nearly always says the same."""
    rng, rows, dropped = random.Random(seed), [], {"equal": 0, "tied": 0}
    for _ in range(20):  # rounds: some stories of each give no pair
        if len(rows) >= pairs:
            break
        problems = [task.make_problem(rng, held_out) for _ in range(max(64, pairs - len(rows)))]
        texts, ended = [], []
        several = max(1, sample_rows // samples)  # problems at once
        for i in range(0, len(problems), several):
            prompts = [encode_prompt(tokenizer, p.prompt) for p in problems[i : i + several] for _ in range(samples)]
            rollout = model.generate(prompts, max_new_tokens, eos=tokenizer.eot_token, generator=generator)
            texts += rollout.texts(tokenizer)
            last = rollout.ids[:, rollout.prompt_len :].gather(1, rollout.mask.sum(1, keepdim=True) - 1)  # [B, 1]
            ended += (last[:, 0] == tokenizer.eot_token).tolist()
        groups = [texts[i : i + samples] for i in range(0, len(texts), samples)]
        scores, asked = judge(problems, groups, rng)  # [P, n]
        for k, (problem, group, pair) in enumerate(zip(problems, groups, best_worst_pairs(scores))):
            chosen, rejected = (group[i] for i in pair or (0, 0))
            if len(rows) >= pairs:
                break
            if len(set(group)) == 1 or (pair and chosen == rejected):
                dropped["equal"] += 1
            elif pair is None:
                dropped["tied"] += 1
            else:
                gold = task.gold_score(problem, chosen) - task.gold_score(problem, rejected)
                rows.append(dict(prompt=problem.prompt, chosen=chosen, rejected=rejected, gold=round(gold, 4)))
                cut_off = [key for key, i in zip(("chosen", "rejected"), pair) if not ended[k * samples + i]]
                if cut_off:
                    rows[-1]["cut_off"] = cut_off
                if asked:  # in both orders, the chosen one first and the rejected one first
                    said = [asked[i][k].item() for i in pair]
                    rows[-1].update(probability=(said[0] + 1 - said[1]) / 2, asked=said)
    return rows, dropped


def write_preferences(path, rows):
    """One JSON object a line."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_preferences(path, single=False):
    """The rows of a file of preferences. Ends the program with one line that names file, line and reason if there is
    none, or one is malformed. single: rows may all be single responses with a label, true or false, in place of pairs."""
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as problem:
                    sys.exit(f"{where}: not JSON: {problem}")
                if not isinstance(row, dict):
                    sys.exit(f"{where}: not a JSON object")
                alone = single and "chosen" not in row and "rejected" not in row
                keys = ("prompt", "response") if alone else KEYS
                if row.get("prompt") is None and row.get("messages") is not None:
                    row["prompt"], keys = row.pop("messages"), keys[1:]
                    if wrong := check_messages(row["prompt"]):
                        sys.exit(f"{where}: {wrong}")
                    if row["prompt"][-1]["role"] != "user":
                        sys.exit(f'{where}: "messages" must end with one of the user')
                    if any("\ud800" <= letter <= "\udfff" for m in row["prompt"] for letter in m["content"]):
                        sys.exit(f'{where}: "messages" has half a character (a lone surrogate) in it')
                for key in keys:
                    # a response may be empty
                    if not isinstance(row.get(key), str) or (key == "prompt" and not row[key]):
                        sys.exit(f'{where}: "{key}" is missing, empty, or not a string')
                    if any("\ud800" <= letter <= "\udfff" for letter in row[key]):
                        sys.exit(f'{where}: "{key}" has half a character (a lone surrogate) in it')
                if alone and not isinstance(row.get("label"), bool):
                    sys.exit(f'{where}: "label" is {row.get("label")!r}, must be true or false')
                if not isinstance(row.get("cut_off", []), list):
                    sys.exit(
                        f'{where}: "cut_off" is {row["cut_off"]!r}, must be a list of "chosen", "rejected", "response"'
                    )
                if rows and alone != ("response" in rows[0]):
                    sys.exit(f"{where}: single responses and pairs in one file; use two files")
                for key, (low, high) in OPTIONAL.items():
                    value = row.get(key)
                    if value is not None and not (type(value) in (int, float) and low <= value <= high):
                        sys.exit(f'{where}: "{key}" is {value!r}, must be a number from {low} to {high}')
                row = {key: value for key, value in row.items() if value is not None}
                rows.append(
                    row if alone else {key: value for key, value in row.items() if key not in ("response", "label")}
                )
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}")
    except UnicodeDecodeError as problem:
        sys.exit(f"{path}: not UTF-8: {problem.reason} at byte {problem.start}")
    if not rows:
        sys.exit(f"{path}: no preferences in it")
    return rows


def gsm8k_preferences(path):
    """Rows from example_model_solutions.jsonl of github.com/openai/grade-school-math: of the four solutions to each
    problem, every right one is preferred to every wrong one. A line break is added to the question."""
    rows = []
    for line in open(path, encoding="utf-8"):
        problem = json.loads(line)
        solutions = [value for value in problem.values() if isinstance(value, dict)]
        right = [s["solution"] for s in solutions if s["is_correct"]]
        wrong = [s["solution"] for s in solutions if not s["is_correct"]]
        for chosen, rejected in itertools.product(right, wrong):
            rows.append(dict(prompt=problem["question"] + "\n", chosen=chosen, rejected=rejected))
    return rows


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m data.preferences example_model_solutions.jsonl pairs.jsonl")
    try:
        found = gsm8k_preferences(sys.argv[1])
    except OSError as problem:
        sys.exit(f"{sys.argv[1]}: {problem.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        sys.exit(f"{sys.argv[1]} is not GSM8K's example_model_solutions.jsonl: {problem!r}")
    if not found:
        sys.exit(f"{sys.argv[1]}: no problem with right and wrong solutions in it")
    try:
        write_preferences(sys.argv[2], found)
    except OSError as problem:
        sys.exit(f"{sys.argv[2]}: {problem.strerror}")
    print(f"{sys.argv[2]}: {len(found)} pairs for {len({row['prompt'] for row in found})} problems")
