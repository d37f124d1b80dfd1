r"""Verifiable rewards and their scoring: what an answer is, whether it is right, whether it is well formed, pass@k.

Accuracy and format are separate functions, because they are separate rewards: a run adds them up (or not) where the
reader can see it. Each takes the text of one response.

How numbers are read. "." is the decimal point and "," parts thousands, as may a thin or no-break space or LaTeX's "\,"
(and behind a marker an ordinary space: "#### 1 234"). Currencies, "%" and units are dropped, not converted: "20%" is 20,
"5 million" is 5. A marked answer has to be one number: not "18 or 19", "18-20", "2 1/2", "2x" or "3\pi". Whoever is paid
by a rule finds its gaps, so in doubt there is no reward.
"""

import math
import re
from fractions import Fraction

_NUMBER = r"(?:(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?)"  # without its sign
_CURRENCY = r"(?:US\$|USD\s|[$€£¥₹])"
_DRESS = [  # what numbers are dressed in -> what is read; in this order
    (r"[\u2212\u2010\u2011\u2013\uff0d]", "-"),  # minus, hyphens, en dash
    (r"\\([$€£%#&])", r"\1"),
    (r"\{,\}|,\\!", ","),
    (r"(?<=\d)(?:\\,|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))", ","),
    (r"\^\s*(?:\{\s*)?\\circ\s*\}?", " "),
    (r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[,!;: ()\[\]]|\\(?:left|right|displaystyle)(?![a-zA-Z])", " "),
]
_FRACTION = r"\\[dt]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}|(\d)\s*(\d))"
_LABEL = r"(?:the\s+)?(?:final\s+)?answer(?:\s+is)?"
_STATED = rf"(?i:{_LABEL})?[\s:*_(≈]*([-+]?)\s*{_CURRENCY}?\s*([-+]?{_NUMBER}(?:\s*/\s*{_NUMBER})?)"
_GOES_ON = re.compile(  # behind a number: it was only a part of a sum, a range, a list, a mixed fraction, a formula
    rf"""\s*(?:(?:[-+*/×÷:,]|x\b|or\b|and\b|to\b)[\s(]*)?{_CURRENCY}?\s*[-+]?\.?\d  # 18 + 3, 18-20, 18 or 19, 2 1/2
    |\s*[\\^×÷]|[_({{]     # 3\pi, 5^x, 101_2, 2(x+1)
    |[a-zA-Z](?![a-zA-Z])  # 2x, but 2kg""",
    re.VERBOSE,
)


def _undress(text):
    if text.isascii() and "\\" not in text and "{" not in text:  # most texts, and nothing to do
        return text
    for pattern, plain in _DRESS:
        text = re.sub(pattern, plain, text)
    return text


def _stated(text):
    """The one number that a marked answer is (or that its equation ends in: "x = 5*3 = 15"), or None."""
    line = re.split(r"\.(?=\s|$)|[;\n]", _undress(text).strip())[0]
    line = re.sub(r"\s+", " ", line)  # the patterns below would try all the ways to share out a long gap
    line = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", ",", line)
    for side in reversed(line.split("=")):
        found = re.match(_STATED, side)
        if found and not _GOES_ON.match(side, found.end()):
            return re.sub(r"[,\s]", "", found[1] + found[2]).lstrip("+")
    return None


def _value(text):
    """`text` as an exact number, or None if it is not one, or one beyond every use (which would be slow)."""
    number = _stated(re.sub(_FRACTION, lambda found: " {}/{}".format(*filter(None, found.groups())), text)) or ""
    top, _, bottom = number.partition("/")
    if len(number) > 100 or re.search(r"e[-+]?\d{3}", number, re.IGNORECASE):
        return None
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None


def last_number(text):
    """The last number in `text` as a plain string ("1,234.50" -> "1234.50"), or None.

    A sign belongs to the number unless it follows a digit or a letter ("2-5=-3" -> "-3", "2-5" -> "5"); thousands'
    commas are dropped; a full stop that ends the sentence, "$" and "%" are not part of it ("-$5" -> "-5").
    """
    found = re.findall(rf"(?:((?<![\w.)])[-+])?{_CURRENCY})?((?:(?<![\w.)])[-+])?{_NUMBER})", _undress(text))
    return "".join(found[-1]).replace(",", "").lstrip("+") if found else None


def last_boxed(text):
    r"""The content of the last complete \boxed{...} in `text`, braces matched, or None: a box cut off in the middle
    is no answer."""
    opened, start, answer = [], -1, None  # opened: for each brace not closed yet, where its box begins, or -1
    for brace in re.finditer(r"(\\boxed\s*)?\{|\}", text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[1] else -1)
        elif opened and (box := opened.pop()) > start:
            start, answer = box, text[box : brace.start()].strip()
    return answer


def extract_answer(text):
    r"""The final answer that a response states, as a string without commas, or None if it states none.

    Looked for in this order, the last occurrence each time: \boxed{...}, "#### ...", <answer>...</answer>, "the answer
    is ...", and else the last number. Text may follow the number ("#### 18 apples."). One of the first three that is
    there but cut short (an unclosed box, "####" with nothing behind it) is no answer: nothing else is tried. What is in
    a box or in <answer> and is no number is the answer as it stands. What stands behind a line "Question:" is not looked
    at: a base model that was asked "Question: ... Answer:" may go on to ask itself the next one.
    """
    text = text.partition("\nQuestion:")[0]
    if "\\boxed" in text:
        inside = last_boxed(text)
        return (inside and _stated(inside)) or inside or None
    if "####" in text:
        return _stated(text.rsplit("####", 1)[1])
    if "<answer>" in text:
        inside = text.rpartition("</answer>")[0].rpartition("<answer>")[2].strip()
        alone = re.findall(_NUMBER, _undress(inside))
        return _stated(inside) or (last_number(inside) if len(alone) == 1 else inside) or None
    said = re.split(r"(?i)\banswer\s+is\b|\bfinal\s+answer:", text)
    return (_stated(said[-1]) if len(said) > 1 else None) or last_number(text)


def stated_text(text):
    """What a response says its answer is, if that is a word or a sentence: what stands in the last \\boxed{...} or
    <answer>, else the rest of the line behind the last "####", else behind the last "answer is" or "answer:", else the
    last line."""
    text = text.partition("\nQuestion:")[0].rstrip()
    inside = last_boxed(text) or text.rpartition("</answer>")[0].rpartition("<answer>")[2]
    behind = re.findall(r"####(.*)", text) or re.findall(r"(?i)\banswer(?: is)?:? (.*)", text) or text.splitlines()[-1:]
    return (inside or (behind[-1] if behind else "")).strip(" \t.,;:!*`'\"()$")


def accuracy_reward(response, answer):
    """1.0 if the answer that `response` states equals `answer`, otherwise 0.0. Numbers are compared as exact fractions
    ("18.00" is 18, "0.5" is 1/2, and no two long integers are the same by rounding); an answer that is no number is
    compared with `stated_text`, whatever the case of the letters."""
    answer = str(answer).strip()
    right, stated = _value(answer), extract_answer(response)
    if answer.casefold().lstrip("+-") in ("nan", "inf", "infinity"):  # the mistake of a program, not an answer
        return 0.0
    if right is None:
        return float(stated == answer or stated_text(response).casefold() == answer.strip(" .").casefold())
    return float(stated is not None and right == _value(stated))


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
