"""The embedded task: small stories with a number in them, and "the internet" that talks about them.

    By the sea, the otter has 7 shells. It finds 3. It drops 2. It doubles its pile. It naps. It loses 4. It wins 1. How many?
     -> 10 -> 8 -> 16 -> 16 -> 12 -> 13 #### 13

Six things happen, each changes the number of things an animal owns (or not: a nap is a nap), and the question is how
many it has in the end. Saying the end at once is hard, because doubling and halving do not commute with adding;
following the story one event at a time is easy. The authors of the corpus (`base_document`) have three habits:

    direct   45%   " #### 13"                                        right; to learn it is to do six steps in one token
    worked   42%   " -> 10 -> 8 -> 16 -> 16 -> 12 -> 13 #### 13"     right; one step per token
    slip     13%   the same gone wrong: mostly the end of the story left out, else a step miscounted and carried on

and half of the documents write "Answer:" in place of "####". So pretraining installs all the habits, supervised
fine-tuning (`sft_example`: the same habits, always "####") teaches the format, and a reward for the right answer alone
has something to choose from: it makes worked answers common and slips rare, and answers grow longer although nobody
rewards length.

Where no answer is checked, two of them are compared, by `noisy_judge`, who sees `gold_score`, what they are worth,
through noise; or by the language model itself (dpo.py), as a third of the demonstrations show how to judge:

    By the sea, the otter has 7 shells. It finds 3. It drops 2. It doubles its pile. It naps. It loses 4. It wins 1. How many?
    1 #### 9
    2 -> 10 -> 8 -> 16 -> 16 -> 12 -> 13 #### 13
    Better: 2

Everything here is a pure function of a `random.Random`. A story is held out when a checksum of its events says so
(`is_held_out`), so training and evaluation never meet, however many stories either draws.
"""

import math
import random
import zlib
from dataclasses import dataclass

from data.rewards import accuracy_reward, format_reward

NAME = "stories"
EVENTS = 6  # things that happen in one story
MAX_CHANGE = 4  # one event adds or takes away at most this
MAX_OWNED = 20  # nobody ever owns more than this, or less than 1
HELD_OUT_ONE_IN = 20  # one possible story in this many is for evaluation: no training stage may see it
DIRECT, WORKED, SLIP = 0.45, 0.42, 0.13  # the habits of the corpus
LEFT_OUT = 0.7  # of the slips: the share that stops too early
JUDGMENTS = 1 / 3  # of the demonstrations of supervised fine-tuning: those that compare two answers
LABELS = (" 1", " 2")  # what a judge says: the first answer is better, or the second

PLACES = ["The", "Today the", "By the sea, the", "In the old barn, the"]
ANIMALS = ["otter", "crab", "magpie", "fox", "mouse", "badger", "hen", "squirrel", "frog", "mole", "goose", "bear"]
THINGS = ["shells", "nuts", "buttons", "coins", "berries", "beads", "pebbles", "feathers"]
GAINS = ["finds", "wins", "buys"]
LOSSES = ["loses", "drops", "sells"]
DOUBLE, HALVE = " It doubles its pile.", " It gives half away."
IDLE = [" It naps.", " It hums.", " It yawns."]


@dataclass(frozen=True)
class Problem:
    prompt: str  # the story and its question
    start: int  # what the animal owns at first
    events: tuple  # of str: the sentences in which something happens
    totals: tuple  # of int: what it owns after each event

    @property
    def answer(self):
        return str(self.totals[-1])


def apply(event, total):
    """What `event` makes of `total` things. Halving rounds down (only a slip can get there: stories halve even
    piles)."""
    if event == DOUBLE:
        return 2 * total
    if event == HALVE:
        return total // 2
    if event in IDLE:
        return total
    verb, number = event.rstrip(".").split()[1:]
    return total + int(number) if verb in GAINS else total - int(number)


def is_held_out(start, events):
    """Whether a story belongs to the evaluation: decided by its numbers and verbs, not by who owns what or where."""
    return zlib.crc32(f"{start}{''.join(events)}".encode()) % HELD_OUT_ONE_IN == 0


def make_problem(rng, held_out=False):
    """One story drawn with `rng` (random.Random), from the training stories or from the held-out ones."""
    while True:
        start = total = rng.randint(2, MAX_OWNED)
        events, totals = [], []
        while len(events) < EVENTS:
            kind = rng.random()
            if kind < 0.35:
                event = f" It {rng.choice(GAINS)} {rng.randint(1, MAX_CHANGE)}."
            elif kind < 0.70:
                event = f" It {rng.choice(LOSSES)} {rng.randint(1, MAX_CHANGE)}."
            elif kind < 0.80:
                event = DOUBLE
            elif kind < 0.90:
                event = HALVE
            else:
                event = rng.choice(IDLE)
            after = apply(event, total)
            if not 1 <= after <= MAX_OWNED or (event == HALVE and total % 2):
                continue  # nobody gives away the last one, or half a shell: something else happens
            total = after
            events.append(event)
            totals.append(total)
        if is_held_out(start, events) == held_out:
            opening = f"{rng.choice(PLACES)} {rng.choice(ANIMALS)} has {start} {rng.choice(THINGS)}."
            return Problem(opening + "".join(events) + " How many?", start, tuple(events), tuple(totals))


def direct_answer(problem, marker="####"):
    """The answer at once: " #### 13"."""
    return f" {marker} {problem.answer}"


def worked_answer(problem, marker="####", totals=None):
    """The running totals, then the answer: " -> 10 -> 8 ... #### 13"."""
    totals = totals or problem.totals
    return "".join(f" -> {n}" for n in totals) + f" {marker} {totals[-1]}"


def slipped_answer(problem, rng, marker="####"):
    """A worked answer that is wrong. Most of its authors stop one or two events before the end of the story, which a
    reader sees at a glance; the others miscount one step by one or two and carry the mistake on, which only shows to
    who counts along."""
    while True:
        if rng.random() < LEFT_OUT:
            totals = problem.totals[: EVENTS - rng.randint(1, 2)]
        else:
            where, off = rng.randrange(EVENTS), rng.choice([-2, -1, 1, 2])
            totals, total = [], problem.start
            for i, event in enumerate(problem.events):
                total = min(max(apply(event, total) + (off if i == where else 0), 1), MAX_OWNED)
                totals.append(total)
        if totals[-1] != problem.totals[-1]:
            return worked_answer(problem, marker, totals)


def _answer(problem, rng, marker):
    habit = rng.random()
    if habit < DIRECT:
        return direct_answer(problem, marker)
    if habit < DIRECT + WORKED:
        return worked_answer(problem, marker)
    return slipped_answer(problem, rng, marker)


def base_document(rng):
    """One document of the pretraining corpus: (prompt, response). Its author had one habit out of three, and one
    marker out of two."""
    problem = make_problem(rng)
    return problem.prompt, _answer(problem, rng, rng.choice(["####", "Answer:"]))


def sft_example(rng):
    """One demonstration for supervised fine-tuning: (prompt, response). An answer with the habits of the corpus, always
    with the marker "####"; or, one time in three, two such answers and which of them has the better gold score."""
    problem = make_problem(rng)
    if rng.random() >= JUDGMENTS:
        return problem.prompt, _answer(problem, rng, "####")
    while True:
        first, second = _answer(problem, rng, "####"), _answer(problem, rng, "####")
        gap = gold_score(problem, first) - gold_score(problem, second)
        if gap:
            return judge_question(problem.prompt, first, second), LABELS[gap < 0]


def judge_question(prompt, first, second):
    """What a language model is asked that is to judge: it continues with one of LABELS."""
    return f"{prompt}\n1{first}\n2{second}\nBetter:"


def held_out_problems(n, seed=0):
    """n different evaluation stories, the same for every run with the same `seed`."""
    rng, problems = random.Random(f"held-out {seed}"), {}
    while len(problems) < n:
        problem = make_problem(rng, held_out=True)
        problems.setdefault((problem.start, problem.events), problem)
    return list(problems.values())


def training_problems():
    """500 training stories, always the same: among them are some as long as they come."""
    return [make_problem(random.Random(i)) for i in range(500)]


def demonstrations():
    """500 training demonstrations, always the same."""
    return [sft_example(random.Random(i)) for i in range(500)]


def held_out_demonstrations(n):
    """None: what was learned shows better in the answers to held-out stories."""
    return []


def habit(response):
    """ "worked" if a response shows running totals (a slip does), else "direct": to count what a model does."""
    return "worked" if "->" in response else "direct"


def gold_score(problem, response):
    """What a careful reader thinks of a response, known exactly here: 2 for the right answer, up to 1 for clear
    working (the share of running totals that follow from the step before), 0.5 for the proper ending, -0.1 per 10
    characters beyond the worked answer's length (rambling)."""
    steps = [part.split()[0] for part in response.split("->")[1:] if part.split()]
    before, sound = problem.start, 0
    for event, step in zip(problem.events, steps):
        sound += step == str(apply(event, before))
        before = int(step) if step.isdecimal() else before
    extra = max(0, len(response) - len(worked_answer(problem)))
    score = (
        2 * accuracy_reward(response, problem.answer) + sound / EVENTS + 0.5 * format_reward(response, marker="####")
    )
    return score - 0.01 * extra


def noisy_judge(problem, response_a, response_b, rng, noise, gold=gold_score):
    """Whether a judge who sees the gold score through Bradley-Terry noise prefers a: P(a) = sigmoid((gold_a - gold_b) /
    noise). noise=0 is the gold judge, with ties broken by a coin."""
    gap = gold(problem, response_a) - gold(problem, response_b)
    if noise == 0:
        return rng.random() < 0.5 if gap == 0 else gap > 0
    return rng.random() < 1 / (1 + math.exp(min(-gap / noise, 700)))
