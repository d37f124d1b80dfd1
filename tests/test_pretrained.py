"""Folders in Hugging Face's format, against `transformers`: small random models of each family, saved by it."""

import dataclasses
import json
import shutil

import pytest
import torch

import pretrained
from gpt import GPT, GPTConfig, Rollout, export

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
SMALL = dict(vocab_size=203, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             max_position_embeddings=512)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip


def family(name, tied, heads=2):
    """A random model as `transformers` makes it, with weights large enough for every part to matter."""
    torch.manual_seed(0)
    if name == "gpt2":
        settings = transformers.GPT2Config(
            vocab_size=203, n_positions=512, n_embd=48, n_layer=3, n_head=6, tie_word_embeddings=tied
        )
    elif name == "qwen2":
        settings = transformers.Qwen2Config(**SMALL, num_key_value_heads=heads, tie_word_embeddings=tied)
    elif name == "qwen3":
        settings = transformers.Qwen3Config(**SMALL, num_key_value_heads=heads, head_dim=16, tie_word_embeddings=tied)
    else:
        settings = transformers.LlamaConfig(
            **SMALL, num_key_value_heads=heads, tie_word_embeddings=tied, rope_parameters=LLAMA3
        )
    model = transformers.AutoModelForCausalLM.from_config(settings).eval()
    for parameter_name, p in model.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=1.0 if "wpe" in parameter_name else 0.25)
        elif ("norm" in parameter_name or "ln_" in parameter_name) and "bias" not in parameter_name:
            torch.nn.init.normal_(p, mean=1.0, std=0.3)
        else:  # a large bias of the last norm would decide what is said, whatever was said before
            torch.nn.init.normal_(p, std=0.02 if "ln_f" in parameter_name else 0.3)
    if tied:
        model.tie_weights()
    return model


def batch(rows=4, length=37, vocabulary=203):
    """Left-padded ids and attention mask [B, T]."""
    torch.manual_seed(1)
    ids, mask = torch.randint(vocabulary, (rows, length)), torch.ones(rows, length, dtype=torch.long)
    for i in range(rows):
        mask[i, : 5 * i] = 0
    return ids * mask, mask


def logits_of(reference, ids, mask):
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return reference(ids, attention_mask=mask, position_ids=positions).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3", "llama"])
def test_logits_of_every_family(tmp_path, name, tied):
    reference = family(name, tied)
    reference.save_pretrained(tmp_path)
    model = GPT.from_pretrained(tmp_path)
    assert model.config.tied == tied
    ids, mask = batch()
    expected = logits_of(reference, ids, mask)
    assert expected.std() > 0.5  # differences would show
    with torch.no_grad():
        found = model(ids, attention_mask=mask)
    torch.testing.assert_close(found[mask > 0], expected[mask > 0], rtol=0, atol=1e-4)
    # padding changes nothing: each row alone
    for row in range(len(ids)):
        alone = ids[row, mask[row] > 0][None]
        with torch.no_grad():
            torch.testing.assert_close(model(alone)[0], expected[row, mask[row] > 0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("heads", [6, 3, 1])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3", "llama"])
def test_greedy_generation(tmp_path, name, heads):
    """64 tokens with the cache, prompts of unequal length, equal ones among them (their cache is shared)."""
    reference = family(name, tied=False, heads=heads)
    reference.save_pretrained(tmp_path)
    model = GPT.from_pretrained(tmp_path)
    ids, mask = batch(length=21)
    prompts = [row[keep > 0].tolist() for row, keep in zip(ids, mask)]
    prompts.append(prompts[1])
    rollout = model.generate(prompts, 64, temperature=0)
    for prompt, found in zip(prompts, rollout.ids[:, rollout.prompt_len :].tolist()):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=64,
                min_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None,
            )[0, len(prompt) :].tolist()  # fmt: skip
        assert len(set(expected)) > 3 and found == expected
    # and what training sees is what sampling saw
    logp = model.rollout_logprobs(rollout, [torch.arange(len(prompts))])
    torch.testing.assert_close(logp, rollout.logp, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_shards_and_bfloat16(tmp_path, name):
    family(name, tied=False).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = GPT.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids, mask = batch()
    with torch.no_grad():
        found = model(ids, attention_mask=mask)
    torch.testing.assert_close(found[mask > 0], logits_of(reference, ids, mask)[mask > 0], rtol=0, atol=1e-4)
    half = GPT.from_pretrained(tmp_path, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    with torch.no_grad():  # bfloat16 has 8 bits; logits here are of size 3
        assert (half(ids, attention_mask=mask).float() - found)[mask > 0].abs().mean() < 0.05


def test_the_old_names_of_gpt2(tmp_path):
    """The files of 2019: without the outer name, with the causal masks of each layer."""
    from safetensors.torch import load_file, save_file

    reference = family("gpt2", tied=True)
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {key.removeprefix("transformer."): value for key, value in weights.items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids, mask = batch()
    with torch.no_grad():
        found = GPT.from_pretrained(tmp_path)(ids, attention_mask=mask)
    torch.testing.assert_close(found[mask > 0], logits_of(reference, ids, mask)[mask > 0], rtol=0, atol=1e-4)


def test_rope_settings_of_older_versions(tmp_path):
    """config.json with rope_theta and rope_scaling, as on the hub, in the place of rope_parameters."""
    family("llama", tied=True).save_pretrained(tmp_path)
    new = pretrained.architecture(json.loads((tmp_path / "config.json").read_text()))
    old = json.loads((tmp_path / "config.json").read_text())
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope
    assert pretrained.architecture(old) == new and new["rope_scaling"] == (8.0, 1.0, 4.0, 64)
    del old["rope_scaling"]
    assert pretrained.architecture(old)["rope_scaling"] is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3", "llama"])
def test_written_folders_load_in_transformers(tmp_path, name, tied):
    family(name, tied).save_pretrained(tmp_path / "a")
    model = GPT.from_pretrained(tmp_path / "a")
    for p in model.parameters():  # trained a little
        p.data += 0.01 * torch.randn_like(p)
    model.wte.weight.data[model.config.vocab_size :] = 7.0  # padding must not get out
    pretrained.write_folder(model, "", 5, tmp_path / "b")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    ids, mask = batch()
    with torch.no_grad():
        found = model(ids, attention_mask=mask)
    torch.testing.assert_close(found[mask > 0], logits_of(reference, ids, mask)[mask > 0], rtol=0, atol=1e-4)
    again = GPT.from_pretrained(tmp_path / "b")
    assert again.config == model.config
    for (key, value), (_, other) in zip(model.state_dict().items(), again.state_dict().items()):
        assert torch.equal(value, other), key
    with pytest.raises(ValueError, match="not empty"):
        pretrained.write_folder(model, "", 5, tmp_path / "b")


def checkpoint(tmp_path, **changes):
    from data import get_tokenizer
    from data.tokenizer import fingerprint

    tokenizer = get_tokenizer("stories")
    torch.manual_seed(3)
    model = GPT(GPTConfig(tokenizer.n_vocab, 48, 2, 2, 32))
    torch.save(
        {
            "script": "grpo", "step": 3, "steps": 3, "config": {"tokenizer": "stories"}, "tokenizer": fingerprint(tokenizer),
            "model_config": dataclasses.asdict(model.config), "model": model.state_dict(), **changes,
        },
        tmp_path / "grpo.pt",
    )  # fmt: skip
    return model, tokenizer


def test_export(tmp_path, capsys):
    model, tokenizer = checkpoint(tmp_path)
    export(str(tmp_path / "grpo.pt"), str(tmp_path / "folder"))
    assert str(tmp_path / "folder") in capsys.readouterr().out
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    ids, mask = batch(vocabulary=tokenizer.n_vocab, length=30)
    with torch.no_grad():
        found = model(ids, attention_mask=mask)
    torch.testing.assert_close(found[mask > 0], logits_of(reference, ids, mask)[mask > 0], rtol=0, atol=1e-4)
    # its tokenizer, too, gives the same ids
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "folder" / "tokenizer.json"))
    text = "By the sea, the otter has 7 shells. It finds 3. It naps. How many? -> 10 -> 10 #### 10 Übergröße\n\n 😀 x"
    assert theirs(text)["input_ids"] == tokenizer.encode_ordinary(text)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert auto(text)["input_ids"] == tokenizer.encode_ordinary(text) and auto.eos_token_id == tokenizer.eot_token
    with pytest.raises(SystemExit, match="not empty"):
        export(str(tmp_path / "grpo.pt"), str(tmp_path / "folder"))


def test_what_cannot_be_exported(tmp_path):
    checkpoint(tmp_path, script="reward_model", model={"heads.0.weight": torch.zeros(1)})
    with pytest.raises(SystemExit, match="only language models"):
        export(str(tmp_path / "grpo.pt"), str(tmp_path / "folder"))
    assert not (tmp_path / "folder").exists()
    with pytest.raises(SystemExit, match=r"nothing\.pt does not exist"):
        export(str(tmp_path / "nothing.pt"), str(tmp_path / "folder"))


REFUSED = {
    "model_type 'mamba'": ("llama", {"model_type": "mamba"}),
    "activation_function 'relu'": ("gpt2", {"activation_function": "relu"}),
    "scale_attn_by_inverse_layer_idx True": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "hidden_act 'gelu'": ("qwen2", {"hidden_act": "gelu"}),
    "use_sliding_window True": ("qwen2", {"use_sliding_window": True}),
    "mlp_bias True": ("llama", {"mlp_bias": True}),
    "attention_bias True": ("llama", {"attention_bias": True}),
    "rope type 'yarn'": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "lacks 'hidden_size'": ("llama", {"hidden_size": None}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_architectures_are_refused(tmp_path, message):
    name, changes = REFUSED[message]
    family(name, tied=True).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(tmp_path)


def test_incomplete_folders(tmp_path):
    family("qwen2", tied=False).save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    index = tmp_path / "whole" / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]

    def broken(change):
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        change(folder)
        with pytest.raises(ValueError) as caught:
            GPT.from_pretrained(folder)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
        return str(caught.value)

    shard = names["model.layers.1.mlp.up_proj.weight"]
    assert shard in broken(lambda folder: (folder / shard).unlink())
    cut_short = broken(lambda folder: (folder / shard).write_bytes((folder / shard).read_bytes()[:-9]))
    assert shard in cut_short
    left_out = {"weight_map": {key: value for key, value in names.items() if value != shard}}
    assert "lack model.layers" in broken(lambda f: (f / index.name).write_text(json.dumps(left_out)))
    assert "config.json" in broken(lambda folder: (folder / "config.json").unlink())
    assert "not JSON" in broken(lambda folder: (folder / "config.json").write_text("{"))
    settings = json.loads((tmp_path / "whole" / "config.json").read_text())
    wider = {**settings, "intermediate_size": 96}
    assert "size mismatch" in broken(lambda folder: (folder / "config.json").write_text(json.dumps(wider)))
    shorter = {**settings, "num_hidden_layers": 2}
    assert "no place" in broken(lambda folder: (folder / "config.json").write_text(json.dumps(shorter)))


def test_names_on_the_hub(tmp_path, monkeypatch):
    """Without a network: what is asked of huggingface_hub, and what a user reads when it fails."""
    hub = pytest.importorskip("huggingface_hub")
    family("gpt2", tied=True).save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: asked.append(name) or str(tmp_path))
    assert GPT.from_pretrained("owner/model").config.n_embd == 48 and asked == ["owner/model"]

    def fail(name, **options):
        raise OSError("no network\nand much more")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"owner/model is no folder, and the Hugging Face hub gave none: no network$"):
        GPT.from_pretrained("owner/model")
    assert pretrained.is_pretrained("owner/model") and pretrained.is_pretrained(str(tmp_path))
    assert not pretrained.is_pretrained("out/sft.pt") and not pretrained.is_pretrained("")


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3"])
def test_activation_checkpointing_changes_no_gradient(tmp_path, name):
    """Prompts shared by rows, unequal lengths: the pass of GRPO."""
    family(name, tied=True).save_pretrained(tmp_path)
    model = GPT.from_pretrained(tmp_path)
    prompts = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8]]
    rollout = Rollout.of(prompts, [[9, 10], [11, 12, 13, 14], [15, 16, 17]])
    weights = torch.randn(9)
    gradients = []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad()
        hidden, tokens = model.response_states(rollout, torch.arange(3))
        (model.token_logprobs(hidden, tokens) * weights).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(g.abs().sum() > 0 for g in gradients[0])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
