"""Stage 3 for checkable answers: GRPO, reinforcement learning with verifiable rewards and without a critic.

For each prompt sample a group of G responses, let a verifier score them, and push each response up or down by how
much better it did than its group:

    A_i   = (r_i - mean(r)) / (std(r) + eps)         one number, shared by all tokens of response i
    rho_t = pi(token_t) / pi_old(token_t)            exactly 1 on the first update after a rollout
    loss  = -min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) + beta * KL_t

averaged over tokens and responses. KL_t estimates KL(policy || reference) at token t; the reference is the SFT model.

    python grpo.py                          140 steps, and before them out/base.pt and out/sft.pt if they are missing
    python grpo.py --variant dr_grpo        the same loop with other switches: dapo, rloo, gspo, cispo, see VARIANTS

What to expect (defaults, two CPU cores): about 80 seconds after the SFT model is there; held-out accuracy from 0.5 to
0.98 and mean length from 6 to 9 tokens. Nobody rewards length: of the habits that pretraining left in the model,
working it out is the one that gets answers right, so it takes over. pass@64 is 1 before and after: the right answers
were there to be found, RL makes them likely.

What to look at: `zero-var` is the share of groups whose answers are all right or all wrong; they say nothing about
what is better, and there are more of them as the policy gets better. `kl` is KL(policy || reference) in nats per
response, how far the policy has moved; it is shown when beta > 0. It is the k3 estimate: never negative, and jumpy,
because a rare response that the reference finds far more likely than the policy does counts for many. The value of
the loss says nothing: on the first update after a rollout it is a mean of advantages, zero or nearly so, with a
gradient that is not.

A response cut off at --max-new-tokens is judged as it stands: it gets no reward unless it says the right answer, and
its tokens are trained like all others.

Sources: Shao et al. 2024 (DeepSeekMath, GRPO, arXiv:2402.03300), Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), Yu et
al. 2025 (DAPO, arXiv:2503.14476), Ahmadian et al. 2024 (RLOO, arXiv:2402.14740), Zheng et al. 2025 (GSPO,
arXiv:2507.18071), MiniMax 2025 (CISPO, arXiv:2506.13585). Deliberately left out: a reward model and a value model, a
separate sampling engine and its importance weights, tool calls, process rewards.
"""

import copy
import math
import os
import random
import time
from dataclasses import dataclass
from typing import Literal

import torch

import common
import memory
from data import encode_prompt, stories
from data.evaluation import evaluate, require_room, sample_responses
from data.tasks import RewardError, drop_long_prompts, get_reward, get_task, show
from gpt import Rollout, load, to_slots
from kernels import kl_estimate, token_kl

# The variants as settings of the same switches; a flag given on the command line overrides its entry. GSPO's ratio is a
# mean over the response and hardly leaves 1, hence its tiny range. CISPO's clip_low=1 means no lower bound, its
# clip_high is our choice. RLOO's paper makes one REINFORCE step, without ratio or clip: --minibatches 1. "constant"
# divides by B * max_new_tokens, so a token weighs the same in a short answer and in a long one.
VARIANTS = {
    "grpo": dict(baseline="mean", scale="std", ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.2,
                 aggregate="sequence", beta=0.01, kl="k3"),
    "dr_grpo": dict(baseline="mean", scale="none", ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.2,
                    aggregate="constant", beta=0.0, kl="k3"),
    "dapo": dict(baseline="mean", scale="std", ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.28,
                 aggregate="token", beta=0.0, kl="k3", dynamic_sampling=True, overlong_buffer=4),
    "rloo": dict(baseline="leave_one_out", scale="none", ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.2,
                 aggregate="constant", beta=0.05, kl="reward"),
    "gspo": dict(baseline="mean", scale="std", ratio="sequence", surrogate="clip", clip_low=3e-4, clip_high=4e-4,
                 aggregate="sequence", beta=0.0, kl="k3"),
    "cispo": dict(baseline="mean", scale="std", ratio="token", surrogate="cispo", clip_low=1.0, clip_high=4.0,
                  aggregate="token", beta=0.0, kl="k3"),
}  # fmt: skip


# Defaults for pretrained weights and real data, in the range of what others use; no GPU was at hand to tune them
REAL = dict(steps=200, max_new_tokens=300, micro_batch=8, sample_rows=256, lr=1e-6, evaluate=200, pass_k=4)


# fmt: off
@dataclass
class Config:
    seed: int = 0  # of the problems and of the sampling
    steps: int = 140  # rollouts; each is followed by epochs * minibatches optimizer steps
    out: str = "out"  # folder for grpo.pt and grpo/
    device: str = "auto"  # auto, cpu, cuda, mps
    resume: bool = False  # continue from the checkpoint; give the other flags again
    init: str = ""  # where to start, which is also the reference: checkpoint, folder of a pretrained model or its name on the hub; empty: <out>/sft.pt, made if it is missing
    tokenizer: str = ""  # must be the one that --init was trained with; empty: what --init says
    chat: Literal["none", "chatml", "llama3"] | None = None  # how prompts are written for a chat model; if not given, as for --init
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the models; auto: on a GPU as stored, else float32
    recompute: bool = False  # activation checkpointing: less memory, a third more time
    task: Literal["stories", "gsm8k"] = "stories"  # where the problems come from
    data: str = ""  # or your own: a file with {"prompt": ..., "answer": ...} a line, a tenth of which is held out
    data_dir: str = ""  # folder with GSM8K's train.jsonl and test.jsonl; empty: they are downloaded once
    reward: str = ""  # file.py:function of yours, called with the responses to a problem and its row; empty, or verifier: is the answer right
    estimate: bool = False  # only print how much memory this takes with known models
    variant: Literal["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"] = "grpo"  # sets the switches below, if they are not given as flags
    prompts: int = 32  # prompts per step
    group_size: int = 8  # G, responses per prompt
    max_new_tokens: int = 16  # longest response
    sample_rows: int = 1024  # responses sampled at once in evaluations; changes memory, and which random numbers they get
    temperature: float = 1.0  # of sampling, and of every log-probability
    epochs: int = 1  # passes over each rollout
    minibatches: int = 4  # optimizer steps per epoch
    micro_batch: int = 64  # responses per forward and backward pass; changes memory, not the gradient
    lr: float = 1.5e-4  # peak learning rate
    warmup: int = 10  # steps of linear warm-up (1: none), as Adam's first steps are badly scaled; then linearly down to 0
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this
    baseline: Literal["mean", "leave_one_out"] | None = None  # what a reward is compared with: its group's mean, or the mean of the others
    scale: Literal["std", "none", "batch"] | None = None  # advantages are divided by the group's std, by nothing, or by the batch's std
    ratio: Literal["token", "sequence"] | None = None  # importance ratio of each token, or its geometric mean over the response
    surrogate: Literal["clip", "cispo"] | None = None  # PPO's clipped objective, or CISPO's clipped weight
    clip_low: float | None = None  # the ratio is clipped below at 1 - this
    clip_high: float | None = None  # and above at 1 + this
    aggregate: Literal["sequence", "token", "constant"] | None = None  # mean per response, per token of the optimizer step, or over a constant
    beta: float | None = None  # weight of the KL to the reference; at 0 no reference model is run
    kl: Literal["k1", "k2", "k3", "exact", "reward"] | None = None  # its estimate as a loss, or k1 subtracted from the reward
    dynamic_sampling: bool | None = None  # drop groups of equal rewards and sample others
    overlong_buffer: int | None = None  # the last so many tokens before max_new_tokens cost up to 1 reward; 0: none
    eval_every: int = 20  # steps between two held-out evaluations
    evaluate: int = 512  # held-out problems
    pass_k: int = 64  # samples per held-out problem before and after the run, for pass@k (1, 4, 16, 64 or 256)
    log_every: int = 5  # steps between two lines
    save_every: int = 10  # steps between two checkpoints

    def __post_init__(self):
        for name, value in {"dynamic_sampling": False, "overlong_buffer": 0, **VARIANTS[self.variant]}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.group_size == 1:
            raise ValueError("--group-size 1: a group of one has no std and no others to compare with; use at least 2")
        for flag in ("beta", "clip_low", "clip_high"):
            if not getattr(self, flag) >= 0:
                raise ValueError(f"--{flag.replace('_', '-')} {getattr(self, flag)}: must not be negative")
        if self.minibatches > self.prompts:
            raise ValueError(f"--minibatches {self.minibatches}: at most one per prompt, --prompts {self.prompts}")
        if not 0 <= self.overlong_buffer <= self.max_new_tokens:
            raise ValueError(f"--overlong-buffer {self.overlong_buffer}: must be 0 to {self.max_new_tokens}")
# fmt: on


def group_advantages(rewards, baseline="mean", scale="std", ddof=1, eps=1e-4):
    """How much better each response did than its group. rewards [P, G], P prompts with G responses each, -> [P, G].

    baseline "mean":           r_i - mean(r) (DeepSeekMath, section 4.1)
             "leave_one_out":  r_i - mean of the others = G / (G - 1) (r_i - mean(r)) (RLOO); its policy gradient is
                               unbiased, the group mean's is (1 - 1/G) times that
    scale    "std":            divided by the group's std + eps, with divisor G - ddof in the variance
             "none":           as it is (Dr. GRPO): dividing gives very easy and very hard prompts more weight
             "batch":          divided by the std of all rewards + eps

    A group of equal rewards has exactly zero advantages, whatever the rounding of its mean. A reward of NaN (the
    verifier could not say) gets 0 and stays out of the baseline. Raises ValueError for groups of one with "std" or
    "leave_one_out", and for an unknown name.
    """
    if baseline not in ("mean", "leave_one_out") or scale not in ("std", "none", "batch"):
        raise ValueError(f"unknown baseline {baseline!r} or scale {scale!r}")
    if rewards.shape[1] == 1 and (scale == "std" or baseline == "leave_one_out"):
        raise ValueError("a group of one has no std and no others to compare with: group_size must be at least 2")
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    scored = ~rewards.isnan()  # [P, G]
    n = scored.sum(1, keepdim=True)  # [P, 1], G unless some are NaN
    highest = rewards.nan_to_num(-torch.inf).amax(1, keepdim=True)
    lowest = rewards.nan_to_num(torch.inf).amin(1, keepdim=True)
    mixed = scored & (highest > lowest)  # in float32 the mean of eight 0.1 is not 0.1: compare, do not subtract
    advantages = torch.where(mixed, rewards - rewards.nanmean(1, keepdim=True), 0.0)
    std = (advantages.square().sum(1, keepdim=True) / (n - ddof).clamp(min=1)).sqrt()  # [P, 1] of each group
    if baseline == "leave_one_out":
        advantages = advantages * n / (n - 1).clamp(min=1)
    if scale == "std":
        advantages = advantages / (std + eps)
    elif scale == "batch":
        spread = rewards[scored].std(correction=ddof) if scored.sum() > ddof else 0.0
        advantages = advantages / (spread + eps)
    return advantages


def aggregate_loss(per_token, mask, aggregate="token", max_tokens=None, denominator=None):
    """Per-token losses [B, T] -> scalar. "sequence": mean over responses of their token mean (GRPO; long wrong
    answers are pushed down less per token). "token": mean over all tokens (DAPO). "constant": sum / (B * max_tokens)
    (Dr. GRPO; no length bias).

    `denominator` is for a micro-batch: B, the tokens, or B * max_tokens of the whole optimizer step, so that the
    parts add up to it.
    """
    per_token = torch.where(mask > 0, per_token, 0.0)
    if aggregate == "sequence":
        return (per_token.sum(1) / mask.sum(1).clamp(min=1)).sum() / (denominator or len(mask))
    if aggregate == "token":
        return per_token.sum() / (denominator or mask.sum().clamp(min=1))
    if aggregate == "constant":
        if denominator is None and max_tokens is None:
            raise ValueError('aggregate="constant" needs max_tokens')
        return per_token.sum() / (denominator or len(mask) * max_tokens)
    raise ValueError(f"unknown aggregate {aggregate!r}: sequence, token or constant")


def policy_loss(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, aggregate="token", max_tokens=None,
                ratio="token", ref_logp=None, beta=0.0, kl="k3", surrogate="clip", exact_kl=None,
                denominator=None):  # fmt: skip
    """The loss of all variants. logp, old_logp, ref_logp, mask [B, T], advantages [B] -> (scalar loss, stats).

    rho = exp(logp - old_logp); ratio="sequence": its geometric mean over the response (GSPO)
    surrogate="clip":   -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); no gradient once rho has left the range
                        in the direction in which A pushes
    surrogate="cispo":  -stopgrad(clip(rho, 1 - clip_low, 1 + clip_high)) A logp (MiniMax-M1); every token keeps one
    beta > 0:           adds beta * kl_estimate(logp, ref_logp, kl) to each token, or beta * exact_kl [B, T] (kl="exact")
    aggregate, max_tokens, denominator: see aggregate_loss

    Only slots with mask = 1 count. stats are means over tokens: clip_fraction, approx_kl = (logp - old_logp)^2 / 2, and
    kl (k3) where there is ref_logp.
    """
    valid = mask > 0
    log_ratio = torch.where(valid, logp - old_logp, 0.0)  # [B, T]
    tokens = mask.sum().clamp(min=1)
    stats = {"approx_kl": (log_ratio.detach().square() / 2).sum() / tokens}
    if ratio == "sequence":
        log_ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(logp)
    elif ratio != "token":
        raise ValueError(f"unknown ratio {ratio!r}: token or sequence")
    rho, A = log_ratio.exp(), advantages[:, None]  # [B, T], [B, 1]
    clipped = rho.clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "clip":
        per_token = -torch.minimum(rho * A, clipped * A)
        was_clipped = clipped * A < rho * A
    elif surrogate == "cispo":
        per_token = -clipped.detach() * A * torch.where(valid, logp, 0.0)
        was_clipped = clipped != rho
    else:
        raise ValueError(f"unknown surrogate {surrogate!r}: clip or cispo")
    stats["clip_fraction"] = (was_clipped & valid).sum() / tokens
    if ref_logp is not None:
        stats["kl"] = torch.where(valid, kl_estimate(logp.detach(), ref_logp), 0.0).sum() / tokens
    if beta:
        token_kls = exact_kl
        if kl != "exact":  # zeros where nothing was sampled: what stands there may be infinite
            token_kls = kl_estimate(torch.where(valid, logp, 0.0), torch.where(valid, ref_logp, 0.0), kl)
        per_token = per_token + beta * token_kls
    return aggregate_loss(per_token, mask, aggregate, max_tokens, denominator), stats


def kl_in_reward(rewards, logp, ref_logp, mask, beta):
    """RLOO's penalised rewards: r_i - beta * sum_t (logp - ref_logp). rewards [B], the others [B, T] -> [B]. Without
    gradient: as a penalty in the reward the k1 estimate has the right gradient, as a loss it has none."""
    return rewards - beta * torch.where(mask > 0, logp - ref_logp, 0.0).sum(1).detach()


def overlong_penalty(lengths, max_tokens, buffer):
    """DAPO's soft punishment (eq. 13), added to the reward: 0 up to max_tokens - buffer tokens, then linearly down to
    -1 at max_tokens. [B] -> [B]"""
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def sample_groups(policy, tokenizer, config, step, task, reward):
    """The rollout of one step: G responses to each of P training problems -> (rollout of P * G rows, rewards [P, G],
    means over all that was sampled: {"reward", "zero_variance": share of groups whose rewards are all equal}).
    Dynamic sampling (DAPO, section 3.2) drops the groups of equal rewards and samples more problems, in at most four
    rounds, so that fewer than P groups, even none, may be left."""
    P, G = config.prompts, config.group_size
    rng = random.Random(common.seed_of("problems", config.seed, step))
    generator = common.generator(config.device, "sampling", config.seed, step)
    rollouts, rewards, means, all_equal = [], [], [], []
    for _ in range(4 if config.dynamic_sampling else 1):
        problems = [task.make_problem(rng) for _ in range(P)]
        prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems for _ in range(G)]
        rollout = policy.generate(
            prompts, config.max_new_tokens, config.temperature, eos=tokenizer.eot_token, generator=generator
        )
        texts = rollout.texts(tokenizer)
        scores = reward(problems, [texts[i * G : (i + 1) * G] for i in range(P)])
        scores = torch.tensor(scores, dtype=torch.float32, device=config.device)  # [P, G]
        means.append(scores.nanmean())  # NaN: a reward of yours could not say
        # no two of a group differ, NaN aside
        all_equal.append(scores.nan_to_num(-torch.inf).amax(1) <= scores.nan_to_num(torch.inf).amin(1))  # [P]
        keep = ~all_equal[-1] if config.dynamic_sampling else torch.ones_like(all_equal[-1])
        rollouts.append(rollout.select(keep.repeat_interleave(G)))
        rewards.append(scores[keep])
        if sum(map(len, rewards)) >= P:
            break
    summary = {"reward": torch.stack(means).mean().item(), "zero_variance": torch.cat(all_equal).float().mean().item()}
    return Rollout.cat(rollouts).select(slice(P * G)), torch.cat(rewards)[:P], summary


def main(config):
    if config.estimate:
        return memory.print_estimate("grpo", config)
    # 0. The task, the policy, and a frozen copy of it as the reference if the KL counts
    task, reward = get_task(config, "" if config.reward else "answer"), get_reward(config.reward, config.data)
    init, policy, tokenizer = load(config, "sft")
    drop_long_prompts(task, tokenizer, policy.config.context - config.max_new_tokens)
    reference = copy.deepcopy(policy).requires_grad_(False) if config.beta > 0 else None
    optimizer = common.AdamW(policy.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0)
    held_out = task.held_out_problems(config.evaluate)
    require_room(policy, tokenizer, held_out + task.training_problems(), config.max_new_tokens)
    columns = f"reward{' held_out_reward' * bool(config.reward)} accuracy length kl entropy clip_fraction zero_variance grad_norm tokens_per_second"
    run = common.Run("grpo", config, tokenizer, columns, init)
    start = run.restore(policy, optimizer)
    switches = {name: getattr(config, name) for name in (*VARIANTS["grpo"], "dynamic_sampling", "overlong_buffer")}
    print(f"GRPO from {init}, variant {config.variant}: " + ", ".join(f"{k} {v}" for k, v in switches.items()))

    done = start  # steps whose weights we have

    def reward_once(problems, groups):
        """What responses are worth, asked in one process, whatever the number of them. A reward of yours may fail: then
        what was learned so far is saved."""
        try:
            return common.on_rank_0(reward, problems, groups)
        except RewardError as problem:
            run.fail(problem, done, policy, optimizer)

    def held_out_scores(step, samples):
        generator = common.generator(config.device, "held out", config.seed)
        scores = evaluate(
            policy, tokenizer, held_out, config.max_new_tokens, samples, generator, reward_once if config.reward else None,
            config.sample_rows,
        )  # fmt: skip
        shown = held_out[:6]  # the same ones each time
        texts, lengths = sample_responses(policy, tokenizer, shown, config.max_new_tokens, generator=generator)
        rewards = reward_once(shown, [[text] for text in texts])
        lines = [
            f"- {show(problem.prompt)}\n  `{text.strip()}` reward {worth[0]:g}, {length} tokens"
            for problem, text, worth, length in zip(shown, texts, rewards, lengths)
        ]
        run.sample(step, "\n".join(lines))
        return scores

    if not config.resume:
        scores = held_out_scores(0, config.pass_k)
        log_scores = {name: scores.get(name) for name in ("accuracy", "held_out_reward", "length")}
        run.log(0, **log_scores, **scores["pass_at_k"])
        run.save(0, policy, optimizer)

    tokens, busy = 0, 0.0
    for step in range(start + 1, config.steps + 1):
        # 1. Rollout
        began = time.perf_counter()
        # B = P * G rows, [P, G]
        rollout, rewards, summary = sample_groups(policy, tokenizer, config, step, task, reward_once)
        P, G = rewards.shape
        mask, lengths = rollout.mask, rollout.mask.sum(1)  # [B, T], [B]

        # 2. The rows of each optimizer step (whole groups, in random order), cut into micro-batches of like length
        order = torch.randperm(P, generator=common.generator("cpu", "minibatches", config.seed, step))
        tokens_of = rollout.attention_mask.sum(1).cpu()  # [B]
        minibatches = []
        for i in range(min(config.minibatches, P)):
            rows = (order[i :: config.minibatches, None] * G + torch.arange(G)).view(-1)
            rows = rows[tokens_of[rows].argsort(stable=True)].to(config.device)
            minibatches.append(rows.split(common.share(config.micro_batch, len(rows))))
        micro_batches = [rows for minibatch in minibatches for rows in minibatch]

        # 3. Log-probabilities [B, T] under the reference, and under the policy as it is now. rollout.logp would do for
        # the latter up to rounding; the same pass as in training makes the first ratio exactly 1. A single update needs
        # neither: its ratio is 1, and logp.detach() says so.
        ref_logp = old_logp = None
        if reference:
            ref_logp = reference.rollout_logprobs(rollout, micro_batches, config.temperature)
        if config.epochs * config.minibatches > 1:
            old_logp = policy.rollout_logprobs(rollout, micro_batches, config.temperature)

        # 4. Rewards and advantages
        rewards = rewards.view(-1)  # [B]
        if config.overlong_buffer:
            rewards = rewards + overlong_penalty(lengths, config.max_new_tokens, config.overlong_buffer)
        if config.kl == "reward" and reference:
            rewards = kl_in_reward(rewards, rollout.logp, ref_logp, mask, config.beta)
        advantages = group_advantages(rewards.view(P, G), config.baseline, config.scale).view(-1)  # [B]

        # 5. Updates
        stats, grad_norms = dict.fromkeys(("loss", "entropy", "approx_kl", "clip_fraction", "kl"), 0.0), 0.0
        lr = config.lr * min(1.0, step / config.warmup) * (1 - (step - 1) / config.steps)
        for minibatch in minibatches * config.epochs:
            n_rows, n_tokens = sum(map(len, minibatch)), int(lengths[torch.cat(minibatch)].sum())
            denominator = {"sequence": n_rows, "token": n_tokens, "constant": n_rows * config.max_new_tokens}
            for rows in common.mine(minibatch):
                hidden, targets = policy.response_states(rollout, rows)  # [N, C], [N]
                logp, entropy = policy.token_logprobs_and_entropy(hidden, targets, config.temperature)  # [N], [N]
                logp, entropy = to_slots(logp, mask[rows]), entropy.detach()  # [b, T]; the entropy is only looked at
                exact_kl = None
                if config.kl == "exact" and reference:
                    with torch.no_grad():
                        ref_logits = reference.lm_head.all_logits(reference.response_states(rollout, rows)[0])  # [N, W]
                    logits, V = policy.lm_head.all_logits(hidden), policy.config.vocab_size  # [N, W]
                    exact_kl = to_slots(token_kl(logits, ref_logits, config.temperature, V), mask[rows])
                loss, part = policy_loss(
                    logp, logp.detach() if old_logp is None else old_logp[rows], advantages[rows], mask[rows],
                    clip_low=config.clip_low, clip_high=config.clip_high, aggregate=config.aggregate,
                    ratio=config.ratio, surrogate=config.surrogate, denominator=denominator[config.aggregate],
                    ref_logp=None if ref_logp is None else ref_logp[rows], exact_kl=exact_kl, kl=config.kl,
                    beta=0.0 if config.kl == "reward" else config.beta,
                )  # fmt: skip
                loss.backward()
                stats["loss"] += loss.item()
                for name, value in (*part.items(), ("entropy", entropy.mean())):  # token means: weigh them by tokens
                    stats[name] += value.item() * len(targets) / n_tokens
            grad_norm = common.finish_gradients(optimizer.parameters(), config.max_grad_norm)
            run.require_finite(step, loss=stats["loss"], grad_norm=grad_norm)
            grad_norms += grad_norm
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        done, updates = step, config.epochs * len(minibatches)  # 0 if dynamic sampling found no group to learn from
        stats = {**common.sum_over_ranks(stats), "grad_norm": grad_norms}
        stats = {name: value / updates for name, value in stats.items()} if updates else {}
        stats["kl"] = stats["kl"] * lengths.float().mean().item() if reference and updates else None  # per response
        tokens, busy = tokens + int(tokens_of.sum()), busy + time.perf_counter() - began

        # 6. Log and checkpoint
        measure, last = step % config.eval_every == 0, step == config.steps
        if measure or last or step % config.log_every == 0:
            scores = held_out_scores(step, config.pass_k if last else 1) if measure or last else {}
            run.log(
                step, **summary, **stats, length=lengths.float().mean().item(), lr=lr, tokens_per_second=tokens / busy,
                accuracy=scores.get("accuracy"), held_out_reward=scores.get("held_out_reward"), held_out_length=scores.get("length"), **scores.get("pass_at_k", {}),
            )  # fmt: skip
            tokens, busy = 0, 0.0
        run.save(step, policy, optimizer, config.save_every)

    # 7. What happened
    run.plot("accuracy", "length", "reward", "entropy")
    measured = [line for line in run.metrics() if line["step"] == 0 or "held_out_length" in line]
    first, last = measured[0], {"held_out_length": measured[0]["length"], **measured[-1]}
    B = f"{config.prompts} x {config.group_size}"
    unpaid = "" if config.overlong_buffer or config.reward not in ("", "verifier") else "; nobody rewarded length"
    print(f"\n{config.variant}: {config.steps} steps of {B} responses in {last['seconds']:.0f} seconds; on {len(held_out)} held-out problems:")
    if config.reward:
        before, after = (line.get("held_out_reward", math.nan) for line in (first, last))
        print(f"  reward             {before:.3f} -> {after:.3f}   the mean of --reward {config.reward}")
    if "accuracy" in first:
        k = max((key for key in first if key.startswith("pass@")), key=lambda key: int(key[5:]))
        print(f"""  accuracy (pass@1)  {first["accuracy"]:.3f} -> {last["accuracy"]:.3f}   a single sample at temperature 1
  {k:<17}  {first[k]:.3f} -> {last.get(k, math.nan):.3f}   at least one right of {k[5:]} samples: what the model could do all along""")
    print(f"""  response length    {first["length"]:5.1f} -> {last["held_out_length"]:5.1f}   tokens{unpaid}
  {run.path}, {run.folder}/samples.md (the same {"six stories" if task is stories else f"{len(held_out[:6])} problems"} before, during and after), {run.folder}/metrics.jsonl""")
    if all(line.get("zero_variance", 1) == 1 for line in run.metrics()):
        print("in no logged step did one response of a group earn more than another: a model that is never right cannot learn from it")
    if task is stories:
        print(f"next: python grpo.py --variant dr_grpo --init {init} --out {os.path.join(config.out, 'dr_grpo')}")


if __name__ == "__main__":
    main(common.parse(Config, __doc__, real=REAL))
