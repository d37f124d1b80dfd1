"""Run plumbing, the same for every script; skip it on a first reading: command line, seeds, device, several processes,
the optimizer for bfloat16 weights, log, checkpoints.

A run called `grpo` writes <out>/grpo.pt (its checkpoint, replaced atomically) and <out>/grpo/ (metrics.jsonl,
samples.md, curves.png).

Several GPUs: `torchrun --nproc_per_node=4 grpo.py` starts this file's scripts in four processes, the ranks. All of them
know the whole batch: prompts are split in sampling (`GPT.generate`) and put together again; of the micro-batches of an
optimizer step each rank computes every fourth (`mine`), with the normalisers of the whole step; the gradients are added
up (`finish_gradients`), and all take the same step. Rank 0 prints and saves.
"""

import argparse
import atexit
import dataclasses
import datetime
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
import torch.distributed as dist

import kernels
from data.tokenizer import fingerprint, get_tokenizer
from pretrained import is_pretrained

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun

COLUMNS = {  # how a metric is printed: key -> (heading, format)
    "loss": ("loss", ".4f"), "held_out_loss": ("held-out", ".4f"), "reward": ("reward", ".3f"), "accuracy": ("accuracy", ".3f"), "length": ("length", ".1f"),
    "kl": ("kl", ".4f"), "entropy": ("entropy", ".3f"), "clip_fraction": ("clip", ".3f"), "zero_variance": ("zero-var", ".2f"),
    "held_out_reward": ("proxy", ".3f"), "gold": ("gold", ".3f"), "approx_kl": ("approx", ".4f"), "explained_variance": ("expl.var", ".2f"),
    "margin": ("margin", ".3f"), "preference_accuracy": ("judge", ".3f"), "gold_accuracy": ("gold", ".3f"),
    "chosen_logp": ("chosen", ".2f"), "chosen_logratio": ("vs ref", "+.2f"), "rejected_logp": ("rejected", ".2f"),
    "rejected_logratio": ("vs ref", "+.2f"), "train_accuracy": ("train", ".3f"),
    "grad_norm": ("grad", ".2f"), "lr": ("lr", ".1e"), "tokens_per_second": ("tok/s", ".0f"),
}  # fmt: skip


def parse(Config, doc, argv=None, real=None):
    """The command line as a Config: one flag per dataclass field, the comment behind a field is its help. Any mistake
    ends the program with one line that names the flag, and exit code 2. A Config raises ValueError for values
    that cannot be. `real`: other defaults, for a pretrained --init, a --task that is not the stories, or --data."""
    real = real or {}
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
        if field.name in real:
            default = f" (default {field.default}; with pretrained weights or real data {real[field.name]})"
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
    given = parser.parse_args(argv)
    task, data, init, estimate = (getattr(given, name, "") for name in ("task", "data", "init", "estimate"))
    if task not in ("", "stories") or data or estimate or is_pretrained(init):
        parser.set_defaults(**real)
        given = parser.parse_args(argv)
    values = vars(given)
    try:
        config = Config(**values)
        for field in dataclasses.fields(Config):
            # a number whose default is positive has to be positive, unless its comment says what 0 does
            value, least = getattr(config, field.name), 0 if "0: " in comments.get(field.name, "") else None
            if type(field.default) in (int, float) and field.default > 0 and not (value > 0 or value == least):
                raise ValueError(f"--{field.name.replace('_', '-')} {value}: must be above 0")
        config.device = pick_device(config.device)
        kernels.implementation(torch.empty(0, device=config.device))  # raises if KERNELS asks for what is not there
        if config.tokenizer:
            get_tokenizer(config.tokenizer)
    except ValueError as problem:
        error(str(problem))
    if WORLD > 1 and not dist.is_initialized():
        if RANK:  # only rank 0 is heard
            sys.stdout = open(os.devnull, "w")
        # a long time, as rank 0 may have to make an earlier stage first
        dist.init_process_group("nccl" if "cuda" in config.device else "gloo", timeout=datetime.timedelta(hours=12))
        atexit.register(dist.destroy_process_group)
        print(f"{WORLD} processes share the work")
    return config


def pick_device(name):
    """ "auto" is the GPU where there is one (each process of torchrun has its own), else the CPU. Raises ValueError for a
    device that this machine lacks."""
    if name in ("auto", "cuda") and WORLD > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return f"cuda:{os.environ['LOCAL_RANK']}"
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


def share(rows, total):
    """How many rows a micro-batch has, if `total` are to be cut into parts of at most `rows`: less where some rank would
    have nothing to do."""
    return max(1, min(rows, -(-total // WORLD)))


def mine(micro_batches):
    """Those of the micro-batches that this rank computes: all of them, if it is the only one."""
    return micro_batches[RANK::WORLD]


def by_length(lengths, rows):
    """Row numbers sorted by length and cut into micro-batches of at most `rows`: rows of like length, so little
    padding."""
    order, rows = sorted(range(len(lengths)), key=lambda i: lengths[i]), share(rows, len(lengths))
    return [order[i : i + rows] for i in range(0, len(order), rows)]


def _collective(operation, *args):
    try:
        operation(*args)
    except RuntimeError as problem:
        reason = str(problem).splitlines()[0][:150]
        sys.stderr.write(f"rank {RANK}: another process of this run has died; --resume goes on from the last checkpoint ({reason})\n")
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would wait for it


def sum_over_ranks(value):
    """The sum over all ranks of a tensor (in place), a number, or a dictionary of numbers."""
    if WORLD == 1:
        return value
    if isinstance(value, torch.Tensor):
        _collective(dist.all_reduce, value)
        return value
    numbers = value.values() if isinstance(value, dict) else [value]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    total = sum_over_ranks(torch.tensor([float(x) for x in numbers], dtype=torch.float64, device=device)).tolist()
    return dict(zip(value, total)) if isinstance(value, dict) else total[0]


def gather(thing):
    """What each rank has, as a list in the order of the ranks. Any object; tensors should be on the CPU."""
    things = [thing] * WORLD
    if WORLD > 1:
        _collective(dist.all_gather_object, things, thing)
    return things


def on_rank_0(function, *args):
    """What function(*args) returns or raises on rank 0, on every rank: for what must happen once."""
    result, problem = None, None
    if RANK == 0:
        try:
            result = function(*args)
        except (Exception, SystemExit) as caught:
            problem = caught
        if WORLD == 1 and problem is not None:
            raise problem
    result, problem = gather((result, problem))[0]
    if problem is not None:
        raise problem
    return result


def finish_gradients(parameters, max_norm):
    """When all micro-batches of an optimizer step are through: adds up the gradients of all ranks, and scales them down
    to a norm of at most `max_norm`. -> the norm before that, a float"""
    parameters = list(parameters)
    if WORLD > 1:
        used = sum_over_ranks(torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device))
        for p, ranks in zip(parameters, used.tolist()):
            if ranks:  # of some, perhaps not of this one, which then had no row
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                sum_over_ranks(p.grad)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which also serves weights in bfloat16. With 8 bits of mantissa, a weight of 1 and a step of 1e-3 make 1
    again: learning rates of post-training would do nothing. So the optimizer keeps a float32 copy of each such weight, adds
    up its gradients and takes its steps there (18 bytes per weight: 2 for itself, 4 each for copy, gradient, and Adam's two
    means; float32 weights need 16), and rounds the result into the model.

    param_groups hold the float32 tensors: clip those gradients. (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1)
    """

    def __init__(self, parameters, **options):
        groups = [dict(g) if isinstance(g, dict) else g for g in parameters]
        groups = groups if groups and isinstance(groups[0], dict) else [dict(params=groups)]
        self.rounded, self.hooks = [], []  # (weight in the model, its float32 copy)
        for group in groups:
            group["params"] = [self._float32(p) for p in group["params"]]
        super().__init__(groups, fused=True, **options)

    def _float32(self, weight):
        if weight.dtype != torch.bfloat16:
            return weight
        copy = weight.detach().float().requires_grad_()

        def move_gradient(weight):
            copy.grad = weight.grad.float() if copy.grad is None else copy.grad.add_(weight.grad)
            weight.grad = None

        self.hooks.append(weight.register_post_accumulate_grad_hook(move_gradient))
        self.rounded.append((weight, copy))
        return copy

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def close(self):
        """Leaves the weights to another optimizer."""
        for hook in self.hooks:
            hook.remove()

    @torch.no_grad()
    def step(self):
        super().step()
        for weight, copy in self.rounded:
            weight.copy_(copy)

    def state_dict(self):
        return {**super().state_dict(), "copies": [copy.detach() for _, copy in self.rounded]}

    @torch.no_grad()
    def load_state_dict(self, state):
        copies = state.get("copies", [])
        if len(copies) != len(self.rounded):
            sys.exit("the checkpoint's optimizer is of another dtype: resume with the --dtype that it was made with")
        super().load_state_dict({key: value for key, value in state.items() if key != "copies"})
        for (_, copy), saved in zip(self.rounded, copies):
            copy.copy_(saved)


def cosine_lr(step, config):
    """Learning rate of step 0, 1, ...: config.warmup steps up to config.lr, then half a cosine down to a tenth of it."""
    return config.lr * min(1.0, (step + 1) / config.warmup) * (0.55 + 0.45 * math.cos(math.pi * step / config.steps))


def settings_of(config):
    """What a reward model that is made for real data has in common with the script that needs it, as flags."""
    if config.task == "stories":
        return {}
    names = ("task", "data_dir", "chat", "dtype", "recompute", "micro_batch", "sample_rows")
    return {name: getattr(config, name) for name in names}


def next_command(script, config, path):
    """What to run after this, as a line for the shell."""
    flags = ["--init", str(path)] if config.task != "stories" or config.data else []
    flags += [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in ("task", "data", "data_dir")
              if getattr(config, name) not in ("", "stories")]  # fmt: skip
    return shlex.join(["python", f"{script}.py", *flags, *([] if config.out == "out" else ["--out", config.out])])


def file_checksum(path):
    """The beginning of the SHA-256 of a file, or of the weights and settings in a folder."""
    checksum = hashlib.sha256()
    for name in sorted(Path(path).glob("*.*")) if os.path.isdir(path) else [path]:
        if str(name).endswith((".pt", ".jsonl", ".safetensors", ".json")) or name is path:
            with open(name, "rb") as file:
                while block := file.read(1 << 24):
                    checksum.update(block)
    return checksum.hexdigest()[:16]


def load_checkpoint(path, tokenizer=None, reward_model=False):
    """The dictionary in `path`, or one line on stderr and exit code 1: missing, truncated, or not what `require_kind`
    wants."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["script"], checkpoint["config"]
    except FileNotFoundError:
        hub = "" if str(path).endswith(".pt") else "; a name on the Hugging Face hub has an owner, as in openai-community/gpt2"
        sys.exit(f"{path} does not exist{hub}")
    except Exception as problem:  # a truncated file raises whatever its first missing byte leads to
        reason = (str(problem).splitlines() or [type(problem).__name__])[0][:100]
        sys.exit(f"{path} is not a complete checkpoint of this project: {reason}")
    if tokenizer is not None:
        require_kind(path, checkpoint, tokenizer, reward_model)
    return checkpoint


def require_kind(path, checkpoint, tokenizer, reward_model=False):
    """One line on stderr and exit code 1 if a checkpoint is of another tokenizer, or a reward model where a language model
    is wanted (or the other way round)."""
    kind = checkpoint["script"]
    if checkpoint["tokenizer"] != fingerprint(tokenizer):
        sys.exit(f"{path} ({kind}) speaks tokenizer {checkpoint['tokenizer']}, this run {fingerprint(tokenizer)}")
    if (kind == "reward_model") != reward_model:
        wanted = "a reward model" if reward_model else "a language model"
        sys.exit(f"{path} was made by {kind}.py: it is not {wanted}")


def make_if_missing(script, path, config, **flags):
    """Runs `python <script>.py` for an earlier stage whose checkpoint is missing, with the seed and tokenizer of `config`
    and any other `flags`, or continues it if it was interrupted."""
    on_rank_0(_make_if_missing, script, path, config, flags)


def _make_if_missing(script, path, config, flags):
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
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    code = subprocess.run([sys.executable, Path(__file__).with_name(command[0]), *command[1:]], env=alone).returncode
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
                if now != value and name not in ("out", "device", "resume", "steps", "lr", "init", "tokenizer", "data_dir"):
                    flag = "--" + name.replace("_", "-")
                    sys.exit(f"{self.path} was made with {flag} {value}, not {now}: resume with that or start anew")
            for path, now, then in zip(inits, self.inits, self.checkpoint["inits"]):
                if now != then:
                    sys.exit(f"{path} is not what {self.path} was started from: it has changed since, or is another")
            self.step, self.seconds = self.checkpoint["step"], self.checkpoint["seconds"]
            print(f"resuming {self.path} at step {self.step} of {config.steps}")
        on_rank_0(self._prepare)
        signal.signal(signal.SIGINT, self._interrupt)
        self.clock = self.first = time.perf_counter()
        self.first_step = self.step

    def _prepare(self):
        try:
            if not self.config.resume:
                self._keep_previous()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._cut("metrics.jsonl", lambda line: json.loads(line)["step"] <= self.step)
            self._cut(
                "samples.md",
                lambda line: not (title := re.fullmatch(r"## Step (\d+)\s*", line)) or int(title[1]) <= self.step,
            )
        except OSError as problem:
            sys.exit(f"--out {self.config.out}: {problem.strerror} ({problem.filename})")

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
        if self.interrupted and WORLD == 1:  # torchrun passes on a Ctrl-C that the processes have seen already
            sys.exit(f"stopped at once. {self._holds()}: --resume goes on from there")
        self.interrupted = True
        print(f"\nCtrl-C: finishing this step, then saving{' (once more to stop at once)' * (WORLD == 1)}", flush=True)

    def restore(self, model, optimizer):
        """Puts the checkpoint's weights and optimizer state in place when resuming; returns the step to go on with."""
        if self.checkpoint:
            if type(model.config)(**self.checkpoint["model_config"]) != model.config:
                sys.exit(f"{self.path} holds another model: {self.checkpoint['model_config']}, not {model.config}")
            model.load_state_dict(self.checkpoint.pop("model"))  # and its memory is free again
            optimizer.load_state_dict(self.checkpoint.pop("optimizer"))
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
        if RANK:
            return
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
        self.interrupted = bool(sum_over_ranks(float(self.interrupted)))  # on any rank
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
            on_rank_0(self._write, path, checkpoint)
        self.step = step
        if self.interrupted:
            flags = [flag for flag in sys.argv[1:] if flag != "--resume"]
            command = shlex.join(["python", os.path.basename(sys.argv[0]), *flags, "--resume"])
            print(f"stopped; {self.path} holds step {step} of {self.config.steps}. Go on with: {command}")
            raise SystemExit(130)

    def fail(self, problem, step, model, optimizer, **more):
        """Ends a run with one line for something that is wrong outside of it: its weights are sound, and are saved."""
        self.save(step, model, optimizer, **more)
        sys.exit(f"{problem}. {self._holds()}: mend it, and --resume goes on from there")

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
        return on_rank_0(self._metrics)

    def _metrics(self):
        try:
            return [json.loads(line) for line in open(self.folder / "metrics.jsonl", encoding="utf-8")]
        except OSError as problem:
            sys.exit(f"{self.folder / 'metrics.jsonl'}: {problem.strerror}. {self._holds()}")

    def plot(self, *keys):
        """curves.png: each of `keys` over the steps, or of a tuple (x, y, ...) its others over x, if matplotlib is
        installed."""
        if RANK:
            return None
        try:
            import matplotlib
        except ImportError:
            return print("no curves.png: matplotlib is not installed (pip install matplotlib)")
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        lines = self._metrics()  # this is rank 0 alone
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
