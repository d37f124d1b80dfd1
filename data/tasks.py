"""Where a script gets its problems, demonstrations and rewards from.

`get_task(config)` is the embedded task, the module data/stories.py, or for real data a `Rows` with the same functions:
GSM8K (--task gsm8k) or a file of your own (--data), one JSON object a line:

    {"prompt": "What is 2 + 3?", "answer": "5"}                                 a problem: grpo.py, ppo.py
    {"prompt": "What is 2 + 3?", "response": "2 + 3 = 5."}                      a demonstration: sft.py
    {"messages": [{"role": "user", "content": "What is 2 + 3?"}], ...}          a chat in place of the prompt (--chat)

A row may have both, and more keys: a reward of yours is given the whole row.
"""

import copy
import importlib.util
import json
import math
import os
import random
import sys
import traceback
import zlib
from dataclasses import dataclass, field

from data import stories
from data.evaluation import verify
from data.rewards import accuracy_reward
from data.tokenizer import encode_prompt

HELD_OUT_ONE_IN = 10  # prompts of a file
MODULE = "user_reward"  # what the file of --reward is called in sys.modules


@dataclass(frozen=True)
class Problem:
    prompt: str | list  # text, or the messages of a chat
    answer: str | None = None
    response: str | None = None  # a demonstration
    row: dict = field(default_factory=dict)  # as it was read, and "line"


def show(prompt):
    """A prompt as text, for people and as a key: the messages of a chat, each behind its role."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


class Rows:
    """Real data with the functions of data/stories.py: training problems and held-out ones."""

    NAME = "problems"

    def __init__(self, training, held_out):
        """Two lists of Problem."""
        self.training, self.held_out = training, random.Random("held-out").sample(held_out, len(held_out))

    def make_problem(self, rng, held_out=False):
        return rng.choice(self.held_out if held_out else self.training)

    def sft_example(self, rng):
        """One demonstration: (prompt, response)."""
        problem = rng.choice(self.training)
        return problem.prompt, problem.response

    def training_problems(self):
        return self.training

    def held_out_problems(self, n):
        """The first n in an order that never changes; fewer, if there are no more."""
        return self.held_out[:n]

    def demonstrations(self):
        return [(p.prompt, p.response) for p in self.training if p.response is not None]

    def held_out_demonstrations(self, n):
        return [(p.prompt, p.response) for p in self.held_out[:n] if p.response is not None]

    def drop(self, too_long):
        """Forgets the problems, on either side, for which too_long(problem) is true; -> how many these are."""
        before = len(self.training) + len(self.held_out)
        self.training, self.held_out = ([p for p in side if not too_long(p)] for side in (self.training, self.held_out))
        return before - len(self.training) - len(self.held_out)

    def gold_score(self, problem, text):
        """1 if the answer is right, else 0; NaN if the row has none."""
        return accuracy_reward(text, problem.answer) if problem.answer is not None else math.nan


def drop_long_prompts(task, tokenizer, room):
    """Leaves out the problems whose prompt has more than `room` tokens, and says how many. (Stories are all of about the same
    length: of them none is left out, and require_room complains.)"""
    if task is not stories:
        n = task.drop(lambda problem: len(encode_prompt(tokenizer, problem.prompt)) > room)
        said = f"; {n} left out, as their prompts have more than {room} tokens" if n else ""
        print(f"{len(task.training)} training problems, {len(task.held_out)} held out{said}")
        if not task.training or not task.held_out:
            sys.exit(f"nothing is left: no prompt has at most {room} tokens, the model's context less --max-new-tokens")


def get_task(config, need="answer"):
    """The task of a Config (task, data, data_dir). need: what the rows of a file must have besides a prompt, "answer" or
    "response", or "" if nothing. Ends the program with one line if something is wrong."""
    data, name = getattr(config, "data", ""), config.task
    if not data and name == "stories":
        return stories
    if not config.init:
        sys.exit(
            f"{'--data' if data else '--task ' + name} needs --init: a folder of a pretrained model, its name on the Hugging Face hub, "
            "or a checkpoint made from one"
        )
    if data and name != "stories":
        sys.exit(f"--task {name} and --data {data}: only one of them")
    if data:
        return Rows(*split(read_rows(data, need), data))
    from data import gsm8k

    def problems(name):
        rows = gsm8k.load(name, config.data_dir)
        if (config.chat or "none") != "none":  # a chat model is asked, a base model continues
            for row in rows:
                question = row["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:")
                row.update(prompt=f'{question}\nThink step by step, and end with "#### " and the answer.')
                row["response"] = row["response"].strip()
        return [Problem(r["prompt"], r["answer"], r["response"], {**r, "line": i + 1}) for i, r in enumerate(rows)]

    return Rows(problems("train"), problems("test"))


def split(problems, path):
    """-> (training problems, held-out ones): a tenth of the prompts, by their checksum, so that a prompt is on the same side
    in every file and every stage. At least one is held out."""
    checksum = {show(p.prompt): zlib.crc32(show(p.prompt).encode()) for p in problems}
    if len(checksum) < 2:
        sys.exit(f"{path}: at least two different prompts are needed, as one is held out")
    others = {text for text, number in checksum.items() if number % HELD_OUT_ONE_IN == 0}
    others = others if 0 < len(others) < len(checksum) else {min(checksum, key=checksum.get)}
    held_out = [p for p in problems if show(p.prompt) in others]
    return [p for p in problems if show(p.prompt) not in others], held_out


def _short(value):
    """Any value, in the short form and the one line that an error message has room for."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def check_messages(messages):
    """What is wrong with the messages of a chat, or None. They may end with the user's or the assistant's."""
    if not isinstance(messages, list) or not messages:
        return '"messages" is not a list with something in it'
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return f'message {i + 1} is not {{"role": ..., "content": "..."}}'
        if message.get("role") not in ("system", "user", "assistant"):
            return f'message {i + 1} has role {_short(message.get("role"))}, must be "system", "user" or "assistant"'
        if not message["content"].strip() and message["role"] != "system":
            return f"message {i + 1} is empty"
    return None


def read_rows(path, need=""):
    """The rows of a file of problems or demonstrations, as Problems. Ends the program with one line that names file, line
    and reason if there is none, or one is malformed or lacks what is needed."""
    problems = []
    try:
        with open(path, "rb") as file:  # bytes, as text is decoded in blocks: then nobody knows which line is not UTF-8
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text.strip():
                        problems.append(_problem(json.loads(text), number, need))
                except UnicodeDecodeError as problem:
                    sys.exit(f"{path}, line {number}: not UTF-8: {problem.reason} at byte {problem.start} of the line")
                except (ValueError, RecursionError) as problem:
                    kind = "not JSON: " if isinstance(problem, (json.JSONDecodeError, RecursionError)) else ""
                    sys.exit(f"{path}, line {number}: {kind}{problem}")
    except OSError as problem:
        sys.exit(f"{path}: {problem.strerror}")
    if not problems:
        sys.exit(f"{path}: no rows in it")
    return problems


def _problem(row, number, need):
    """One row as a Problem; what is null counts as not said. Raises ValueError with what is wrong."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    prompt, response, answer = row.get("prompt"), row.get("response"), row.get("answer")
    if row.get("messages") is not None:
        if prompt is not None:
            raise ValueError('both "prompt" and "messages": one of them is enough')
        prompt = row["messages"]
        if wrong := check_messages(prompt):
            raise ValueError(wrong)
        if prompt[-1]["role"] == "assistant" and response is None:  # the demonstration
            prompt, response = prompt[:-1], prompt[-1]["content"]
        if not prompt or prompt[-1]["role"] != "user":
            raise ValueError(
                "\"messages\" do not end with the user's (or, as a demonstration, the assistant's answer to it)"
            )
    elif not isinstance(prompt, str) or not prompt.strip():
        raise ValueError('"prompt" is missing, empty, or not a string')
    if type(answer) is int or (type(answer) is float and math.isfinite(answer)):  # true is neither; 18.0 -> "18"
        answer = str(int(answer) if answer == int(answer) else answer)
    for key, value in (("response", response), ("answer", answer)):
        if value is None and key != need:
            continue
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f'"{key}" is missing, empty, or not a string' + " or a number" * (key == "answer"))
    for text in (show(prompt), response or "", answer or ""):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("half a character (a lone surrogate) in it")
    return Problem(prompt, answer, response, {**row, **({} if answer is None else {"answer": answer}), "line": number})


class RewardError(Exception):
    """A reward of the user's failed; str() is one line that says on which row, and why."""


def get_reward(spec, path=""):
    """The reward as a function (problems, groups) -> for each problem a list of numbers, one for each text of its group.

    spec "" or "verifier": is the answer right. "my_reward.py:score": score(responses, row) of that file, called once
    per problem with its responses (strings) and its row (a dictionary), -> a number for each; NaN means that it cannot
    say. If it raises, or returns anything else, that is a RewardError. `path`: of the data, to name the row. Ends the
    program with one line if there is no such function.
    """
    if spec in ("", "verifier"):
        return verify
    score = load_function(spec)

    def reward(problems, groups):
        scores = []
        for problem, texts in zip(problems, groups):
            row = getattr(problem, "row", None) or {"prompt": problem.prompt, "answer": problem.answer}
            where = f"line {row['line']} of {path}" if path and "line" in row else _short(show(problem.prompt))
            try:
                # copies: what it does to them must not reach the next step
                found = _numbers(score(list(texts), copy.deepcopy(row)))
            except (Exception, SystemExit) as caught:
                raise RewardError(f"--reward {spec} failed on {where}: {_said(caught, spec)}") from None
            if not isinstance(found, list):
                raise RewardError(f"--reward {spec} returned {_short(found)} on {where}: must be a list of numbers")
            if len(found) != len(texts):
                raise RewardError(f"--reward {spec} gave {len(found)} numbers for {len(texts)} responses on {where}")
            for value in found:
                # an integer too long for a float is as bad as an infinite one
                if not isinstance(value, (bool, int, float)) or abs(value) > sys.float_info.max:
                    said = f"gave {_short(value)} on {where}: must be a finite number, or NaN"
                    raise RewardError(f"--reward {spec} {said}")
            scores.append([float(value) for value in found])
        return scores

    return reward


def _numbers(found):
    """What a reward returned, as a list of plain numbers: a list, a tuple, or an array of torch or numpy may hold them.
    Anything else is returned as it is (a set has lost its order, a dictionary's keys are no scores)."""
    if hasattr(found, "tolist"):
        return found.tolist()
    if not isinstance(found, (list, tuple)):
        return found
    return [value.item() if hasattr(value, "item") else value for value in found]


def _said(problem, spec):
    """An exception out of the user's file as one line: type, message, and the last line of that file it went through."""
    path = os.path.abspath(spec.rpartition(":")[0])
    said = " ".join(f"{type(problem).__name__}: {problem}".split()).removesuffix(":")
    lines = [f.lineno for f in traceback.extract_tb(problem.__traceback__) if os.path.abspath(f.filename) == path]
    return said[:200] + (f" ({os.path.basename(path)}, line {lines[-1]})" if lines else "")


def load_function(spec):
    """The function that "file.py:name" names. Modules beside the file can be imported by it. Ends the program with
    one line if there is none."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        sys.exit(f"--reward {spec}: must be a file and a function in it, as in my_reward.py:score")
    if not os.path.isfile(path):
        sys.exit(f"--reward {spec}: there is no file {path}")
    described = importlib.util.spec_from_file_location(MODULE, os.path.abspath(path))
    module = importlib.util.module_from_spec(described)
    sys.modules[MODULE] = module  # where dataclasses and pickle look for it
    sys.path.append(os.path.dirname(os.path.abspath(path)))  # at the end: no file of the user's hides one of ours
    try:
        described.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        sys.exit(f"--reward {spec}: {path} cannot be loaded: {_said(problem, spec)}")
    if not callable(getattr(module, name, None)):
        sys.exit(f"--reward {spec}: there is no function {name} in {path}")
    return getattr(module, name)
