"""Runs as a user meets them: resume after a crash at any step, Ctrl-C, bad input, a full disk. Every message is one
line, nothing is lost."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_script

import common
import dpo
import gpt
import grpo
import ppo
import reward_model
import sft
from data import get_tokenizer

resource = pytest.importorskip("resource", reason="signals and limits as on Linux and macOS")

COMMON = dict(device="cpu", evaluate=6, log_every=1)
TINY = {
    "gpt": (
        gpt,
        dict(steps=6, n_layer=1, n_embd=16, n_head=2, documents=4, micro_batch=2, save_every=2, warmup=2, **COMMON),
    ),
    "sft": (sft, dict(steps=6, examples=4, micro_batch=2, save_every=2, **COMMON)),
    "reward_model": (
        reward_model,
        dict(steps=6, pairs=40, samples=3, prompts=2, ensemble=2, eval_every=2, save_every=2, **COMMON),
    ),
    "ppo": (
        ppo,
        dict(
            steps=6,
            prompts=8,
            minibatches=2,
            epochs=2,
            micro_batch=4,
            samples=2,
            eval_every=2,
            save_every=2,
            ptx=0.1,
            ptx_documents=2,
            kl_target=0.1,
            kl_horizon=100.0,
            refresh=2,
            refresh_pairs=10,
            stop_on_gold=True,
            **COMMON,
        ),
    ),
    "dpo": (
        dpo,
        dict(
            steps=6,
            pairs=24,
            rounds=2,
            reset_reference=True,
            loss="kto",
            batch=4,
            micro_batch=4,
            eval_every=2,
            save_every=2,
            **COMMON,
        ),
    ),
    "grpo": (
        grpo,
        dict(
            steps=6,
            prompts=4,
            group_size=4,
            pass_k=2,
            save_every=2,
            eval_every=2,
            minibatches=2,
            epochs=2,
            micro_batch=4,
            **COMMON,
        ),
    ),
}
FILES = {"gpt": "base", "sft": "sft", "reward_model": "reward_model", "ppo": "ppo", "dpo": "dpo", "grpo": "grpo"}
NEEDS = {
    "gpt": (),
    "sft": ("base",),
    "reward_model": ("sft",),
    "ppo": ("sft", "reward_model"),
    "dpo": ("sft",),
    "grpo": ("sft",),
}
CLOCKS = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A folder with a finished tiny run of every script."""
    out = tmp_path_factory.mktemp("chain")
    for module, options in TINY.values():
        main(module, out, **options)
    return out


def main(module, out, **options):
    config = module.Config(out=str(out), **options)
    module.main(config)


def metrics(out, script):
    lines = [json.loads(line) for line in (out / FILES[script] / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines]


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def start_from(chain, out, script):
    """What the script needs to find in `out`."""
    out.mkdir(exist_ok=True)
    for earlier in NEEDS[script]:
        shutil.copy(chain / f"{earlier}.pt", out)
    return out


class Crash(BaseException):
    """Nothing in the scripts catches it: like a power cut."""


@pytest.mark.parametrize("script, when", [(s, k) for s in TINY for k in range(1, 7)])
def test_resume_is_bit_identical_whenever_it_died(chain, tmp_path, monkeypatch, script, when):
    module, options = TINY[script]
    out, save = start_from(chain, tmp_path, script), common.Run.save

    def dying(self, step, *args, **kw):
        if step == when:
            raise Crash
        save(self, step, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "save", dying)
        with pytest.raises(Crash):
            main(module, out, **options)
    main(module, out, resume=True, **options)
    assert metrics(out, script) == metrics(chain, script)
    a, b = weights(out / f"{FILES[script]}.pt"), weights(chain / f"{FILES[script]}.pt")
    assert all(torch.equal(a[name], b[name]) for name in b)
    if script not in ("gpt", "sft"):
        assert (out / script / "samples.md").read_text() == (chain / script / "samples.md").read_text()
    if script == "ppo":
        for name in ("value_head", "reward_model", "beta"):
            a, b = (torch.load(path / "ppo.pt", weights_only=True)[name] for path in (out, chain))
            assert a == b if name == "beta" else all(torch.equal(a[key], b[key]) for key in b)


def test_metrics_have_the_agreed_keys(chain):
    lines = metrics(chain, "grpo")
    assert [line["step"] for line in lines] == list(range(7))
    assert {"accuracy", "length", "pass@1", "pass@4"} - set(lines[0]) <= {"pass@4"}  # pass_k is 2 here
    wanted = {
        "step",
        "loss",
        "reward",
        "length",
        "kl",
        "entropy",
        "approx_kl",
        "clip_fraction",
        "zero_variance",
        "grad_norm",
        "lr",
    }
    assert all(wanted <= set(line) for line in lines[1:])
    assert [("accuracy" in line) for line in lines] == [True, False, True, False, True, False, True]
    samples = (chain / "grpo/samples.md").read_text()
    assert [f"## Step {n}" in samples for n in (0, 2, 4, 6)] == [True] * 4
    assert (chain / "grpo/curves.png").stat().st_size > 5000


def cli(script, out, resume=False):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY[script][1], "steps": 40}.items()]
    return [f"{script}.py", "--out", str(out), *flags, *(["--resume"] if resume else [])]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_resumed_for_real(chain, tmp_path, how):
    whole, killed = start_from(chain, tmp_path / "whole", "grpo"), start_from(chain, tmp_path / "killed", "grpo")
    run_script(*cli("grpo", whole), cwd=tmp_path)
    process = subprocess.Popen(
        [sys.executable, ROOT / "grpo.py", *cli("grpo", killed)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = killed / "grpo/metrics.jsonl"
    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) > 9):
        time.sleep(0.01)
    process.send_signal(how)
    text = process.communicate()[0]
    if how == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in text
        assert "Go on with: python grpo.py --out" in text and text.rstrip().endswith("--resume")
        stopped = torch.load(killed / "grpo.pt", weights_only=True)["step"]
        assert metrics(killed, "grpo")[-1]["step"] == stopped < 40
    else:
        assert process.returncode == -9
    run_script(*cli("grpo", killed, resume=True), cwd=tmp_path)
    assert metrics(killed, "grpo") == metrics(whole, "grpo")


def test_missing_stages_are_made_and_unfinished_ones_continued(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **kw: ran.append([str(c) for c in command]) or subprocess.CompletedProcess(command, 0),
    )
    config = sft.Config(out=str(tmp_path), seed=3, device="cpu")
    common.make_if_missing("gpt", str(tmp_path / "base.pt"), config)
    assert ran[0][1].endswith("gpt.py") and ran[0][2:] == ["--seed", "3", "--out", str(tmp_path), "--device", "cpu"]
    assert "is missing: running python gpt.py" in capsys.readouterr().out
    torch.save(dict(script="base", step=4, steps=10, config=dict(seed=7, n_layer=2, steps=10)), tmp_path / "base.pt")
    common.make_if_missing("gpt", str(tmp_path / "base.pt"), config)
    flags = ["--seed", "7", "--n-layer", "2", "--steps", "10", "--out", str(tmp_path), "--device", "cpu", "--resume"]
    assert ran[1][2:] == flags  # with the settings it was started with
    assert "stopped at step 4 of 10" in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", lambda command, **kw: subprocess.CompletedProcess(command, 130))
    with pytest.raises(SystemExit) as stop:
        common.make_if_missing("gpt", str(tmp_path / "base.pt"), config)
    assert stop.value.code == 130


def test_an_earlier_run_is_kept(chain, tmp_path, capsys):
    out = start_from(chain, tmp_path, "sft")
    module, options = TINY["sft"]
    main(module, out, **options)
    first = (out / "sft.pt").read_bytes()
    main(module, out, **{**options, "seed": 1})
    assert (out / "sft.previous.pt").read_bytes() == first and (out / "sft.previous/metrics.jsonl").exists()
    assert "kept as" in capsys.readouterr().out


# ---- bad input


@pytest.mark.parametrize(
    "module, flags, words",
    [
        (grpo, ["--stpes", "5"], ["--stpes", "did you mean --steps?"]),
        (grpo, ["--steps", "many"], ["--steps", "many"]),
        (grpo, ["--steps", "0"], ["--steps 0"]),
        (grpo, ["--variant", "ppo"], ["--variant", "ppo", "dr_grpo"]),
        (grpo, ["--kl", "k4"], ["--kl", "k4"]),
        (grpo, ["--group-size", "1"], ["--group-size 1"]),
        (grpo, ["--group-size", "1", "--variant", "rloo"], ["--group-size 1"]),
        (grpo, ["--group-size", "1", "--scale", "none"], ["--group-size 1"]),
        (grpo, ["--beta", "-1"], ["--beta -1"]),
        (grpo, ["--temperature", "0"], ["--temperature 0"]),
        (grpo, ["--minibatches", "64"], ["--minibatches 64"]),
        (grpo, ["--tokenizer", "klingon"], ["klingon"]),
        (grpo, ["--device", "cuda:9"], ["--device cuda:9"]),
        (grpo, ["--device", "quantum"], ["--device quantum"]),
        (gpt, ["--n-embd", "30"], ["--n-embd 30", "--n-head 4"]),
        (gpt, ["--lr", "0"], ["--lr 0"]),
        (sft, ["--examples", "0"], ["--examples 0"]),
        (reward_model, ["--judge", "random"], ["--judge", "random", "noisy"]),
        (reward_model, ["--pairs", "0"], ["--pairs 0"]),
        (reward_model, ["--samples", "1"], ["--samples 1"]),
        (ppo, ["--beta", "-1"], ["--beta -1"]),
        (ppo, ["--lam", "1.5"], ["--lam 1.5"]),
        (ppo, ["--kl-target", "6", "--beta", "0"], ["--kl-target 6", "--beta"]),
        (ppo, ["--kl-target", "6", "--kl-horizon", "20"], ["--kl-horizon 20", "--prompts 128"]),
        (reward_model, ["--steps", "-5"], ["--steps -5"]),
        (reward_model, ["--centering", "-1"], ["--centering -1"]),
        (ppo, ["--clip", "0"], ["--clip 0"]),
        (ppo, ["--dual-clip", "0.5"], ["--dual-clip 0.5"]),
        (ppo, ["--minibatches", "999"], ["--minibatches 999", "--prompts 128"]),
        (ppo, ["--combine", "median"], ["--combine", "median"]),
        (dpo, ["--loss", "dpoo"], ["--loss", "dpoo", "simpo"]),
        (dpo, ["--beta", "0"], ["--beta 0"]),
        (dpo, ["--label-smoothing", "0.5"], ["--label-smoothing 0.5"]),
        (dpo, ["--samples", "1"], ["--samples 1"]),
        (dpo, ["--samples", "4", "--judge", "self"], ["--samples 4", "--judge self"]),
        (dpo, ["--rounds", "2", "--data", "pairs.jsonl"], ["--rounds 2", "--data"]),
        (dpo, ["--rounds", "9", "--pairs", "8"], ["--rounds 9", "--pairs 8"]),
        (dpo, ["--compare", "--resume"], ["--resume", "--compare"]),
        (dpo, ["--compare", "--beta", "0.3"], ["--beta", "--compare"]),
        (dpo, ["--seeds", "3"], ["--seeds 3", "--compare"]),
        (dpo, ["--compare", "--loss", "ipo"], ["--loss", "--compare"]),
        (dpo, ["--steps", "-1"], ["--steps -1"]),
    ],
)
def test_bad_flags(capsys, module, flags, words):
    with pytest.raises(SystemExit) as stop:
        common.parse(module.Config, "", flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and all(word in error for word in words)


@pytest.mark.parametrize(
    "choice, words", [("cuda", "KERNELS=cuda: must be torch or triton"), ("triton", "KERNELS=triton")]
)
def test_bad_environment(capsys, monkeypatch, choice, words):
    """Before any work starts, in one line."""
    monkeypatch.setenv("KERNELS", choice)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stop:
        common.parse(gpt.Config, "", ["--device", "cpu"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and words in error


def test_the_reference_of_a_resumed_run_is_the_same(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    module, options = TINY["grpo"]
    stops(lambda: main(module, out, init=str(out / "grpo.pt"), **options), "--init", out / "grpo.pt", "overwrite")
    checkpoint = torch.load(out / "sft.pt", weights_only=True)
    torch.save({**checkpoint, "step": 7}, out / "sft.pt")
    stops(lambda: main(module, out, resume=True, **options), out / "sft.pt", "has changed")


def test_the_reward_model_of_a_resumed_run_is_the_same(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    module, options = TINY["ppo"]
    checkpoint = torch.load(out / "reward_model.pt", weights_only=True)
    torch.save({**checkpoint, "step": 7}, out / "reward_model.pt")
    stops(lambda: main(module, out, resume=True, **options), out / "reward_model.pt", "has changed")


def test_the_comparisons_of_a_resumed_run_are_the_same(chain, tmp_path):
    out, data = start_from(chain, tmp_path / "run", "reward_model"), tmp_path / "pairs.jsonl"
    rows = [json.dumps(dict(prompt=f"{i}", chosen="a", rejected="b")) for i in range(40)]
    data.write_text("\n".join(rows))
    module, options = TINY["reward_model"]
    main(module, out, data=str(data), **options)
    data.write_text("\n".join(rows[1:]))
    stops(lambda: main(module, out, data=str(data), resume=True, **{**options, "steps": 8}), data, "has changed")


def test_rounds_of_a_resumed_run_end_where_they_did(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    module, options = TINY["dpo"]
    stops(lambda: main(module, out, resume=True, **{**options, "steps": 12}), out / "dpo.pt", "--steps 6", "round")


def pairs_file(path, n=40, single=False, **more):
    """Answers that are worth something and answers that are not, to n prompts; or as single responses with a label."""
    rows = [dict(prompt=f"How many? {i}", chosen=" #### 1", rejected=" #### 20", **more) for i in range(n)]
    if single:
        rows = [
            dict(prompt=row["prompt"], response=row[key], label=key == "chosen")
            for row in rows
            for key in ("chosen", "rejected")
        ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "loss, single", [("dpo", False), ("cdpo", False), ("kto", False), ("kto", True), ("orpo", False)]
)
def test_dpo_learns_from_a_file_and_resumes(chain, tmp_path, loss, single):
    """Pairs or single labels: the good answer becomes the likelier one, on held-out prompts; a run that was interrupted
    goes on with the same numbers."""
    data = pairs_file(tmp_path / "labels.jsonl", single=single)
    options = dict(init=str(chain / "sft.pt"), data=data, loss=loss, steps=12, batch=8, lr=3e-3, warmup=2, save_every=1, device="cpu", evaluate=6,
                   log_every=1, eval_every=3)  # fmt: skip
    main(dpo, tmp_path / "whole", **options)
    lines = metrics(tmp_path / "whole", "dpo")
    gap = lambda line: line["chosen_logp"] - line["rejected_logp"]  # noqa: E731
    assert gap(lines[-1]) > gap(lines[0]) + 0.5
    assert ("preference_accuracy" in lines[-1]) == ("margin" in lines[-1]) == (not single)
    assert not (tmp_path / "whole/dpo/preferences.jsonl").exists()  # they are in the user's file
    main(dpo, tmp_path / "half", **options)
    shutil.rmtree(tmp_path / "half")
    with pytest.MonkeyPatch.context() as patch:
        save = common.Run.save

        def dying(self, step, *args, **kw):
            save(self, step, *args, **kw)
            if step == 5:
                raise Crash

        patch.setattr(common.Run, "save", dying)
        with pytest.raises(Crash):
            main(dpo, tmp_path / "half", **options)
    main(dpo, tmp_path / "half", resume=True, **options)
    assert metrics(tmp_path / "half", "dpo") == lines


def test_what_dpo_says_of_a_file(chain, tmp_path, capsys):
    """What is dropped is counted, what is not used is named, what does not fit the loss ends the run in one line."""
    options = dict(init=str(chain / "sft.pt"), steps=1, device="cpu", evaluate=6)
    data = tmp_path / "pairs.jsonl"
    pairs_file(data, probability=0.8, margin=0.5)
    same = json.dumps(dict(prompt="one", chosen="a", rejected="a"))
    long = json.dumps(dict(prompt="two", chosen=" otter" * 60, rejected="a"))
    data.write_text(data.read_text() + "\n" + "\n".join([same, long] * 20))
    main(dpo, tmp_path, data=str(data), **options)
    printed = capsys.readouterr().out
    assert "has probability and margin: only --loss cdpo uses a probability, no loss a margin" in printed
    kept, equal, long = map(
        int, re.search(r"round 1 of 1: (\d+) pairs; dropped: (\d+) equal, (\d+) too long", printed).groups()
    )
    assert 30 <= kept <= 40 and equal in (0, 20) and long in (0, 20)
    single = pairs_file(tmp_path / "single.jsonl", single=True)
    stops(lambda: main(dpo, tmp_path / "x", data=single, **options), single, "--loss kto")
    (tmp_path / "useless.jsonl").write_text("\n".join([same, long if isinstance(long, str) else same] * 20))
    useless = str(tmp_path / "useless.jsonl")
    stops(lambda: main(dpo, tmp_path / "x", data=useless, **options), useless, "nothing to learn from")
    (tmp_path / "mixed.jsonl").write_text(open(single).read() + "\n" + same)
    stops(
        lambda: main(dpo, tmp_path / "x", data=str(tmp_path / "mixed.jsonl"), **options),
        "mixed.jsonl, line 81",
        "use two files",
    )
    (tmp_path / "label.jsonl").write_text(json.dumps(dict(prompt="a", response="b", label=1)))
    stops(
        lambda: main(dpo, tmp_path / "x", data=str(tmp_path / "label.jsonl"), loss="kto", **options),
        "line 1",
        '"label" is 1',
        "true or false",
    )
    bad = [json.dumps(dict(prompt=f"{i}", response="b", label=False)) for i in range(30)]
    (tmp_path / "bad.jsonl").write_text("\n".join(bad))
    stops(
        lambda: main(dpo, tmp_path / "x", data=str(tmp_path / "bad.jsonl"), loss="kto", **options),
        "all labels are False",
    )
    two = [json.dumps(dict(prompt=f"{i % 2}", chosen="b", rejected="c")) for i in range(30)]
    (tmp_path / "two.jsonl").write_text("\n".join(two))
    stops(lambda: main(dpo, tmp_path / "x", data=str(tmp_path / "two.jsonl"), loss="kto", **options), "several prompts")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("judge", ["self", "reward_model"])
def test_dpo_with_other_judges(chain, tmp_path, capsys, judge):
    out = start_from(chain, tmp_path, "ppo")  # with sft.pt and reward_model.pt
    main(dpo, out, judge=judge, steps=2, pairs=30, batch=8, device="cpu", evaluate=12)
    rows = [json.loads(line) for line in (out / "dpo/preferences.jsonl").read_text().splitlines()]
    printed = capsys.readouterr().out
    if judge == "self":
        assert "the model as judge sides with gold in" in printed and "position bias" in printed
        for row in rows:
            assert (
                row["probability"] == pytest.approx((row["asked"][0] + 1 - row["asked"][1]) / 2)
                and row["probability"] >= 0.5
            )
    else:
        model = reward_model.RewardModel(
            gpt.GPTConfig(**torch.load(out / "reward_model.pt", weights_only=True)["model_config"]), 2
        )
        model.load_state_dict(weights(out / "reward_model.pt"))
        tokenizer = get_tokenizer()
        for row in rows[:10]:
            reward = {}
            for key in ("chosen", "rejected"):
                ids = torch.tensor(
                    [
                        [
                            *map(int, tokenizer.encode_ordinary(row["prompt"]) + tokenizer.encode_ordinary(row[key])),
                            tokenizer.eot_token,
                        ]
                    ]
                )
                reward[key] = model(ids[:, :48], torch.ones_like(ids[:, :48])).mean().item()
            assert reward["chosen"] > reward["rejected"]
        checkpoint = torch.load(out / "reward_model.pt", weights_only=True)
        torch.save({**checkpoint, "step": 5}, out / "reward_model.pt")
        options = dict(judge=judge, reward_model=str(out / "reward_model.pt"), device="cpu")
        stops(lambda: main(dpo, out, **options), "stopped at step 5 of 6")


def test_what_a_run_would_move_away_is_not_what_it_starts_from(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    own = str(out / "reward_model/preferences.jsonl")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    stops(lambda: main(reward_model, out, data=own, **TINY["reward_model"][1]), own, "copy it first")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_reward_model_is_no_language_model(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    reward, language = str(out / "reward_model.pt"), str(out / "sft.pt")
    for script in ("sft", "reward_model", "ppo", "dpo", "grpo"):
        module, options = TINY[script]
        stops(lambda: main(module, out, init=reward, **options), reward, "not a language model")  # noqa: B023
    module, options = TINY["ppo"]
    stops(lambda: main(module, out, reward_model=language, **options), language, "not a reward model")


def test_a_start_that_fails_displaces_nothing(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    module, options = TINY["grpo"]
    for _ in range(2):
        stops(lambda: main(module, out, max_new_tokens=40, **options), "--max-new-tokens 40")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    stops(lambda: main(module, "/proc/nope", init=str(chain / "sft.pt"), **options), "--out")


def test_dynamic_sampling_that_finds_nothing(chain, tmp_path, monkeypatch):
    """Every group fails: no update, no crash, and no made-up statistics in the log."""
    out = start_from(chain, tmp_path, "grpo")
    monkeypatch.setattr("data.evaluation.accuracy_reward", lambda *_: 0.0)
    main(grpo, out, variant="dapo", **TINY["grpo"][1])
    for line in metrics(out, "grpo")[1:]:
        assert line["zero_variance"] == 1.0 and line["reward"] == 0.0 and "loss" not in line and "kl" not in line
    before, after = weights(out / "sft.pt"), weights(out / "grpo.pt")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_flags_override_the_variant():
    config = common.parse(grpo.Config, "", ["--variant", "dapo", "--clip-high", "0.5", "--no-dynamic-sampling"])
    assert (config.clip_low, config.clip_high, config.dynamic_sampling, config.overlong_buffer, config.beta) == (
        0.2,
        0.5,
        False,
        4,
        0.0,
    )


def test_help_names_every_flag_and_the_exit_code_is_right(tmp_path):
    for script, (module, _) in TINY.items():
        text = run_script(f"{script}.py", "--help", cwd=tmp_path).stdout
        for name in module.Config.__dataclass_fields__:
            assert "--" + name.replace("_", "-") in text
        silent = re.findall(r"^  (--\S+)(?: \S+)?$(?!\n {10,}\S)", text, re.MULTILINE)
        assert not silent  # there is a word about each
    done = run_script("grpo.py", "--nonsense", cwd=tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def stops(call, *words):
    """call() ends the program with one line that has all of `words`."""
    with pytest.raises(SystemExit) as stop:
        call()
    assert (
        isinstance(stop.value.code, str) and "\n" not in stop.value.code
    )  # a text is printed on stderr, and the exit code is 1
    assert all(str(word) in stop.value.code for word in words), stop.value.code


def test_bad_checkpoints(chain, tmp_path):
    module, options = TINY["grpo"]
    missing = str(tmp_path / "nothing.pt")
    stops(lambda: main(module, tmp_path, init=missing, **options), missing, "does not exist")
    stops(
        lambda: main(module, tmp_path, resume=True, init=str(chain / "sft.pt"), **options),
        tmp_path / "grpo.pt",
        "does not exist",
    )
    whole = (chain / "sft.pt").read_bytes()
    for n in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.pt").write_bytes(whole[:n])
        stops(
            lambda: main(module, tmp_path, init=str(tmp_path / "cut.pt"), **options),
            tmp_path / "cut.pt",
            "not a complete checkpoint",
        )
    (tmp_path / "text.pt").write_text("hello")
    stops(lambda: main(module, tmp_path, init=str(tmp_path / "text.pt"), **options), tmp_path / "text.pt")
    assert not (tmp_path / "grpo.pt").exists()


def test_another_tokenizer_or_configuration(chain, tmp_path):
    module, options = TINY["grpo"]
    checkpoint = torch.load(chain / "sft.pt", weights_only=True)
    torch.save({**checkpoint, "tokenizer": "gpt2:50257:0123456789ab"}, tmp_path / "other.pt")
    stops(
        lambda: main(module, tmp_path, init=str(tmp_path / "other.pt"), **options),
        tmp_path / "other.pt",
        "gpt2:50257",
        "stories",
    )
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    before = (out / "grpo.pt").read_bytes()
    stops(lambda: main(module, out, resume=True, **{**options, "prompts": 3}), "--prompts", "3", out / "grpo.pt")
    stops(lambda: main(module, out, resume=True, **{**options, "seed": 4}), "--seed", "4")
    stops(lambda: main(gpt, out, resume=True, **{**TINY["gpt"][1], "n_layer": 2}), "--n-layer", "2")
    assert (out / "grpo.pt").read_bytes() == before and metrics(out, "grpo") == metrics(chain, "grpo")


def test_a_longer_run_may_resume_a_shorter_one(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    module, options = TINY["grpo"]
    main(module, out, resume=True, **{**options, "steps": 8})
    assert metrics(out, "grpo")[:7] == metrics(chain, "grpo") and len(metrics(out, "grpo")) == 9


def test_prompt_longer_than_the_context(chain, tmp_path):
    module, options = TINY["grpo"]
    stops(
        lambda: main(module, start_from(chain, tmp_path, "grpo"), max_new_tokens=40, **options),
        "--max-new-tokens 40",
        "context of 48",
    )
    stops(lambda: main(gpt, tmp_path / "b", context=20, **TINY["gpt"][1]), "context")


@pytest.mark.parametrize("script", TINY)
def test_not_finite(chain, tmp_path, monkeypatch, script):
    """A NaN stops the run before it reaches the weights; the checkpoint before it stays and can be resumed."""
    module, options = TINY[script]
    out = start_from(chain, tmp_path, script)
    if script in ("grpo", "ppo"):
        plain, count = module.policy_loss, []

        def poisoned(*args, **kw):
            loss, stats = plain(*args, **kw)
            count.append(1)
            return (loss * float("nan") if len(count) > {"grpo": 25, "ppo": 12}[script] else loss), stats

        monkeypatch.setattr(module, "policy_loss", poisoned)
    elif script == "dpo":
        plain, update, count = dpo.preference_loss, dpo.update, []
        monkeypatch.setattr(dpo, "update", lambda *args: count.append(1) or update(*args))

        def poisoned_pairs(*args, **kw):
            losses, *rewards = plain(*args, **kw)
            return (losses * float("nan") if len(count) > 3 else losses), *rewards

        monkeypatch.setattr(dpo, "preference_loss", poisoned_pairs)
    elif script == "reward_model":
        plain, count = reward_model.bradley_terry_loss, []
        monkeypatch.setattr(
            reward_model,
            "bradley_terry_loss",
            lambda *args: plain(*args) * (float("nan") if count.append(1) or len(count) > 6 else 1),
        )
    else:
        plain, count = gpt.GPT.token_logprobs, []
        monkeypatch.setattr(
            gpt.GPT,
            "token_logprobs",
            lambda *args: plain(*args) * (float("nan") if count.append(1) or len(count) > 7 else 1),
        )
    path = out / f"{FILES[script]}.pt"
    stops(lambda: main(module, out, **options), "step 4", "loss is nan", path, "holds step 2")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["step"] == 2 and all(w.isfinite().all() for w in checkpoint["model"].values())
    monkeypatch.undo()
    main(module, out, resume=True, **options)
    assert metrics(out, script) == metrics(chain, script)


def test_full_disk_simulated(chain, tmp_path, monkeypatch):
    module, options = TINY["sft"]
    out, calls = start_from(chain, tmp_path, "sft"), []

    def full(*args):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    stops(lambda: main(module, out, **options), "could not save", "No space left on device", "holds step 2")
    assert torch.load(out / "sft.pt", weights_only=True)["step"] == 2 and not list(out.glob("*.tmp"))
    monkeypatch.undo()
    main(module, out, resume=True, **options)
    assert metrics(out, "sft") == metrics(chain, "sft")


def test_full_disk_for_real(chain, tmp_path):
    """The write itself fails: the process may not write files beyond 20 kB."""
    out = start_from(chain, tmp_path, "sft")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    done = run_script(*cli("sft", out), cwd=tmp_path, check=False, preexec_fn=limit)
    assert (
        done.returncode == 1
        and "could not save" in done.stderr
        and "No step is saved yet" in done.stderr
        and done.stderr.count("\n") == 1
    )
    assert not (out / "sft.pt").exists() and not list(out.glob("*.tmp"))


def test_half_a_line_of_metrics_is_dropped(chain, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(chain, out)
    log = out / "sft/metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 7, "lo')
    module, options = TINY["sft"]
    main(module, out, resume=True, **{**options, "steps": 7})
    assert [line["step"] for line in metrics(out, "sft")] == list(range(8))


def test_checkpoints_need_no_pickle(chain):
    for name in FILES.values():
        checkpoint = torch.load(chain / f"{name}.pt", weights_only=True)
        assert {"model", "optimizer", "step", "steps", "config", "model_config", "tokenizer"} <= set(checkpoint)
        assert checkpoint["tokenizer"] == common.fingerprint(get_tokenizer())
