"""Held-out accuracy: sample from a model, check the answers."""

import math

from data.rewards import accuracy_reward, pass_at_k
from data.stories import habit
from data.tokenizer import encode_prompt


def sample_responses(model, tokenizer, problems, max_new_tokens, temperature=1.0, generator=None, rows=1024):
    """One sampled response per problem, as text without its end-of-text token, and its length in tokens (with it).

    Returns (texts, lengths). A response that never ended counts max_new_tokens tokens. At most `rows` are decoded at
    once.
    """
    texts, lengths = [], []
    for i in range(0, len(problems), rows):
        prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems[i : i + rows]]
        rollout = model.generate(prompts, max_new_tokens, temperature, eos=tokenizer.eot_token, generator=generator)
        texts += rollout.texts(tokenizer)
        lengths += rollout.mask.sum(1).tolist()
    return texts, lengths


def require_room(model, tokenizer, problems, max_new_tokens):
    """Ends the program with one line if a problem's prompt and the response would not fit the model's context."""
    lengths = {problem.prompt if isinstance(problem.prompt, str) else i: len(encode_prompt(tokenizer, problem.prompt))
               for i, problem in enumerate(problems)}  # fmt: skip
    longest = max(lengths.values())
    if longest + max_new_tokens > model.config.context:
        raise SystemExit(
            f"--max-new-tokens {max_new_tokens}: with prompts of up to {longest} tokens that exceeds the model's "
            f"context of {model.config.context} tokens"
        )


def habits(scores):
    """The scores of `evaluate` as two lines of text: how often the model works it out or answers at once, and with
    what success."""
    worked, direct = scores["worked"], 1 - scores["worked"]
    return (f"  worked out {worked:4.0%} of the time, {scores['worked_accuracy']:4.0%} of those right\n"
            f"  at once    {direct:4.0%} of the time, {scores['direct_accuracy']:4.0%} of those right")  # fmt: skip


def verify(problems, groups):
    """The verifier as a reward: groups[i] are texts answering problems[i] -> for each text 1.0 if it states the answer,
    else 0.0."""
    return [[accuracy_reward(text, problem.answer) for text in texts] for problem, texts in zip(problems, groups)]


def evaluate(model, tokenizer, problems, max_new_tokens, samples=1, generator=None, reward=None, rows=1024):
    """Samples every problem `samples` times at temperature 1 and returns what the answers are worth:

    accuracy (pass@1), length (mean tokens, end-of-text included), worked (share of responses with running totals),
    accuracy of the worked and of the direct ones (NaN where there are none), and pass_at_k = {"pass@1": ..., "pass@4":
    ...}, k = 1, 4, 16, 64, 256, as far as `samples` allows. With a `reward` of your own also its mean, held_out_reward;
    for problems without an answer only that and the length.
    """
    texts, lengths = sample_responses(
        model, tokenizer, [p for p in problems for _ in range(samples)], max_new_tokens, generator=generator, rows=rows
    )
    groups = [texts[i : i + samples] for i in range(0, len(texts), samples)]
    mean = lambda values: sum(values) / len(values) if values else float("nan")  # noqa: E731
    found = {}
    if reward:  # NaN: it cannot say
        found["held_out_reward"] = mean([r for row in reward(problems, groups) for r in row if not math.isnan(r)])
    if any(problem.answer is None for problem in problems):
        return {**found, "accuracy": float("nan"), "length": mean(lengths), "pass_at_k": {}}
    groups = verify(problems, groups)
    right = [r for group in groups for r in group]
    worked = [habit(text) == "worked" for text in texts]
    correct = [sum(group) for group in groups]
    return {
        **found,
        "accuracy": mean(right),
        "length": mean(lengths),
        "worked": mean(worked),
        "worked_accuracy": mean([r for r, w in zip(right, worked) if w]),
        "direct_accuracy": mean([r for r, w in zip(right, worked) if not w]),
        "pass_at_k": {
            f"pass@{k}": mean([pass_at_k(samples, int(c), k) for c in correct])
            for k in (1, 4, 16, 64, 256)
            if k <= samples
        },
    }
