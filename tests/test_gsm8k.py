"""What real models write as an answer, and what a checker makes of it; GSM8K's files, from a folder or fetched."""

import hashlib
import http.client
import io
import json
import multiprocessing
import os
import time
import urllib.error
import urllib.request
from fractions import Fraction

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from data import accuracy_reward, extract_answer, gsm8k, last_boxed, last_number

FOLDER = ROOT.parent / "shared/data/gsm8k"
here = pytest.mark.skipif(not (FOLDER / "train.jsonl").exists(), reason="GSM8K's files are not here")


@pytest.mark.parametrize(
    "response, answer",
    [
        # "####", as in GSM8K itself
        ("She makes 9*2 = 18 dollars.\n#### 18", "18"), ("#### 18 apples.", "18"), ("####18", "18"), ("####\n18\n", "18"), ("#### 18.", "18"), ("#### 18\n\nThat is 2 a day.", "18"),
        ("#### $1,234.50", "1234.5"), ("#### 18.00", "18"), ("#### .5", "0.5"), ("#### -.5", "-1/2"), ("#### 1/2", "0.5"), ("#### 20%", "20"), ("#### 18 dollars", "18"), ("#### 18kg", "18"),
        ("#### -18", "-18"), ("#### −18", "-18"), ("#### –18", "-18"), ("#### -$18", "-18"), ("#### $-18", "-18"), ("#### - 18", "-18"), ("#### +18", "18"), ("#### €18", "18"), ("#### £ 18", "18"), ("#### US$18", "18"), ("#### USD 18", "18"),
        ("#### 1 234", "1234"), ("#### 1\u202f234\u202f567", "1234567"), ("#### 1\u00a0234", "1234"), ("#### **18**", "18"), ("#### The final answer is 18", "18"), ("#### Answer: **$18**", "18"),
        ("#### x = 18", "18"), ("#### 5 + 13 = 18", "18"), ("#### 2 dozen = 24 eggs", "24"), ("#### 18 (= 9 * 2)", "18"), ("#### 5\nWait, no.\n#### 18", "18"), ("#### 1e3", "1000"), ("#### 18 (2 each)", "18"),
        # \boxed{}
        (r"so \boxed{18}.", "18"), (r"$\boxed{18}$ and that is 3 more", "18"), (r"\boxed{\$18}", "18"), (r"\boxed{ -\$1,234 }", "-1234"), (r"\boxed{1{,}234}", "1234"), (r"\boxed{1,\!234,\!567}", "1234567"), (r"\boxed{1\,234}", "1234"), (r"\boxed{1 234}", "1234"),
        (r"\boxed{18 \text{ apples}}", "18"), (r"\boxed{18\,\text{cm}^2}", "18"), (r"\boxed{\text{18}}", "18"), (r"\boxed{\textbf{18}}", "18"), (r"\boxed{18\%}", "18"), (r"\boxed{90^\circ}", "90"), (r"\boxed{90^{\circ}}", "90"), (r"\boxed{x = 18}", "18"), (r"\boxed{18.0}", "18"),
        (r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{\dfrac{-3}{4}}", "-0.75"), (r"\boxed{-\frac{3}{4}}", "-.75"), (r"\boxed{\frac12}", "1/2"), (r"\boxed{\frac{1}{3}}", "1/3"), (r"\boxed{\left(18\right)}", "18"), (r"\boxed{5} no, \boxed{18}", "18"), (r"\boxed {18}", "18"), (r"\boxed{x+1}", "x+1"), (r"\boxed{18} #### 5", "18"),
        # <answer>, "the answer is", and nothing at all
        ("<think>9</think> <answer>18</answer>", "18"), ("<answer>\n$18.00\n</answer>", "18"), ("<answer>18 eggs</answer>", "18"), ("<answer>She has 18 left.</answer>", "18"), ("<answer>9 * 2 = 18</answer>", "18"), ("<answer>5</answer> <answer>18</answer> 7", "18"), ("<answer>1/2</answer>", "0.5"),
        ("The answer is 18.\n\nQuestion: What is 2 + 3?\nAnswer: 5", "18"), ("#### 18\n\nQuestion: 2 + 3?\nAnswer: #### 5", "18"),
        ("The answer is 18. I checked it with 9 + 9.", "18"), ("The final answer is: **$1,234** (see step 3)", "1234"), ("Final Answer: The final answer is $18$. I hope it is correct, at 99%.", "18"), ("The answer is not 5 but 18", "18"), ("Final answer: 18 eggs in 2 days", "18"),
        ("The answer is 18. For x = 5 that is right.", "18"), ("it is 1\u202f234 km", "1234"), (r"\(1\,234\)", "1234"),
        ("A: 18", "18"), ("She pays $18.", "18"), ("so she has -$18 left", "-18"), ("he owes it: $-18", "-18"), ("it falls to −18 degrees", "-18"), ("= 1,234,567.", "1234567"), ("9+9=18", "18"), ("20-2=-18", "-18"), ("it is .5 of it", "0.5"), ("about 18%", "18"), (r"It is \(18\).", "18"), ("18 dollars", "18"),
        ("12345678901234567891", "12345678901234567891"), ("0.1", "1/10"), ("-0", "0"), ("007", "7"),
    ],
)  # fmt: skip
def test_right_answers(response, answer):
    assert accuracy_reward(response, answer) == 1.0


@pytest.mark.parametrize(
    "response, answer",
    [
        ("#### -18", "18"), ("#### 18", "-18"), ("#### −18", "18"), ("-$18", "18"), ("#### 1,234", "1"), ("#### 1,234", "234"), ("#### 1 234", "1"), ("#### 1\u202f234", "234"), ("#### 0.5", "5"), ("#### .5", "5"), ("#### 18.5", "18"), ("#### 180", "18"),
        # two answers are none, and a part of something is not an answer
        ("#### 18 or 19", "18"), ("#### 18 or 19", "19"), ("#### 18, 19", "18"), ("#### 18-20", "18"), ("#### 18–20", "18"), ("#### 18–20", "20"), ("#### 18 to 20", "18"), ("#### 18 and 5", "18"), ("#### 18 + 3", "18"), ("#### 18 x 2", "18"), ("#### 2 1/2", "2"), ("#### 18/3", "18"), ("#### 3:30", "3"), ("#### 18^2", "18"), ("#### 1.234,50", "1.234"),
        ("<answer>18 or 19</answer>", "18"), ("<answer>18 or 19</answer>", "19"), ("<answer>18-20</answer>", "20"), ("<answer>1 2 3 4 5</answer>", "5"), ("<answer>18</answer>", "8"), ("The answer is 5, 18 in all is wrong", "5"),
        (r"\boxed{2x}", "2"), (r"\boxed{2\pi}", "2"), (r"\boxed{2\sqrt{3}}", "2"), (r"\boxed{18, 19}", "18"), (r"\boxed{18, 19}", "19"), (r"\boxed{(1, 2)}", "1"), (r"\boxed{\frac{1}{2}}", "1"), (r"\boxed{2\frac{1}{2}}", "2"), (r"\boxed{2\frac{1}{2}}", "10.5"), (r"\boxed{\frac{1}{0}}", "1"), (r"\boxed{101_2}", "101"), (r"\boxed{x^2}", "2"), (r"\boxed{18 \text{ or } 19}", "18"), (r"\boxed{2(3)}", "2"),
        # marked, but cut short or empty, and the right number elsewhere
        ("18 ####", "18"), ("18 #### none", "18"), (r"18 \boxed{", "18"), (r"18 \boxed{}", "18"), ("<answer>18", "18"), ("18 <answer></answer>", "18"), ("#### 18 #### 5", "18"), (r"\boxed{18} \boxed{5}", "18"), ("18, no, 5", "18"), ("The answer is 18. The answer is 5.", "18"), ("####", "None"), ("", "0"), ("eighteen", "18"),
        # neither numbers nor rounding
        ("#### nan", "18"), ("#### inf", "18"), ("nan", "nan"), (r"\boxed{inf}", "18"), ("#### 1e999", "18"), ("1e999", "999"), ("#### 1e999", "1"), ("12345678901234567891", "12345678901234567890"), ("0.30000000000000001", "0.3"), ("#### 0.333", "1/3"), ("5%", "0.05"), ("#### " + "1" * 200 + ".0", "1" * 200),
    ],
)  # fmt: skip
def test_wrong_answers(response, answer):
    assert accuracy_reward(response, answer) == 0.0


def test_what_is_extracted():
    for text, answer in [
        ("#### -$1,234.50 a day", "-1234.50"), ("#### 1/2", "1/2"), ("#### 18 or 19", None), (r"\boxed{}", None), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{18\text{ or }19}", r"18\text{ or }19"),
        ("<answer></answer>", None), ("-$5", "-5"), ("no", None), ("10-$3", "3"), ("1e999", "1e999"),
    ]:  # fmt: skip
        assert extract_answer(text) == answer
    assert last_boxed(r"\boxed{a \boxed{b} c") == "b" and last_boxed(r"}\boxed{a} { \boxed{\{b}") == "a"
    assert last_boxed(r"\boxed{a \boxed{b} c}") == "b" and last_number("−5,000") == "-5000"


LONG = 100_000


@pytest.mark.parametrize(
    "text",
    [
        "9" * LONG, "#### " + "9" * LONG, "#### 1" + "0" * LONG + "/3", "1" + ",234" * LONG, "1" + ",234" * LONG + "5", "1" + " 234" * LONG, "1e" + "9" * LONG, "#### 1e-999999999",
        r"\boxed{" * LONG, r"\boxed{" * LONG + "1" + "}" * LONG, r"\boxed{" + "{" * LONG, "<answer>" * LONG, "</answer>" * LONG, "#### " + "=" * LONG, "#### 1" + " " * LONG + "x", "#### " + " (" * LONG, "#### 1" + " (" * LONG,
        "^" + " " * LONG, r"\text{" * LONG, r"\frac{" * LONG, r"\boxed{\frac{" + "1" * LONG + "}{1}}", "answer is " * LONG, "the " * LONG + "answer", "-" * LONG, "." * LONG, "$" * LONG, "#" * LONG, "\\" * LONG, r"\boxed{" + "\\frac" + " " * LONG + "}", "1/" * LONG, "#### 1" + "\t" * LONG + "2",
    ],
    ids=lambda text: text[:20].encode("unicode_escape").decode(),
)  # fmt: skip
def test_nothing_hangs_or_crashes(text):
    began = time.process_time()
    # the deepest of 100,000 boxes does hold a "1"
    assert accuracy_reward(text, "18") == accuracy_reward(text, "1e999") == accuracy_reward("#### 18", text) == 0.0
    assert time.process_time() - began < 2


TEMPLATES = "#### {}", "#### {} apples.", "{}", "So it is {}.", r"\boxed{{{}}}", r"$\boxed{{{}\text{{ km}}}}$", "<answer> {} </answer>", "The answer is {}. I add 1 and 2.", "5 + 7 #### 3\n#### {}"  # fmt: skip
MINUS = st.sampled_from("-−")


@settings(max_examples=500, deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(0, 4), st.booleans(), st.sampled_from(["", "$", "€", "£"]), MINUS, st.sampled_from(TEMPLATES))  # fmt: skip
def test_any_number_in_any_dress(digits, places, commas, currency, minus, template):
    number = Fraction(digits, 10**places)
    whole, part = divmod(abs(digits), 10**places)
    written = f"{whole:,}" if commas else str(whole)
    written = currency + written + (f".{part:0{places}d}" if places else "")
    text = template.format(minus + written if digits < 0 else written)
    assert accuracy_reward(text, str(number)) == 1.0
    assert accuracy_reward(text, str(number + 1)) == accuracy_reward(text, str(number + Fraction(1, 10**places))) == 0.0
    assert number == 0 or accuracy_reward(text, str(-number)) == 0.0


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="19.,-+$ #/=(){}\\boxedfranswi<>%e\n") | st.text(), st.integers(-99, 99))
def test_any_text_gets_a_reward(text, answer):
    assert accuracy_reward(text, answer) in (0.0, 1.0) and accuracy_reward(f"{text}\n#### {answer}", answer) == (
        1.0 if "\\boxed" not in text else accuracy_reward(text + "\n####", answer)
    )


# ---- the files


@here
@pytest.mark.parametrize("split, n", [("train", 7473), ("test", 1319)])
def test_every_gold_answer_is_read(split, n):
    rows = gsm8k.load(split, FOLDER)
    raw = [json.loads(line) for line in (FOLDER / f"{split}.jsonl").open(encoding="utf-8")]
    assert len(rows) == len(raw) == n
    for row, line in zip(rows, raw):
        assert row.keys() == {"prompt", "answer", "response"}
        assert extract_answer(line["answer"]) == extract_answer(row["response"]) == row["answer"]
        assert row["answer"] == line["answer"].split("#### ")[1].replace(",", "")
        assert accuracy_reward(line["answer"], row["answer"]) == accuracy_reward(row["response"], row["answer"]) == 1.0
        assert accuracy_reward(row["response"], str(int(row["answer"]) + 1)) == 0.0
        assert row["prompt"] == f"Question: {line['question'].strip()}\nAnswer:"
        assert row["response"][0] == " " and row["response"][1] != " " and "<<" not in row["response"]


@here
def test_labelled_model_solutions():
    """OpenAI's verdict on 5,276 solutions by four models, and ours: they agree on every one (2,001 right).

    So there is no disagreement to explain; the sixteen solutions that do not end in "A: " and a plain number (cut off in
    the middle, endless digits, "A: 1/5", "A: 10+John's age", "A: -1.8 billion") are all wrong by either.
    """
    gold, verdicts = [row["answer"] for row in gsm8k.load("test", FOLDER)], []
    for line, answer in zip((FOLDER / "example_model_solutions.jsonl").open(encoding="utf-8"), gold):
        for solution in json.loads(line).values():
            if isinstance(solution, dict):
                ours = accuracy_reward(solution["solution"], answer)
                verdicts.append((solution["is_correct"], ours == 1.0))
    assert len(verdicts) == 5276
    assert sum(published for published, _ in verdicts) == 2001
    agreement = sum(published == ours for published, ours in verdicts) / len(verdicts)
    assert agreement == 1.0


ROW = json.dumps(
    {"question": " How many? ", "answer": "He has 3*6=<<3*6=18>>18.\nIt is $<<1*1,234=1234>>1,234.\n#### 1,234"}
)


def test_rows_of_a_folder(tmp_path):
    (tmp_path / "test.jsonl").write_text(ROW + "\n\n" + ROW)
    rows = gsm8k.load("test", str(tmp_path))
    assert rows == [
        {
            "prompt": "Question: How many?\nAnswer:",
            "answer": "1234",
            "response": " He has 3*6=18.\nIt is $1,234.\n#### 1234",
        }
    ] * 2  # fmt: skip
    with pytest.raises(ValueError, match=r"unknown split 'dev'.*train, test"):
        gsm8k.load("dev", tmp_path)
    with pytest.raises(SystemExit, match=r"train\.jsonl: No such file"):
        gsm8k.load("train", tmp_path)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "not JSON"), ("[" * 100_000, "not JSON"), ("[]", "not a JSON object"), ('{"question": "a"}', '"answer" is missing'), ('{"question": 1, "answer": "#### 1"}', '"question" is missing, empty'),
        *((json.dumps({"question": "a", "answer": answer}), 'does not end in one "####" and a number') for answer in ("1", "####", "#### one", "#### 1 #### 2", "#### 1/2", "#### 18 apples")),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_malformed_row_is_named(tmp_path, line, reason):
    (tmp_path / "test.jsonl").write_text(ROW + "\n" + line + "\n")
    with pytest.raises(SystemExit) as ended:
        gsm8k.load("test", tmp_path)
    assert ended.value.code.startswith(f"{tmp_path}/test.jsonl, line 2: ") and reason in ended.value.code


def test_files_that_are_none(tmp_path):
    (tmp_path / "test.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(SystemExit, match="not UTF-8"):
        gsm8k.load("test", tmp_path)
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(SystemExit, match="no problems in it"):
        gsm8k.load("test", tmp_path)


@pytest.fixture
def release(tmp_path, monkeypatch):
    """A release of one row, a cache of its own, and no network but what a test puts there."""
    content = (ROW + "\n").encode()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(gsm8k.FILES, "test", (len(content), hashlib.sha256(content).hexdigest()))
    source = tmp_path / "release"
    source.mkdir()
    (source / "test.jsonl").write_bytes(content)
    monkeypatch.setattr(gsm8k, "URL", source.as_uri() + "/{}.jsonl")
    return source / "test.jsonl", tmp_path / "cache/post-training/gsm8k"


def test_fetched_once(release, capsys):
    source, cache = release
    assert len(gsm8k.load("test")) == 1
    assert capsys.readouterr().err == f"GSM8K test: fetching 0.0 MB from {source.as_uri()}\n"
    assert [file.name for file in cache.iterdir()] == ["test.jsonl"]
    assert (cache / "test.jsonl").read_bytes() == source.read_bytes()
    source.unlink()
    assert len(gsm8k.load("test")) == 1 and capsys.readouterr().err == ""  # from the cache
    (cache / "test.jsonl").write_text(ROW[:-9])
    with pytest.raises(SystemExit, match=r"test\.jsonl \(delete it to fetch it again\): SHA-256"):
        gsm8k.load("test")


@pytest.mark.parametrize(
    "damage", [lambda b: b + b"\n", lambda b: b[:-20], lambda b: b.replace(b"18", b"19"), lambda b: b""]
)
def test_a_wrong_checksum_keeps_nothing(release, damage):
    source, cache = release
    good = source.read_bytes()
    source.write_bytes(damage(good))
    with pytest.raises(SystemExit) as ended:
        gsm8k.load("test")
    got = hashlib.sha256(damage(good)[: len(good) + 1]).hexdigest()
    for part in (source.as_uri(), got, hashlib.sha256(good).hexdigest(), "--data-dir FOLDER"):
        assert part in ended.value.code
    assert not cache.exists() and "\n" not in ended.value.code
    source.write_bytes(good)
    assert len(gsm8k.load("test")) == 1


class HalfReply(io.BytesIO):
    def read(self, n=-1):
        raise http.client.IncompleteRead(b"{", 99)


@pytest.mark.parametrize(
    "reply, reason",
    [
        (urllib.error.URLError(OSError(101, "Network is unreachable")), "Network is unreachable"),
        (urllib.error.HTTPError("u", 404, "Not Found", {}, None), "Not Found"), (TimeoutError("timed out"), "timed out"), (HalfReply(), "IncompleteRead"),
    ],
)  # fmt: skip
def test_no_network_says_what_to_do(release, monkeypatch, reply, reason):
    def urlopen(url, timeout):
        assert 0 < timeout <= 60
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(SystemExit) as ended:
        gsm8k.load("test")
    assert reason in ended.value.code and "\n" not in ended.value.code and not release[1].exists()
    assert "train.jsonl and test.jsonl by hand and give --data-dir FOLDER" in ended.value.code


def test_a_cache_that_cannot_be_written(release, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(SystemExit, match="--data-dir FOLDER"):
        gsm8k.load("test")
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SystemExit, match="No space left on device"):
        gsm8k.load("test")
    assert list(release[1].iterdir()) == []  # not even half of it


def test_two_processes_at_once(release):
    context = multiprocessing.get_context("fork")  # the children have the patched release
    children = [context.Process(target=lambda: os._exit(len(gsm8k.load("test")) + 40)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [41] * 4
    assert [file.name for file in release[1].iterdir()] == ["test.jsonl"]


@here
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_checksums_are_of_the_real_files(split):
    content = (FOLDER / f"{split}.jsonl").read_bytes()
    assert gsm8k.FILES[split] == (len(content), hashlib.sha256(content).hexdigest())
    gsm8k.check(content, split, "the file")


@pytest.mark.parametrize("response", ["#### Paris", "So the answer is Paris.", "Answer: paris", "Paris", r"It is \boxed{Paris}.",
                                      "<answer> Paris </answer>", "Not Rome.\n#### **Paris**", "Paris\n\nQuestion: And Rome?"])  # fmt: skip
def test_answers_that_are_no_numbers(response):
    assert accuracy_reward(response, "Paris") == 1.0
    assert accuracy_reward(response, "Rome") == accuracy_reward(response, "Paris, Texas") == 0.0
    assert accuracy_reward(response, "7") == 0.0
