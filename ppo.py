"""Stage 3b, RLHF: PPO on a learned reward, with a leash to the reference.

Four roles. The policy answers. A value head on the policy's trunk predicts, at every token, the reward still to come.
The reward model (reward_model.py, frozen) scores whole responses. The reference, the SFT model (frozen), holds the
leash: the reward of token t is

    r_t = -beta * (log pi(token_t) - log pi_ref(token_t)), and at the last sampled token the score on top

so that sum_t r_t is the score minus beta times an estimate of KL(policy || reference). Then, with values V_t:

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}         R_t = A_t + V_t      (GAE)
    rho_t   = pi(token_t) / pi_old(token_t)      exactly 1 on the first update after a rollout
    loss    = mean max(-rho_t A_t, -clamp(rho_t, 1 - clip, 1 + clip) A_t)
              + value_weight * 0.5 mean max((V_t - R_t)^2, (clamp(V_t, V_old,t +- clip_value) - R_t)^2)
              + ptx * mean of -log pi(next token) over documents of the pretraining corpus

the advantages whitened (brought to mean 0 and std 1 over the tokens of the rollout), all means over tokens. The last
term, off by default, is called PPO-ptx: mixed in, it keeps the policy from forgetting what pretraining taught.

    python ppo.py            and before it out/base.pt, out/sft.pt and out/reward_model.pt if they are missing

What to expect (defaults, two CPU cores): a minute and a half after the reward model is there; held-out accuracy from
0.5 to 0.9 and mean length from 6 to 9 tokens, at less than one nat of KL. The reward model has learned that stories
are worked out to their end, and the policy does it nearly always. What is missing to grpo.py's 0.98 are miscounted
steps, which the reward model cannot see.

What to look at, the gauge: `proxy` is what the reward model thinks of answers to held-out stories, 0 and 1 being the
mean and the std of the SFT model's; `gold` (data/stories.py, at most 3.5) is what they are worth, which nobody trains
on. With a poor reward model and no leash they part (Gao et al. 2023, arXiv:2210.10760):

    python reward_model.py --pairs 100 --init out/sft.pt --out out/few
    python ppo.py --beta 0 --init out/sft.pt --out out/few       out/few/ppo/curves.png: both over sqrt(KL), as there

proxy climbs to the end, gold until about step 10; then it falls far below the SFT model's, and out/few/ppo/samples.md
shows what the reward model likes so much. `--stop-on-gold` keeps the best as ppo/best.pt. `--refresh 10` has the judge
compare what the policy says by then, and the reward model learn from it: that slows the fall, but counting it does not
learn.

More columns: `reward` is the proxy of the rollout; `kl` is KL(policy || reference) of the rollout in nats per response,
the mean of log pi - log pi_ref (k1, see kernels/plain.py), which may be negative by chance; `expl.var` is the share of
the returns' variance that the critic explains, which starts at 0 as the values do.

A response cut off at --max-new-tokens gets --missing-eos-score in place of its score, and nothing comes after it: its
last token's value is not made up from an estimate of what might have followed (bootstrapped). The order is: rewards
(whitened without shifting their mean, if at all), GAE, returns, then advantages whitened. A critic on a frozen copy of
the reward model's trunk was measured and left out: it explained less of the variance (0.22 and 0.36 at the end, seeds 0
and 1, against 0.43 and 0.46) at the same accuracy.

Sources: Ziegler et al. 2019 (arXiv:1909.08593); Stiennon et al. 2020 (arXiv:2009.01325); Ouyang et al. 2022
(InstructGPT, arXiv:2203.02155), section 3.5 and eq. 2; Schulman et al. 2017 (PPO, arXiv:1707.06347) and 2016 (GAE,
arXiv:1506.02438); Huang et al. 2024 (arXiv:2403.17031), the details. Deliberately left out: a critic of its own, an
entropy bonus, several responses to a prompt (see grpo.py). The letters of the shapes are explained in gpt.py.
"""

import copy
import os
import random
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn

import common
import memory
from data import accuracy_reward, encode_prompt, stories
from data.evaluation import require_room
from data.preferences import sample_preferences
from data.tasks import RewardError, drop_long_prompts, get_reward, get_task, show
from gpt import GPTConfig, load, right_pad, to_slots
from kernels import token_kl
from reward_model import Config as RewardConfig
from reward_model import RewardModel, batch_of, combine, comparisons, normalise, update

# Defaults for pretrained weights and real data, in the range of what others use; no GPU was at hand to tune them
REAL = dict(steps=200, prompts=64, max_new_tokens=300, micro_batch=8, sample_rows=256, lr=1e-6, value_lr=1e-4, beta=0.05,
            evaluate=200, samples=1, missing_eos_score=0.0)  # fmt: skip


# fmt: off
@dataclass
class Config:
    seed: int = 0  # of the problems and of the sampling
    steps: int = 120  # rollouts; each is followed by epochs * minibatches optimizer steps
    out: str = "out"  # folder for ppo.pt and ppo/
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
    reward: str = ""  # in place of the reward model: "verifier", is the answer right; or file.py:function of yours, called with a list of one response and its row
    estimate: bool = False  # only print how much memory this takes with known models
    reward_model: str = ""  # checkpoint of the reward model; empty: <out>/reward_model.pt, made if it is missing
    combine: Literal["mean", "min", "mean-std"] = "mean"  # the rewards of an ensemble: their mean, the least, or mean - std
    prompts: int = 128  # prompts per step, with one response each
    max_new_tokens: int = 16  # longest response
    sample_rows: int = 1024  # responses sampled at once in evaluations; changes memory, and which random numbers they get
    temperature: float = 1.0  # of sampling, and of every log-probability
    missing_eos_score: float = -1.0  # replaces the score of a response that --max-new-tokens cut off
    beta: float = 0.3  # weight of the KL to the reference, in reward per nat; 0: no leash
    kl_target: float = 0.0  # nats per response: beta is moved to keep the KL there; 0: beta stays as it is
    kl_horizon: float = 1000.0  # responses over which beta moves by a fifth at most
    gamma: float = 1.0  # discount per token; 0: only the reward of the token itself
    lam: float = 0.95  # of GAE. 1: the whole return counts, no bias; 0: the next value in its place, least variance
    whiten_rewards: bool = False  # bring the rewards of each rollout to std 1 around their mean
    clip: float = 0.2  # the ratio is clipped at 1 - clip and 1 + clip
    dual_clip: float = 0.0  # above 1: where the advantage is negative, the loss is at most this times its size; 0: off
    clip_value: float = 0.2  # values move at most this far from the old ones before the loss stops counting it
    value_weight: float = 0.1  # of the value loss; 0: the values stay 0
    epochs: int = 1  # passes over each rollout
    minibatches: int = 4  # optimizer steps per epoch
    stop_kl: float = 0.0  # no more updates on a rollout once approx_kl exceeds this; 0: off
    micro_batch: int = 64  # responses per forward and backward pass; changes memory, not the gradient
    ptx: float = 0.0  # weight of the pretraining loss (PPO-ptx); 0: off
    ptx_documents: int = 32  # documents of the pretraining corpus per optimizer step
    lr: float = 1.5e-4  # peak learning rate
    value_lr: float = 1.5e-3  # peak learning rate of the value head, which starts from nothing
    warmup: int = 10  # steps of linear warm-up (1: none), as Adam's first steps are badly scaled; then linearly down to 0
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this
    refresh: int = 0  # steps between two lessons in which the reward model learns from the policy's own responses, judged anew; 0: none
    refresh_pairs: int = 500  # comparisons per lesson
    stop_on_gold: bool = False  # keep the best policy by held-out gold score in ppo/best.pt, and stop after three evaluations without a better one
    eval_every: int = 10  # steps between two held-out evaluations
    evaluate: int = 512  # held-out problems
    samples: int = 8  # responses to each before and after the run; one in between
    log_every: int = 5  # steps between two lines
    save_every: int = 10  # steps between two checkpoints

    def __post_init__(self):
        for flag in ("beta", "kl_target", "dual_clip", "stop_kl", "ptx", "refresh"):
            if not getattr(self, flag) >= 0:
                raise ValueError(f"--{flag.replace('_', '-')} {getattr(self, flag)}: must not be negative")
        for flag in ("gamma", "lam"):
            if not 0 <= getattr(self, flag) <= 1:
                raise ValueError(f"--{flag} {getattr(self, flag)}: must be from 0 to 1")
        if self.kl_target and self.kl_horizon < self.prompts:
            raise ValueError(f"--kl-horizon {self.kl_horizon}: must be at least --prompts {self.prompts}")
        if self.kl_target and not self.beta:
            raise ValueError(f"--kl-target {self.kl_target}: beta is multiplied to get there, so --beta must not be 0")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"--dual-clip {self.dual_clip}: must be above 1, or 0 for none")
        if self.refresh and self.reward:
            raise ValueError(f"--refresh {self.refresh}: with --reward there is no reward model to learn")
        if self.ptx and (self.task != "stories" or self.data):
            raise ValueError(f"--ptx {self.ptx}: there are no pretraining documents but of the stories")
        if self.minibatches > self.prompts:
            raise ValueError(f"--minibatches {self.minibatches}: at most one per prompt, --prompts {self.prompts}")
# fmt: on


def kl_penalised_rewards(scores, logp, ref_logp, mask, beta):
    """Rewards of each token, [B, T]: -beta (logp - ref_logp), and the score [B] on top at the last token with mask = 1.
    0 where the mask is 0; a row without tokens gets none.

    The penalty is the k1 estimate of the KL, which as a reward has the right gradient (as a loss it would have none, on
    average).
    The score goes to the last sampled token, the EOS, not to the slot behind it.
    """
    valid = mask > 0
    rewards = torch.where(valid, -beta * (logp - ref_logp), 0.0)
    last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1, keepdim=True)  # [B, 1]
    return rewards.scatter_add(1, last, (scores[:, None] * valid.any(1, keepdim=True)).to(rewards.dtype))


def gae(rewards, values, mask, gamma=1.0, lam=0.95, bootstrap=None):
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16), all [B, T] -> (advantages,
    returns), 0 where the mask is 0.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    After the last token with mask = 1 the value is `bootstrap` [B], or 0: nothing comes after EOS. t + 1 is the next
    slot with mask = 1: what stands in a masked slot, be it at the end or between, is never looked at.
    """
    next_value = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap  # [B], V of the next valid slot
    advantage, advantages = torch.zeros_like(values[:, 0]), torch.zeros_like(values)  # [B], [B, T]
    for t in reversed(range(values.shape[1])):
        valid = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(valid, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(valid, values[:, t], next_value)
        advantages[:, t] = torch.where(valid, advantage, 0.0)
    return advantages, torch.where(mask > 0, advantages + values, 0.0)


def whiten(x, mask, shift_mean=True, ddof=0):
    """x [B, T] with mean 0 and std 1 over the tokens with mask = 1 of the whole batch, 0 elsewhere. The variance has
    divisor n - ddof and 1e-8 added; shift_mean=False keeps the mean (for rewards: a mean of 0 would change what is good on
    the whole)."""
    valid = mask > 0
    n = valid.sum()
    x = torch.where(valid, x, 0.0)
    mean = x.sum() / n.clamp(min=1)
    variance = (torch.where(valid, x - mean, 0.0) ** 2).sum() / (n - ddof).clamp(min=1)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(valid, whitened if shift_mean else whitened + mean, 0.0)


def masked_mean(x, mask, denominator=None):
    """The mean of x [B, T] over the tokens with mask = 1 -> scalar. `denominator` is for a micro-batch: the tokens of
    the whole optimizer step, so that the parts add up to it."""
    return torch.where(mask > 0, x, 0.0).sum() / (denominator or mask.sum().clamp(min=1))


def policy_loss(logp, old_logp, advantages, mask, clip=0.2, dual_clip=None, denominator=None):
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), all [B, T] -> (scalar loss, stats).

        rho = exp(logp - old_logp)          loss = mean of max(-rho A, -clip(rho, 1 - clip, 1 + clip) A)

    No gradient where A > 0 and rho > 1 + clip, or A < 0 and rho < 1 - clip; there is one to come back. dual_clip=c: the
    loss is at most -c A where A < 0 (Ye et al. 2020, arXiv:1912.09729). stats, means over tokens:
    clip_fraction, approx_kl = (logp - old_logp)^2 / 2.
    """
    # zeros where nothing was sampled, at the input: what stands there may be infinite
    log_ratio, advantages = (torch.where(mask > 0, x, 0.0) for x in (logp - old_logp, advantages))  # [B, T] each
    rho = log_ratio.exp()
    unclipped, clipped = -rho * advantages, -rho.clamp(1 - clip, 1 + clip) * advantages
    per_token = torch.maximum(unclipped, clipped)
    if dual_clip:
        per_token = torch.where(advantages < 0, torch.minimum(per_token, -dual_clip * advantages), per_token)
    stats = {
        "clip_fraction": masked_mean((clipped > unclipped).to(rho.dtype), mask, denominator),
        "approx_kl": masked_mean(log_ratio.detach() ** 2 / 2, mask, denominator),
    }
    return masked_mean(per_token, mask, denominator), stats


def value_loss(values, old_values, returns, mask, clip=0.2, denominator=None):
    """0.5 * mean of max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), all [B, T] -> (scalar loss, stats). The
    maximum: a value that has moved by more than `clip` is drawn no further in that direction (Ziegler et al. 2019's
    code). stats: value_clip_fraction."""
    values, old_values, returns = (torch.where(mask > 0, x, 0.0) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    plain, limited = (values - returns) ** 2, (clipped - returns) ** 2
    stats = {"value_clip_fraction": masked_mean((limited > plain).to(plain.dtype), mask, denominator)}
    return 0.5 * masked_mean(torch.maximum(plain, limited), mask, denominator), stats


class ValueHead(nn.Linear):
    """The critic: from what the token head reads, how much reward is still to come, [..., C] -> [...]. Its weights start
    at 0, and as long as they are small, the value loss hardly moves the policy's trunk below it."""

    def __init__(self, width):
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden):
        return super().forward(hidden.to(self.weight.dtype))[..., 0]  # in float32, whatever the model's dtype


class AdaptiveKL:
    """A coefficient that keeps the KL near `target` nats per response (Ziegler et al. 2019, arXiv:1909.08593, section
    2.2): e = clip(KL / target - 1, -0.2, 0.2); beta *= 1 + e n / horizon after n responses."""

    def __init__(self, beta, target, horizon):
        self.beta, self.target, self.horizon = beta, target, horizon

    def update(self, kl, n):
        """Moves beta after n responses whose mean KL was `kl`, and returns it."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.beta *= 1 + error * n / self.horizon
        return self.beta


def explained_variance(values, returns, mask):
    """1 - Var(returns - values) / Var(returns) over the tokens: 1 is a perfect critic, 0 one that says the mean;
    NaN if all returns are the same."""
    valid = mask > 0
    if not returns[valid].var() > 0:
        return float("nan")
    return (1 - (returns - values)[valid].var() / returns[valid].var()).item()


def unless_cut_off(scores, rollout, rows, eos, missing_eos_score):
    """Scores [b] of these rows of a rollout, but missing_eos_score where the response has no EOS, as --max-new-tokens cut it
    off (Huang et al. 2024; TRL takes something off instead): otherwise never stopping could pay."""
    response, mask = rollout.ids[rows, rollout.prompt_len :], rollout.mask[rows]  # [b, T] each
    ended = ((response == eos) & (mask > 0)).any(1)
    return torch.where(ended, scores, missing_eos_score)


def score_responses(reward_model, rollout, rows, eos, config):
    """What the reward model says of these rows of a rollout, [b]."""
    scores = combine(reward_model(rollout.ids[rows], rollout.attention_mask[rows]), config.combine)
    return unless_cut_off(scores, rollout, rows, eos, config.missing_eos_score)


def main(config):
    if config.estimate:
        return memory.print_estimate("ppo", config)
    # 0. Four roles: the policy, its value head, the frozen reference, the frozen reward model (or a reward of yours)
    task = get_task(config, "answer" if config.reward == "verifier" else "")
    reward = get_reward(config.reward.replace("verifier", ""), config.data) if config.reward else None
    init, policy, tokenizer = load(config, "sft")
    drop_long_prompts(task, tokenizer, policy.config.context - config.max_new_tokens)
    inits, judge, reward_model = [init], config.reward_model or os.path.join(config.out, "reward_model.pt"), None
    if not config.reward:
        if not config.reward_model and not config.resume:
            flags = dict(init=init, max_new_tokens=config.max_new_tokens, **common.settings_of(config))
            common.make_if_missing("reward_model", judge, config, **flags)
        judged = common.load_checkpoint(judge, tokenizer, reward_model=True)
        if judged["step"] < judged["steps"]:
            raise SystemExit(
                f"{judge} stopped at step {judged['step']} of {judged['steps']}: finish it first, with --resume"
            )
        if (judged["config"].get("chat") or "none") != config.chat:
            raise SystemExit(f"{judge} was trained with --chat {judged['config'].get('chat')}, this run has {config.chat}")
        if config.refresh and judged["config"].get("data"):
            raise SystemExit(f"--refresh: {judge} learned from a file of preferences, whose judge cannot be asked again")
        reward_model = RewardModel(GPTConfig(**judged["model_config"]), judged["config"]["ensemble"])
        reward_model.load_state_dict(judged["model"])
        reward_model.trunks.to(policy.wte.weight.dtype)
        reward_model.to(config.device).requires_grad_(False)
        inits.append(judge)
    value_head = ValueHead(policy.config.n_embd).to(config.device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    groups = [dict(params=policy.parameters(), lr=config.lr), dict(params=value_head.parameters(), lr=config.value_lr)]
    optimizer = common.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
    held_out = task.held_out_problems(config.evaluate)
    # their prompts have to fit, and `refresh` scales the rewards by the answers to them
    training = task.training_problems()
    for model in (policy, reward_model) if reward_model else (policy,):
        require_room(model, tokenizer, held_out + training, config.max_new_tokens)
    columns = "reward held_out_reward gold accuracy length kl entropy explained_variance approx_kl clip_fraction"
    run = common.Run("ppo", config, tokenizer, columns, *inits)
    start = run.restore(policy, optimizer)
    leash = AdaptiveKL(config.beta, config.kl_target, config.kl_horizon)
    if run.checkpoint:
        value_head.load_state_dict(run.checkpoint["value_head"])
        leash.beta = run.checkpoint["beta"]
        if config.refresh:
            reward_model.load_state_dict(run.checkpoint["reward_model"])
    print(f"PPO from {init} on the rewards of {config.reward or judge}, beta {leash.beta}")
    done = start  # steps whose weights we have

    def rewards_of(problems, texts, rollout, rows):
        """Scores [b] of these rows of a rollout by the reward model; or by a reward of yours, which is asked in one process
        and may fail: then what was learned so far is saved."""
        if reward_model:
            return score_responses(reward_model, rollout, rows, tokenizer.eot_token, config)
        mine = rows.tolist()
        try:
            scores = common.on_rank_0(reward, [problems[i] for i in mine], [[texts[i]] for i in mine])
        except RewardError as problem:
            save(done, problem=problem)
        scores = torch.tensor(scores, dtype=torch.float32, device=config.device)[:, 0].nan_to_num(0.0)
        return unless_cut_off(scores, rollout, rows, tokenizer.eot_token, config.missing_eos_score)

    @torch.no_grad()
    def measure(step, samples):
        """The gauge, on stories that no model was trained on: what the reward model thinks of the policy, what it is
        really worth, and how far it has moved."""
        generator = common.generator(config.device, "held out", config.seed)
        problems = [problem for problem in held_out for _ in range(samples)]
        found, texts = {"held_out_reward": [], "held_out_kl": [], "held_out_length": []}, []
        for i in range(0, len(problems), config.sample_rows):
            part = problems[i : i + config.sample_rows]
            prompts = [encode_prompt(tokenizer, problem.prompt) for problem in part]
            rollout = policy.generate(prompts, config.max_new_tokens, eos=tokenizer.eot_token, generator=generator)
            said = rollout.texts(tokenizer)
            for rows in torch.arange(len(part), device=config.device).split(config.micro_batch):
                found["held_out_reward"] += rewards_of(part, said, rollout, rows).tolist()
                # The exact KL at each position: its sum over a response has the same mean as that of log pi - log pi_ref
                # at the sampled tokens, and has less noise
                logits = [m.lm_head.all_logits(m.response_states(rollout, rows)[0]) for m in (policy, reference)]
                kl = to_slots(token_kl(*logits, vocab_size=policy.config.vocab_size), rollout.mask[rows])  # [b, T]
                found["held_out_kl"] += kl.sum(1).tolist()
            found["held_out_length"] += rollout.mask.sum(1).tolist()
            texts += said
        if all(problem.answer is not None for problem in problems):
            found["gold"] = [task.gold_score(problem, text) for problem, text in zip(problems, texts)]
            found["accuracy"] = [accuracy_reward(text, problem.answer) for problem, text in zip(problems, texts)]
        run.sample(step, "\n".join(
            f"- {show(problems[i].prompt)}\n  `{texts[i].strip()}` reward {found['held_out_reward'][i]:+.2f}, "
            + (f"gold {found['gold'][i]:.2f}, right {found['accuracy'][i]:.0f}, " if "gold" in found else "")
            + f"{found['held_out_length'][i]} tokens"
            for i in range(0, len(problems), samples)[:6]  # the same stories each time
        ))  # fmt: skip
        means = {name: sum(values) / len(values) for name, values in found.items()}
        return {"sqrt_kl": max(means["held_out_kl"], 0.0) ** 0.5, **means}  # rounding can make a KL of 0 a little less

    def refresh(step):
        """The judge compares responses of the policy as it is now, and the reward model learns from it, in one pass at
        the rate with which its training ended; then new gain and bias."""
        lesson, name = RewardConfig(**judged["config"]), ("refresh", config.seed, step)
        noise = lesson.noise if lesson.judge == "noisy" else 0.0
        rows, _ = sample_preferences(
            policy, tokenizer, config.refresh_pairs, lesson.samples, noise, common.seed_of(*name), config.max_new_tokens,
            common.generator(config.device, *name), task=task, sample_rows=config.sample_rows,
        )  # fmt: skip
        elements, _ = comparisons(
            rows, tokenizer, reward_model.config.context
        )  # none if the policy always says the same
        reward_model.requires_grad_(True)
        members = [[*trunk.parameters(), *head.parameters()] for trunk, head in zip(reward_model.trunks, reward_model.heads)]
        student = common.AdamW([dict(params=member) for member in members], betas=(0.9, 0.99), weight_decay=0.01)
        for i in range(-(-len(elements) // lesson.prompts)):
            batches = [batch_of(elements, i, lesson.prompts, name, k) for k in range(lesson.ensemble)]
            update(reward_model, student, batches, lesson.lr / 10, lesson)
        student.close()
        reward_model.requires_grad_(False)
        prompts = [encode_prompt(tokenizer, problem.prompt) for problem in training[:512]]
        generator = common.generator(config.device, "normalise", *name)
        normalise(
            reward_model, reference, prompts, config.max_new_tokens, tokenizer.eot_token, generator, config.sample_rows
        )

    def save(step, every=1, best=False, stopped=False, problem=None):
        """Everything that changes: the policy, its value head, beta, and a reward model that still learns."""
        learning = reward_model.state_dict() if config.refresh else None
        more = dict(value_head=value_head.state_dict(), beta=leash.beta, reward_model=learning, stopped=stopped)
        if problem:
            run.fail(problem, step, policy, optimizer, **more)
        run.save(step, policy, optimizer, every, best, **more)

    if not config.resume:
        found = measure(0, config.samples)
        run.log(0, **found, length=found["held_out_length"])
        save(0, best=config.stop_on_gold)

    if run.checkpoint and run.checkpoint["stopped"]:
        print(f"--stop-on-gold had stopped it at step {start}")
        start = config.steps

    tokens, busy = 0, 0.0
    for step in range(start + 1, config.steps + 1):
        began = time.perf_counter()
        # 0. A lesson for the reward model, if it gets any: it has never seen what the policy says by now
        if config.refresh and step > 1 and (step - 1) % config.refresh == 0:
            refresh(step)

        # 1. Rollout: one response to each prompt
        rng = random.Random(common.seed_of("problems", config.seed, step))
        problems = [task.make_problem(rng) for _ in range(config.prompts)]
        prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
        generator = common.generator(config.device, "sampling", config.seed, step)
        rollout = policy.generate(
            prompts, config.max_new_tokens, config.temperature, eos=tokenizer.eot_token, generator=generator
        )
        B, mask, lengths = len(prompts), rollout.mask, rollout.mask.sum(1)  # mask [B, T], lengths [B]

        # 2. The rows of each optimizer step in random order, cut into micro-batches of like length
        order = torch.randperm(B, generator=common.generator("cpu", "minibatches", config.seed, step))
        tokens_of = rollout.attention_mask.sum(1).cpu()  # [B]
        minibatches = []
        for rows in order.tensor_split(config.minibatches):
            rows = rows[tokens_of[rows].argsort(stable=True)].to(config.device)
            minibatches.append(rows.split(common.share(config.micro_batch, len(rows))))
        micro_batches = [rows for minibatch in minibatches for rows in minibatch]

        # 3. What all four roles say of the rollout. The policy's log-probabilities come from the same pass as in training
        # (and not from the sampler), so that the first ratio is exactly 1.
        scores = torch.zeros(B, device=config.device)  # [B]
        old_logp, old_values = torch.zeros_like(rollout.logp), torch.zeros_like(rollout.logp)  # [B, T] each
        ref_logp = reference.rollout_logprobs(rollout, micro_batches, config.temperature)  # [B, T]
        if reward:
            everything = torch.arange(B, device=config.device)
            scores = rewards_of(problems, rollout.texts(tokenizer), rollout, everything)
        with torch.no_grad():
            for rows in common.mine(micro_batches):
                if reward_model:
                    scores[rows] = score_responses(reward_model, rollout, rows, tokenizer.eot_token, config)
                hidden, targets = policy.response_states(rollout, rows)  # [N, C], [N]
                old_logp[rows] = to_slots(policy.token_logprobs(hidden, targets, config.temperature), mask[rows])
                old_values[rows] = to_slots(value_head(hidden), mask[rows])
        for part in (old_logp, old_values, *([scores] if reward_model else [])):
            common.sum_over_ranks(part)

        # 4. Rewards and advantages
        kl = ((old_logp - ref_logp) * mask).sum(1).mean().item()  # nats per response
        beta = leash.beta
        rewards = kl_penalised_rewards(scores, old_logp, ref_logp, mask, beta)  # [B, T]
        if config.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        advantages, returns = gae(rewards, old_values, mask, config.gamma, config.lam)  # [B, T] each
        explained = explained_variance(old_values, returns, mask)
        advantages = whiten(advantages, mask)
        if config.kl_target:
            leash.update(kl, B)

        # 5. Updates
        names = "loss value_loss ptx_loss entropy approx_kl clip_fraction value_clip_fraction".split()
        stats, grad_norms = dict.fromkeys(names, 0.0), 0.0
        schedule = min(1.0, step / config.warmup) * (1 - (step - 1) / config.steps)
        updates = 0
        for minibatch in minibatches * config.epochs:
            n_tokens = int(lengths[torch.cat(minibatch)].sum())
            approx_kl = 0.0
            for rows in common.mine(minibatch):
                hidden, targets = policy.response_states(rollout, rows)  # [N, C], [N]
                logp, entropy = policy.token_logprobs_and_entropy(hidden, targets, config.temperature)  # [N], [N]
                logp, values = to_slots(logp, mask[rows]), to_slots(value_head(hidden), mask[rows])  # [b, T] each
                pg_loss, pg_stats = policy_loss(
                    logp, old_logp[rows], advantages[rows], mask[rows], config.clip, config.dual_clip, n_tokens
                )
                v_loss, v_stats = value_loss(
                    values, old_values[rows], returns[rows], mask[rows], config.clip_value, n_tokens
                )
                loss = pg_loss + config.value_weight * v_loss
                loss.backward()
                parts = dict(
                    loss=loss, value_loss=v_loss, entropy=entropy.detach().sum() / n_tokens, **pg_stats, **v_stats
                )
                for name, value in parts.items():  # each is a part of a mean over the minibatch's tokens
                    stats[name] += value.item()
                approx_kl += pg_stats["approx_kl"].item()
            if config.ptx:
                rng = random.Random(common.seed_of("ptx", config.seed, step, updates))
                documents = [
                    tokenizer.encode_ordinary("".join(task.base_document(rng))) + [tokenizer.eot_token]
                    for _ in range(config.ptx_documents)
                ]
                n_targets = sum(map(len, documents)) - len(documents)
                for rows in common.mine(common.by_length(list(map(len, documents)), config.micro_batch)):
                    ids, real = (x.to(config.device) for x in right_pad([documents[i] for i in rows]))  # [b, L]
                    nll = (
                        -(policy.token_logprobs(policy.hidden(ids[:, :-1]), ids[:, 1:]) * real[:, 1:]).sum() / n_targets
                    )
                    (config.ptx * nll).backward()
                    stats["ptx_loss"] += nll.item()
                    stats["loss"] += config.ptx * nll.item()
            grad_norm = common.finish_gradients(optimizer.parameters(), config.max_grad_norm)
            run.require_finite(step, loss=stats["loss"], grad_norm=grad_norm)
            grad_norms += grad_norm
            updates += 1
            for group, lr in zip(optimizer.param_groups, (config.lr, config.value_lr)):
                group["lr"] = lr * schedule
            optimizer.step()
            optimizer.zero_grad()
            if config.stop_kl and common.sum_over_ranks(approx_kl) > config.stop_kl:
                break
        done, stats = step, {**common.sum_over_ranks(stats), "grad_norm": grad_norms}
        stats = {name: value / updates for name, value in stats.items()}
        tokens, busy = tokens + int(tokens_of.sum()), busy + time.perf_counter() - began

        # 6. Log and checkpoint
        evaluate, last = step % config.eval_every == 0, step == config.steps
        best = False
        if evaluate or last or step % config.log_every == 0:
            golds = [line["gold"] for line in run.metrics() if "gold" in line] or [float("-inf")]
            found = measure(step, config.samples if last else 1) if evaluate or last else {}
            best = config.stop_on_gold and "gold" in found and found["gold"] > max(golds)
            run.log(
                step, reward=scores.mean().item(), length=lengths.float().mean().item(), kl=kl, beta=beta,
                explained_variance=explained, lr=config.lr * schedule, tokens_per_second=tokens / busy, **stats, **found,
            )  # fmt: skip
            tokens, busy = 0, 0.0
        stop = config.stop_on_gold and evaluate and not best and len(golds) - golds.index(max(golds)) >= 3
        save(step, 1 if stop else config.save_every, best, stop)
        if stop:
            print(f"stopped at step {step}: three evaluations without a better gold score than {max(golds):.3f}")
            break

    # 7. What happened
    few = os.path.join(config.out, "few")
    run.plot("accuracy", "held_out_length", ("sqrt_kl", "held_out_reward", "gold"), "entropy")
    measured = [line for line in run.metrics() if "held_out_reward" in line]
    first, last, peak = measured[0], measured[-1], max(measured, key=lambda line: line.get("gold", 0.0))
    best = f"what it is worth; best was {peak['gold']:.3f} at step {peak['step']}" if "gold" in peak else ""
    meaning = f"the mean of --reward {config.reward}"
    if not config.reward:
        meaning = "what the reward model thinks (0 and 1: mean and std of the SFT model's)"
    lines = [
        ("reward" if config.reward else "proxy reward", "held_out_reward", "+.3f", meaning),
        ("gold score", "gold", ".3f", best),
        ("accuracy (pass@1)", "accuracy", ".3f", "a single sample at temperature 1"),
        ("KL to reference", "held_out_kl", ".3f", "nats per response"),
        ("response length", "held_out_length", ".1f", "tokens"),
    ]
    print(
        f"\nPPO: {last['step']} steps of {config.prompts} responses in {last['seconds']:.0f} seconds; on {len(held_out)} held-out problems:"
    )
    for name, key, form, meaning in lines:
        if key not in last:  # no answers to check
            continue
        print(f"  {name:<18}{format(first[key], form):>7} -> {format(last[key], form):>7}   {meaning}")
    print(
        f"  {run.path}, {run.folder}/samples.md (the same {'six stories' if task is stories else f'{len(held_out[:6])} problems'} before, during and after), "
        f"{run.folder}/metrics.jsonl"
    )
    if task is stories:
        next_one = f"python reward_model.py --pairs 100 --init {init} --out {few} && python ppo.py --beta 0 --init {init} --out {few}"
        print(f"next: {next_one}")


if __name__ == "__main__":
    main(common.parse(Config, __doc__, real=REAL))
