"""Verifiable rewards and their scoring: what an answer is, whether it is right, whether it is well formed, pass@k.

Accuracy and format are separate functions, because they are separate rewards: a run adds them up (or not) where the
reader can see it. Each takes the text of one response.
"""

import math
import re

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # without its sign


def last_number(text):
    """The last number in `text` as a plain string ("1,234.50" -> "1234.50"), or None.

    A sign belongs to the number unless it follows a digit or a letter ("2-5=-3" -> "-3", "2-5" -> "5"); thousands'
    commas are dropped; a full stop that ends the sentence, "$" and "%" are not part of it.
    """
    found = re.findall(rf"(?<![\w.)])[-+]?{_NUMBER}|{_NUMBER}", text)
    return found[-1].replace(",", "").lstrip("+") if found else None


def last_boxed(text):
    r"""The content of the last complete \boxed{...} in `text`, braces matched, or None: a box cut off in the middle
    is no answer."""
    answer = None
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                answer = text[match.end() : end].strip()
                break
    return answer


def extract_answer(text):
    r"""The final answer that a response states, as a string without commas, or None if it states none.

    Looked for in this order, the last occurrence each time: \boxed{...}, "#### ...", <answer>...</answer>, and else
    the last number. A marker that is there but cut short (an unclosed box, "####" with nothing behind it) is no
    answer: nothing else is tried.
    """
    if "\\boxed" in text:
        inside = last_boxed(text)
        number = re.fullmatch(rf"(?:\\?\$)?\s*([-+]?{_NUMBER})\s*(?:\\?%)?", inside or "")
        return number.group(1).replace(",", "").lstrip("+") if number else inside
    if "####" in text:
        number = re.match(rf"\s*\$?\s*([-+]?{_NUMBER})", text.rsplit("####", 1)[1])
        return number.group(1).replace(",", "").lstrip("+") if number else None
    if "<answer>" in text:
        inside = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        return (last_number(inside[-1]) or inside[-1].strip() or None) if inside else None
    return last_number(text)


def accuracy_reward(response, answer):
    """1.0 if the answer that `response` states equals `answer` (as numbers where both are, else as text), otherwise
    0.0."""
    stated = extract_answer(response)
    if stated is None:
        return 0.0
    try:
        return float(float(stated) == float(str(answer).replace(",", "")))
    except ValueError:
        return float(stated.strip() == str(answer).strip())


def format_reward(response, marker=None):
    """1.0 if `response` has the demanded form, otherwise 0.0, whatever the answer is worth.

    Without `marker`, R1-Zero's template: exactly one <think>...</think>, then exactly one <answer>...</answer>, white
    space alone before, between and after (DeepSeek-R1, arXiv:2501.12948, table 1). With marker="####": the marker
    once, then one space, a number, and nothing else.
    """
    if marker is not None:
        return float(
            response.count(marker) == 1 and bool(re.search(rf"{re.escape(marker)} [-+]?{_NUMBER}\s*\Z", response))
        )
    once = all(response.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(once and bool(re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", response, re.DOTALL)))


def pass_at_k(n, c, k):
    """The chance that at least one of k draws without replacement is right, when c of n samples were: 1 - C(n-c, k) /
    C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1). 1 - (1 - c/n)^k is biased low. Raises
    ValueError unless 0 <= c <= n and 1 <= k <= n: from n samples nothing can be said of k > n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
