"""Several processes under torchrun, on the CPU with gloo: the same gradients as one process, one log, a clean end when one
of them dies."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

pytest.importorskip("torch.distributed.run")

# What a process runs: scripts, whose gradients of every optimizer step rank 0 writes down when they are complete. All
# processes sample the whole batch, from the same random numbers as a single one would.
WORKER = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
import common, data.tasks, gpt
how, jobs = sys.argv[1], json.loads(sys.argv[2])
gpt.GPT.generate = lambda self, prompts, n, temperature=1.0, top_k=None, eos=None, generator=None: self._generate(
    prompts, n, temperature, top_k, eos, generator)
seen, plain = [], common.finish_gradients

def finish(parameters, max_norm):
    parameters = list(parameters)
    norm = plain(parameters, 1e9)  # not clipped
    seen.append([p.grad.clone() for p in parameters])
    if how == "dies" and common.RANK == 1 and len(seen) == 5:
        os._exit(9)
    return norm

def score(problems, groups):
    if how == "fails":
        raise data.tasks.RewardError("--reward mine.py:score failed on line 7 of mine.jsonl: KeyError: 'x'")
    return [[float(len(t) % 3) for t in texts] for texts in groups]  # an untrained model is never right

common.finish_gradients = finish
for name, path, *flags in jobs:
    seen.clear()
    module = __import__(name)
    if name == "grpo":
        module.get_reward = lambda *args: score
    module.main(common.parse(module.Config, "", flags))
    if common.RANK == 0:
        torch.save(seen, path)
"""


def run(folder, ranks, how, jobs, check=True):
    """jobs: (script, file for its gradients, *flags)"""
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    command += [str(folder / "worker.py"), how, json.dumps([[*job, "--device", "cpu"] for job in jobs])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, env=environment)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


BASE = "--steps 2 --n-layer 1 --n-embd 16 --n-head 2 --documents 7 --micro-batch 3 --evaluate 4".split()
STAGES = {  # rows that cannot be dealt out evenly, micro-batches of unequal length
    "gpt": BASE,
    "sft": "--steps 2 --examples 7 --micro-batch 3 --evaluate 4".split(),
    "reward_model": "--steps 2 --pairs 20 --evaluate 8 --prompts 3 --micro-batch 4 --ensemble 2".split(),
    "ppo": "--steps 2 --prompts 7 --minibatches 2 --micro-batch 3 --evaluate 4 --samples 1 --whiten-rewards --ptx 0.1 "
    "--ptx-documents 3".split(),
    "dpo": "--steps 2 --pairs 20 --evaluate 8 --batch 5 --micro-batch 4 --loss rpo".split(),
    "grpo": "--steps 2 --prompts 3 --group-size 3 --minibatches 1 --micro-batch 4 --evaluate 4 --pass-k 1 --kl reward "
    "--aggregate token --baseline leave_one_out".split(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every script in one process, and from the same checkpoints in two."""
    folder = tmp_path_factory.mktemp("ranks")
    run(folder, 1, "", [(name, f"{name}-1", *flags, "--out", "one") for name, flags in STAGES.items()])
    jobs = []
    for name, flags in STAGES.items():
        inits = {"gpt": [], "sft": ["--init", "one/base.pt"]}.get(name, ["--init", "one/sft.pt"])
        inits += ["--reward-model", "one/reward_model.pt"] if name == "ppo" else []
        jobs.append((name, f"{name}-2", *flags, *inits, "--out", "two"))
    assert run(folder, 2, "", jobs).stdout.count("2 processes share the work") == 1
    return folder


@pytest.mark.parametrize("name", STAGES)
def test_same_gradients_as_one_process(folder, name):
    expected, found = (torch.load(folder / f"{name}-{ranks}") for ranks in (1, 2))
    assert len(found) == len(expected) >= 2
    for a, b in zip(found[0], expected[0]):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert max(g.abs().max() for g in expected[0]) > 1e-3  # there is something to compare
    # the steps taken with them: Adam divides by tiny numbers, so later ones agree less closely
    for a, b in zip(found[-1], expected[-1]):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)
    # one log, by one process, with the numbers of the whole batch
    script = {"gpt": "base"}.get(name, name)
    logs = [[json.loads(x) for x in open(folder / out / script / "metrics.jsonl")] for out in ("one", "two")]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]
    for one, two in zip(*logs):
        assert one.keys() == two.keys()
        for key in {"loss", "grad_norm", "kl", "entropy", "reward", "margin", "value_loss", "ptx_loss"} & one.keys():
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-4), key


def test_sampling_is_shared(folder, tmp_path):
    """Greedy responses are those of one process; sampled ones differ between equal prompts of different processes, and all
    processes have the same in the end."""
    (tmp_path / "worker.py").write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch, common, gpt
from dataclasses import dataclass
@dataclass
class Config:
    device: str = "cpu"
    tokenizer: str = ""
common.parse(Config, "", [])
saved = common.load_checkpoint({str(folder / "one/sft.pt")!r})
model = gpt.GPT(gpt.GPTConfig(**saved["model_config"]))
model.load_state_dict(saved["model"])
prompts = [[1, 2, 3]] * 3 + [[7, 8]] * 4
draw = lambda count, n, t: model.generate(prompts[:count], n, t, eos=5, generator=torch.Generator().manual_seed(3))
greedy, alone = draw(7, 9, 0), model._generate(prompts, 9, 0, None, 5, None)
assert all(torch.equal(getattr(greedy, k), getattr(alone, k)) for k in ("ids", "mask", "positions", "attention_mask"))
sampled, few = draw(7, 20, 1.0), draw(1, 4, 1.0)  # fewer prompts than processes
both = common.gather((sampled, few))
for part in range(2):
    for k in ("ids", "mask", "logp"):
        assert torch.equal(getattr(both[0][part], k), getattr(both[1][part], k))
rows = [tuple(row.tolist()) for row in sampled.ids]
assert len(set(rows)) == 7, rows
print("checked")
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", tmp_path / "worker.py"]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("checked") == 1, done.stdout + done.stderr


def test_a_process_that_dies(folder):
    """The others stop with one line, and the checkpoint is whole: all go on from there."""
    flags = [*STAGES["sft"], "--steps", "8", "--save-every", "2", "--init", "one/base.pt", "--out", "dead"]
    done = run(folder, 2, "dies", [("sft", "dead-1", *flags)], check=False)
    assert done.returncode != 0
    assert "rank 0: another process of this run has died; --resume" in done.stderr
    assert "common.py" not in done.stderr  # no traceback of ours
    assert torch.load(folder / "dead" / "sft.pt")["step"] == 4
    done = run(folder, 2, "", [("sft", "dead-2", *flags, "--resume")])
    assert "at step 4 of 8" in done.stdout and torch.load(folder / "dead" / "sft.pt")["step"] == 8


def test_a_reward_that_fails(folder):
    """It is asked in one process; all of them stop, and what was learned is saved."""
    job = ("grpo", "failed", *STAGES["grpo"], "--init", "one/sft.pt", "--out", "failed")
    done = run(folder, 2, "fails", [job], check=False)
    assert done.returncode != 0 and "line 7 of mine.jsonl" in done.stderr and "--resume goes on" in done.stderr
    assert torch.load(folder / "failed" / "grpo.pt")["step"] == 0
