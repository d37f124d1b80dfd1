"""The scripts on real input: GSM8K's text, GPT-2's vocabulary, a small random GPT-2 folder; a user's own files, chats and
rewards; bfloat16. Sizes are tiny: what is tested is that everything fits together, and that the loss falls."""

import copy
import dataclasses
import json
import os

import pytest
import torch
from conftest import ROOT

import common
import dpo
import gpt
import grpo
import ppo
import pretrained
import reward_model
import sft
from data import get_tokenizer, preferences
from data.tokenizer import to_tokenizer_json

pytest.importorskip("safetensors")
SHARED = ROOT.parent / "shared/data"
GSM8K = SHARED / "gsm8k"
SMALL = dict(evaluate=6, max_new_tokens=12, device="cpu", log_every=1, micro_batch=4)


def gpt2_tokenizer(monkeypatch):
    if (SHARED / "tiktoken_cache").exists():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    try:
        return get_tokenizer("r50k_base")
    except ValueError as problem:
        pytest.skip(f"GPT-2's vocabulary is not here: {problem}")


def write_model(folder, tokenizer, context=1024, **options):
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(tokenizer.n_vocab, context, 1, 2, 32, **options))
    for p in model.parameters():  # as GPT-2 starts
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.02)
    pretrained.write_folder(model, to_tokenizer_json(tokenizer), tokenizer.eot_token, folder)
    return folder


def config_of(module, **options):
    """As the command line would make it: with the defaults for real data."""
    flags = []
    for name, value in {**SMALL, **options}.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return common.parse(module.Config, "", flags, module.REAL)


def lines_of(out, script):
    return [json.loads(line) for line in (out / script / "metrics.jsonl").open()]


class Crash(BaseException):
    pass


def crash_and_resume(monkeypatch, module, when, **options):
    save = common.Run.save

    def dying(self, step, *args, **kw):
        if step == when:
            raise Crash
        save(self, step, *args, **kw)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(common.Run, "save", dying)
        module.main(config_of(module, **options))
    module.main(config_of(module, resume=True, **options))


def test_gsm8k_end_to_end(tmp_path, monkeypatch, capsys):
    """SFT with falling loss, then GRPO, PPO, DPO from it, each interrupted and resumed; an exported model at the end."""
    tokenizer = gpt2_tokenizer(monkeypatch)
    if not (GSM8K / "train.jsonl").exists():
        pytest.skip("GSM8K's files are not here")
    folder, real = write_model(tmp_path / "gpt2", tokenizer), dict(task="gsm8k", data_dir=GSM8K)
    one, two = tmp_path / "one", tmp_path / "two"
    options = dict(init=folder, steps=12, examples=8, lr=1e-2, warmup=2, save_every=4, **real)
    sft.main(config_of(sft, out=one, **options))
    crash_and_resume(monkeypatch, sft, 7, out=two, **options)
    said = capsys.readouterr().out
    assert "7473 demonstrations, 1319 held out; 0 left out" in said and "next: python grpo.py --init" in said
    lines = lines_of(one, "sft")
    assert lines[0]["held_out_loss"] == pytest.approx(10.82, abs=0.1)  # log 50257: it knows nothing
    assert lines[-1]["held_out_loss"] < 9.5 and lines[-1]["loss"] < lines[1]["loss"] - 1
    weights = [torch.load(out / "sft.pt", weights_only=True)["model"] for out in (one, two)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])

    reward = tmp_path / "digits.py"
    reward.write_text('def score(responses, row):\n    assert row["answer"].lstrip("-").replace(".", "").isdigit()\n'
                      '    return [len(text) / 50 for text in responses]\n')  # fmt: skip
    shared = dict(init=one / "sft.pt", steps=4, save_every=2, out=one, lr=1e-3, **real)
    crash_and_resume(monkeypatch, grpo, 3, prompts=4, group_size=2, minibatches=2, pass_k=1, reward=f"{reward}:score", **shared)
    crash_and_resume(monkeypatch, ppo, 3, prompts=4, minibatches=2, reward=f"{reward}:score", missing_eos_score=1.0, **shared)
    if (GSM8K / "example_model_solutions.jsonl").exists():
        pairs = preferences.gsm8k_preferences(GSM8K / "example_model_solutions.jsonl")[:60]
        preferences.write_preferences(tmp_path / "pairs.jsonl", pairs)
        del shared["task"], shared["data_dir"]
        crash_and_resume(monkeypatch, dpo, 3, batch=4, data=tmp_path / "pairs.jsonl", **shared)
        dpo_lines = lines_of(one, "dpo")
        assert dpo_lines[0]["kl"] == pytest.approx(0, abs=1e-4) and dpo_lines[1]["loss"] == pytest.approx(0.693, abs=0.02)
    for script in ("grpo", "ppo"):
        lines = lines_of(one, script)
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
        assert sum(line.get("grad_norm", 0) > 0 for line in lines) == 4  # there was something to learn
    gpt.export(str(one / "grpo.pt"), str(tmp_path / "served"))
    assert get_tokenizer(str(tmp_path / "served")).encode_ordinary("6 * 7 = 42") == tokenizer.encode_ordinary("6 * 7 = 42")


def test_sampled_preferences_of_gsm8k(tmp_path, monkeypatch, capsys):
    """The whole of RLHF: reward_model.py and dpo.py sample the model and compare by the verifier; what is right is the
    better one, ties are dropped. A model that is never right: one line says so."""
    tokenizer = get_tokenizer("stories")
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        rows = [dict(question=f"What is {i % 7} + {i}?", answer=f"#### {i + 1000003}") for i in range(60)]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder, real = write_model(tmp_path / "model", tokenizer, 128), dict(task="gsm8k", data_dir=tmp_path / "gsm8k")
    with pytest.raises(SystemExit, match="nothing to learn from"):
        reward_model.main(config_of(reward_model, init=folder, out=tmp_path / "out", pairs=12, **real))
    # right when the answer has an even number of digits on it: half of what anyone says
    monkeypatch.setattr("data.tasks.accuracy_reward", lambda text, answer: float(len(text) % 2))
    reward_model.main(config_of(reward_model, init=folder, out=tmp_path / "out", pairs=40, **real))
    rows = preferences.read_preferences(tmp_path / "out/reward_model/preferences.jsonl")
    assert len(rows) == 40 and all(len(row["chosen"]) % 2 and len(row["rejected"]) % 2 == 0 for row in rows)
    options = dict(init=folder, out=tmp_path / "out", **real)
    ppo.main(config_of(ppo, steps=2, prompts=4, minibatches=1, reward_model=tmp_path / "out/reward_model.pt", **options))
    dpo.main(config_of(dpo, steps=2, pairs=20, batch=4, **options))
    rows = preferences.read_preferences(tmp_path / "out/dpo/preferences.jsonl")
    assert len(rows) == 20 and all(row["gold"] == 1 for row in rows)
    assert "PPO: 2 steps" in capsys.readouterr().out


def test_your_own_problems_and_chats(tmp_path, capsys):
    """Demonstrations and problems as chats, for a model that knows ChatML; the reward is given the row."""
    stories = get_tokenizer("stories")
    settings = json.loads(to_tokenizer_json(stories))
    for token in ("<|im_start|>", "<|im_end|>"):
        settings["added_tokens"].append({**settings["added_tokens"][0], "content": token, "id": len(settings["added_tokens"]) + 506})
    folder = write_model(tmp_path / "model", stories, 160)
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(520, 160, 1, 2, 32))
    for file in folder.iterdir():
        file.unlink()
    pretrained.write_folder(model, json.dumps(settings), config["eos_token_id"], folder)
    rows = []
    for i in range(30):
        ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Say {i}. <|im_end|>"}]
        rows.append(dict(messages=ask, answer=i, response=f"It is {i}.", colour="red"))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft.main(config_of(sft, init=folder, chat="chatml", data=data, out=tmp_path, steps=3, examples=4))
    saved = torch.load(tmp_path / "sft.pt", weights_only=True)
    assert saved["config"]["chat"] == "chatml"
    (tmp_path / "mine.py").write_text(
        'def score(responses, row):\n    assert row["colour"] == "red" and row["messages"][0]["role"] == "system" and row["line"]\n'
        "    return [float(len(text)) for text in responses]\n"
    )
    options = dict(init=tmp_path / "sft.pt", data=data, out=tmp_path, steps=2, prompts=3, minibatches=1, reward=f"{tmp_path}/mine.py:score")
    grpo.main(config_of(grpo, group_size=2, pass_k=1, **options))  # the chat format is that of --init
    ppo.main(config_of(ppo, **options))
    text = (tmp_path / "grpo/samples.md").read_text()
    assert "user: Say" in text and "nan" not in capsys.readouterr().out.split("PPO")[0]
    # without a chat format there is no way to write a chat
    with pytest.raises(SystemExit, match="--chat chatml"):
        sft.main(config_of(sft, init=folder, chat="none", data=data, out=tmp_path / "b", steps=1))


def test_a_name_on_the_hub_as_init(tmp_path, monkeypatch):
    """From the name to the checkpoint, and on from there, without a network."""
    hub = pytest.importorskip("huggingface_hub")
    folder = write_model(tmp_path / "model", get_tokenizer("stories"), 128)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: str(folder))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(dict(prompt=f"Say {i}.", response=f" {i}", answer=i)) + "\n" for i in range(40)))
    shared = dict(data=data, out=tmp_path / "out", steps=2, save_every=1)
    crash_and_resume(monkeypatch, sft, 2, init="owner/model", examples=4, **shared)
    options = dict(prompts=3, minibatches=1, group_size=2, pass_k=1, **shared)
    crash_and_resume(monkeypatch, grpo, 2, init="owner/model", **options)
    grpo.main(config_of(grpo, **{**options, "init": tmp_path / "out/sft.pt"}))


@pytest.mark.parametrize("module", [grpo, ppo])
def test_a_reward_that_fails_loses_nothing(tmp_path, module):
    folder = write_model(tmp_path / "model", get_tokenizer("stories"), 128)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(dict(prompt=f"Say {i}.", answer=i)) + "\n" for i in range(40)))
    reward = tmp_path / "mine.py"
    good = "def score(responses, row):\n    return [float(len(text)) for text in responses]\n"
    options = dict(init=folder, data=data, out=tmp_path / "out", steps=5, prompts=3, minibatches=1, save_every=100, eval_every=100, reward=f"{reward}:score")
    options |= dict(group_size=2, pass_k=1) if module is grpo else {}
    reward.write_text(good)
    module.main(config_of(module, **{**options, "out": tmp_path / "whole"}))
    calls = "import os\nPATH = os.path.join(os.path.dirname(__file__), 'calls')\n"
    reward.write_text(
        calls + "def score(responses, row):\n    open(PATH, 'a').write('x')\n"
        "    if os.path.getsize(PATH) == 16:\n        return responses[99]\n    return [float(len(text)) for text in responses]\n"
    )
    with pytest.raises(SystemExit) as stop:
        module.main(config_of(module, **options))
    said = str(stop.value)
    assert "\n" not in said and "failed on line " in said and "rows.jsonl: IndexError" in said and "mine.py" in said
    assert "--resume goes on from there" in said
    name = module.__name__
    assert torch.load(tmp_path / "out" / f"{name}.pt", weights_only=True)["step"] >= 1  # though it was not due
    reward.write_text(good)
    module.main(config_of(module, resume=True, **options))
    weights = [torch.load(tmp_path / out / f"{name}.pt", weights_only=True)["model"] for out in ("whole", "out")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


BAD = {
    "--task gsm8k needs --init": (grpo, dict(task="gsm8k")),
    "--data needs --init": (sft, dict(data="rows.jsonl")),
    "only one of them": (grpo, dict(task="gsm8k", data="rows.jsonl", init="model")),
    "there is no file nothing.py": (grpo, dict(task="gsm8k", data_dir="gsm8k", init="model", reward="nothing.py:score")),
    "as in my_reward.py:score": (ppo, dict(task="gsm8k", data_dir="gsm8k", init="model", reward="score")),
    "the vocabulary of model has no <|im_start|>": (grpo, dict(task="gsm8k", data_dir="gsm8k", init="model", chat="chatml")),
    "No such file": (grpo, dict(task="gsm8k", data_dir="nowhere", init="model")),
    "nothing is left": (grpo, dict(task="gsm8k", data_dir="gsm8k", init="model", max_new_tokens=127)),
}


@pytest.mark.parametrize("words", BAD)
def test_mistakes_end_in_one_line(tmp_path, monkeypatch, words):
    module, options = BAD[words]
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", get_tokenizer("stories"), 128)
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(dict(question="1 + 1?", answer="#### 2")) + "\n")
    with pytest.raises(SystemExit) as stop:
        module.main(config_of(module, out="out", **options))
    assert words in str(stop.value) and "\n" not in str(stop.value)
    assert not os.path.exists("out")


# ---- bfloat16


def test_the_optimizer_keeps_what_bfloat16_would_lose():
    """Steps of 1e-5 on weights of 1: in bfloat16 alone they vanish. Gradients of micro-batches add up in float32; the state
    survives a checkpoint."""
    torch.manual_seed(0)
    start = torch.randn(40, 8).bfloat16()
    half = torch.nn.Parameter(start.clone())
    exact = torch.nn.Parameter(start.float())
    ours = common.AdamW([half], lr=1e-5, betas=(0.9, 0.99), weight_decay=0.01)
    torch_one = torch.optim.AdamW([exact], lr=1e-5, betas=(0.9, 0.99), weight_decay=0.01)
    assert ours.parameters()[0].dtype == torch.float32
    for step in range(300):
        parts = [torch.randn(40, 8).bfloat16() + 0.5 for _ in range(3)]
        for part in parts:
            (half * part).sum().backward()
        assert half.grad is None
        exact.grad = sum(part.float() for part in parts)
        torch.testing.assert_close(ours.parameters()[0].grad, exact.grad, rtol=1e-6, atol=1e-6)
        ours.step()
        ours.zero_grad()
        torch_one.step()
        if step == 150:  # a checkpoint
            saved = copy.deepcopy(ours.state_dict())
            other = torch.nn.Parameter(half.detach().clone())
            ours = common.AdamW([other], lr=1e-5, betas=(0.9, 0.99), weight_decay=0.01)
            ours.load_state_dict(saved)
            half = other
    torch.testing.assert_close(ours.parameters()[0], exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(half, exact.bfloat16()) and (exact - start.float()).abs().min() > 1e-3
    lost = start.clone()
    for _ in range(300):
        lost -= 1e-5
    assert (lost == start).float().mean() > 0.9


def test_one_optimizer_after_another_on_the_same_weights():
    """As ppo.py --refresh makes them; and a checkpoint of another dtype is refused."""
    weight = torch.nn.Parameter(torch.ones(3).bfloat16())
    for _ in range(2):
        optimizer = common.AdamW([weight], lr=0.1)
        (weight * 2).sum().backward()
        assert optimizer.parameters()[0].grad.tolist() == [2.0] * 3
        optimizer.step()
        optimizer.close()
    assert weight.max() < 0.85
    other = common.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(SystemExit, match="another dtype"):
        optimizer.load_state_dict(other.state_dict())


def test_bfloat16_is_sampled_and_measured_in_float32():
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(300, 48, 1, 2, 32)).bfloat16()
    hidden = 8 * torch.randn(5, 32).bfloat16()
    exact = hidden.double() @ model.lm_head.weight.double().T
    with torch.no_grad():
        found = model.lm_head(hidden)
    assert found.dtype == torch.float32 and (found.double() - exact[:, :300]).abs().max() < 1e-4
    prompts = [[1, 2, 3], [4, 5]]
    rollout = model.generate(prompts, 8, generator=torch.Generator().manual_seed(0))
    logp = model.rollout_logprobs(rollout, [torch.arange(2)])
    assert (logp - rollout.logp).abs().max() < 0.05  # what is left is the trunk's, cached or not


def test_bfloat16_learns_too(tmp_path):
    """sft.py, then grpo.py on a chain of bfloat16: the loss falls as in float32, checkpoints and --resume work."""
    tokenizer = get_tokenizer("stories")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(tokenizer.n_vocab, 48, 2, 2, 32))
    checkpoint = dict(script="base", step=1, steps=1, config={}, tokenizer=common.fingerprint(tokenizer), model=model.state_dict(),
                      model_config=dataclasses.asdict(model.config))  # fmt: skip
    torch.save(checkpoint, tmp_path / "base.pt")
    losses = {}
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        sft.main(sft.Config(init=str(tmp_path / "base.pt"), out=str(out), steps=30, lr=3e-3, dtype=dtype, evaluate=4, device="cpu"))
        losses[dtype] = [line["loss"] for line in lines_of(out, "sft")[1:]]
        saved = torch.load(out / "sft.pt", weights_only=True)
        assert saved["model"]["wte.weight"].dtype == getattr(torch, dtype)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02) and losses["float32"][-1] < 3.5
    shared = dict(init=str(out / "sft.pt"), dtype="bfloat16", out=str(out), steps=2, evaluate=4, device="cpu")
    grpo.main(grpo.Config(prompts=4, pass_k=1, **shared))
    with pytest.MonkeyPatch.context() as patch:
        crash_config = dict(prompts=8, minibatches=2, samples=1, save_every=1, **shared)
        reward_model.main(reward_model.Config(pairs=40, **{**shared, "steps": 2}))
        crash = common.Run.save
        patch.setattr(common.Run, "save", lambda self, step, *a, **k: (_ for _ in ()).throw(Crash) if step == 2 else crash(self, step, *a, **k))
        with pytest.raises(Crash):
            ppo.main(ppo.Config(reward_model=str(out / "reward_model.pt"), **crash_config))
    ppo.main(ppo.Config(reward_model=str(out / "reward_model.pt"), resume=True, **crash_config))
    assert lines_of(out, "ppo")[-1]["step"] == 2
