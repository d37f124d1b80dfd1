"""The estimate of --estimate against the peak that runs of small models have on the CPU."""

import itertools
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import memory
from gpt import GPT, GPTConfig
from pretrained import write_folder

pytest.importorskip("safetensors")
if not os.path.exists("/proc/self/clear_refs"):
    pytest.skip("the peak memory of a process is read as Linux says it", allow_module_level=True)

SMALL = {
    "gpt2": GPTConfig(4096, 256, 8, 4, 256),
    "qwen2": GPTConfig(4096, 256, 8, 4, 256, n_kv_head=2, n_inner=1024, mlp="swiglu", norm="rms", rope_theta=1e4, bias=False),
    "qwen3": GPTConfig(8192, 256, 6, 4, 256, n_kv_head=1, head_dim=128, n_inner=640, mlp="swiglu", norm="rms", rope_theta=1e4,
                       bias=False, qkv_bias=False, qk_norm=True, tied=False),
}  # fmt: skip
TINY = GPTConfig(512, 256, 1, 1, 8)
PROMPT = 80
# The peak of the process, less what it had after a run of a tiny model, which loads all libraries. Large blocks go back to
# the system at once.
WORKER = f"""
import gc, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
import common
module, status = __import__(sys.argv[1]), lambda key: int(open("/proc/self/status").read().split(key + ":")[1].split()[0])
for model in ("tiny", "model"):
    config = common.parse(module.Config, "", real=module.REAL, argv=[*sys.argv[2:], "--init", model, "--out", model + ".out"])
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    module.main(config)
print("PEAK", (status("VmHWM") - before) * 1024)
"""
RUNS = {
    "sft": "--steps 2 --examples 24 --micro-batch 12 --evaluate 4 --max-new-tokens 60",
    "grpo": "--steps 2 --prompts 8 --group-size 2 --minibatches 1 --micro-batch 8 --evaluate 4 --pass-k 1 --max-new-tokens 120 "
    "--sample-rows 16",
    "ppo": "--steps 2 --prompts 16 --minibatches 1 --micro-batch 8 --evaluate 4 --reward verifier --max-new-tokens 120 "
    "--sample-rows 16",
    "dpo": "--steps 2 --batch 16 --micro-batch 16 --evaluate 4 --max-new-tokens 60 --sample-rows 4",
    "reward_model": "--steps 2 --prompts 8 --micro-batch 8 --evaluate 4 --max-new-tokens 60 --sample-rows 4",
}


def files(folder):
    """Rows whose prompts have PROMPT tokens of the stories' vocabulary, and responses of 120 (60 in pairs)."""
    rng = random.Random(0)
    digits = lambda n: "".join(rng.choice("abcdefghij") + "?" for _ in range(n // 2))  # noqa: E731
    rows = [dict(prompt=digits(PROMPT), answer="7", response=digits(120)) for _ in range(40)]
    pairs = [dict(prompt=row["prompt"], chosen=digits(60), rejected=digits(60)) for row in rows]
    for name, lines in (("rows.jsonl", rows), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


RARELY = pytest.mark.skipif(not os.environ.get("SLOW"), reason="SLOW=1 in the environment runs all thirty, half an hour")
ALWAYS = [("sft", "gpt2", False), ("grpo", "qwen2", False), ("ppo", "qwen3", True)]
CASES = [(script, name, recompute) for script in RUNS for name in SMALL for recompute in (False, True)]


@pytest.mark.parametrize(
    "script, name, recompute", [case if case in ALWAYS else pytest.param(*case, marks=RARELY) for case in CASES]
)
def test_the_estimate_is_what_a_run_takes(tmp_path, script, name, recompute):
    files(tmp_path)
    torch.manual_seed(0)
    write_folder(GPT(SMALL[name]), "", 0, tmp_path / "model")
    write_folder(GPT(TINY), "", 0, tmp_path / "tiny")
    (tmp_path / "worker.py").write_text(WORKER)
    flags = [*RUNS[script].split(), "--tokenizer", "stories", *(["--recompute"] if recompute else [])]
    flags += ["--data", "pairs.jsonl" if script in ("dpo", "reward_model") else "rows.jsonl", "--device", "cpu"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "worker.py", script, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = int(done.stdout.split("PEAK")[1])
    module = __import__(script)
    config = module.Config(**{**module.REAL, **parsed(flags)})
    load = memory.load_of(script, config, PROMPT)
    if script in ("sft", "dpo", "reward_model"):
        load.response = 121 if script == "sft" else 61  # of the file, with its end
    found = memory.estimate(SMALL[name], load, recompute=recompute)
    print(script, name, recompute, f"measured {measured / 1e6:.0f} MB, estimated {found['peak'] / 1e6:.0f}",
          {key: round(value / 1e6) for key, value in found.items()})  # fmt: skip
    assert measured == pytest.approx(found["peak"], rel=0.15)


def parsed(flags):
    """The flags that matter to the estimate, as fields."""
    pairs = dict(itertools.pairwise(flags))
    names = ("micro_batch", "prompts", "group_size", "max_new_tokens", "sample_rows", "evaluate", "reward")
    given = {name: pairs.get("--" + name.replace("_", "-")) for name in names}
    return {name: int(value) if value.isdigit() else value for name, value in given.items() if value is not None}


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_counted_exactly(name):
    model = GPT(SMALL[name])
    assert memory.parameters(SMALL[name]) == sum(p.numel() for p in model.parameters())


def test_known_models_have_their_published_sizes():
    """GPT-2's 124 M; Qwen2.5's 0.49 B and 1.54 B (model cards)."""
    sizes = {name: memory.parameters(c) / 1e9 for name, c in memory.KNOWN.items()}
    assert sizes["GPT-2 124M"] == pytest.approx(0.124, abs=0.001)
    assert sizes["Qwen2.5-0.5B"] == pytest.approx(0.49, abs=0.005)
    assert sizes["Qwen2.5-1.5B"] == pytest.approx(1.54, abs=0.005)
