"""Held-out accuracy: sample from a model, check the answers."""

from data.rewards import accuracy_reward, pass_at_k
from data.stories import habit


def sample_responses(model, tokenizer, problems, max_new_tokens, temperature=1.0, generator=None, rows=1024):
    """One sampled response per problem, as text without its end-of-text token, and its length in tokens (with it).

    Returns (texts, lengths). A response that never ended counts max_new_tokens tokens. At most `rows` are decoded at once.
    """
    texts, lengths = [], []
    for i in range(0, len(problems), rows):
        prompts = [tokenizer.encode_ordinary(problem.prompt) for problem in problems[i : i + rows]]
        rollout = model.generate(prompts, max_new_tokens, temperature, eos=tokenizer.eot_token, generator=generator)
        texts += rollout.texts(tokenizer)
        lengths += rollout.mask.sum(1).tolist()
    return texts, lengths


def evaluate(model, tokenizer, problems, max_new_tokens, samples=1, generator=None):
    """Samples every problem `samples` times at temperature 1 and returns what the answers are worth:

    accuracy (pass@1), length (mean tokens, end-of-text included), worked (share of responses with running totals), accuracy of the
    worked and of the direct ones (NaN where there are none), and pass_at_k = {"pass@1": ..., "pass@4": ...}, k = 1, 4, 16, 64, 256, as far as `samples` allows.
    """
    texts, lengths = sample_responses(model, tokenizer, [p for p in problems for _ in range(samples)], max_new_tokens, generator=generator)
    right = [accuracy_reward(text, problems[i // samples].answer) for i, text in enumerate(texts)]
    worked = [habit(text) == "worked" for text in texts]
    mean = lambda values: sum(values) / len(values) if values else float("nan")  # noqa: E731
    correct = [sum(right[i : i + samples]) for i in range(0, len(right), samples)]
    return {
        "accuracy": mean(right),
        "length": mean(lengths),
        "worked": mean(worked),
        "worked_accuracy": mean([r for r, w in zip(right, worked) if w]),
        "direct_accuracy": mean([r for r, w in zip(right, worked) if not w]),
        "pass_at_k": {f"pass@{k}": mean([pass_at_k(samples, int(c), k) for c in correct]) for k in (1, 4, 16, 64, 256) if k <= samples},
    }
