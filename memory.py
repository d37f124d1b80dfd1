"""How much memory does a script need? Counted, not guessed: `python grpo.py --estimate` prints it for known models.

What stays, per weight, in bytes:

                              float32     bfloat16
    the weight                   4           2
    its gradient                 4           4        summed up in float32, see common.AdamW
    AdamW's two means            8           8
    its float32 copy             -           4
    the same weight, frozen      4           2        the reference (ppo, dpo, grpo with beta > 0), the reward model (ppo),
                                                      the model whose answers are judged (reward_model)

What comes and goes; the larger of the two counts, as they take turns:

    training    the activations of one micro-batch that autograd keeps, and its logits with the gradient of the head
    sampling    the key-value cache, and four tensors of one step's logits [rows, V]

So the micro-batch decides about the first, and the number of responses sampled at once about the second; both leave
the gradient as it is. The tests compare this with what runs take, on a CPU (tests/test_memory.py). A GPU needs about
1 GiB on top, for CUDA itself and for the gaps between tensors; GPUs were not measured.
"""

from dataclasses import dataclass

import common
from gpt import GPTConfig, padded
from kernels.linear_logprob import CHUNK_TOKENS
from pretrained import architecture, find_folder, is_pretrained, read_json

# as in their config.json
KNOWN = {
    "GPT-2 124M": GPTConfig(50257, 1024, 12, 12, 768),
    "Qwen2.5-0.5B": GPTConfig(151936, 32768, 24, 14, 896, n_kv_head=2, n_inner=4864, mlp="swiglu", norm="rms", norm_eps=1e-6,
                              rope_theta=1e6, bias=False),
    "Qwen2.5-1.5B": GPTConfig(151936, 131072, 28, 12, 1536, n_kv_head=2, n_inner=8960, mlp="swiglu", norm="rms",
                              norm_eps=1e-6, rope_theta=1e6, bias=False),
}  # fmt: skip
PROMPT = 200  # tokens of a long prompt; of GSM8K's, 99 in 100 are shorter
GIB = 1 << 30


@dataclass
class Load:
    """What a script does at once. The numbers of models count weights like the policy's."""

    frozen: int = 0  # models that are only read
    trained: int = 1  # models that learn
    rows: int = 8  # texts in a micro-batch
    prompts: int = 8  # different prompts among them that are computed on their own (GPT.response_states); 0: with their texts
    prompt: int = PROMPT  # tokens
    response: int = 300  # tokens
    head: bool = True  # token log-probabilities of the responses
    sampled: int = 256  # responses at once
    sampled_prompts: int = 256  # different prompts among them


def load_of(script, config, prompt=PROMPT):
    """The Load of a script with the settings of its Config."""
    load = Load(rows=config.micro_batch, prompts=config.micro_batch, prompt=prompt, response=config.max_new_tokens)
    if script == "sft":
        load.prompts, load.sampled = 0, min(1024, config.evaluate)
    elif script == "reward_model":
        load.trained, load.frozen, load.prompts, load.head = config.ensemble, 1, 0, False
        load.sampled = config.sample_rows
    elif script == "ppo":
        load.frozen = 1 if config.reward else 2  # of an ensemble each member counts
        load.sampled = max(config.prompts, config.sample_rows)
    elif script == "dpo":
        load.frozen = 2 if config.judge == "reward_model" else 1
        load.prompts, load.sampled = -(-config.micro_batch // 2), config.sample_rows
    elif script == "grpo":
        load.frozen = int(config.beta > 0)
        load.sampled = max(config.prompts * config.group_size, config.sample_rows)
    answers = config.group_size if script == "grpo" else config.samples if script == "dpo" else 1  # to one prompt
    load.sampled_prompts = -(-load.sampled // answers)
    return load


def parameters(c):
    """The number of weights of a GPTConfig, the padding of the vocabulary included."""
    qkv, attention, inner = (c.n_head + 2 * c.n_kv_head) * c.head_dim, c.n_head * c.head_dim, c.n_inner
    up = inner * (2 if c.mlp == "swiglu" else 1)
    matrices = c.n_embd * (qkv + attention + up + inner)
    biases = c.qkv_bias * qkv + c.bias * (c.n_embd + up + c.n_embd)
    norm = c.n_embd * (1 if c.norm == "rms" else 2)
    embedding = padded(c.vocab_size) * c.n_embd
    return (
        c.n_layer * (matrices + biases + 2 * norm + 2 * c.qk_norm * c.head_dim) + norm
        + embedding * (1 if c.tied else 2) + (0 if c.rope_theta else c.context * c.n_embd)
    )  # fmt: skip


def saved_by_layer(c, load):
    """How many numbers autograd keeps of one block for a micro-batch, each behind the operation that reads it in its
    backward pass. -> (numbers, those among them that outlive the block with activation checkpointing)"""
    qkv, attention = (c.n_head + 2 * c.n_kv_head) * c.head_dim, c.n_head * c.head_dim
    rope, grouped = bool(c.rope_theta), c.n_kv_head < c.n_head
    # per token: input and output of both norms, and of an RMSNorm its input scaled to length 1 as well
    norms = (6 if c.norm == "rms" else 4) * c.n_embd
    mlp = (4 if c.mlp == "swiglu" else 2) * c.n_inner  # c_fc's output, the activation, and with a gate their product
    q_k_norm = (qkv + (c.n_head + c.n_kv_head) * c.head_dim) if c.qk_norm else 0
    # attention: what it reads and what it gives; without rotation, queries, keys and values are still where c_attn put them
    q = attention if rope else qkv
    per_token = norms + mlp + q_k_norm + q + attention
    kv = 2 * c.n_kv_head * c.head_dim  # keys and values of a token
    read = 2 * attention if grouped else kv  # as attention reads them: for every head
    length = load.prompt + load.response
    if not load.prompts:  # texts as a whole
        return load.rows * length * (per_token + (read if rope else 0)), load.rows * length * c.n_embd
    # prompts: their keys and values stay for the responses; those read them put together with their own
    prompt_tokens, response_tokens = load.prompts * load.prompt, load.rows * load.response
    numbers = prompt_tokens * (per_token + (kv if rope else 0) + (read if grouped else 0)) + response_tokens * per_token
    kept = prompt_tokens * (kv if rope else qkv)
    return numbers + load.rows * length * read, (prompt_tokens + response_tokens) * c.n_embd + kept


def estimate(c, load, size=4, recompute=False):
    """Bytes, by purpose. size: bytes of a weight in the models, 4 (float32) or 2 (bfloat16)."""
    n, V = parameters(c), padded(c.vocab_size)
    found = {
        "weights": load.trained * n * size,
        "frozen": load.frozen * n * size,
        "gradients": load.trained * n * 4,
        "optimizer": load.trained * n * (8 if size == 4 else 12),
    }
    layer, kept = saved_by_layer(c, load)
    activations = (c.n_layer * kept + layer if recompute else c.n_layer * layer) * size
    # while a block goes backward, the gradients of what its c_fc gave and of what became of it
    activations += 2 * load.rows * (load.prompt + load.response) * c.n_inner * (2 if c.mlp == "swiglu" else 1) * size
    tokens = min(load.rows * load.response, CHUNK_TOKENS) if load.head else 0
    # the logits of a chunk, in their place their gradient (in bfloat16 beside them); and the gradient of the head, summed
    # over chunks, before it is added to the others (in bfloat16 a chunk's part beside it)
    head = tokens * V * (4 if size == 4 else 6) + load.head * V * c.n_embd * (4 if size == 4 else 8)
    found["activations"], found["head"] = activations, head
    columns = load.prompt + load.response
    cache = 2 * c.n_layer * c.n_kv_head * c.head_dim * size * (
        load.sampled * columns + (load.sampled_prompts * load.prompt if load.sampled_prompts < load.sampled else 0)
    )  # fmt: skip
    # prompts pass as a whole: queries, keys, values, output and the MLP of one block
    widest = load.sampled_prompts * load.prompt * size * (2 * c.n_embd + (3 if c.mlp == "swiglu" else 2) * c.n_inner)
    found["sampling"] = cache + max(4 * load.sampled * V * 4, widest)
    fixed = found["weights"] + found["frozen"] + found["optimizer"]
    found["peak"] = fixed + max(found["gradients"] + activations + head, found["sampling"])
    return found


def print_estimate(script, config):
    """A table for the models in KNOWN, and for --init."""
    models, load = dict(KNOWN), load_of(script, config)
    try:
        if config.init and is_pretrained(config.init):
            models[config.init] = GPTConfig(**architecture(read_json(find_folder(config.init) / "config.json")))
        elif config.init:
            models[config.init] = GPTConfig(**common.load_checkpoint(config.init)["model_config"])
    except ValueError as problem:
        raise SystemExit(f"--init {config.init}: {problem}") from None
    print(
        f"{script}.py: micro-batches of {load.rows} texts, {load.prompt} tokens of prompt and {load.response} of response; "
        f"{load.sampled} responses sampled at once. GiB:\n"
    )
    names = ["weights", "frozen", "gradients", "optimizer", "activations", "head", "sampling", "peak"]
    width = max(map(len, models)) + 2
    print(f"{'model':<{width}}{'dtype':<10}" + "".join(f"{name:>12}" for name in names) + f"{'--recompute':>13}")
    for name, c in models.items():
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            found = estimate(c, load, size)
            cells = "".join(f"{found[key] / GIB:>12.2f}" for key in names)
            print(f"{name:<{width}}{dtype:<10}{cells}{estimate(c, load, size, recompute=True)['peak'] / GIB:>13.2f}")
    print(
        "\npeak = weights + frozen + optimizer + the larger of (gradients + activations + head) and sampling; a GPU needs about "
        "1 GiB more.\nLess of it: --recompute (last column), a smaller --micro-batch, "
        + {"sft": "a smaller --evaluate.", "grpo": "a smaller --sample-rows and fewer --prompts.",
           "ppo": "a smaller --sample-rows and fewer --prompts."}.get(script, "a smaller --sample-rows.")
    )
