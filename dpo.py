"""Stage 3 without the reinforcement learning: DPO and its family, one-shot or iterated, with the mass leak in view.

RLHF maximises E[r] - beta KL(pi || ref), and the policy that does it best is known: ref, tilted by the reward (Z is
whatever makes it a distribution):

    pi*(y | x) = ref(y | x) exp(r(x, y) / beta) / Z(x)        so        r(x, y) = beta log pi*(y|x) / ref(y|x) + beta log Z(x)

In the difference of two rewards of one prompt Z cancels. So a policy is a reward model: its implicit reward is
beta log pi / ref, and it can be fitted to comparisons as reward_model.py fits one. No reward model, no sampling, no critic:

    a = log pi(chosen | prompt) - log ref(chosen | prompt),   b = the same of the rejected one, sums over response tokens
    loss = mean over pairs of -log sigmoid(beta (a - b))                           log 2 as long as pi = ref
    its gradient = -beta sigmoid(beta (b - a)) [grad log pi(chosen) - grad log pi(rejected)]

A pair counts the more, the more the implicit rewards have it wrong. `preference_loss` has eleven more losses.

    python dpo.py                       and before it out/base.pt and out/sft.pt if they are missing
    python dpo.py --rounds 4            the same number of labels in four rounds, each on what the policy says by then
    python dpo.py --judge self          AI feedback: the SFT model itself says which of its answers is better
    python dpo.py --compare             all losses, and mere imitation of the chosen ones, on the same pairs: a table
    python dpo.py --rounds 4 --compare  one-shot and iterated with the same number of labels: a table
    python dpo.py --toy                 two completions: what beta does, and how probability mass leaks
    python dpo.py --data pairs.jsonl    your own: {"prompt": ..., "chosen": ..., "rejected": ...} a line

What to expect (defaults, two CPU cores): under a minute after the SFT model is there; held-out accuracy from 0.5 to 0.8 and
mean length from 6 to 9 tokens at about one nat of KL, and with --rounds 4 to 0.9.

What to look at: "why do the log-probabilities of the chosen responses go down?" The loss only sees a - b: it is just as
happy when both fall and the rejected one falls faster, and the probability goes to responses that nobody compared (Razin
et al. 2024, arXiv:2410.08847). `chosen` and `rejected` are the log-probabilities of held-out pairs and `vs ref` is how far
they have moved; when both have fallen, a line says so, and to which tokens the mass went. `train` and `judge` are how often
the implicit rewards side with the judge, on the step's pairs and on held-out ones. `kl` is KL(policy || SFT model) of
fresh samples, exact at each of their positions. All but `train` is against the SFT model, also after --reset-reference,
and the held-out pairs are answers of the SFT model to the end.

Iterated (--rounds): new pairs of what the policy says by then, labelled by the judge, and on, with one learning-rate
schedule over all rounds. The reference stays the SFT model, so that all rounds together stay near it; --reset-reference
makes it the policy that the round starts with, so that each round may go as far again. (A small beta is a long leash: at the
default there is no difference, with --beta 1 there is. README.md, "Fresh samples help".)

Sources: Rafailov et al. 2023 (DPO, arXiv:2305.18290), eq. 4, 5 and 7; of the other losses, at each. Iterated: Xu et al. 2023
(arXiv:2312.16682). AI feedback: Lee et al. 2023 (RLAIF, arXiv:2309.00267). Deliberately left out: LoRA, packing, pairs of
responses of several models. The letters of the shapes are explained in gpt.py, but here B counts pairs; R responses, M
pairs or single responses of a data set.
"""

import contextlib
import copy
import dataclasses
import json
import math
import os
import random
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

import common
import memory
from data import accuracy_reward, encode_prompt, stories
from data.evaluation import require_room
from data.judges import ask_both_orders, gold_scores, report, swap_average
from data.preferences import read_preferences, sample_best_worst, write_preferences
from data.tasks import drop_long_prompts, get_task, show
from gpt import GPTConfig, Rollout, load, right_pad, to_slots
from kernels import token_kl, token_logprobs_and_entropy
from reward_model import RewardModel, combine

# The losses, and the beta of each that --beta replaces; it is not the same thing in all, see preference_loss. As published
# where there is a usual one, but for sppo, whose 0.001 sets targets of +-500 nats.
BETA = {"dpo": 0.1, "cdpo": 0.1, "robust": 0.1, "dpo_norm": 0.1, "hinge": 0.1, "ipo": 0.1, "ipo_avg": 0.1, "sppo": 0.1,
        "kto": 0.1, "rpo": 0.1, "simpo": 2.5, "orpo": 0.1}  # fmt: skip
WITHOUT_REFERENCE = ("simpo", "orpo")
FINAL_SAMPLES = 8  # of each held-out prompt, before and after; one in between
# Defaults for pretrained weights and real data, in the range of what others use; no GPU was at hand to tune them
REAL = dict(pairs=2000, judge="gold", samples=4, max_new_tokens=300, micro_batch=8, sample_rows=256, lr=5e-7, evaluate=200)


# fmt: off
@dataclass
class Config:
    seed: int = 0  # of the stories, the sampling, the judge, and the order of the pairs
    steps: int = 0  # optimizer steps, over all rounds; 0: one pass over the pairs of each
    out: str = "out"  # folder for dpo.pt and dpo/
    device: str = "auto"  # auto, cpu, cuda, mps
    resume: bool = False  # continue from the checkpoint; give the other flags again
    init: str = ""  # where to start, which is also the reference: checkpoint, folder of a pretrained model or its name on the hub; empty: <out>/sft.pt, made if it is missing
    tokenizer: str = ""  # must be the one that --init was trained with; empty: what --init says
    chat: Literal["none", "chatml", "llama3"] | None = None  # how prompts are written for a chat model; if not given, as for --init
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the models; auto: on a GPU as stored, else float32
    recompute: bool = False  # activation checkpointing: less memory, a third more time
    task: Literal["stories", "gsm8k"] = "stories"  # where the problems come from
    data_dir: str = ""  # folder with GSM8K's train.jsonl and test.jsonl; empty: they are downloaded once
    estimate: bool = False  # only print how much memory this takes with known models
    data: str = ""  # a file of preferences (JSONL), a tenth of whose prompts is held out; for kto also of single labelled responses; empty: samples of the model, judged
    pairs: int = 4000  # labels to train on, over all rounds: a label is one comparison
    samples: int = 2  # responses per story, of which the judge's best and worst make a pair; of more than two it has to rank all
    judge: Literal["noisy", "gold", "reward_model", "self"] = "noisy"  # sees the gold score through noise, or exactly; reward_model.py; the SFT model itself
    noise: float = 1.5  # of the noisy judge, in units of the gold score: at 1.5 it agrees with gold in three pairs of four
    reward_model: str = ""  # checkpoint of --judge reward_model; empty: <out>/reward_model.pt, made if it is missing
    max_new_tokens: int = 16  # longest sampled response
    sample_rows: int = 1024  # responses sampled at once; changes memory, and which random numbers they get
    rounds: int = 1  # sample, judge, train; 1: one-shot, all pairs from the SFT model
    reset_reference: bool = False  # the reference of each round is the policy that it starts with, not the SFT model
    loss: Literal[tuple(BETA)] = "dpo"  # see preference_loss
    beta: float | None = None  # strength of the leash to the reference; each loss has its own default
    label_smoothing: float = 0.1  # cdpo, robust: how likely it is that a label is wrong (to cdpo, a row with a probability says it itself; of the noisy judge's a quarter are); 0: never
    gamma: float = 1.375  # simpo: by how much the chosen one has to lead; 0: not at all
    nll_weight: float = 1.0  # rpo: weight of -log pi(chosen)
    desirable_weight: float = 1.0  # kto: weight of chosen responses
    undesirable_weight: float = 1.0  # kto: weight of rejected ones
    batch: int = 50  # pairs per optimizer step
    micro_batch: int = 128  # responses per forward and backward pass; changes memory, not the gradient
    lr: float = 1e-4  # peak learning rate
    warmup: int = 10  # steps of linear warm-up (1: none), then a cosine down to a tenth
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this
    compare: bool = False  # run all losses on the same pairs, or, with --rounds, one-shot and iterated, and print a table
    seeds: int = 1  # of --compare: repeats with --seed, --seed + 1, ...
    toy: bool = False  # only print the toy
    evaluate: int = 512  # held-out problems, and held-out pairs
    eval_every: int = 10  # steps between two held-out evaluations
    log_every: int = 5  # steps between two lines
    save_every: int = 20  # steps between two checkpoints

    def __post_init__(self):
        if not self.steps >= 0:
            raise ValueError(f"--steps {self.steps}: must not be negative")
        if self.compare and self.rounds == 1 and (self.beta or self.loss != "dpo"):
            raise ValueError(f"--{'beta' if self.beta else 'loss'}: --compare runs every loss with the beta it has in BETA")
        if self.beta is None:
            self.beta = BETA[self.loss]
        if not self.beta > 0:
            raise ValueError(f"--beta {self.beta}: must be above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label-smoothing {self.label_smoothing}: must be from 0 to below 0.5, where labels say nothing")
        if self.samples == 1:
            raise ValueError("--samples 1: there is nothing to compare one response with; use at least 2")
        if self.seeds > 1 and not self.compare:
            raise ValueError(f"--seeds {self.seeds}: only --compare repeats; use --seed")
        if self.compare and self.resume:
            raise ValueError("--resume: --compare starts all its runs anew")
        if self.judge == "self" and self.samples > 2:
            raise ValueError(f"--samples {self.samples}: --judge self compares two answers")
        if self.data and self.rounds > 1:
            raise ValueError(f"--rounds {self.rounds}: the labels of --data are given, there is no judge for new responses")
        if self.rounds > self.pairs:
            raise ValueError(f"--rounds {self.rounds}: at most one per label, --pairs {self.pairs}")
# fmt: on


def log1mexp(x):
    """log(1 - exp(x)) for x < 0, exact on either side of -log 2 (Mächler 2012, the log1mexp note of R's Rmpfr)."""
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def preference_loss(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, loss="dpo", *, label_smoothing=0.0, gamma=0.0,
    nll_weight=1.0, chosen_lengths=None, rejected_lengths=None, mean_chosen_length=None, policy_kl=None, ref_kl=None,
    desirable_weight=1.0, undesirable_weight=1.0,
):  # fmt: skip
    """The loss of each pair and its two implicit rewards (detached), [B] each, from log-probabilities of whole responses:
    sums over their tokens, EOS included, [B]. A mean over rows of a padded width would divide beta by that width.

    a, b: chosen and rejected response, log pi - log ref.

    loss      uses      formula                                         what for
    dpo       sums      -log sigmoid(beta (a - b))                      the original
    cdpo      sums      (1 - e) dpo(a - b) + e dpo(b - a)               labels that are wrong with chance e = label_smoothing
    robust    sums      [(1 - e) dpo(a - b) - e dpo(b - a)] / (1 - 2e)  the same, unbiased under flips; may be negative
    dpo_norm  averages  -log sigmoid(beta (a/|chosen| - b/|rejected|))  length not to count
    hinge     sums      max(0, 1 - beta (a - b))                        no push once the margin is there
    ipo       sums      (a - b - 1 / (2 beta))^2                        a margin to reach and not to exceed
    ipo_avg   averages  the same with a/|chosen|, b/|rejected|          ... whatever the lengths
    sppo      sums      (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2         a target for each, not only for the margin
    kto       sums      1 - sigmoid(+-beta (a or b - z0)), see below    single responses, good or bad
    rpo       sums      dpo + nll_weight * -log pi(chosen) per token    chosen responses to become likely
    simpo     averages  -log sigmoid(beta (log pi(chosen)/|chosen| - log pi(rejected)/|rejected|) - gamma)     no reference
    orpo      averages  -log pi(chosen)/|chosen| + beta * -log sigmoid(log odds ratio)                         no reference

    chosen_lengths, rejected_lengths [B]: tokens, where averages are used (and by rpo). label_smoothing may be a number per
    pair, [B]. Of a micro-batch, rpo is told the mean_chosen_length of the whole step, over whose tokens its mean is. kto may
    have more chosen than rejected responses or fewer, and returns the losses of the chosen ones, then of the rejected
    ones, [Bc + Br]; policy_kl, ref_kl [K] are log-probabilities of responses to other prompts. Raises ValueError for an
    unknown loss, or lengths that are missing.
    """
    if loss not in BETA:
        raise ValueError(f"unknown loss {loss!r}: one of {', '.join(BETA)}")
    averages = loss in ("dpo_norm", "ipo_avg", "simpo", "orpo")
    if (averages or loss == "rpo") and (chosen_lengths is None or (averages and rejected_lengths is None)):
        raise ValueError(f"loss {loss!r} needs chosen_lengths and rejected_lengths")
    a, b = policy_chosen, policy_rejected
    if loss not in WITHOUT_REFERENCE:
        a, b = a - ref_chosen, b - ref_rejected
    if averages:
        a, b = a / chosen_lengths, b / rejected_lengths

    if loss in ("dpo", "dpo_norm"):
        # Rafailov et al. 2023, eq. 7; averages: Lambert et al. 2024 (Tulu 3, arXiv:2411.15124)
        per_pair = -F.logsigmoid(beta * (a - b))
    elif loss == "cdpo":
        # Mitchell 2023, a note on DPO with noisy preferences. Least where beta (a - b) is logit(1 - e)
        z = beta * (a - b)
        per_pair = -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)
    elif loss == "robust":
        # Ray Chowdhury et al. 2024, arXiv:2403.00409: its mean over the flips is dpo's loss of the true label
        z = beta * (a - b)
        flipped = -(1 - label_smoothing) * F.logsigmoid(z) + label_smoothing * F.logsigmoid(-z)
        per_pair = flipped / (1 - 2 * label_smoothing)
    elif loss == "hinge":
        # Zhao et al. 2023 (SLiC-HF, arXiv:2305.10425), with DPO's log-ratios
        per_pair = torch.relu(1 - beta * (a - b))
    elif loss in ("ipo", "ipo_avg"):
        # Azar et al. 2023, arXiv:2310.12036, eq. 17, whose tau is beta: of whole responses. TRL takes averages, as the
        # authors confirmed (TRL issue 1265)
        per_pair = (a - b - 1 / (2 * beta)) ** 2
    elif loss == "sppo":
        # Wu et al. 2024, arXiv:2405.00675, eq. 4.7, for a judge that says 1 or 0
        per_pair = (a - 1 / (2 * beta)) ** 2 + (b + 1 / (2 * beta)) ** 2
    elif loss == "kto":
        # Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8. z0: what any response is expected to have gained, an estimate of
        # the KL, without gradient
        z0 = 0.0 if policy_kl is None else (policy_kl - ref_kl).mean().clamp(min=0).detach()
        desirable = desirable_weight * (1 - torch.sigmoid(beta * (a - z0)))  # [Bc]
        undesirable = undesirable_weight * (1 - torch.sigmoid(beta * (z0 - b)))  # [Br]
        per_pair = torch.cat([desirable, undesirable])
    elif loss == "rpo":
        # Pang et al. 2024, arXiv:2404.19733, eq. 1, with the mean over all tokens in place of each response's own
        mean_length = chosen_lengths.to(a.dtype).mean() if mean_chosen_length is None else mean_chosen_length
        per_pair = -F.logsigmoid(beta * (a - b)) - nll_weight * policy_chosen / mean_length
    elif loss == "simpo":
        # Meng et al. 2024, arXiv:2405.14734, eq. 6
        per_pair = -F.logsigmoid(beta * (a - b) - gamma)
    elif loss == "orpo":
        # Hong et al. 2024, arXiv:2403.07691, eq. 4 to 7; odds are p / (1 - p) with p = exp(a), and beta is its lambda
        sure = torch.finfo(a.dtype).eps  # p = 1 has no odds
        log_odds_ratio = (a - log1mexp(a.clamp(max=-sure))) - (b - log1mexp(b.clamp(max=-sure)))
        per_pair = -a - beta * F.logsigmoid(log_odds_ratio)
    return per_pair, beta * a.detach(), beta * b.detach()


def sign_test(wins, n):
    """The chance of at least so many wins among n fair coins: one-sided."""
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


def judge_scores(problems, groups, rng, config, tokenizer, model, reward_model, task=stories):
    """What the judge thinks of n responses (texts) to each of P problems -> scores [P, n], of which only the order in a row
    matters; and, of a language model, what it said in both orders: [P], [P]."""
    if config.judge == "self":
        asked = ask_both_orders(model, tokenizer, problems, groups)
        probability, _, _ = swap_average(*asked)
        return torch.stack([probability, 1 - probability], 1), asked
    if config.judge == "reward_model":
        texts = [
            [*encode_prompt(tokenizer, p.prompt), *tokenizer.encode_ordinary(text), tokenizer.eot_token][: reward_model.config.context]
            for p, group in zip(problems, groups) for text in group
        ]  # fmt: skip
        scores = torch.zeros(len(texts))
        for rows in common.by_length(list(map(len, texts)), config.micro_batch):
            ids, mask = (x.to(config.device) for x in right_pad([texts[i] for i in rows]))  # [b, L]
            scores[rows] = combine(reward_model(ids, mask)).cpu()
        return scores.view(len(groups), -1), None
    return gold_scores(problems, groups, rng, config.noise if config.judge == "noisy" else 0.0, task), None


def sample_pairs(policy, count, name, config, tokenizer, model, reward_model, task=stories, held_out=False):
    """`count` comparisons of what `policy` says, labelled by the judge (`model` is the language model that may be it) ->
    (rows, dropped), see data/preferences.py. `name` seeds the stories, the sampling and the judge."""
    judge = lambda problems, groups, rng: judge_scores(  # noqa: E731
        problems, groups, rng, config, tokenizer, model, reward_model, task
    )
    return sample_best_worst(
        policy, tokenizer, count, config.samples, judge, common.seed_of(*name), config.max_new_tokens,
        common.generator(config.device, *name), held_out, task, config.sample_rows,
    )  # fmt: skip


@dataclass
class Preferences:
    """Comparisons as tensors: M elements, each a pair of responses, or with single labelled responses one."""

    rollout: Rollout  # R responses, with their prompts
    elements: torch.Tensor  # [M, 2] numbers of the chosen and the rejected response: [[0, 1], [2, 3] ...]; or [M, 1]
    chosen: torch.Tensor  # [R] bool: whether a response is a chosen (desirable) one
    lengths: torch.Tensor  # [R] tokens of each response, EOS included
    smoothing: (
        torch.Tensor
    )  # [M] how likely the label is wrong: --label-smoothing, or 1 - probability if the row has it
    gold_gap: torch.Tensor  # [M] by how much the chosen one is the better by the gold score, NaN where it is not known
    ref_logp: torch.Tensor | None = None  # [R] of the responses under the reference: computed once
    mismatched: Rollout | None = None  # for kto: each prompt with a response to another prompt
    mismatched_ref_logp: torch.Tensor | None = None  # [R]


def encode(row, tokenizer):
    """A row of preferences as token ids: (prompt, [chosen, rejected]), or (prompt, [response]) if it was judged alone. Each
    response ends with EOS, unless it was cut off."""
    keys = ("chosen", "rejected") if "chosen" in row else ("response",)
    eos = [[] if key in row.get("cut_off", ()) else [tokenizer.eot_token] for key in keys]
    return encode_prompt(tokenizer, row["prompt"]), [tokenizer.encode_ordinary(row[k]) + e for k, e in zip(keys, eos)]


def usable(rows, tokenizer, context):
    """-> (the rows that can be learned from, how many were dropped, by reason). "equal": chosen and rejected are the same
    text, or one has no token at all. "too long": a text does not fit the context; it is not cut, as a response without its
    end would teach to run on."""
    kept, dropped = [], {"equal": 0, "too long": 0}
    for row in rows:
        prompt, responses = encode(row, tokenizer)
        if ("chosen" in row and row["chosen"] == row["rejected"]) or not all(responses):
            dropped["equal"] += 1
        elif len(prompt) + max(map(len, responses)) > context:
            dropped["too long"] += 1
        else:
            kept.append(row)
    return kept, dropped


def as_tensors(rows, tokenizer, config):
    """Usable rows as Preferences."""
    prompts, responses, chosen, elements, smoothing = [], [], [], [], []
    for row in rows:
        prompt, texts = encode(row, tokenizer)
        elements.append([len(responses) + i for i in range(len(texts))])
        prompts += [prompt] * len(texts)
        responses += texts
        chosen += [True, False] if len(texts) == 2 else [row["label"]]
        # robust is for labels of which a known share is wrong, whatever is said of a single one
        soft = config.loss == "cdpo" and "probability" in row
        smoothing.append(1 - row["probability"] if soft else config.label_smoothing)
    rollout, gold = Rollout.of(prompts, responses, config.device), [row.get("gold", math.nan) for row in rows]
    elements, chosen, smoothing, gold = (
        torch.tensor(x, device=config.device) for x in (elements, chosen, smoothing, gold)
    )
    return Preferences(rollout, elements, chosen, rollout.mask.sum(1), smoothing, gold)


def mismatch(data, context, seed):
    """Each prompt with a response to another prompt, chosen where the row's own is chosen, for kto's z0. Cut where it exceeds
    the context. The prompts must not all be the same."""
    rng, P = random.Random(seed), data.rollout.prompt_len
    ids, attention = data.rollout.ids.tolist(), data.rollout.attention_mask.tolist()
    prompts = [[token for token, real in zip(i[:P], a[:P]) if real] for i, a in zip(ids, attention)]
    responses = [[token for token, real in zip(i[P:], a[P:]) if real] for i, a in zip(ids, attention)]
    elements, others = data.elements.tolist(), []
    for element in elements:
        other = element
        while prompts[other[0]] == prompts[element[0]]:
            other = rng.choice(elements)
        others += [responses[row][: context - len(prompts[element[0]])] for row in other]
    return Rollout.of(prompts, others, data.rollout.ids.device)


def sequence_logprobs(model, rollout, micro_batch):
    """log p(response | prompt) under `model`, summed over tokens, without gradient. -> [R]"""
    lengths = rollout.attention_mask.sum(1).tolist()
    micro_batches = [torch.tensor(rows, device=rollout.ids.device) for rows in common.by_length(lengths, micro_batch)]
    return model.rollout_logprobs(rollout, micro_batches).sum(1)


def ask_reference(reference, data, config):
    """The reference's log-probabilities, once for all steps; none where the loss has no reference."""
    if config.loss not in WITHOUT_REFERENCE:
        data.ref_logp = sequence_logprobs(reference, data.rollout, config.micro_batch)
    if config.loss == "kto":
        data.mismatched = mismatch(data, reference.config.context, config.seed)
        data.mismatched_ref_logp = sequence_logprobs(reference, data.mismatched, config.micro_batch)


def update(policy, optimizer, data, step_in_round, seed_name, config):
    """One optimizer step on the next config.batch elements, in an order that `seed_name` decides -> (means over the step: loss,
    margin of the implicit rewards, train_accuracy (a tie is wrong), grad_norm; tokens that passed)."""
    M = len(data.elements)
    epoch, i = divmod(step_in_round, -(-M // config.batch))
    order = torch.randperm(M, generator=common.generator("cpu", *seed_name, epoch)).to(data.elements.device)
    elements = order[i * config.batch : (i + 1) * config.batch]  # [b]
    rows = data.elements[elements]  # [b, 2] or [b, 1]
    n_losses = rows.numel() if config.loss == "kto" else len(rows)
    options = dict(gamma=config.gamma, nll_weight=config.nll_weight, desirable_weight=config.desirable_weight,
                   undesirable_weight=config.undesirable_weight)  # fmt: skip
    # what is a mean over the whole step is computed before it is cut
    if config.loss == "rpo":
        options["mean_chosen_length"] = data.lengths[rows[:, 0]].float().mean()
    if config.loss == "kto":
        others = rows.flatten()
        options["ref_kl"] = data.mismatched_ref_logp[others]
        options["policy_kl"] = sequence_logprobs(policy, data.mismatched.select(others), config.micro_batch)

    stats = dict.fromkeys(("loss", "margin", "train_accuracy"), 0.0)
    longest = (data.rollout.attention_mask.sum(1)[rows]).amax(1)  # [b]
    size = common.share(max(1, config.micro_batch // rows.shape[1]), len(rows))
    for part in common.mine(longest.argsort(stable=True).split(size)):
        flat = rows[part].flatten()  # chosen, rejected, chosen, rejected ...
        hidden, tokens = policy.response_states(data.rollout, flat)  # [N, C], [N]
        logp = to_slots(policy.token_logprobs(hidden, tokens), data.rollout.mask[flat]).sum(1)  # [2b]
        w, l = flat[data.chosen[flat]], flat[~data.chosen[flat]]  # noqa: E741
        ref = (None, None) if data.ref_logp is None else (data.ref_logp[w], data.ref_logp[l])
        losses, chosen_reward, rejected_reward = preference_loss(
            logp[data.chosen[flat]], logp[~data.chosen[flat]], *ref, config.beta, config.loss,
            label_smoothing=data.smoothing[elements[part]], chosen_lengths=data.lengths[w],
            rejected_lengths=data.lengths[l], **options,
        )  # fmt: skip
        loss = losses.sum() / n_losses
        loss.backward()
        stats["loss"] += loss.item()
        if rows.shape[1] == 2:
            stats["margin"] += (chosen_reward - rejected_reward).sum().item() / len(rows)
            stats["train_accuracy"] += (chosen_reward > rejected_reward).sum().item() / len(rows)
    stats = common.sum_over_ranks(stats)
    if rows.shape[1] == 1:
        del stats["margin"], stats["train_accuracy"]  # nothing was compared
    stats["grad_norm"] = common.finish_gradients(optimizer.parameters(), config.max_grad_norm)
    # if not, the weights stay as they are, and the caller stops
    if math.isfinite(stats["loss"]) and math.isfinite(stats["grad_norm"]):
        optimizer.step()
    optimizer.zero_grad()
    return stats, int(data.rollout.attention_mask[rows.flatten()].sum())


@torch.no_grad()
def measure_pairs(policy, data, config):
    """What happens to the held-out pairs: the mean log-probabilities of their chosen and rejected responses, absolute and
    against the SFT model (data.ref_logp, also after --reset-reference); the margin of the implicit rewards of the loss, and
    how often they side with the judge, and with the gold score where it is known and differs."""
    logp, w = sequence_logprobs(policy, data.rollout, config.micro_batch), data.chosen  # [R]
    ratio = logp - data.ref_logp
    found = dict(chosen_logp=logp[w], chosen_logratio=ratio[w], rejected_logp=logp[~w], rejected_logratio=ratio[~w])
    found = {key: value.mean().item() for key, value in found.items()}
    if data.elements.shape[1] == 2:
        chosen, rejected = data.elements.T
        _, chosen_reward, rejected_reward = preference_loss(
            logp[chosen], logp[rejected], data.ref_logp[chosen], data.ref_logp[rejected], config.beta, config.loss,
            chosen_lengths=data.lengths[chosen], rejected_lengths=data.lengths[rejected],
        )  # fmt: skip
        difference, known = chosen_reward - rejected_reward, data.gold_gap.abs() > 0  # [M]; NaN > 0 is False
        found["held_out_margin"] = difference.mean().item()
        if difference.any():  # not while the policy is the reference
            found["preference_accuracy"] = (difference > 0).float().mean().item()
            found["gold_accuracy"] = (difference * data.gold_gap > 0)[known].float().mean().item()
    return found


@torch.no_grad()
def measure_samples(policy, reference, prompts, problems, tokenizer, samples, config, task=stories):
    """What the policy says to held-out prompts (token ids): its KL to the reference in nats per response, exact at each
    position, its entropy per token and the length of its responses; if `problems` are given, accuracy and gold score.
    -> (means, texts)"""
    generator = common.generator(config.device, "held out", config.seed)
    several = [prompt for prompt in prompts for _ in range(samples)]
    found, texts = {"kl": [], "entropy": [], "length": []}, []
    for i in range(0, len(several), config.sample_rows):
        rollout = policy.generate(
            several[i : i + config.sample_rows], config.max_new_tokens, eos=tokenizer.eot_token, generator=generator
        )
        for rows in torch.arange(len(rollout.ids), device=config.device).split(config.micro_batch):
            hidden, tokens = policy.response_states(rollout, rows)  # [N, C], [N]
            logits = policy.lm_head.all_logits(hidden)  # [N, W]
            ref_logits = reference.lm_head.all_logits(reference.response_states(rollout, rows)[0])
            V = policy.config.vocab_size
            kl = token_kl(logits, ref_logits, vocab_size=V)  # [N]
            _, entropy = token_logprobs_and_entropy(logits, tokens, vocab_size=V)  # [N]
            found["kl"] += to_slots(kl, rollout.mask[rows]).sum(1).tolist()
            found["entropy"] += entropy.tolist()
        found["length"] += rollout.mask.sum(1).tolist()
        texts += rollout.texts(tokenizer)
    if problems:
        several = [problem for problem in problems for _ in range(samples)]
        found["accuracy"] = [accuracy_reward(text, problem.answer) for problem, text in zip(several, texts)]
        found["gold"] = [task.gold_score(problem, text) for problem, text in zip(several, texts)]
    return {name: sum(values) / len(values) for name, values in found.items()}, texts


@torch.no_grad()
def where_the_mass_went(policy, reference, rollout, micro_batch):
    """By how much each token has gained, the mean over all positions of these responses of p(token) - p_ref(token). -> [V]"""
    gain, n = torch.zeros(policy.config.vocab_size, device=rollout.ids.device), 0
    for rows in torch.arange(len(rollout.ids), device=rollout.ids.device).split(micro_batch):
        p, q = (
            model.lm_head(model.response_states(rollout, rows)[0]).float().softmax(-1) for model in (policy, reference)
        )
        gain, n = gain + (p - q).sum(0), n + len(p)
    return gain / n


def compare(config):
    """Runs `main` for each loss on the same pairs, or, with several rounds, one-shot and iterated with as many labels and
    steps, with as many seeds as asked for, in folders of their own; and prints a table."""
    if config.rounds == 1:
        variants = {loss: dict(loss=loss, beta=beta) for loss, beta in BETA.items()}
        variants["chosen only"] = dict(loss="rpo", beta=1e-6)  # what is left of rpo is to imitate them
    else:
        variants = {
            "one-shot": dict(rounds=1),
            "kept": dict(reset_reference=False),
            "reset": dict(reset_reference=True),
        }
    seeds, folder = range(config.seed, config.seed + config.seeds), os.path.join(config.out, "compare")
    init, judge = (
        given or os.path.join(config.out, name)
        for given, name in ((config.init, "sft.pt"), (config.reward_model, "reward_model.pt"))
    )
    if not config.init:
        common.make_if_missing("sft", init, config)
    if not config.reward_model and config.judge == "reward_model":
        common.make_if_missing("reward_model", judge, config, init=init, max_new_tokens=config.max_new_tokens)
    runs = {name: {} for name in variants}  # name -> seed -> what was measured before and after
    began, total = time.perf_counter(), len(seeds) * len(variants)
    print(f"{total} runs from {init}, each in a folder of {folder}")
    for done, (seed, name) in enumerate((seed, name) for seed in seeds for name in variants):
        out, said = os.path.join(folder, f"{name}-{seed}"), "done"
        os.makedirs(out, exist_ok=True)
        mine = {
            **dataclasses.asdict(config),
            **dict(compare=False, seeds=1, seed=seed, init=init, reward_model=judge, out=out),
        }
        try:
            with open(os.path.join(out, "log.txt"), "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
                labels = main(Config(**{**mine, **variants[name]}))
            with open(os.path.join(out, "dpo", "metrics.jsonl"), encoding="utf-8") as file:
                lines = [line for line in map(json.loads, file) if "kl" in line]
            runs[name][seed] = lines[0], {**lines[-1], "labels": labels}
        except SystemExit as stop:
            if stop.code == 130:
                print(f"stopped; what was finished is in {folder}")
                raise
            said = f"failed: {stop.code}"
        left = (time.perf_counter() - began) / (done + 1) * (total - done - 1)
        print(f"seed {seed}, {name}: {said}; {int(left) // 60}:{int(left) % 60:02d} left", flush=True)

    # the accuracy of each seed; all else is the mean over seeds
    columns = [("labels", "labels", ".0f"), ("gold", "gold", ".3f"), ("kl", "kl", ".3f"), ("entropy", "entropy", ".3f"),
               ("length", "length", ".1f"), ("chosen", "chosen_logratio", "+.2f"), ("rejected", "rejected_logratio", "+.2f"),
               ("seconds", "seconds", ".0f")]  # fmt: skip
    source, headings = config.data or f"judge: {config.judge}", "".join(f"{heading:>9}" for heading, _, _ in columns)
    print(f"\n{source}; chosen, rejected: log-probability of held-out pairs against {init}")
    print(f"{'':<12}{'beta':>6}{'accuracy':>{9 * len(seeds)}}{headings}")
    runs = {name: measured for name, measured in runs.items() if measured}  # all may have failed
    before = {seed: (first, first) for seed, (first, _) in next(iter(runs.values()), {}).items()}
    for name, measured in {"before": before, **runs}.items():
        lasts = {seed: last for seed, (_, last) in measured.items()}
        cells = [format(lasts.get(seed, {}).get("accuracy", math.nan), ".3f") for seed in seeds]
        for _, key, form in columns:
            cells.append(format(sum(last.get(key, math.nan) for last in lasts.values()) / max(1, len(lasts)), form))
        beta = "" if name == "before" else format(variants[name].get("beta", config.beta), "g")
        print(f"{name:<12}{beta:>6}" + "".join(f"{cell:>9}".replace("nan", "   ") for cell in cells))
    for name in ("kept", "reset") if config.rounds > 1 and "one-shot" in runs else ():
        both = set(runs["one-shot"]) & set(runs.get(name, {}))
        pairs = [[runs[which][seed][1]["accuracy"] for which in (name, "one-shot")] for seed in both]
        differ, wins = sum(a != b for a, b in pairs), sum(a > b for a, b in pairs)
        print(
            f"{config.rounds} rounds, reference {name}: better than one-shot with {wins} of {differ} seeds; by chance that often "
            f"or more with p = {sign_test(wins, differ):.4f} (sign test)"
        )


def toy(log_probs, parameter, beta, steps=200, lr=0.5):
    """Gradient descent on the DPO loss of a policy without a model: log_probs(parameter) [n], of which the first is
    preferred to the second; the reference is where it starts. -> log-probabilities [n] at the end"""
    parameter = torch.tensor(parameter, dtype=torch.float64, requires_grad=True)
    ref = log_probs(parameter).detach().clone()
    for _ in range(steps):
        logp = log_probs(parameter)
        loss, _, _ = preference_loss(logp[:1], logp[1:2], ref[:1], ref[1:2], beta)
        parameter.data -= lr * torch.autograd.grad(loss.mean(), parameter)[0]
    return log_probs(parameter).detach()


def print_toys():
    print(
        "Two completions, one log-probability each, 200 steps of gradient descent at lr 0.5 on the DPO loss. (It would go on: the"
    )
    print("loss is 0 only at an infinite difference.)\n")
    print(f"{'beta':>6}{'log pi - log ref':>20}{'implicit reward':>18}{'P(win)':>9}")
    for beta in (0.1, 1.0):
        up, down = (toy(lambda logp: logp, [-5.0, -5.0], beta) + 5).tolist()
        moved, rewards = f"{up:+.4f}, {down:+.4f}", f"{beta * up:+.4f}, {beta * down:+.4f}"
        print(f"{beta:>6}{moved:>20}{rewards:>18}{1 / (1 + math.exp(beta * (down - up))):>9.4f}")
    at_beta_1, matched = up, math.log(0.69 / 0.31) / 2  # beta * up = logit(P) / 2
    wrong = 0.1 * at_beta_1
    print(f"""
The implicit reward is beta * (log pi - log ref), and P(win) the sigmoid of the difference of the two. If the 0.1 stays in the
print line after training with beta 1, one reads +-{wrong:.2f} and P(win) {1 / (1 + math.exp(-2 * wrong)):.2f}, and believes that the policy has hardly
moved; it has moved by {at_beta_1:.2f}. To one and the same P(win), 0.69, it moves by {matched / 0.1:.4f} either way with beta 0.1 and by {matched:.4f}
with beta 1, exactly a tenth: the larger beta, the shorter the leash.

The mass leak: three outcomes, one parameter theta (logits theta * 1, 0, 5), the first preferred to the second, beta 0.1:
""")
    leak = toy(lambda theta: (theta * torch.tensor([1.0, 0.0, 5.0])).log_softmax(0), 0.0, 0.1).tolist()
    for name, value in zip(("chosen", "rejected", "never compared"), leak):
        print(
            f"  {name:<16}log-probability {-math.log(3):.2f} -> {value:6.2f}     probability 0.333 -> {math.exp(value):.1e}"
        )
    margin = 0.1 * (leak[0] - leak[1])
    print(f"""
The margin has grown from 0 to {margin:.3f}, and the loss has fallen from {math.log(2):.3f} to {math.log(1 + math.exp(-margin)):.3f}; yet chosen and rejected have both become
all but impossible. Only theta could lift the first above the second, and it lifts the third five times as much.""")


def read(config):
    """The rows of --data, split by prompt: (to train on, a tenth to test on), and what the user should know of them."""
    rows = read_preferences(config.data, single=True)
    single = "response" in rows[0]
    if single and config.loss != "kto":
        raise SystemExit(f"{config.data} has single responses, not pairs: only --loss kto learns from them")
    unused = [key for key in ("probability", "margin") if any(key in row for row in rows)]
    if unused and (config.loss != "cdpo" or "margin" in unused):
        print(f"{config.data} has {' and '.join(unused)}: only --loss cdpo uses a probability, no loss a margin")
    rng, prompts = random.Random(common.seed_of("split", config.seed)), sorted({show(row["prompt"]) for row in rows})
    others = set(rng.sample(prompts, max(1, len(prompts) // 10)))
    held_out = [row for row in rows if show(row["prompt"]) in others]
    rows, held_out = [row for row in rows if show(row["prompt"]) not in others], rng.sample(held_out, len(held_out))
    if config.loss == "kto":
        if len({show(row["prompt"]) for row in rows}) < 2:
            raise SystemExit(
                f"{config.data}: kto needs training rows of several prompts, to see what responses to another one gain"
            )
        desirable = sum(row["label"] for row in rows) if single else len(rows)
        undesirable = len(rows) - desirable if single else len(rows)
        if not desirable or not undesirable:
            raise SystemExit(f"{config.data}: all labels are {bool(desirable)}, there is nothing to tell apart")
        balance = desirable * config.desirable_weight / (undesirable * config.undesirable_weight)
        print(f"weight of desirable responses against undesirable ones: {balance:.2f} (KTO's authors advise 1 to 1.33)")
    return rows, held_out[: config.evaluate]


def main(config):
    if config.toy:
        return print_toys()
    if config.estimate:
        return memory.print_estimate("dpo", config)
    if config.compare:
        return compare(config)

    # 0. The policy, the frozen reference, and whoever judges
    # the file first, as a mistake in it should cost no time
    rows, held_out_rows = read(config) if config.data else ([], [])
    task = stories if config.data else get_task(config)
    init, policy, tokenizer = load(config, "sft")
    drop_long_prompts(task, tokenizer, policy.config.context - config.max_new_tokens)
    reference = copy.deepcopy(policy).requires_grad_(False)
    inits, reward_model = [init, *([config.data] if config.data else [])], None
    if config.judge == "reward_model" and not config.data:
        path = config.reward_model or os.path.join(config.out, "reward_model.pt")
        if not config.reward_model and not config.resume:
            flags = dict(init=init, max_new_tokens=config.max_new_tokens, **common.settings_of(config))
            common.make_if_missing("reward_model", path, config, **flags)
        judge = common.load_checkpoint(path, tokenizer, reward_model=True)
        if judge["step"] < judge["steps"]:
            raise SystemExit(
                f"{path} stopped at step {judge['step']} of {judge['steps']}: finish it first, with --resume"
            )
        reward_model = RewardModel(GPTConfig(**judge["model_config"]), judge["config"]["ensemble"])
        reward_model.load_state_dict(judge["model"])
        reward_model.trunks.to(policy.wte.weight.dtype)
        reward_model.to(config.device).requires_grad_(False)
        inits.append(path)
    sampled = (config, tokenizer, reference, reward_model, task)  # what sample_pairs has to know

    # 1. What is held out: stories, or else the prompts of the file's held-out rows
    problems = task.held_out_problems(config.evaluate) if config.tokenizer == "stories" or not config.data else []
    if not config.data:
        require_room(policy, tokenizer, task.training_problems(), config.max_new_tokens)
        held_out_rows, _ = sample_pairs(reference, config.evaluate, ("held out", config.seed), *sampled, True)
    if problems:
        require_room(policy, tokenizer, problems, config.max_new_tokens)
        prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
    else:
        room = policy.config.context - config.max_new_tokens
        texts = {show(row["prompt"]): row["prompt"] for row in held_out_rows}.values()
        prompts = [prompt for prompt in (encode_prompt(tokenizer, t) for t in texts) if 0 < len(prompt) <= room]
    rows, dropped = usable(rows, tokenizer, policy.config.context)
    held_out_rows, _ = usable(held_out_rows, tokenizer, policy.config.context)
    if (config.data and not rows) or not held_out_rows or not prompts:
        raise SystemExit(
            f"{config.data or 'samples of ' + init}: nothing to learn from: {len(rows)} rows to train on, "
            f"{len(held_out_rows)} to test on, {len(prompts)} prompts with room for --max-new-tokens "
            f"{config.max_new_tokens} in the context of {policy.config.context}"
        )

    # 2. The number of steps: the same for each round
    share = (len(rows) if config.data else config.pairs) // config.rounds  # labels per round
    per_round = -(-config.steps // config.rounds) if config.steps else -(-share // config.batch)
    config.steps = per_round * config.rounds
    columns = "loss chosen_logp chosen_logratio rejected_logp rejected_logratio train_accuracy preference_accuracy"
    columns += " accuracy gold kl length" if problems else " kl length entropy"
    optimizer = common.AdamW(policy.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0)
    run = common.Run("dpo", config, tokenizer, columns, *inits)
    step = run.restore(policy, optimizer)
    if run.checkpoint and config.rounds > 1 and run.checkpoint["steps"] != config.steps:
        raise SystemExit(
            f"{run.path} was made with --steps {run.checkpoint['steps']}: with --rounds they decide when a round ends"
        )
    labels = 0  # how many there were so far
    if run.checkpoint:
        held_out_rows, labels = run.checkpoint["held_out_rows"], run.checkpoint["labels"]
    held_out = as_tensors(held_out_rows, tokenizer, config)
    held_out.ref_logp = sequence_logprobs(reference, held_out.rollout, config.micro_batch)

    def begin_round(r):
        """New comparisons, of what the policy says now, and the reference's log-probabilities of them, once."""
        if config.data:
            new, lost = rows, dropped
        else:
            new, lost = sample_pairs(policy, share, ("pairs", config.seed, r), *sampled)
            new, more = usable(new, tokenizer, policy.config.context)
            lost["too long"] = more["too long"]
        why = ", ".join(f"{n} {reason}" for reason, n in lost.items() if n) or "none"
        short = "" if len(new) == share else f" ({share} were asked for: it nearly always says the same)"
        kind = "responses" if new and "label" in new[0] else "pairs"
        print(f"round {r + 1} of {config.rounds}: {len(new)} {kind}{short}; dropped: {why}")
        if not new:
            save(step, [], None)
            raise SystemExit(f"the policy says always the same: nothing to learn from; {run.path} holds step {step}")
        if not config.data:
            name = "preferences.jsonl" if r == 0 else f"preferences-{r + 1}.jsonl"
            common.on_rank_0(write_preferences, run.folder / name, new)
        if not config.data and config.judge == "self":
            print(report(new))
        data = as_tensors(new, tokenizer, config)
        ask_reference(policy if config.reset_reference else reference, data, config)
        return new, data

    def save(step, rows, data, every=1):
        """With the pairs of the round, what its reference says of them, and the held-out pairs."""
        run.save(
            step, policy, optimizer, every, rows=[] if config.data else rows, held_out_rows=held_out_rows, labels=labels,
            ref_logp=data and data.ref_logp, mismatched_ref_logp=data and data.mismatched_ref_logp,
        )  # fmt: skip

    def measure(step, samples):
        """The gauge, on pairs and prompts that nobody trained on."""
        means, texts = measure_samples(policy, reference, prompts, problems, tokenizer, samples, config, task)
        shown = [
            f"- {tokenizer.decode(prompts[i])}\n  `{texts[i * samples].strip()}`"
            + (f" gold {task.gold_score(problems[i], texts[i * samples]):.2f}" if problems else "")
            for i in range(min(6, len(prompts)))  # the same ones each time
        ]
        run.sample(step, "\n".join(shown))
        return {**means, **measure_pairs(policy, held_out, config)}

    def name_of(token):
        try:
            return repr(tokenizer.decode([token]))
        except KeyError:  # an id that the encoding leaves unused
            return f"token {token}"

    def mass_leak(step, found):
        gain = where_the_mass_went(policy, reference, held_out.rollout, config.micro_batch)
        most = [i for i in gain.topk(min(5, len(gain))).indices.tolist() if gain[i] > 0]
        top = ", ".join(f"{name_of(i)} {gain[i]:+.3f}" for i in most)
        return (
            f"mass leak at step {step}: chosen responses of held-out pairs are {-found['chosen_logratio']:.2f} nats less "
            f"likely than under {init}, rejected ones {-found['rejected_logratio']:.2f}. Tokens whose probability rose "
            f"most, on average over the positions of these responses: {top}"
        )

    if not config.resume:
        run.log(0, **measure(0, FINAL_SAMPLES))
        save(0, [], None)
    leaks = lambda line: line.get("chosen_logratio", 0) < 0 and line.get("rejected_logratio", 0) < 0  # noqa: E731
    warned = any(leaks(line) for line in run.metrics())
    data, tokens, busy = None, 0, 0.0
    while step < config.steps:
        # 3. A round begins; or goes on, after --resume, with its pairs and what its reference said of them
        r, k = divmod(step, per_round)
        if k == 0:
            new, data = begin_round(r)
            labels += len(new)
        elif data is None:
            new = rows if config.data else run.checkpoint["rows"]
            data = as_tensors(new, tokenizer, config)
            data.mismatched = mismatch(data, policy.config.context, config.seed) if config.loss == "kto" else None
            for name in ("ref_logp", "mismatched_ref_logp"):
                value = run.checkpoint[name]
                setattr(data, name, None if value is None else value.to(config.device))

        # 4. One step
        began = time.perf_counter()
        lr = common.cosine_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        stats, n = update(policy, optimizer, data, k, ("order", config.seed, r), config)
        step += 1
        run.require_finite(step, loss=stats["loss"], grad_norm=stats["grad_norm"])
        tokens, busy = tokens + n, busy + time.perf_counter() - began

        # 5. Log and checkpoint
        evaluate, last = step % config.eval_every == 0, step == config.steps
        if evaluate or last or step % config.log_every == 0:
            found = measure(step, FINAL_SAMPLES if last else 1) if evaluate or last else {}
            run.log(step, **stats, **found, lr=lr, tokens_per_second=tokens / busy)
            tokens, busy = 0, 0.0
            if leaks(found) and not warned:
                warned = True
                print(mass_leak(step, found), flush=True)
        save(step, new, data, config.save_every)

    # 6. What happened
    run.plot("accuracy", "kl", ("step", "chosen_logratio", "rejected_logratio"), "length")
    lines = [line for line in run.metrics() if "kl" in line]
    first, last = lines[0], lines[-1]
    gold = held_out.gold_gap[held_out.gold_gap.abs() > 0]
    judge_itself = f"of pairs whose gold scores differ; the judge itself in {(gold > 0).float().mean().item():.3f}"
    table = [
        ("accuracy (pass@1)", "accuracy", ".3f", "a single sample at temperature 1"),
        ("gold score", "gold", ".3f", "what answers are worth, at most 3.5"),
        ("KL to the start", "kl", ".3f", f"nats per response, of fresh samples, to {init}"),
        ("response length", "length", ".1f", "tokens"),
        ("entropy", "entropy", ".3f", "nats per token"),
        ("chosen log-prob", "chosen_logp", ".2f", "of held-out pairs, summed over the response"),
        ("rejected log-prob", "rejected_logp", ".2f", "both may fall: the loss sees only their difference"),
        ("margin", "held_out_margin", ".3f", "chosen minus rejected, of implicit rewards, on held-out pairs"),
        ("sides with judge", "preference_accuracy", ".3f", "the implicit rewards, on held-out pairs"),
        ("sides with gold", "gold_accuracy", ".3f", judge_itself),
    ]
    print(
        f"\nDPO ({config.loss}, beta {config.beta:g}): {config.steps} steps on {labels} labels in {last['seconds']:.0f} seconds; "
        f"on {len(prompts)} held-out {task.NAME if problems else 'prompts'}:"
    )
    for name, key, form, meaning in table:
        before, after = (format(line[key], form) if key in line else "" for line in (first, last))
        if after:
            print(f"  {name:<18}{before:>7} -> {after:>7}   {meaning}")
    if leaks(last):
        print(mass_leak(last["step"], last))
    print(
        f"  {run.path}, {run.folder}/samples.md (the same prompts before, during and after), {run.folder}/metrics.jsonl"
    )
    if config.rounds == 1 and not config.data:
        print(f"next: the same with --rounds 4 --init {init} --out {os.path.join(config.out, 'iterated')}")
    return labels


if __name__ == "__main__":
    main(common.parse(Config, __doc__, real=REAL))
