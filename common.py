"""Run plumbing, the same for every script; skip it on a first reading: command line, seeds, device, log, checkpoints.

A run called `grpo` writes <out>/grpo.pt (its checkpoint, replaced atomically) and <out>/grpo/ (metrics.jsonl,
samples.md, curves.png).
"""

import argparse
import dataclasses
import difflib
import hashlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
import typing
from pathlib import Path

import torch

import kernels
from data.tokenizer import fingerprint, get_tokenizer

COLUMNS = {  # how a metric is printed: key -> (heading, format)
    "loss": ("loss", ".4f"), "reward": ("reward", ".3f"), "accuracy": ("accuracy", ".3f"), "length": ("length", ".1f"),
    "kl": ("kl", ".4f"), "entropy": ("entropy", ".3f"), "clip_fraction": ("clip", ".3f"), "zero_variance": ("zero-var", ".2f"),
    "held_out_reward": ("proxy", ".3f"), "gold": ("gold", ".3f"), "approx_kl": ("approx", ".4f"), "explained_variance": ("expl.var", ".2f"),
    "margin": ("margin", ".3f"), "preference_accuracy": ("judge", ".3f"), "gold_accuracy": ("gold", ".3f"),
    "chosen_logp": ("chosen", ".2f"), "chosen_logratio": ("vs ref", "+.2f"), "rejected_logp": ("rejected", ".2f"),
    "rejected_logratio": ("vs ref", "+.2f"), "train_accuracy": ("train", ".3f"),
    "grad_norm": ("grad", ".2f"), "lr": ("lr", ".1e"), "tokens_per_second": ("tok/s", ".0f"),
}  # fmt: skip


def parse(Config, doc, argv=None):
    """The command line as a Config: one flag per dataclass field, the comment behind a field is its help. Any mistake
    ends the program with one line that names the flag, and exit code 2. A Config raises ValueError for values
    that cannot be."""
    comments = dict(re.findall(r"^    (\w+):[^#\n]*#\s*(.*)$", inspect.getsource(Config), re.MULTILINE))
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags = {}
    for field in dataclasses.fields(Config):
        kind, options = field.type, {}
        # `float | None`: None means that something else decides
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            kind = next(t for t in typing.get_args(kind) if t is not types.NoneType)
        if typing.get_origin(kind) is typing.Literal:
            options["choices"] = typing.get_args(kind)
            kind = type(options["choices"][0])
        options.update(action=argparse.BooleanOptionalAction) if kind is bool else options.update(type=kind)
        if kind is not bool and "choices" not in options:
            options["metavar"] = kind.__name__.upper()
        default = "" if field.default in (None, "", False) else f" (default {field.default})"
        flag = "--" + field.name.replace("_", "-")
        flags[flag] = parser.add_argument(
            flag, default=field.default, help=comments.get(field.name, "") + default, **options
        )

    def error(message):
        message = message.removeprefix("argument ")
        for unknown in re.findall(r"unrecognized arguments: (\S+)", message):
            close = difflib.get_close_matches(unknown, flags, 1)
            message += f" (did you mean {close[0]}?)" if close else ""
        print(f"{parser.prog}: {message} (--help lists the flags)", file=sys.stderr)
        raise SystemExit(2)

    parser.error = error
    values = vars(parser.parse_args(argv))
    try:
        config = Config(**values)
        for field in dataclasses.fields(Config):
            # a number whose default is positive has to be positive, unless its comment says what 0 does
            value, least = getattr(config, field.name), 0 if "0: " in comments.get(field.name, "") else None
            if type(field.default) in (int, float) and field.default > 0 and not (value > 0 or value == least):
                raise ValueError(f"--{field.name.replace('_', '-')} {value}: must be above 0")
        config.device = pick_device(config.device)
        kernels.implementation(torch.empty(0, device=config.device))  # raises if KERNELS asks for what is not there
        get_tokenizer(config.tokenizer)
    except ValueError as problem:
        error(str(problem))
    return config


def pick_device(name):
    """ "auto" is the GPU where there is one, else the CPU. Raises ValueError for a device that this machine lacks."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise ValueError(f"--device {name}: {str(problem).splitlines()[0]}") from None
    return name


def seed_of(*parts):
    """A 48-bit seed from anything printable. Every step draws from its own seed, so a resumed run needs no random
    state."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def generator(device, *parts):
    """A torch.Generator on `device`, seeded by `seed_of(*parts)`."""
    return torch.Generator(device=device).manual_seed(seed_of(*parts))


def by_length(lengths, rows):
    """Row numbers sorted by length and cut into micro-batches of at most `rows`: rows of like length, so little
    padding."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[i : i + rows] for i in range(0, len(order), rows)]


def cosine_lr(step, config):
    """Learning rate of step 0, 1, ...: config.warmup steps up to config.lr, then half a cosine down to a tenth of it."""
    return config.lr * min(1.0, (step + 1) / config.warmup) * (0.55 + 0.45 * math.cos(math.pi * step / config.steps))


def file_checksum(path):
    """The beginning of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def load_checkpoint(path, tokenizer=None, reward_model=False):
    """The dictionary in `path`, or one line on stderr and exit code 1: missing, truncated, of another tokenizer, or a
    reward model where a language model is wanted (or the other way round)."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        kind = checkpoint["script"]
    except FileNotFoundError:
        sys.exit(f"{path} does not exist")
    except Exception as problem:  # a truncated file raises whatever its first missing byte leads to
        reason = (str(problem).splitlines() or [type(problem).__name__])[0][:100]
        sys.exit(f"{path} is not a complete checkpoint of this project: {reason}")
    if tokenizer is not None and checkpoint["tokenizer"] != fingerprint(tokenizer):
        sys.exit(f"{path} ({kind}) speaks tokenizer {checkpoint['tokenizer']}, this run {fingerprint(tokenizer)}")
    if tokenizer is not None and (kind == "reward_model") != reward_model:
        wanted = "a reward model" if reward_model else "a language model"
        sys.exit(f"{path} was made by {kind}.py: it is not {wanted}")
    return checkpoint


def make_if_missing(script, path, config, **flags):
    """Runs `python <script>.py` for an earlier stage whose checkpoint is missing, with the seed and tokenizer of `config`
    and any other `flags`, or continues it if it was interrupted."""
    checkpoint = load_checkpoint(path) if os.path.exists(path) else None
    if checkpoint and checkpoint["step"] >= checkpoint["steps"]:
        return
    settings = checkpoint["config"] if checkpoint else {"seed": config.seed, "tokenizer": config.tokenizer, **flags}
    command = [f"{script}.py"]
    for name, value in {**settings, "out": config.out, "device": config.device, "resume": bool(checkpoint)}.items():
        flag = "--" + name.replace("_", "-")
        if value is not None and value is not False and value not in ("", "stories"):
            command += [flag] if value is True else [flag, str(value)]
    why = f"stopped at step {checkpoint['step']} of {checkpoint['steps']}" if checkpoint else "is missing"
    print(f"{path} {why}: running {shlex.join(['python', *command])}\n", flush=True)
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the stage that runs: it saves and stops
    code = subprocess.run([sys.executable, Path(__file__).with_name(command[0]), *command[1:]]).returncode
    signal.signal(signal.SIGINT, handler)
    if code:
        sys.exit(code)
    print(flush=True)


class Run:
    """One run of a script: its files, its clock, its Ctrl-C. Without --resume an earlier run's files are kept as
    *.previous. `inits` are the files that it started from, which have to be the same when it resumes."""

    def __init__(self, script, config, tokenizer, columns, *inits):
        self.script, self.config, self.tokenizer = script, config, fingerprint(tokenizer)
        self.columns, self.inits = columns.split(), [file_checksum(path) for path in inits]
        self.path, self.folder = Path(config.out, f"{script}.pt"), Path(config.out, script)
        self.step, self.seconds, self.lines, self.interrupted, self.checkpoint = 0, 0.0, 0, False, None
        if os.path.exists(self.path) and any(os.path.samefile(path, self.path) for path in inits):
            sys.exit(f"--init {self.path}: this run would overwrite it; copy it first, or use another --out")
        for path in inits:
            if self.folder.resolve() in Path(path).resolve().parents:
                sys.exit(f"{path} is in the folder that this run writes: copy it first, or use another --out")
        if config.resume:
            self.checkpoint = load_checkpoint(self.path, tokenizer, reward_model=script == "reward_model")
            for name, value in self.checkpoint["config"].items():
                now = getattr(config, name, None)
                if now != value and name not in ("out", "device", "resume", "steps", "lr", "init"):
                    flag = "--" + name.replace("_", "-")
                    sys.exit(f"{self.path} was made with {flag} {value}, not {now}: resume with that or start anew")
            for path, now, then in zip(inits, self.inits, self.checkpoint["inits"]):
                if now != then:
                    sys.exit(f"{path} is not what {self.path} was started from: it has changed since, or is another")
            self.step, self.seconds = self.checkpoint["step"], self.checkpoint["seconds"]
            print(f"resuming {self.path} at step {self.step} of {config.steps}")
        try:
            if not config.resume:
                self._keep_previous()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._cut("metrics.jsonl", lambda line: json.loads(line)["step"] <= self.step)
            self._cut(
                "samples.md",
                lambda line: not (title := re.fullmatch(r"## Step (\d+)\s*", line)) or int(title[1]) <= self.step,
            )
        except OSError as problem:
            sys.exit(f"--out {config.out}: {problem.strerror} ({problem.filename})")
        signal.signal(signal.SIGINT, self._interrupt)
        self.clock = self.first = time.perf_counter()
        self.first_step = self.step

    def _keep_previous(self):
        """Renames the files of an earlier run, unless it stopped before its first step: those are overwritten."""
        log = self.folder / "metrics.jsonl"
        started = not self.folder.exists() or (log.exists() and len(log.read_text(encoding="utf-8").splitlines()) > 1)
        for path in (self.path, self.folder) if started else ():
            if path.exists():
                kept = path.with_name(f"{path.stem}.previous{path.suffix}")
                shutil.rmtree(kept, ignore_errors=True)
                os.replace(path, kept)
                print(f"{path} exists: kept as {kept}")

    def _cut(self, name, keep):
        """Drops what an interrupted run wrote after its last checkpoint: it is about to be written again."""
        path = self.folder / name
        if path.exists():
            lines, kept = path.read_text(encoding="utf-8").splitlines(keepends=True), []
            for line in lines:
                try:
                    if not keep(line):
                        break
                except (ValueError, IndexError, KeyError):  # half a line, written when the power went
                    break
                kept.append(line)
            if kept != lines:
                temporary = path.with_name(name + ".tmp")
                temporary.write_text("".join(kept), encoding="utf-8")
                os.replace(temporary, path)

    def _interrupt(self, *_):
        if self.interrupted:
            sys.exit(f"stopped at once. {self._holds()}: --resume goes on from there")
        self.interrupted = True
        print("\nCtrl-C: finishing this step, then saving (once more to stop at once)", flush=True)

    def restore(self, model, optimizer):
        """Puts the checkpoint's weights and optimizer state in place when resuming; returns the step to go on with."""
        if self.checkpoint:
            if self.checkpoint["model_config"] != dataclasses.asdict(model.config):
                sys.exit(f"{self.path} holds another model: {self.checkpoint['model_config']}, not {model.config}")
            model.load_state_dict(self.checkpoint["model"])
            optimizer.load_state_dict(self.checkpoint["optimizer"])
        return self.step

    def log(self, step, **metrics):
        """Appends a line to metrics.jsonl and prints its columns with the time left; NaN and None mean that it does
        not apply."""
        now = time.perf_counter()
        metrics = {k: v for k, v in metrics.items() if v is not None and not math.isnan(v)}
        record = {"step": step, "seconds": round(self.seconds + now - self.clock, 3), **metrics}
        self._append("metrics.jsonl", json.dumps(record) + "\n")
        if self.lines % 20 == 0:
            print(f"{'step':>9}" + "".join(f"{COLUMNS[k][0]:>9}" for k in self.columns) + f"{'left':>8}")
        self.lines += 1
        cells = [format(metrics[k], COLUMNS[k][1]) if k in metrics else "" for k in self.columns]
        left = ""
        if step > self.first_step:
            seconds = (now - self.first) / (step - self.first_step) * (self.config.steps - step)
            left = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        else:
            self.first = now  # the evaluation before the first step says nothing about the steps
        print(f"{f'{step}/{self.config.steps}':>9}" + "".join(f"{c:>9}" for c in cells) + f"{left:>8}", flush=True)

    def sample(self, step, text):
        """Appends a section to samples.md."""
        self._append("samples.md", f"## Step {step}\n\n{text}\n\n")

    def _append(self, name, text):
        try:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as problem:
            sys.exit(f"{self.folder / name}: {problem.strerror}. {self._holds()}")

    def _holds(self):
        return f"{self.path} holds step {self.step}" if self.path.exists() else "No step is saved yet"

    def require_finite(self, step, **values):
        """Stops the run before a NaN or an infinity can reach the weights."""
        for name, value in values.items():
            if not math.isfinite(value):
                sys.exit(
                    f"step {step}: {name} is {value}; its batch follows from --seed {self.config.seed}. Nothing was "
                    f"overwritten. {self._holds()}: --resume with a smaller --lr, or start anew"
                )

    def save(self, step, model, optimizer, every=1, best=False, **more):
        """Writes the checkpoint when `step` is due (each `every` steps, at the end, after Ctrl-C), with whatever `more`
        the script has to remember; if it is the best so far, first to <script>/best.pt as well. Atomic: a crash or a
        full disk leaves the old file as it was."""
        if step % every and step != self.config.steps and not self.interrupted and not best:
            return
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        checkpoint = {
            "script": self.script, "step": step, "steps": self.config.steps, "seconds": self.seconds,
            "config": dataclasses.asdict(self.config), "model_config": dataclasses.asdict(model.config),
            "tokenizer": self.tokenizer, "inits": self.inits,
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), **more,
        }  # fmt: skip
        for path in (self.folder / "best.pt", self.path) if best else (self.path,):
            self._write(path, checkpoint)
        self.step = step
        if self.interrupted:
            flags = [flag for flag in sys.argv[1:] if flag != "--resume"]
            command = shlex.join(["python", os.path.basename(sys.argv[0]), *flags, "--resume"])
            print(f"stopped; {self.path} holds step {step} of {self.config.steps}. Go on with: {command}")
            raise SystemExit(130)

    def _write(self, path, checkpoint):
        temporary = path.with_name(path.name + ".tmp")
        try:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as problem:  # RuntimeError: torch's name for a write that failed
            temporary.unlink(missing_ok=True)
            cause = problem if isinstance(problem, OSError) else problem.__context__
            reason = getattr(cause, "strerror", None) or str(problem).splitlines()[0]
            step = checkpoint["step"]
            sys.exit(f"could not save {path} at step {step}: {reason}. {self._holds()}: make room, then --resume")

    def metrics(self):
        """All lines of metrics.jsonl so far, as dictionaries."""
        try:
            return [json.loads(line) for line in open(self.folder / "metrics.jsonl", encoding="utf-8")]
        except OSError as problem:
            sys.exit(f"{self.folder / 'metrics.jsonl'}: {problem.strerror}. {self._holds()}")

    def plot(self, *keys):
        """curves.png: each of `keys` over the steps, or of a tuple (x, y, ...) its others over x, if matplotlib is
        installed."""
        try:
            import matplotlib
        except ImportError:
            return print("no curves.png: matplotlib is not installed (pip install matplotlib)")
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        lines = self.metrics()
        figure, axes = plt.subplots(1, len(keys), figsize=(3.6 * len(keys), 2.8), layout="constrained")
        for axis, key in zip(axes, keys):
            x, *ys = key if isinstance(key, tuple) else ("step", key)
            for y in ys:
                points = [(line[x], line[y]) for line in lines if x in line and y in line]
                label, marker = y.replace("_", " "), "o" if len(points) < 30 else ""
                axis.plot(*zip(*points) if points else ((), ()), marker=marker, markersize=3, label=label)
            axis.set(title=" and ".join(y.replace("_", " ") for y in ys), xlabel=x.replace("_", " "))
            axis.grid(alpha=0.3)
            if len(ys) > 1:
                axis.legend()
        figure.savefig(self.folder / "curves.png", dpi=110)
        plt.close(figure)
