"""Shared by all tests: the numeric cases, small models, a toy world, and a way to run a script as a user would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the kernels are tested
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels then run on the CPU, slowly
if "PYTEST_XDIST_WORKER" in os.environ:  # two of them side by side: one thread each, and for what they start
    os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))

CASES = {case["name"]: case for case in json.loads((ROOT / "tests/vectors.json").read_text())}
BUGS = {bug["id"]: bug for bug in json.loads((ROOT / "tests/bugs_public.json").read_text())}


def tensor(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def close(actual, expected, atol=1e-6):
    actual = actual if isinstance(actual, torch.Tensor) else torch.tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), tensor(expected).double(), rtol=0, atol=atol)


def run_script(script, *flags, cwd, check=True, **kwargs):
    """python <script> flags, in the folder cwd; returns the finished process with its output as text."""
    done = subprocess.run(
        [sys.executable, ROOT / script, *map(str, flags)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def tiny_model():
    from gpt import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=61, context=40, n_layer=2, n_head=2, n_embd=32))
