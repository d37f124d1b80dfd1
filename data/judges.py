"""Who says which of several responses to a problem is the better: a program that knows their gold score, through noise or
not, or a language model that was taught to judge (stories.sft_example shows how).

A judge gives each of n responses to each of P problems a number, [P, n], of which only the order in a row matters.
"""

import math

import torch

from data import stories
from data.stories import LABELS, judge_question


def gold_scores(problems, groups, rng, noise=0.0, task=stories):
    """The gold score of each response, groups [P][n] of texts, through noise -> [P, n] float64.

    The noise is a Gumbel variable times `noise`. The difference of two of them is logistic, so of two responses the first
    wins with the chance sigmoid((gold_1 - gold_2) / noise): Bradley and Terry's judge, as stories.noisy_judge is; of
    several, any two of the ranking stand so (Plackett and Luce's)."""
    scores = [[task.gold_score(problem, text) for text in texts] for problem, texts in zip(problems, groups)]
    if noise:
        scores = [[score - noise * math.log(-math.log(1 - rng.random())) for score in row] for row in scores]
    return torch.tensor(scores, dtype=torch.float64)


@torch.no_grad()
def ask(model, tokenizer, questions, rows=256):
    """The probability that `model` gives to the first of LABELS against the second, behind each question -> [B]. Whatever else
    it might say does not count (Lee et al. 2023, RLAIF, arXiv:2309.00267, section 2.1). Of a question longer than its context
    it reads the end."""
    labels = [tokenizer.encode_ordinary(label) for label in LABELS]
    if any(len(label) != 1 for label in labels):
        raise SystemExit(f"the model cannot be asked to judge: {LABELS} must be one token each in its vocabulary")
    texts = [tokenizer.encode_ordinary(question)[-model.config.context :] for question in questions]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # of like length together
    probability, device = torch.zeros(len(texts)), model.wte.weight.device
    for part in (order[i : i + rows] for i in range(0, len(order), rows)):
        lengths = torch.tensor([len(texts[i]) for i in part], device=device)
        width = int(lengths.max())
        # padded on the right, where causal attention never looks
        ids = torch.tensor([texts[i] + [0] * (width - len(texts[i])) for i in part], device=device)  # [b, L]
        last = model.hidden(ids)[torch.arange(len(part), device=device), lengths - 1]  # [b, C]
        logits = model.lm_head(last).float()[:, [label[0] for label in labels]]  # [b, 2]
        probability[part] = logits.softmax(1)[:, 0].cpu()
    return probability


def ask_both_orders(model, tokenizer, problems, groups):
    """The language model compares the two responses of each group, shown in one order and in the other -> two times the
    probability that it gives to the one shown first, [P] each: to groups[i][0], then to groups[i][1]."""
    pairs = [(problem.prompt, *texts) for problem, texts in zip(problems, groups)]
    questions = [judge_question(prompt, a, b) for prompt, a, b in pairs] + [
        judge_question(prompt, b, a) for prompt, a, b in pairs
    ]
    return ask(model, tokenizer, questions).chunk(2)


def swap_average(first_ab, first_ba):
    """What a judge who is asked in both orders thinks (Lee et al. 2023, section 2.1.1). first_ab, first_ba [B]: the
    probability it gave to the one shown first, which was A, then B -> (probability that A is better [B], whether both orders
    agree [B], position bias: how much it is for the first one on average, 0 if not at all)."""
    probability = (first_ab + 1 - first_ba) / 2
    return probability, (first_ab > 0.5) == (first_ba < 0.5), ((first_ab + first_ba) / 2 - 0.5).mean().item()


def report(rows):
    """How a language model judged, from rows with `asked` (data/preferences.py): a line of text."""
    first_ab, first_ba = torch.tensor([row["asked"] for row in rows]).T
    _, consistent, bias = swap_average(first_ab, first_ba)
    known = [(row["gold"] > 0, *row["asked"]) for row in rows if row["gold"]]  # asked: chosen first, rejected first
    right = sum(better for better, _, _ in known) / max(1, len(known))
    once = sum(((ab > 0.5) == better) + ((ba < 0.5) == better) for better, ab, ba in known) / max(1, 2 * len(known))
    return (
        f"the model as judge sides with gold in {right:.1%} (asked in one order only: {once:.1%}); it says the same in both "
        f"orders in {consistent.float().mean():.1%}; position bias {bias:+.3f} for the one shown first"
    )
