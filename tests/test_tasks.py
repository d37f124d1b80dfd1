"""data/tasks.py: files of problems and demonstrations, which rows are held out, and rewards of one's own. And chats in
files of preferences."""

import json
import math
import random
import re
import sys
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest

from data import gsm8k, preferences, stories
from data.tasks import Problem, RewardError, Rows, get_reward, get_task, read_rows, show

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
REPLY = {"role": "assistant", "content": "5"}


def write(path, *rows):
    """A file with these rows, as JSON unless they are text. -> its path"""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def config(**flags):
    return SimpleNamespace(**{"task": "stories", "data": "", "data_dir": "", "init": "model", "chat": None, **flags})


def numbered(n, **more):
    return [dict(prompt=f"What is {i} + 1?", answer=i + 1, **more) for i in range(n)]


@pytest.mark.parametrize(
    "need, line, words",
    [
        ("answer", '{"prompt": "a", "answer": ', "not JSON"),
        ("answer", "[" * 100_000, "not JSON"),
        ("answer", '["a", "b"]', "not a JSON object"),
        ("answer", {"prompt": "a"}, '"answer" is missing, empty, or not a string or a number'),
        ("answer", {"prompt": "a", "answer": ""}, '"answer" is missing'),
        ("answer", {"prompt": "a", "answer": None}, '"answer" is missing'),
        ("answer", {"prompt": "a", "answer": True}, '"answer" is missing'),
        ("answer", {"prompt": "a", "answer": [5]}, '"answer" is missing'),
        ("answer", '{"prompt": "a", "answer": NaN}', '"answer" is missing'),
        ("answer", '{"prompt": "a", "answer": -Infinity}', '"answer" is missing'),
        ("answer", {"answer": "5"}, '"prompt" is missing, empty, or not a string'),
        ("answer", {"prompt": "", "answer": "5"}, '"prompt" is missing'),
        ("answer", {"prompt": " \n", "answer": "5"}, '"prompt" is missing'),
        ("answer", {"prompt": 5, "answer": "5"}, '"prompt" is missing'),
        ("", {"prompt": ["a"]}, '"prompt" is missing'),
        ("response", {"prompt": "a", "answer": "5"}, '"response" is missing, empty, or not a string'),
        ("response", {"prompt": "a", "response": ""}, '"response" is missing'),
        ("response", {"prompt": "a", "response": 5}, '"response" is missing'),
        ("", {"prompt": "a", "messages": ASK}, 'both "prompt" and "messages"'),
        ("", {"messages": []}, '"messages" is not a list with something in it'),
        ("", {"messages": "hello"}, '"messages" is not a list'),
        ("", {"messages": ["hello"]}, "message 1 is not"),
        ("", {"messages": [*ASK, {"role": "user"}]}, "message 3 is not"),
        ("", {"messages": [*ASK, {"role": "user", "content": None}]}, "message 3 is not"),
        ("", {"messages": [*ASK, {"role": "user", "content": "  "}]}, "message 3 is empty"),
        ("", {"messages": [{"role": "bot", "content": "a"}, *ASK]}, "message 1 has role 'bot'"),
        ("", {"messages": [{"role": ["user"], "content": "a"}, *ASK]}, "message 1 has role ['user']"),
        ("", {"messages": ASK[:1]}, '"messages" do not end with'),
        ("response", {"messages": [REPLY]}, '"messages" do not end with'),
        ("response", {"messages": [*ASK, REPLY], "response": "5"}, '"messages" do not end with'),
        ("response", {"messages": ASK}, '"response" is missing'),
        ("", r'{"prompt": "a\ud83d"}', "lone surrogate"),
        ("response", r'{"prompt": "a", "response": "\udc00"}', "lone surrogate"),
        ("answer", r'{"prompt": "a", "answer": "\udc00"}', "lone surrogate"),
        ("", r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "lone surrogate"),
    ],
)
def test_a_bad_row_is_named(tmp_path, need, line, words):
    good = dict(prompt="a", answer="b", response="c")
    path = write(tmp_path / "rows.jsonl", good, "", line, good)
    with pytest.raises(SystemExit) as stop:
        read_rows(path, need)
    text = stop.value.code
    assert text.startswith(f"{path}, line 3: ") and words in text and "\n" not in text and len(text) < 300


def test_a_bad_file_is_named(tmp_path):
    path, good = tmp_path / "rows.jsonl", b'{"prompt": "a", "answer": "b"}\n'
    for make, words in (
        (lambda: None, ": No such file"),
        (lambda: path.write_bytes(b""), ": no rows"),
        (lambda: path.write_bytes(b"\xef\xbb\xbf \r\n\n"), ": no rows"),
        # far into the file, where a reader of text has decoded many a line already
        (lambda: path.write_bytes(good * 5000 + b'{"prompt": "\xe4"}\n'), ", line 5001: not UTF-8"),
        (lambda: path.write_text('{"prompt": "a"}\n', encoding="utf-16"), ", line 1: not UTF-8"),
    ):
        make()
        with pytest.raises(SystemExit) as stop:
            read_rows(path, "")
        assert stop.value.code.startswith(f"{path}{words}") and "\n" not in stop.value.code
    with pytest.raises(SystemExit, match="Is a directory"):
        read_rows(tmp_path, "")


def test_windows_files_and_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = (
        '{"prompt": "Käse?", "answer": "a"}',
        "",
        '{"prompt": "c\u2028\x85", "answer": "d"}',
        '{"prompt": "e", "answer": "f"}',
    )
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    read = read_rows(path, "answer")
    assert [(p.prompt, p.answer) for p in read] == [("Käse?", "a"), ("c\u2028\x85", "d"), ("e", "f")]
    assert [p.row["line"] for p in read] == [1, 3, 4]


def test_numbers_become_the_text_that_a_response_would_say(tmp_path):
    written = {
        "18": "18",
        "18.0": "18",
        "-2.50": "-2.5",
        "-0.0": "0",
        "1e3": "1000",
        '"18.0"': "18.0",
        "7" * 400: "7" * 400,
    }
    path = write(tmp_path / "rows.jsonl", *(f'{{"prompt": "a", "answer": {number}}}' for number in written))
    assert [p.answer for p in read_rows(path, "answer")] == list(written.values())


def test_what_a_row_is_made_of(tmp_path):
    rows = [
        dict(prompt="a", answer=18, level={"n": 3}),
        dict(messages=ASK, response="5", tags=["x"]),
        dict(messages=[*ASK, REPLY], answer="5"),
        dict(messages=[*ASK, REPLY, ASK[1]], response="r"),
        dict(prompt=None, messages=[{"role": "system", "content": ""}, ASK[1]], response="r", answer=None),
        dict(prompt="b", messages=None),
    ]
    read = read_rows(write(tmp_path / "rows.jsonl", *rows), "")
    assert [(p.prompt, p.answer, p.response) for p in read] == [
        ("a", "18", None),
        (ASK, None, "5"),
        (ASK, "5", "5"),
        ([*ASK, REPLY, ASK[1]], None, "r"),
        ([{"role": "system", "content": ""}, ASK[1]], None, "r"),
        ("b", None, None),
    ]
    rows[0]["answer"] = "18"  # as the verifier has it; all else is as it was
    assert [p.row for p in read] == [{**row, "line": i + 1} for i, row in enumerate(rows)]


def test_a_prompt_is_on_one_side_in_every_file(tmp_path):
    problems = numbered(400)
    demonstrations = [
        dict(prompt=row["prompt"], response=f"it is {k}", k=k) for row in problems[::-1] for k in range(2)
    ]
    one = get_task(config(data=str(write(tmp_path / "problems.jsonl", *problems))))
    two = get_task(config(data=str(write(tmp_path / "demonstrations.jsonl", *demonstrations[:600]))), "response")
    for task, rows in ((one, problems), (two, demonstrations[:600])):
        training, held_out = (
            [p.prompt for p in side] for side in (task.training_problems(), task.held_out_problems(999))
        )
        assert Counter(training + held_out) == Counter(row["prompt"] for row in rows)  # all of them, once
        assert {text for text in training + held_out if zlib.crc32(text.encode()) % 10 == 0} == set(held_out)
        assert not set(training) & set(held_out)
    assert {p.prompt for p in two.held_out_problems(999)} <= {p.prompt for p in one.held_out_problems(999)}
    assert 20 < len(one.held_out_problems(999)) < 60


def test_small_files(tmp_path):
    """One prompt is held out even if none has such a checksum, or all have."""
    texts = [f"prompt {i}" for i in range(200)]
    tenth = [text for text in texts if zlib.crc32(text.encode()) % 10 == 0]
    others = [text for text in texts if text not in tenth]
    for some in (tenth[:3], others[:2], others[:7]):
        path = write(tmp_path / "rows.jsonl", *(dict(prompt=text, answer="1") for text in some * 2))
        task = get_task(config(data=str(path)))
        held_out = {p.prompt for p in task.held_out_problems(99)}
        assert held_out == {min(some, key=lambda text: zlib.crc32(text.encode()))}
        assert {p.prompt for p in task.training_problems()} == set(some) - held_out
    with pytest.raises(SystemExit, match="at least two different prompts are needed") as stop:
        get_task(config(data=str(write(path, *[dict(prompt="a", answer="1")] * 5))))
    assert stop.value.code.startswith(f"{path}: ")


def test_chats_are_split_by_their_prompt_alone(tmp_path):
    chats = [[ASK[0], {"role": "user", "content": f"{i} + 1?"}] for i in range(200)]
    problems = write(tmp_path / "problems.jsonl", *(dict(messages=chat, answer=i + 1) for i, chat in enumerate(chats)))
    demonstrations = write(tmp_path / "chats.jsonl", *(dict(messages=[*chat, REPLY]) for chat in chats))
    sides = [
        [p.prompt for p in get_task(config(data=str(path)), need).held_out_problems(99)]
        for path, need in ((problems, "answer"), (demonstrations, "response"))
    ]
    assert sides[0] == sides[1] and 5 < len(sides[0]) < 40 and all(prompt in chats for prompt in sides[0])


def test_drawing_depends_on_rng_alone(tmp_path):
    path = str(write(tmp_path / "rows.jsonl", *numbered(100, response="r")))
    tasks_ = [get_task(config(data=path, seed=seed)) for seed in (0, 1)]
    tasks_[1].make_problem(random.Random(5)), random.seed(1)  # neither what was drawn before nor the global generator
    for draw in ("make_problem", "sft_example"):
        drawn = [[getattr(task, draw)(random.Random(i)) for i in range(50)] for task in tasks_]
        assert drawn[0] == drawn[1] and len({str(x) for x in drawn[0]}) > 25
    first, second = ([p.prompt for p in task.held_out_problems(99)] for task in tasks_)
    assert first == second and first[:3] == [p.prompt for p in tasks_[0].held_out_problems(3)]
    rng = random.Random(0)
    assert {tasks_[0].make_problem(rng).prompt for _ in range(2000)} == {
        p.prompt for p in tasks_[0].training_problems()
    }
    assert {tasks_[0].make_problem(rng, held_out=True).prompt for _ in range(500)} == set(first)
    drawn = {tasks_[0].sft_example(rng) for _ in range(2000)}
    assert drawn == set(tasks_[0].demonstrations()) == {(p.prompt, "r") for p in tasks_[0].training_problems()}
    assert tasks_[0].held_out_demonstrations(2) == [(prompt, "r") for prompt in first[:2]]


def test_gold_score():
    problem, open_ended = Problem("2 + 3?", "5"), Problem("Write a poem.")
    rows = Rows([problem], [open_ended])
    assert rows.gold_score(problem, "so #### 5.0") == 1.0 and rows.gold_score(problem, "#### 6") == 0.0
    assert math.isnan(rows.gold_score(open_ended, "#### 5"))  # who does not know the answer cannot say


def test_which_task(tmp_path, monkeypatch):
    assert get_task(config()) is stories
    asked = []

    def load(split, data_dir=""):
        asked.append((split, data_dir))
        return [dict(prompt=f"Question: {split} {i}\nAnswer:", answer="1", response=" 1\n#### 1") for i in range(3)]

    monkeypatch.setattr(gsm8k, "load", load)
    task = get_task(config(task="gsm8k", data_dir="there"))
    assert sorted(asked) == [("test", "there"), ("train", "there")]
    assert [p.prompt for p in task.training_problems()] == [f"Question: train {i}\nAnswer:" for i in range(3)]
    assert sorted(p.prompt for p in task.held_out_problems(9)) == [f"Question: test {i}\nAnswer:" for i in range(3)]
    assert task.sft_example(random.Random(0))[1] == " 1\n#### 1"


# Rewards of one's own


@pytest.fixture
def reward_file(tmp_path, monkeypatch):
    """reward_file(source) writes that to mine.py -> the flag that names its function `score`."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(source):
        (tmp_path / "mine.py").write_text(source)
        return f"{tmp_path / 'mine.py'}:score"

    return make


ROWS = [Problem("a", "5", None, dict(prompt="a", answer=5, line=3)), Problem("b", "6", None, dict(prompt="b", line=12))]
GROUPS = [["#### 5", "no"], ["#### 6", "#### 5"]]


def test_no_reward_is_the_verifier():
    assert get_reward("")(ROWS, GROUPS) == [[1.0, 0.0], [1.0, 0.0]]


def test_a_reward_gets_responses_and_the_whole_row(tmp_path, reward_file):
    rows = [dict(prompt=f"p{i}", unit="kg", deep={"list": [i]}) for i in range(2)]
    problems = read_rows(write(tmp_path / "rows.jsonl", *rows), "")
    log = tmp_path / "calls.jsonl"
    reward = get_reward(
        reward_file(
            "import json\ndef score(*args):\n"
            f"    print(json.dumps(args), file=open({str(log)!r}, 'a'))\n    return [0] * len(args[0])"
        )
    )
    assert reward(problems, GROUPS) == [[0.0, 0.0], [0.0, 0.0]]
    story = stories.make_problem(random.Random(0))
    assert reward([story], [["x"]]) == [[0.0]]
    assert [json.loads(line) for line in log.open()] == [
        *([group, {**row, "line": i + 1}] for i, (group, row) in enumerate(zip(GROUPS, rows))),
        [["x"], {"prompt": story.prompt, "answer": story.answer}],
    ]


def test_a_reward_cannot_change_what_it_is_given(tmp_path, reward_file):
    problems = read_rows(write(tmp_path / "rows.jsonl", dict(prompt="a", answer="5", deep=[1])), "answer")
    spec = reward_file(
        "def score(responses, row):\n    n = len(row['deep'])\n    row['deep'].clear(), row.pop('answer')\n"
        "    size = len(responses)\n    responses.clear()\n    return [n] * size"
    )
    groups = [["x", "y"]]
    for _ in range(2):
        assert get_reward(spec)(problems, groups) == [[1.0, 1.0]]
    assert groups == [["x", "y"]] and problems[0].row == dict(prompt="a", answer="5", deep=[1], line=1)


@pytest.mark.parametrize(
    "returned, numbers",
    [
        ("[True, False]", [1.0, 0.0]),
        ("(2, -0.5)", [2.0, -0.5]),
        ("[float('nan'), 1]", [math.nan, 1.0]),
        ("torch.tensor([1.5, 0])", [1.5, 0.0]),
        ("[torch.tensor(1.5), numpy.float32(2)]", [1.5, 2.0]),
        ("numpy.array([True, False])", [1.0, 0.0]),
        ("[numpy.bool_(True), 10**30]", [1.0, 1e30]),
    ],
)
def test_numbers_that_a_reward_may_return(reward_file, returned, numbers):
    spec = reward_file(f"import numpy, torch\ndef score(responses, row):\n    return {returned}")
    found = get_reward(spec)(ROWS[:1], GROUPS[:1])
    assert str(found) == str([numbers]) and all(type(value) is float for value in found[0])


@pytest.mark.parametrize(
    "body, words",
    [
        ("return [1 / 0, 0]", "ZeroDivisionError: division by zero (mine.py, line 4)"),
        ("return helper(row)", "KeyError: 'unit' (mine.py, line 2)"),
        ("raise ValueError('two\\n\\nlines')", "ValueError: two lines (mine.py, line 4)"),
        ("assert False", "AssertionError (mine.py, line 4)"),
        ("import json; json.loads('x')", "char 0) (mine.py, line 4)"),  # not the line of the library
        ("raise SystemExit(3)", "SystemExit: 3 (mine.py, line 4)"),
        ("return score(responses, row)", "RecursionError"),
        ("return None", "returned None"),
        ("return 1.0", "returned 1.0"),
        ("return '10'", "returned '10'"),
        ("return {1.0, 0.0}", "returned {"),
        ("return {0: 1.0, 1: 0.0}", "returned {0: 1.0"),
        ("yield 1.0", "returned <generator"),
        ("return [1.0]", "gave 1 numbers for 2 responses"),
        ("return [1.0, 0.0, 0.0]", "gave 3 numbers for 2 responses"),
        ("return [1.0, None]", "gave None"),
        ("return [1.0, '1']", "gave '1'"),
        ("return [1.0, [0.0]]", "gave [0.0]"),
        ("return [1.0, float('-inf')]", "gave -inf"),
        ("return [10**400, 1.0]", "gave 1000"),
        ("return [1j, 1.0]", "gave 1j"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_row(reward_file, body, words):
    spec = reward_file(f"def helper(row):\n    return row['unit']\ndef score(responses, row):\n    {body}")
    with pytest.raises(RewardError) as stop:
        get_reward(spec, "folder/problems.jsonl")(ROWS[1:], GROUPS[1:])
    text = str(stop.value)
    assert text.startswith(f"--reward {spec} ") and words in text
    assert "line 12 of folder/problems.jsonl" in text and "\n" not in text and len(text) < 500
    story = stories.make_problem(random.Random(0))  # has no line: it is named by its beginning
    with pytest.raises(RewardError, match=re.escape(story.prompt[:20])):
        get_reward(spec)([story], [["x", "y"]])


def test_ctrl_c_passes_through_a_reward(reward_file):
    with pytest.raises(KeyboardInterrupt):
        get_reward(reward_file("def score(*_):\n    raise KeyboardInterrupt"))(ROWS, GROUPS)


def test_a_reward_may_have_modules_beside_it(tmp_path, reward_file):
    """Its own are found, when it is loaded and later; ours are not hidden by one of the same name."""
    (tmp_path / "beside_the_reward.py").write_text("BONUS = 3")
    (tmp_path / "later_than_the_reward.py").write_text("BONUS = 4")
    (tmp_path / "data.py").write_text("raise RuntimeError")
    spec = reward_file(
        "import beside_the_reward\nfrom data import accuracy_reward\ndef score(responses, row):\n"
        "    import later_than_the_reward\n    return [beside_the_reward.BONUS, later_than_the_reward.BONUS]"
    )
    before = sys.path[:]
    assert get_reward(spec)(ROWS[:1], GROUPS[:1]) == [[3.0, 4.0]]
    assert sys.path[: len(before)] == before


def test_a_reward_file_may_have_dataclasses(reward_file):
    """Whose annotations are looked up in sys.modules."""
    spec = reward_file(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Weights:\n"
        "    right: float = 2.0\ndef score(responses, row):\n    return [Weights().right] * 2"
    )
    assert get_reward(spec)(ROWS[:1], GROUPS[:1]) == [[2.0, 2.0]]


def test_a_reward_that_cannot_be_loaded(tmp_path, reward_file):
    path = tmp_path / "mine.py"
    for source, spec, words in (
        ("", "mine.py", "must be a file and a function in it"),
        ("", f"{path}:", "must be a file and a function in it"),
        ("", f"{tmp_path / 'none.py'}:score", "there is no file"),
        ("", f"{path}:score", "there is no function score"),
        ("score = 3", f"{path}:score", "there is no function score"),
        ("x = 1\nimport no_such_module_anywhere", f"{path}:score", "ModuleNotFoundError: No module named 'no_such_module_anywhere' (mine.py, line 2)"),
        ("def score(:", f"{path}:score", "SyntaxError: invalid syntax (mine.py, line 1)"),
        ("raise SystemExit", f"{path}:score", "SystemExit (mine.py, line 1)"),
    ):  # fmt: skip
        reward_file(source)
        with pytest.raises((SystemExit, ValueError)) as stop:
            get_reward(spec)
        text = str(stop.value)
        assert text.startswith(f"--reward {spec}: ") and words in text and "\n" not in text


# Preferences between answers to a chat


def test_preferences_may_be_of_chats(tmp_path):
    pair = dict(chosen="c", rejected="r")
    plain = dict(prompt="a", messages="of someone else's", **pair)  # as before: a key like any other
    path = write(
        tmp_path / "pairs.jsonl", dict(messages=ASK, **pair), dict(prompt=None, messages=ASK[1:], **pair), plain
    )
    rows = preferences.read_preferences(path)
    assert rows == [dict(prompt=ASK, **pair), dict(prompt=ASK[1:], **pair), plain]
    keys = [show(row["prompt"]) for row in rows]
    assert len(set(keys)) == 3 and keys[2] == "a" and keys[0] == "\n".join(f"{m['role']}: {m['content']}" for m in ASK)
    single = write(tmp_path / "single.jsonl", dict(messages=ASK, response="r", label=True))
    assert preferences.read_preferences(single, single=True) == [dict(prompt=ASK, response="r", label=True)]


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], '"messages" is not a list'),
        ([*ASK, REPLY], '"messages" must end with one of the user'),
        ([{"role": "bot", "content": "a"}], "message 1 has role 'bot'"),
        ([{"role": "user", "content": "\ud83d"}], "half a character"),
        (None, '"prompt" is missing'),
    ],
)
def test_a_bad_chat_of_preferences_is_named(tmp_path, messages, words):
    good = dict(messages=ASK, chosen="c", rejected="r")
    path = write(tmp_path / "pairs.jsonl", good, {**good, "messages": messages})
    with pytest.raises(SystemExit) as stop:
        preferences.read_preferences(path)
    assert stop.value.code.startswith(f"{path}, line 2: ") and words in stop.value.code and "\n" not in stop.value.code
