"""GSM8K: 7,473 + 1,319 word problems from primary school with worked solutions, a real task with verifiable answers
(Cobbe et al. 2021, arXiv:2110.14168; OpenAI's files, MIT licence, from github.com/openai/grade-school-math).

    from data import gsm8k
    rows = gsm8k.load("train")  # fetches the file once, 4.2 MB, or: load("train", data_dir="folder/with/the/files")

A file has one JSON object a line: {"question": ..., "answer": "the solution, line by line\n#### 18"}.
"""

import hashlib
import http.client
import json
import os
import re
import sys
import tempfile
import urllib.request
from pathlib import Path

URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{}.jsonl"
FILES = {  # split -> (bytes, SHA-256)
    "train": (4_166_206, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "test": (749_738, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}
BY_HAND = "fetch train.jsonl and test.jsonl by hand and give --data-dir FOLDER"


def load(split, data_dir=""):
    """The problems of `split`, "train" or "test" -> list of {"prompt", "answer", "response"}, three strings.

    prompt: "Question: ...\\nAnswer:", which a base model continues with an answer, as it has seen on many a page.
    response: " " + the solution + "\\n#### 18", the calculator annotations <<48/2=24>> taken out. answer: "18", without
    commas. Every prompt + response is one text, and the answer can be checked with accuracy_reward.

    From `data_dir`/{split}.jsonl, if it is given (any file of that form), else from the cache, and at first from
    OpenAI's release. Raises ValueError for another split. Ends the program with one line if there is no file, no
    network, a wrong checksum, or a malformed row.
    """
    if split not in FILES:
        raise ValueError(f"unknown split {split!r} of GSM8K, must be one of: {', '.join(FILES)}")
    return read(Path(data_dir) / f"{split}.jsonl" if data_dir else cached(split))


def read(path):
    """The rows of one of GSM8K's files, in the form that load() describes. Ends the program with one line that names
    file, line and reason if there is none, or one is malformed."""
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
                for key in ("question", "answer"):
                    if not isinstance(row.get(key), str) or not row[key].strip():
                        sys.exit(f'{where}: "{key}" is missing, empty, or not a string')
                solution, _, answer = row["answer"].partition("####")
                answer = answer.strip().replace(",", "")
                if not re.fullmatch(r"-?\d+(\.\d+)?", answer):
                    sys.exit(f'{where}: "answer" does not end in one "####" and a number')
                solution = re.sub(r"<<[^<>]*>>", "", solution).strip()
                rows.append(
                    dict(
                        prompt=f"Question: {row['question'].strip()}\nAnswer:",
                        answer=answer,
                        response=f" {solution}\n#### {answer}",
                    )
                )
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}")
    except UnicodeDecodeError as problem:
        sys.exit(f"{path}: not UTF-8: {problem.reason} at byte {problem.start}")
    if not rows:
        sys.exit(f"{path}: no problems in it")
    return rows


def cached(split):
    """The path of `split` in ~/.cache/post-training/gsm8k (or under XDG_CACHE_HOME), fetched if it is not there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "post-training" / "gsm8k"
    path = folder / f"{split}.jsonl"
    try:
        if path.exists():
            check(path.read_bytes(), split, f"{path} (delete it to fetch it again)")
            return path
        content = fetch(split)
        folder.mkdir(parents=True, exist_ok=True)
        # under a name of its own first: whoever finds the file, finds all of it, and two processes do not collide
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{split}.")
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}; or {BY_HAND}")
    return path


def fetch(split):
    """The bytes of OpenAI's file, its checksum verified. Ends the program with one line that says what to do instead."""
    size, url = FILES[split][0], URL.format(split)
    print(f"GSM8K {split}: fetching {size / 1e6:.1f} MB from {url}", file=sys.stderr, flush=True)
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            content = reply.read(size + 1)  # one more than there should be: enough to see that it is another file
    except (OSError, http.client.HTTPException) as problem:  # urllib's own errors are OSErrors
        sys.exit(f"{url}: {getattr(problem, 'reason', None) or problem!r}; {BY_HAND}")
    check(content, split, url)
    return content


def check(content, split, name):
    """Ends the program if `content` is not the file that OpenAI published."""
    size, expected = FILES[split]
    got = hashlib.sha256(content).hexdigest()
    if got != expected:
        sys.exit(f"{name}: SHA-256 {got} (first {len(content)} bytes), expected {expected} ({size} bytes); {BY_HAND}")
