"""The transformer that every stage shares, and stage 1: pretraining.

A GPT-2 in the manner of nanoGPT: learned positions, pre-norm blocks, tanh-GELU, output head tied to the embedding. It
adds what reinforcement learning needs and nanoGPT lacks: a preallocated key-value cache, and `generate` for a batch
of prompts of different lengths that returns the log-probability of every token it sampled. With the same weights its
logits are those of `transformers`' GPT-2 (tests/test_gpt.py).

Pretraining minimises the mean of -log p(token | the tokens before it) over "the internet" (data/stories.py):

    python gpt.py            about a minute on two CPU cores: out/base.pt, held-out accuracy about 0.5

Pretrained GPT-2, Llama 3, Qwen2.5 and Qwen3 models are the same transformer with other settings: `GPT.from_pretrained`
reads them, and every later stage takes them as --init. The way back, for models trained here:

    python gpt.py --export out/grpo.pt FOLDER            a folder that `transformers` loads

What to expect: the loss falls to 1.6; the model has then picked up every habit of its corpus, answering at
once (almost always wrong), working it out (mostly right), working it out with a slip (wrong), in the corpus'
proportions.

Shapes in this project's comments: B rows (b of a micro-batch, n still decoding, U different prompts), T new columns or
response slots, S columns that attention sees, P prompt columns, C width, H heads, D = C / H, V vocabulary, N selected
tokens of all rows.

Sources: Radford et al. 2019 (GPT-2), and for the pre-norm block Xiong et al. 2020, arXiv:2002.04745. Deliberately
left out: dropout (every document is seen once), learning-rate groups, models that need more than one GPU.
"""

import math
import os
import random
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import common
from data import get_tokenizer, stories
from data.evaluation import evaluate, habits, require_room
from data.tokenizer import to_tokenizer_json
from kernels import linear_logprobs, linear_logprobs_and_entropy
from kernels.linear_logprob import product
from pretrained import architecture, find_folder, is_pretrained, read_json, read_weights, write_folder, write_json

# `generate` asks after so many tokens who has finished; not after each on a GPU, because to ask it is to wait for it
ASK_EVERY = {"cpu": 1, "cuda": 16, "mps": 16}


@dataclass
class GPTConfig:
    """The defaults are GPT-2's architecture at a small size. Llama, Qwen2.5 and Qwen3 differ in what is below the line."""

    vocab_size: int = 512
    context: int = 48  # the longest sequence, prompt and response together
    n_layer: int = 3
    n_head: int = 4  # H, of queries
    n_embd: int = 128  # C
    # ---
    n_kv_head: int = 0  # K, heads of keys and values, each for H / K heads of queries (GQA); 0: H
    head_dim: int = 0  # D; 0: C / H
    n_inner: int = 0  # width inside the MLP; 0: 4 C
    mlp: str = "gelu"  # or swiglu
    norm: str = "layer"  # or rms
    norm_eps: float = 1e-5
    rope_theta: float = 0.0  # base of rotary positions; 0: learned positions
    rope_scaling: tuple | None = None  # Llama 3's: factor, low_freq_factor, high_freq_factor, original context
    bias: bool = True  # in the linear layers, but for
    qkv_bias: bool = True  # that of queries, keys and values
    qk_norm: bool = False  # an RMSNorm on each head of the queries and of the keys (Qwen3)
    tied: bool = True  # the output head is the embedding

    def __post_init__(self):
        self.n_kv_head, self.n_inner = self.n_kv_head or self.n_head, self.n_inner or 4 * self.n_embd
        if not self.head_dim and self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")


def make_norm(config, width):
    return (nn.RMSNorm if config.norm == "rms" else nn.LayerNorm)(width, eps=config.norm_eps)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head, config.n_kv_head, config.head_dim  # H, K, D
        H, K, D = self.heads
        self.c_attn = nn.Linear(config.n_embd, (H + 2 * K) * D, bias=config.qkv_bias)  # q, k and v in one matmul
        self.c_proj = nn.Linear(H * D, config.n_embd, bias=config.bias)
        self.ln_q, self.ln_k = (make_norm(config, D) if config.qk_norm else None for _ in range(2))

    def forward(self, x, mask=None, cache=None, layer=None, rope=None):
        (B, T, _), (H, K, D) = x.shape, self.heads
        qkv = self.c_attn(x).view(B, T, H + 2 * K, D).transpose(1, 2)
        q, kv = qkv[:, :H], qkv[:, H:].unflatten(1, (2, K)).transpose(0, 1)  # [B, H, T, D], [2, B, K, T, D]
        if self.ln_q is not None:
            q, kv = self.ln_q(q), torch.stack([self.ln_k(kv[0]), kv[1]])
        if rope is not None:
            q, kv = rotate(q, *rope), torch.stack([rotate(kv[0], *rope), kv[1]])
        if cache is not None:
            kv = cache.extend(layer, kv)
        k, v = kv  # [B, K, S, D] each
        if K < H and T == 1:  # decoding: the heads of a group become queries to the same keys, which are not copied
            q = q.reshape(B, K, H // K, D)
        elif K < H:
            k, v = (y.repeat_interleave(H // K, dim=1) for y in (k, v))  # [B, H, S, D] each
        # without a mask: causal, and a single new token may look at everything
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)  # [B, H, T, D]
        return self.c_proj(y.reshape(B, H, T, D).transpose(1, 2).reshape(B, T, H * D))


class MLP(nn.Module):
    """c_proj(gelu(c_fc(x))), or with "swiglu" (Shazeer 2020, arXiv:2002.05202) c_proj(silu(gate) * up), where gate and up
    are the halves of c_fc(x)."""

    def __init__(self, config):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.c_fc = nn.Linear(config.n_embd, (1 + self.gated) * config.n_inner, bias=config.bias)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)

    def forward(self, x):
        x = self.c_fc(x)
        if not self.gated:
            return self.c_proj(F.gelu(x, approximate="tanh"))
        gate, up = x.chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = make_norm(config, config.n_embd), Attention(config)
        self.ln_2, self.mlp = make_norm(config, config.n_embd), MLP(config)

    def forward(self, x, mask=None, cache=None, layer=None, rope=None):
        x = x + self.attn(self.ln_1(x), mask, cache, layer, rope)
        return x + self.mlp(self.ln_2(x))


def rope_frequencies(config):
    """By how much each pair of channels turns per position, theta^(-2i/D) -> [D / 2], float32 (Su et al. 2021,
    arXiv:2104.09864, section 3.2.2). Llama 3's scaling: pairs with a wavelength beyond original context /
    low_freq_factor turn `factor` times slower, those below original context / high_freq_factor as before, and between
    the two it is interpolated (`apply_scaling` in Meta's llama-models)."""
    D = config.head_dim
    frequencies = config.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)
    if config.rope_scaling:
        factor, low, high, original = config.rope_scaling
        turns = original * frequencies / (2 * math.pi)  # in the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it was
        frequencies = frequencies * (keep + (1 - keep) / factor)
    return frequencies


def rotate(x, cos, sin):
    """Turns the pairs (x_i, x_{i + D/2}) of x [B, H, T, D] by the angles whose cos and sin [B or nothing, 1, T, D / 2] are
    given, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def padded(vocab_size):
    """The next multiple of 64: rows of so many logits start where a GPU reads and multiplies fastest."""
    return -(-vocab_size // 64) * 64


class Head(nn.Linear):
    """The output head, a matrix of `padded(V)` rows. Called, it returns the V true logits, so that the padding is in no
    softmax and never sampled; `all_logits` are for kernels/, which are told V."""

    def __init__(self, config):
        super().__init__(config.n_embd, padded(config.vocab_size), bias=False)
        self.vocab_size = config.vocab_size

    def forward(self, x):
        return self.all_logits(x)[..., : self.vocab_size]  # [..., V], a view

    def all_logits(self, x):
        """[..., C] -> [..., W]; for sampling and measuring in float32, as those of training are (kernels/linear_logprob.py):
        a bfloat16 logit of 16 is off by up to 0.06."""
        if x.dtype == torch.bfloat16 and not torch.is_grad_enabled():
            return product(x.flatten(0, -2), self.weight.T).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight)


def _without_padding(model, state, prefix, metadata):
    """A hook of state_dict(): checkpoints hold the true rows only, once for both names of a tied weight. They are a
    copy: to change the weights, use the model's parameters."""
    wte, head = (layer.weight.detach()[: model.config.vocab_size] for layer in (model.wte, model.lm_head))
    state[prefix + "wte.weight"] = wte.clone()
    state[prefix + "lm_head.weight"] = state[prefix + "wte.weight"] if model.config.tied else head.clone()


def _with_padding(model, state, prefix, *unused):
    """A hook of load_state_dict(): rows of zeros take the place of the padding."""
    for name in (prefix + "wte.weight", prefix + "lm_head.weight"):
        if name in state:
            state[name] = F.pad(state[name], (0, 0, 0, len(model.wte.weight) - model.config.vocab_size))


class KVCache:
    """Keys and values of every layer, allocated once: kv is [L, 2, B, K, S, D], and `length` of its S columns are
    filled."""

    def __init__(self, config, rows, columns, like):
        # of the weights' dtype and device
        self.kv = like.new_empty(config.n_layer, 2, rows, config.n_kv_head, columns, config.head_dim)
        self.length = 0

    def extend(self, layer, kv):
        """Appends the keys and values [2, B, K, T, D] of one layer and returns all it has, [2, B, K, length + T, D].
        B may be fewer rows than the cache has: its first ones."""
        _, B, _, T, _ = kv.shape
        mine = self.kv[layer, :, :B, :, : self.length + T]
        mine[:, :, :, self.length :] = kv
        return mine

    def copy_rows(self, to, source, rows):
        """The rows `to` become copies of the `rows` of another cache (or of this one), as far as that is filled."""
        self.kv[:, :, to, :, : source.length] = source.kv[:, :, rows, :, : source.length]


class PromptCache:
    """Stands in for a KVCache in training, where the responses of a group share their prompt. First the U different
    prompts pass through the model, and their keys and values are kept, with gradient. Then, with `of_rows(prompt_of_row
    [b])` in its place, the responses pass through, and each attends to its own prompt's; nothing of theirs is kept."""

    def __init__(self, layers=None, prompt_of_row=None, length=0):
        self.layers, self.prompt_of_row, self.length = layers or {}, prompt_of_row, length

    def of_rows(self, prompt_of_row):
        return PromptCache(self.layers, prompt_of_row, self.length)

    def extend(self, layer, kv):
        """kv [2, U, K, P, D] of prompts -> the same. kv [2, b, K, T, D] of responses -> [2, b, K, P + T, D]."""
        if self.prompt_of_row is None:
            self.layers.setdefault(layer, kv)  # a block that is computed again for its backward pass changes nothing
            return kv
        return torch.cat([self.layers[layer][:, self.prompt_of_row], kv], dim=3)


@dataclass
class Rollout:
    """What `generate` returns: B rows of P prompt columns (left-padded) and T response slots."""

    ids: torch.Tensor  # [B, P + T]
    positions: torch.Tensor  # [B, P + T] position of each token in its own text, 0 in the padding
    attention_mask: torch.Tensor  # [B, P + T] 1 for tokens, 0 for padding on either side
    mask: torch.Tensor  # [B, T] 1 for sampled tokens, up to and including the first EOS
    logp: torch.Tensor  # [B, T] log-probability of each sampled token at the sampling temperature, 0 where mask is 0
    prompt_len: int  # P

    @staticmethod
    def of(prompts, responses, device="cpu"):
        """Given texts in the place of sampled ones: B prompts and B responses as token ids, each response with its EOS.
        logp is 0 everywhere."""
        prompt_ids, prompt_mask = _pad(prompts, max(map(len, prompts)), left=True)  # [B, P]
        ids, mask = _pad(responses, max(map(len, responses)))  # [B, T]
        ids = torch.from_numpy(np.concatenate([prompt_ids, ids], 1)).to(device)  # [B, P + T]
        attention = torch.from_numpy(np.concatenate([prompt_mask, mask], 1)).to(device)
        mask, positions = torch.from_numpy(mask).to(device), (attention.cumsum(1) - 1).clamp(min=0) * attention
        return Rollout(ids, positions, attention, mask, torch.zeros(mask.shape, device=device), prompt_ids.shape[1])

    def texts(self, tokenizer):
        """The responses as strings, without EOS."""

        def decode(tokens):
            try:
                return tokenizer.decode([token for token in tokens if token != tokenizer.eot_token])
            except KeyError:  # an id that the encoding leaves unused: only an untrained model says it
                return "\ufffd"

        lengths = self.mask.sum(1).tolist()
        return [decode(row[:n]) for row, n in zip(self.ids[:, self.prompt_len :].tolist(), lengths)]

    def select(self, rows):
        """Some rows as a Rollout of their own."""
        return Rollout(
            *(x[rows] for x in (self.ids, self.positions, self.attention_mask, self.mask, self.logp)), self.prompt_len
        )

    def to(self, device):
        return Rollout(
            *(x.to(device) for x in (self.ids, self.positions, self.attention_mask, self.mask, self.logp)), self.prompt_len
        )

    @staticmethod
    def cat(rollouts):
        """Several Rollouts as one, padded to the longest prompt and the longest response."""
        P, T = max(r.prompt_len for r in rollouts), max(r.mask.shape[1] for r in rollouts)
        columns = {}
        for name in ("ids", "positions", "attention_mask", "mask", "logp"):
            padded = []
            for r in rollouts:
                left = P - r.prompt_len if name in ("ids", "positions", "attention_mask") else 0
                padded.append(F.pad(getattr(r, name), (left, T - r.mask.shape[1])))
            columns[name] = torch.cat(padded)
        return Rollout(**columns, prompt_len=P)


def to_slots(values, mask):
    """values [N], in the order of the ones of mask [b, T] -> [b, T], 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask > 0, values)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(padded(config.vocab_size), config.n_embd)
        self.wpe = None if config.rope_theta else nn.Embedding(config.context, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = make_norm(config, config.n_embd)
        self.lm_head = Head(config)
        if config.tied:
            self.lm_head.weight = self.wte.weight
        # not a buffer: `to(torch.bfloat16)` would round it
        self.frequencies = rope_frequencies(config) if config.rope_theta else None
        self.recompute = False  # activation checkpointing: see `hidden`
        std = config.n_embd**-0.5  # GPT-2's 0.02 suits its width of 768; at 128 it makes a long plateau of pretraining
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "ln_" not in name:  # what is added to the residual stream 2L times starts smaller (GPT-2, section 2.3)
                nn.init.normal_(p, std=std / math.sqrt(2 * config.n_layer) if "c_proj" in name else std)
        for layer in (self.wte, self.lm_head):  # the padding, which never gets a gradient either
            nn.init.zeros_(layer.weight.data[config.vocab_size :])
        # Checkpoints hold the true rows only
        self.register_state_dict_post_hook(_without_padding)
        self.register_load_state_dict_pre_hook(_with_padding)

    @classmethod
    def from_pretrained(cls, name, dtype=torch.float32):
        """The model in a folder of Hugging Face's format, or of that name on its hub: GPT-2, Llama 3, Qwen2.5 or Qwen3
        (pretrained.py). Raises ValueError for anything else."""
        folder = find_folder(name)
        config = GPTConfig(**architecture(read_json(folder / "config.json")))
        with torch.device("meta"):  # without memory, and so without random weights
            model = cls(config)
        try:
            model.load_state_dict(read_weights(folder, config, dtype), assign=True)
        except RuntimeError as problem:  # a shape that config.json does not announce
            raise ValueError(f"{folder}: {str(problem).splitlines()[-1].strip()}") from None
        if config.tied:
            model.lm_head.weight = model.wte.weight
        model.frequencies = rope_frequencies(config) if config.rope_theta else None
        return model

    def forward(self, ids, positions=None, attention_mask=None, cache=None):
        """ids [B, T] -> logits [B, T, V]; logits[:, t] predict ids[:, t + 1]. See `hidden` for the rest."""
        return self.lm_head(self.hidden(ids, positions, attention_mask, cache))

    def hidden(self, ids, positions=None, attention_mask=None, cache=None):
        """ids [B, T] -> what the head reads, [B, T, C]. Training takes the head only where a response token is
        predicted, and only its log-probability: see `token_logprobs`.

        attention_mask [B, S]: 1 for tokens, 0 for padding, over the S = cache.length + T columns seen so far; None:
        no padding. positions [B, T]: None means cumsum(attention_mask) - 1, so padding on the left does not count.
        cache: a KVCache, extended in place. With self.recompute, training keeps only what goes from block to block, and
        computes each block a second time when its gradient is due: a third more time, much less memory (Chen et al. 2016,
        arXiv:1604.06174).
        """
        B, T = ids.shape
        start = cache.length if cache is not None else 0
        # columns may exceed the context where padding does: positions decide
        if start + T > self.config.context and (positions is None or int(positions.max()) >= self.config.context):
            raise ValueError(f"{start + T} tokens do not fit the model's context of {self.config.context}")
        mask = None  # None: plain causal attention
        if attention_mask is not None:
            if positions is None:
                positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, start:]
            mask = attention_mask[:, None, None, :].bool()  # [B, 1, 1, S]
        elif positions is None:
            positions = torch.arange(start, start + T, device=ids.device)
        if T > 1 and (mask is not None or start > 0):
            query = torch.arange(start, start + T, device=ids.device)[:, None]
            key = torch.arange(start + T, device=ids.device)
            causal = key <= query  # [T, S]
            # a padded query has nothing to look at and would be 0/0: let it see itself; nobody looks at it
            mask = causal if mask is None else (causal & mask) | (key == query)
        x, rope = self.wte(ids), None  # [B, T, C]
        if self.wpe is not None:
            x = x + self.wpe(positions)
        else:
            self.frequencies = self.frequencies.to(x.device)
            angles = positions[..., None, :, None] * self.frequencies  # [B or nothing, 1, T, D / 2]
            rope = angles.cos(), angles.sin()
        for layer, block in enumerate(self.h):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, cache, layer, rope, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, mask, cache, layer, rope)
        if cache is not None:
            cache.length += T
        return self.ln_f(x)

    def token_logprobs(self, hidden, targets, temperature=1.0):
        """log softmax(head(hidden) / temperature)[targets]: hidden [..., C], targets [...] -> [...]. The logits exist for
        4096 tokens at most at a time (kernels/linear_logprob.py)."""
        return linear_logprobs(hidden, self.lm_head.weight, targets, temperature, self.config.vocab_size)

    def token_logprobs_and_entropy(self, hidden, targets, temperature=1.0):
        """The same, and the entropy [...] of each distribution."""
        return linear_logprobs_and_entropy(hidden, self.lm_head.weight, targets, temperature, self.config.vocab_size)

    def response_states(self, rollout, rows):
        """What the head reads to predict the response tokens of these rows, [N, C], and those tokens [N]: N =
        mask[rows].sum(), in the order of the mask's ones (`to_slots` puts such values in their slots).

        A training pass that computes no token twice: each different prompt once, whatever the number of its
        responses, and nothing beyond the longest response. The gradient is that of the plain forward pass, row by
        row.
        """
        P, mask = rollout.prompt_len, rollout.mask[rows]  # [b, T]
        T = max(1, int(mask.sum(1).max()))
        prompts = torch.stack([rollout.ids[rows, :P], rollout.attention_mask[rows, :P]], 2)  # [b, P, 2]
        prompts, prompt_of_row = prompts.unique(dim=0, return_inverse=True)  # [U, P, 2], [b]
        first = P - int(prompts[:, :, 1].sum(1).max())  # padding in front of all of them
        ids, attention = prompts[:, first:, 0], prompts[:, first:, 1]
        padded = not bool(attention.all())
        cache = PromptCache()
        hidden = self.hidden(ids, attention_mask=attention if padded else None, cache=cache)  # [U, P, C]
        hidden = hidden[:, -1:][prompt_of_row]  # [b, 1, C]: the last prompt token predicts slot 0
        if T > 1:
            columns = slice(P, P + T - 1)  # the last token predicts nothing
            seen = rollout.attention_mask[rows, first : P + T - 1] if padded else None
            rest = self.hidden(rollout.ids[rows, columns], rollout.positions[rows, columns], seen, cache.of_rows(prompt_of_row))
            hidden = torch.cat([hidden, rest], 1)  # [b, T, C]
        chosen = mask[:, :T].bool()
        return hidden[chosen], rollout.ids[rows, P : P + T][chosen]

    @torch.no_grad()
    def rollout_logprobs(self, rollout, micro_batches, temperature=1.0):
        """Log-probabilities [B, T] of a rollout's tokens under this model, 0 where none was sampled. micro_batches: row
        numbers, cut into parts that fit the memory. Several processes share them, and all get all."""
        logp = torch.zeros_like(rollout.logp)
        for rows in common.mine(micro_batches):
            hidden, tokens = self.response_states(rollout, rows)
            logp[rows] = to_slots(self.token_logprobs(hidden, tokens, temperature), rollout.mask[rows])
        return common.sum_over_ranks(logp)

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, temperature=1.0, top_k=None, eos=None, generator=None):
        """Samples one response of at most `max_new_tokens` for each prompt (lists of token ids) and returns a
        `Rollout`.

        Temperature 0 takes the most likely token. logp is log softmax(logits / temperature) at the sampled token
        (temperature 1 for greedy decoding) over the whole vocabulary, also under top_k. Raises ValueError for an
        empty prompt or one that does not fit the context.

        Equal prompts are computed once. A row that sampled `eos` leaves the batch: the last live row moves into its
        slot, so that the live ones stay the first n rows of the cache and the others cost nothing.

        Under torchrun each process samples for its share of the prompts, with random numbers of its own, and all get all.
        """
        if common.WORLD > 1:
            share = [len(prompts) * rank // common.WORLD for rank in (common.RANK, common.RANK + 1)]
            device, part = self.wte.weight.device, None
            seed = common.gather(int(torch.randint(2**60, (), generator=generator, device=device)))[0] + common.RANK
            if share[0] < share[1]:
                own = torch.Generator(device).manual_seed(seed)
                part = self._generate(prompts[slice(*share)], max_new_tokens, temperature, top_k, eos, own).to("cpu")
            return Rollout.cat([part for part in common.gather(part) if part is not None]).to(device)
        return self._generate(prompts, max_new_tokens, temperature, top_k, eos, generator)

    def _generate(self, prompts, max_new_tokens, temperature, top_k, eos, generator):
        device, B = self.wte.weight.device, len(prompts)
        if B == 0 or max_new_tokens < 1 or temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(
                f"needs prompts ({B} given), max_new_tokens >= 1 ({max_new_tokens}), temperature >= 0 ({temperature}), "
                f"top_k >= 1 or None ({top_k})"
            )
        P, shortest = max(map(len, prompts)), min(map(len, prompts))
        if shortest == 0 or P + max_new_tokens > self.config.context:
            raise ValueError(
                f"prompts of {shortest} to {P} tokens and {max_new_tokens} new ones: none may be empty, and together "
                f"they must fit the context of {self.config.context}"
            )
        # 1. The prompts, each different one once
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        prompt_of_row = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=device)  # [B]
        prompt_ids, prompt_mask = (torch.from_numpy(a).to(device) for a in _pad(list(number), P, left=True))  # [U, P]
        padded, shared = shortest < P, len(number) < B
        cache = KVCache(self.config, len(number), P if shared else P + max_new_tokens, self.wte.weight)
        hidden = self.hidden(prompt_ids, attention_mask=prompt_mask if padded else None, cache=cache)[:, -1]  # [U, C]
        logits = self.lm_head(hidden)[prompt_of_row]  # [B, V]
        if shared:
            prompt_cache, cache = cache, KVCache(self.config, B, P + max_new_tokens, self.wte.weight)
            cache.copy_rows(slice(None), prompt_cache, prompt_of_row)
            cache.length = P
        # 2. One token at a time. Slot i of the batch belongs to row rows[i] of the result.
        ids = torch.full((B, P + max_new_tokens), 0 if eos is None else eos, device=device)
        ids[:, :P] = prompt_ids[prompt_of_row]
        attention = torch.ones_like(ids)
        attention[:, :P] = prompt_mask[prompt_of_row]
        prompt_length = attention[:, :P].sum(1)  # [n]; the token sampled at t has position prompt_length + t
        logp = torch.zeros(B, max_new_tokens, device=device)
        rows = torch.arange(B, device=device)
        live_attention = attention.clone()  # in the order of the slots; response columns are always 1
        for t in range(max_new_tokens):
            token, token_logp = _sample(logits, temperature, top_k, generator)  # [n], [n]
            ids[rows, P + t] = token
            logp[rows, t] = token_logp
            if t + 1 == max_new_tokens:
                break
            if eos is not None and (t + 1) % ASK_EVERY[device.type] == 0:
                live = (ids[rows, P : P + t + 1] != eos).all(1)  # [n]
                n = int(live.sum())
                if n == 0:
                    break
                if n < len(rows):  # there are as many free slots among the first n as live rows behind them
                    free, movers = (~live[:n]).nonzero()[:, 0], live[n:].nonzero()[:, 0] + n
                    cache.copy_rows(free, cache, movers)
                    for per_slot in (rows, token, prompt_length, live_attention):
                        per_slot[free] = per_slot[movers]
                    rows, token = rows[:n], token[:n]
                    prompt_length, live_attention = prompt_length[:n], live_attention[:n]
            seen = live_attention[:, : P + t + 1] if padded else None
            logits = self.lm_head(self.hidden(token[:, None], (prompt_length + t)[:, None], seen, cache)[:, 0])
        # 3. The mask, from positions: everything up to and including the first EOS
        response = ids[:, P:]
        ends = response == (-1 if eos is None else eos)
        mask = (ends.cumsum(1) - ends.long() == 0).long()  # [B, max_new_tokens]: no EOS strictly before the slot
        T = int(mask.sum(1).max())
        mask = mask[:, :T]  # [B, T]
        ids = torch.cat([ids[:, :P], torch.where(mask > 0, response[:, :T], 0 if eos is None else eos)], 1)
        attention = torch.cat([attention[:, :P], mask], 1)
        return Rollout(ids, (attention.cumsum(1) - 1).clamp(min=0) * attention, attention, mask, logp[:, :T] * mask, P)


def _sample(logits, temperature, top_k, generator):
    """One token for each row of logits [n, V] and its log-probability, [n] each."""
    log_probs = F.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = log_probs.argmax(-1)
    else:
        probs = log_probs.exp()
        if top_k is not None and top_k < probs.shape[-1]:
            probs = probs.masked_fill(log_probs < log_probs.topk(top_k).values[:, -1:], 0.0)
        # Inverse-CDF sampling: one random number u in (0, 1] for each row picks the first token whose
        # cumulative probability reaches it. A token of probability 0 does not raise the sum: on a CPU it is never the
        # first, on a GPU up to the rounding of its parallel sum.
        # (torch.multinomial draws V numbers a row, which is as slow as a layer of the model.)
        cumulative = probs.cumsum(-1)
        u = 1 - torch.rand(len(probs), 1, device=probs.device, generator=generator)
        token = torch.searchsorted(cumulative, u * cumulative[:, -1:])[:, 0]
        # NaN logits end up behind the last token: let the loss report them
        token = token.clamp(max=probs.shape[-1] - 1)
    return token, log_probs.gather(-1, token[:, None])[:, 0]


def _pad(sequences, width, left=False):
    """Token lists as numpy arrays (ids [B, width], attention mask [B, width]), padded with zeros on the right or on
    the left."""
    ids, mask = np.zeros((len(sequences), width), np.int64), np.zeros((len(sequences), width), np.int64)
    for i, tokens in enumerate(sequences):
        where = slice(width - len(tokens), width) if left else slice(len(tokens))
        ids[i, where], mask[i, where] = tokens, 1
    return ids, mask


def right_pad(sequences):
    """Token lists -> ids [B, L] and attention mask [B, L] as tensors, padded with zeros on the right."""
    return tuple(map(torch.from_numpy, _pad(sequences, max(map(len, sequences)))))


def load(config, earlier):
    """What a stage starts from -> (where it is, model, tokenizer): --init, which is a checkpoint of this project, a folder of
    a pretrained model or its name on the hub; without it <out>/<earlier>.pt (gpt.py's is base.pt), made if missing. Settings that are not
    given are those of --init: the tokenizer, the chat format, and on a GPU the dtype. Ends the program with one line if
    something does not fit."""
    init = config.init or os.path.join(config.out, {"gpt": "base"}.get(earlier, earlier) + ".pt")
    if not config.init and not config.resume:
        common.make_if_missing(earlier, init, config)
    dtype = getattr(torch, config.dtype) if config.dtype != "auto" else torch.get_default_dtype()  # float32
    as_stored = config.dtype == "auto" and "cuda" in config.device
    try:
        folder = common.on_rank_0(find_folder, init) if is_pretrained(init) else None
        checkpoint = None if folder else common.load_checkpoint(init)
        settings = {"tokenizer": str(folder)} if folder else checkpoint["config"]
        config.tokenizer = config.tokenizer or settings.get("tokenizer") or "stories"
        config.chat = config.chat or settings.get("chat") or "none"
        tokenizer = get_tokenizer(config.tokenizer, config.chat.replace("none", ""))
        if folder:
            stored = read_json(folder / "config.json")
            if as_stored and "bfloat16" in (stored.get("dtype"), stored.get("torch_dtype")):
                dtype = torch.bfloat16
            model = GPT.from_pretrained(folder, dtype)
        else:
            common.require_kind(init, checkpoint, tokenizer)
            model = GPT(GPTConfig(**checkpoint["model_config"]))
            model.load_state_dict(checkpoint["model"])
            dtype = checkpoint["model"]["wte.weight"].dtype if as_stored else dtype
            model.to(dtype)
        if tokenizer.n_vocab > model.config.vocab_size:
            raise ValueError(f"its tokenizer has {tokenizer.n_vocab} tokens, its embedding {model.config.vocab_size}")
    except ValueError as problem:
        raise SystemExit(f"--init {init}: {problem}") from None
    real = bool(folder) or settings.get("task", "stories") != "stories" or settings.get("data")
    if real and config.task == "stories" and not config.data:
        print(f"{init} comes from elsewhere, and neither --task nor --data is given: it is trained on the embedded stories")
    model.recompute, config.dtype = config.recompute, str(dtype).removeprefix("torch.")
    return str(folder or init), model.to(config.device), tokenizer


def export(checkpoint, folder):
    """Writes the model of one of this project's checkpoints as a folder that `transformers` loads."""
    found = common.load_checkpoint(checkpoint)
    if "wte.weight" not in found["model"]:
        raise SystemExit(f"{checkpoint} was made by {found['script']}.py: only language models can be exported")
    model = GPT(GPTConfig(**found["model_config"]))
    model.load_state_dict(found["model"])
    model.to(found["model"]["wte.weight"].dtype)
    try:
        tokenizer = get_tokenizer(found["config"]["tokenizer"], found["config"].get("chat", "none").replace("none", ""))
        write_folder(model, to_tokenizer_json(tokenizer), tokenizer.eot_token, folder, tokenizer.bos_token)
        ids = {i: name for name, i in tokenizer._special_tokens.items()}
        ends = {"eos_token": ids[tokenizer.eot_token], "bos_token": ids.get(tokenizer.bos_token)}
        write_json({"tokenizer_class": "PreTrainedTokenizerFast", **ends}, os.path.join(folder, "tokenizer_config.json"))
    except (OSError, ValueError) as problem:
        raise SystemExit(f"--export {checkpoint} {folder}: {problem}") from None
    print(f"{folder}: {found['script']}.pt of step {found['step']}, for AutoModelForCausalLM.from_pretrained({folder!r})")


@dataclass
class Config:
    seed: int = 0  # of the initial weights and of the documents
    steps: int = 1000  # optimizer steps
    out: str = "out"  # folder for base.pt and base/
    device: str = "auto"  # auto, cpu, cuda, mps
    resume: bool = False  # continue from the checkpoint; give the other flags again
    tokenizer: str = "stories"  # stories (embedded) or any name that tiktoken knows; it sets the vocabulary
    context: int = 48  # longest sequence in tokens
    n_layer: int = 3  # transformer blocks
    n_head: int = 4  # attention heads
    n_embd: int = 128  # width
    documents: int = 32  # documents per step
    micro_batch: int = 32  # documents per forward and backward pass
    lr: float = 2e-3  # peak learning rate
    warmup: int = 100  # steps of linear warm-up (1: none); then a cosine down to a tenth
    log_every: int = 50  # steps between two lines
    save_every: int = 100  # steps between two checkpoints
    evaluate: int = 512  # held-out problems, sampled before and after
    max_new_tokens: int = 16  # longest sampled response

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(f"--n-embd {self.n_embd}: must be a multiple of --n-head {self.n_head}")


def main(config):
    # data and model
    tokenizer = get_tokenizer(config.tokenizer)
    model_config = GPTConfig(tokenizer.n_vocab, config.context, config.n_layer, config.n_head, config.n_embd)
    torch.manual_seed(common.seed_of(config.seed))  # of the initial weights
    model = GPT(model_config).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    held_out = stories.held_out_problems(config.evaluate)
    require_room(model, tokenizer, held_out, config.max_new_tokens)
    run = common.Run("base", config, tokenizer, "loss accuracy length grad_norm lr tokens_per_second")
    step = run.restore(model, optimizer)

    def held_out_scores():
        generator = common.generator(config.device, "held out", config.seed)
        return evaluate(model, tokenizer, held_out, config.max_new_tokens, generator=generator)

    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"pretraining {size:.2f} M parameters, {config.steps} steps of {config.documents} documents")

    if not config.resume:
        scores = held_out_scores()
        run.log(0, accuracy=scores["accuracy"], length=scores["length"])
        run.save(0, model, optimizer)

    final, tokens, busy = {}, 0, 0.0
    while step < config.steps:
        # the documents of this step
        began = time.perf_counter()
        rng = random.Random(common.seed_of("base", config.seed, step))
        documents = [
            tokenizer.encode_ordinary("".join(stories.base_document(rng))) + [tokenizer.eot_token]
            for _ in range(config.documents)
        ]
        longest = max(map(len, documents))
        if longest > config.context:
            raise SystemExit(f"a document of {longest} tokens does not fit --context {config.context}")
        n_targets = sum(map(len, documents)) - len(documents)  # every token but the first of each document is predicted

        # loss = mean of -log p over the tokens of the whole step, added up over micro-batches of like length
        total = 0.0
        for rows in common.mine(common.by_length(list(map(len, documents)), config.micro_batch)):
            ids, mask = (x.to(config.device) for x in right_pad([documents[i] for i in rows]))  # [b, L]
            # padding is on the right, where causal attention never looks
            hidden = model.hidden(ids[:, :-1])  # [b, L-1, C]
            logp = model.token_logprobs(hidden, ids[:, 1:])  # [b, L-1]
            loss = -(logp * mask[:, 1:]).sum() / n_targets
            loss.backward()
            total += loss.item()
        total = common.sum_over_ranks(total)
        grad_norm = common.finish_gradients(model.parameters(), 1.0)
        run.require_finite(step + 1, loss=total, grad_norm=grad_norm)
        lr = common.cosine_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

        # log and checkpoint
        step += 1
        tokens, busy = tokens + n_targets, busy + time.perf_counter() - began
        if step % config.log_every == 0 or step == config.steps:
            final = held_out_scores() if step == config.steps else {}
            run.log(
                step,
                loss=total,
                accuracy=final.get("accuracy"),
                length=final.get("length"),
                grad_norm=grad_norm,
                lr=lr,
                tokens_per_second=tokens / busy,
            )
            tokens, busy = 0, 0.0
        run.save(step, model, optimizer, config.save_every)

    # what it learned
    run.plot("loss", "grad_norm")
    scores = final or held_out_scores()
    print(f"""
{run.path}: {config.steps} steps in {run.metrics()[-1]["seconds"]:.0f} seconds. Sampled on {len(held_out)} held-out stories:
{habits(scores)}
  accuracy (pass@1) {scores["accuracy"]:.3f}
next: python sft.py""")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--export"]:
        if len(sys.argv) != 4:
            sys.exit("usage: python gpt.py --export out/grpo.pt FOLDER")
        export(*sys.argv[2:])
    else:
        main(common.parse(Config, __doc__))
