"""Models from elsewhere: folders in Hugging Face's format, read into `gpt.GPT` and written from it.

    model = GPT.from_pretrained("Qwen/Qwen2.5-0.5B")          a name on the hub, or a folder
    python gpt.py --export out/grpo.pt FOLDER                 the way back: `transformers` and what builds on it load it

A folder has config.json (the architecture), model.safetensors (the weights, in one file or in several with an index)
and tokenizer.json (data/tokenizer.py reads that). GPT-2, Llama 3, Qwen2.5 and Qwen3 are the same transformer with other
settings (gpt.GPTConfig) and other names for its matrices (`NAMES`): that is all this file knows. What a config.json asks
for beyond that is refused, so that no model is run as what it is not.

Needs the package safetensors, and huggingface_hub for names on the hub; both are imported where they are used.
Source of formats and names: the `transformers` library, models gpt2, llama, qwen2, qwen3; the tests compare the logits.
"""

import json
import os
from pathlib import Path

import torch

# our name -> theirs; several of theirs are rows of one matrix of ours, one below the other. {} is the number of the layer
NAMES = {
    "gpt2": {
        "wte.weight": ["transformer.wte.weight"],
        "wpe.weight": ["transformer.wpe.weight"],
        "h.{}.ln_1": ["transformer.h.{}.ln_1"],
        "h.{}.attn.c_attn": ["transformer.h.{}.attn.c_attn"],
        "h.{}.attn.c_proj": ["transformer.h.{}.attn.c_proj"],
        "h.{}.ln_2": ["transformer.h.{}.ln_2"],
        "h.{}.mlp.c_fc": ["transformer.h.{}.mlp.c_fc"],
        "h.{}.mlp.c_proj": ["transformer.h.{}.mlp.c_proj"],
        "ln_f": ["transformer.ln_f"],
        "lm_head.weight": ["lm_head.weight"],
    },
    "llama": {  # and qwen2, qwen3
        "wte.weight": ["model.embed_tokens.weight"],
        "h.{}.ln_1": ["model.layers.{}.input_layernorm"],
        "h.{}.attn.c_attn": ["model.layers.{}.self_attn." + name for name in ("q_proj", "k_proj", "v_proj")],
        "h.{}.attn.ln_q": ["model.layers.{}.self_attn.q_norm"],
        "h.{}.attn.ln_k": ["model.layers.{}.self_attn.k_norm"],
        "h.{}.attn.c_proj": ["model.layers.{}.self_attn.o_proj"],
        "h.{}.ln_2": ["model.layers.{}.post_attention_layernorm"],
        "h.{}.mlp.c_fc": ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
        "h.{}.mlp.c_proj": ["model.layers.{}.mlp.down_proj"],
        "ln_f": ["model.norm"],
        "lm_head.weight": ["lm_head.weight"],
    },
}


def is_pretrained(name):
    """Whether `name` is a folder, or looks like a name on the hub (owner/model), and not like a file of this project."""
    on_hub = name.count("/") == 1 and not name.endswith(".pt") and not name.startswith((".", "/", "~"))
    return os.path.isdir(name) or (on_hub and not os.path.exists(name))


def find_folder(name):
    """The folder called `name`; of a name on the hub, the one into which huggingface_hub has put its files. Raises
    ValueError."""
    if os.path.isdir(name):
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{name} is no folder; to look it up on the Hugging Face hub: pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as problem:  # no network, no such name, no permission: the library's words say which
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        raise ValueError(f"{name} is no folder, and the Hugging Face hub gave none: {reason[0][:200]}") from None


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}") from None
    except ValueError as problem:
        raise ValueError(f"{path} is not JSON: {problem}") from None


def architecture(c):
    """The contents of a config.json -> the fields of GPTConfig. Raises ValueError for what gpt.py does not have."""
    kind = c.get("model_type")

    def refuse(**wanted):
        for key, value in wanted.items():
            if c.get(key, value) not in (value, None):
                raise ValueError(f"config.json: {key} {c[key]!r} of this {kind} model is not supported, only {value!r}")

    try:
        if kind == "gpt2":
            refuse(activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
                   add_cross_attention=False)  # fmt: skip
            return dict(
                vocab_size=c["vocab_size"], context=c.get("n_positions", 1024), n_layer=c["n_layer"], n_head=c["n_head"],
                n_embd=c["n_embd"], n_inner=c.get("n_inner") or 0, norm_eps=c.get("layer_norm_epsilon", 1e-5),
                tied=c.get("tie_word_embeddings", True),
            )  # fmt: skip
        if kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"config.json: model_type {kind!r} is not one of gpt2, llama, qwen2, qwen3")
        refuse(hidden_act="silu", mlp_bias=False, use_sliding_window=False, pretraining_tp=1)
        refuse(attention_bias=False)
        # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling
        rope = c.get("rope_parameters") or {**(c.get("rope_scaling") or {}), "rope_theta": c.get("rope_theta", 10000.0)}
        scaling, how = None, rope.get("rope_type", rope.get("type", "default"))
        if how == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            scaling = tuple(rope[name] for name in names)
        elif how != "default":
            raise ValueError(f"config.json: rope type {how!r} is not supported, only default and llama3")
        return dict(
            vocab_size=c["vocab_size"], context=c["max_position_embeddings"], n_layer=c["num_hidden_layers"],
            n_head=c["num_attention_heads"], n_embd=c["hidden_size"],
            n_kv_head=c.get("num_key_value_heads") or c["num_attention_heads"],
            head_dim=c.get("head_dim") or (128 if kind == "qwen3" else 0), n_inner=c["intermediate_size"], mlp="swiglu",
            norm="rms", norm_eps=c["rms_norm_eps"], rope_theta=float(rope["rope_theta"]), rope_scaling=scaling, bias=False,
            qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3", tied=c.get("tie_word_embeddings", False),
        )  # fmt: skip
    except KeyError as problem:
        raise ValueError(f"config.json of a {kind} model lacks {problem}") from None


def entries(config):
    """All matrices and vectors of a model: (our name, their names)."""
    family = NAMES["llama" if config.rope_theta else "gpt2"]
    for ours, theirs in family.items():
        if (ours == "lm_head.weight" and config.tied) or (("ln_q" in ours or "ln_k" in ours) and not config.qk_norm):
            continue
        for layer in range(config.n_layer) if "{}" in ours else [""]:
            parts = [""]
            if not ours.endswith("weight"):
                biased = config.norm == "layer" if "ln_" in ours else config.bias
                biased = config.qkv_bias if "c_attn" in ours else biased
                parts = [".weight", ".bias"] if biased else [".weight"]
            for part in parts:
                yield ours.format(layer) + part, [name.format(layer) + part for name in theirs]


def transposed(name, config):
    """GPT-2's linear layers are stored as [in, out]."""
    return not config.rope_theta and ".c_" in name and name.endswith("weight")


def read_weights(folder, config, dtype):
    """The weights of a folder as a state_dict of `GPT`, cast to `dtype` one by one. Raises ValueError for missing files,
    and for tensors that are missing, of another shape, or left over."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(f"to read the weights in {folder}: pip install safetensors") from None
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"] if not index.exists() else sorted(set(read_json(index)["weight_map"].values()))
    files = {}  # their name -> the open file that has it
    for name in names:
        try:
            file = safe_open(folder / name, framework="pt")
        except Exception as problem:  # missing, cut short, something else
            raise ValueError(f"{folder / name}: {str(problem).splitlines()[0]}") from None
        files.update(dict.fromkeys(file.keys(), file))
    if "wte.weight" in files:  # the GPT-2 files of 2019 were saved without the outer name
        files = {f"transformer.{name}": file for name, file in files.items()}

    def read(name):
        if name not in files:
            raise ValueError(f"{folder}: the weights lack {name}")
        stored = name if name in files[name].keys() else name.removeprefix("transformer.")
        return files[name].get_tensor(stored).to(dtype)

    state, used = {}, set()
    for ours, theirs in entries(config):
        parts = [read(name) for name in theirs]
        state[ours] = parts[0] if len(parts) == 1 else torch.cat(parts)
        if transposed(ours, config):
            state[ours] = state[ours].T.contiguous()
        used.update(theirs)
    # a tied head may be stored as well; the first GPT-2 files hold their causal masks, old Llama files their frequencies
    ignored = ("lm_head.weight", ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    left = [name for name in files if name not in used and not name.endswith(ignored)]
    if left:
        raise ValueError(f"{folder}: the weights hold {left[0]}, for which this architecture has no place")
    if config.tied:
        state["lm_head.weight"] = state["wte.weight"]
    return state


def write_json(contents, path):
    Path(path).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def describe(config, eos, bos=None):
    """The config.json of a model, as `transformers` reads it. eos, bos: the token ids that end a text, and begin it."""
    shared = dict(
        vocab_size=config.vocab_size, tie_word_embeddings=config.tied, bos_token_id=bos, eos_token_id=eos,
        torch_dtype="float32", initializer_range=0.02,
    )  # fmt: skip
    if not config.rope_theta:
        return dict(
            model_type="gpt2", architectures=["GPT2LMHeadModel"], n_positions=config.context, n_ctx=config.context,
            n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, n_inner=config.n_inner,
            layer_norm_epsilon=config.norm_eps, activation_function="gelu_new", **shared,
        )  # fmt: skip
    kind, name = ("qwen3", "Qwen3") if config.qk_norm else ("qwen2", "Qwen2") if config.qkv_bias else ("llama", "Llama")
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope.update(zip(names, config.rope_scaling), rope_type="llama3")
    return dict(
        model_type=kind, architectures=[f"{name}ForCausalLM"], max_position_embeddings=config.context,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim, hidden_size=config.n_embd, intermediate_size=config.n_inner, hidden_act="silu",
        rms_norm_eps=config.norm_eps, rope_parameters=rope, rope_theta=config.rope_theta,
        rope_scaling=rope if config.rope_scaling else None, attention_bias=False, **shared,
    )  # fmt: skip


def write_folder(model, tokenizer_json, eos, folder, bos=None):
    """Writes config.json, model.safetensors (of the weights' dtype) and tokenizer.json (its text). Raises ValueError if the
    folder is there and not empty: nothing is overwritten."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError(f"to write weights into {folder}: pip install safetensors") from None
    folder, config, state, tensors = Path(folder), model.config, model.state_dict(), {}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already, and not empty: name another folder")
    H, K, D = config.n_head, config.n_kv_head, config.head_dim
    for ours, theirs in entries(config):
        tensor = state[ours].T if transposed(ours, config) else state[ours]
        # the rows of one matrix of ours: queries, keys and values; or gate and up
        rows = {1: [len(tensor)], 2: [config.n_inner] * 2, 3: [H * D, K * D, K * D]}[len(theirs)]
        tensors.update(zip(theirs, (part.contiguous() for part in tensor.split(rows))))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(state["wte.weight"].dtype).removeprefix("torch.")
    write_json({**describe(config, eos, bos), "torch_dtype": dtype}, folder / "config.json")
    if tokenizer_json:
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
