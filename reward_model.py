"""Stage 3a, the reward model: learn from comparisons what a judge likes, as one number per response.

The SFT model answers each prompt several times and a judge says of every pair of answers which is the better. The
reward model is that same transformer with a scalar head in the place of the token head, read at the last token of
prompt + response. Bradley and Terry's model of a judge says that a response with reward r beats one with reward r' with
probability sigmoid(r - r'), and the loss is its negative log-likelihood, by default without margin and centering:

    loss = mean over pairs of [ -log sigmoid(r_chosen - r_rejected - margin) + centering * (r_chosen + r_rejected)^2 ]

Only differences of rewards mean anything. So that one KL coefficient fits every reward model, a gain and a bias then
bring the rewards of the SFT model's own responses to mean 0 and standard deviation 1 (those of each member, if there is
an ensemble).

    python reward_model.py                           4000 pairs, and before them out/base.pt and out/sft.pt if missing
    python reward_model.py --data pairs.jsonl        your own: {"prompt": ..., "chosen": ..., "rejected": ...} a line
    python reward_model.py --curve                   how good with 20, 100, 1000 ... pairs: a table

What to expect (defaults, two CPU cores): 15 seconds. The judge is noisy and sides with the gold score in three of
four pairs; no model of this judge can agree with it more often than that. With few pairs the reward model learns that
working it out is better than guessing, with a thousand that a story has six events, so that working which stops early
is wrong. Whether each step was counted right it never learns: to see that, it would have to count along. Whoever
optimises this reward gets what the reward model sees (ppo.py).

What to look at: `judge` and `gold` are how often the reward model sides with each on held-out pairs (0.5 is chance),
and `margin` is the mean of r_chosen - r_rejected in the step's batch. The table at the end says whether "80% sure" is
right in 80% of the cases. In samples.md the rewards of all but the last step are before gain and bias.

All pairs of a prompt are in the same batch, where each of its responses is computed once (InstructGPT, section 3.5:
spread over several batches, the same responses would be seen several times, and overfitted). One pass over the data,
for the same reason.

Sources: Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155), section 3.5 and eq. 1; Stiennon et al. 2020
(arXiv:2009.01325), the head's initial weights and mean 0 before RL; Ziegler et al. 2019 (arXiv:1909.08593), gain and
bias; Touvron et al. 2023 (Llama 2, arXiv:2307.09288), eq. 2, the margin; Eisenstein et al. 2023 (arXiv:2312.09244),
centering and ensembles. Deliberately left out: rewards of steps (process reward models), regression on grades.

Shapes: B texts, L columns, M pairs, k members of an ensemble (1 by default); the other letters are explained in gpt.py.
"""

import dataclasses
import math
import random
import time
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

import common
import memory
from data import encode_prompt
from data.evaluation import require_room
from data.preferences import read_preferences, sample_preferences, write_preferences
from data.tasks import drop_long_prompts, get_task, show
from gpt import GPT, load, right_pad

# Defaults for pretrained weights and real data, in the range of what others use; no GPU was at hand to tune them
REAL = dict(pairs=2000, judge="gold", max_new_tokens=300, micro_batch=8, sample_rows=256, lr=1e-5, evaluate=200)


# fmt: off
@dataclass
class Config:
    seed: int = 0  # of the stories, the judge, the order of the pairs, and the head's initial weights
    steps: int = 0  # optimizer steps; 0: one pass over the pairs
    out: str = "out"  # folder for reward_model.pt and reward_model/
    device: str = "auto"  # auto, cpu, cuda, mps
    resume: bool = False  # continue from the checkpoint; give the other flags again
    init: str = ""  # whose transformer it starts from and whose responses are judged: checkpoint, folder of a pretrained model or its name on the hub; empty: <out>/sft.pt, made if it is missing
    tokenizer: str = ""  # must be the one that --init was trained with; empty: what --init says
    chat: Literal["none", "chatml", "llama3"] | None = None  # how prompts are written for a chat model; if not given, as for --init
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the models; auto: on a GPU as stored, else float32
    recompute: bool = False  # activation checkpointing: less memory, a third more time
    task: Literal["stories", "gsm8k"] = "stories"  # where the problems come from
    data_dir: str = ""  # folder with GSM8K's train.jsonl and test.jsonl; empty: they are downloaded once
    estimate: bool = False  # only print how much memory this takes with known models
    data: str = ""  # a file of preferences (JSONL), a tenth of whose prompts is held out; empty: samples of the model, judged
    pairs: int = 4000  # comparisons to train on, if they are sampled
    samples: int = 4  # responses per story, all of whose pairs are judged
    judge: Literal["noisy", "gold"] = "noisy"  # sees the gold score through Bradley-Terry noise, or exactly
    noise: float = 1.5  # of the noisy judge, in units of the gold score: at 1.5 it agrees with gold in three pairs of four
    max_new_tokens: int = 16  # longest sampled response
    sample_rows: int = 1024  # responses sampled at once; changes memory, and which random numbers they get
    prompts: int = 16  # prompts per optimizer step, with all their pairs; fewer if a pass would then be under eight steps
    micro_batch: int = 64  # responses per forward and backward pass; changes memory, not the gradient
    lr: float = 1e-3  # peak learning rate
    warmup: int = 10  # steps of linear warm-up (1: none), then a cosine down to a tenth
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this
    centering: float = 0.0  # weight of (r_chosen + r_rejected)^2, which keeps rewards near 0; 0.01 is usual
    ensemble: int = 1  # reward models, each with its own transformer, head, and order of the data; saved as one
    curve: bool = False  # only print how good it gets with 20, 100, 1000 ... pairs; saves nothing
    evaluate: int = 1000  # held-out comparisons
    eval_every: int = 20  # steps between two held-out evaluations
    log_every: int = 5  # steps between two lines
    save_every: int = 20  # steps between two checkpoints

    def __post_init__(self):
        for flag in ("steps", "centering"):
            if not getattr(self, flag) >= 0:
                raise ValueError(f"--{flag} {getattr(self, flag)}: must not be negative")
        if self.samples == 1:
            raise ValueError("--samples 1: there is nothing to compare one response with; use at least 2")
# fmt: on


def bradley_terry_loss(chosen, rejected, margin=None, centering=0.0, probability=None):
    """-log sigmoid(chosen - rejected - margin) + centering (chosen + rejected)^2, the mean over pairs. [B], [B] ->
    scalar.

    margin [B]: by how much the chosen one has to lead (Llama 2, eq. 2). probability [B]: a soft label p, how likely it
    is that `chosen` is the better one; the loss is then -p log sigmoid(d) - (1 - p) log sigmoid(-d) with
    d = chosen - rejected - margin, least where d is logit p. logsigmoid does not overflow, log(1 + exp(-d)) does.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(difference)
    if probability is not None:
        loss = probability * loss - (1 - probability) * F.logsigmoid(-difference)
    return (loss + centering * (chosen + rejected) ** 2).mean()


def last_token_index(attention_mask):
    """The column of each row's last token, [B, T] -> [B], wherever the padding is. (mask.sum(1) - 1 would be wrong
    with padding on the left, and a search for the first EOS finds one in the prompt.)"""
    return (attention_mask * torch.arange(attention_mask.shape[1], device=attention_mask.device)).argmax(1)


def gain_and_bias(rewards):
    """The numbers that bring `rewards` [..., N] to mean 0 and std 1 over the last dimension: gain * r + bias, each
    [...]. The std has divisor N, as in the code of Ziegler et al. 2019. Equal rewards keep gain 1."""
    equal = rewards.amax(-1) == rewards.amin(-1)  # rounding can give equal rewards a std above 0
    gain = torch.where(equal, 1.0, 1 / rewards.std(-1, correction=0))
    return gain, -gain * rewards.mean(-1)


def combine(rewards, how="mean"):
    """One reward from those of an ensemble, [k, B] -> [B]: "mean"; "min", the most sceptical member (Coste et al.
    2023, arXiv:2310.02743); "mean-std", the mean less the members' disagreement, with divisor k."""
    if how == "mean":
        return rewards.mean(0)
    if how == "min":
        return rewards.amin(0)
    if how == "mean-std":
        return rewards.mean(0) - rewards.std(0, correction=0)
    raise ValueError(f"unknown combination {how!r}: mean, min or mean-std")


class RewardModel(nn.Module):
    """k transformers with a scalar head each (k = 1 unless an ensemble is asked for). model(ids, attention_mask)
    gives every member's rewards, [k, B]; `combine` makes one of them."""

    def __init__(self, config, ensemble=1):
        super().__init__()
        self.config = config
        self.trunks = nn.ModuleList(GPT(config) for _ in range(ensemble))
        self.heads = nn.ModuleList(nn.Linear(config.n_embd, 1) for _ in range(ensemble))
        for head in self.heads:  # so that the first rewards have a variance of about 1
            nn.init.normal_(head.weight, std=(config.n_embd + 1) ** -0.5)
            nn.init.zeros_(head.bias)
        self.register_buffer("gain", torch.ones(ensemble))
        self.register_buffer("bias", torch.zeros(ensemble))

    def member(self, k, ids, attention_mask):
        """Rewards of member k before gain and bias. ids, attention_mask [B, T] -> [B], padding on either side."""
        # causal attention never looks at padding on the right, so it needs no mask
        mask = None if bool(attention_mask[:, 0].all()) else attention_mask
        hidden = self.trunks[k].hidden(ids, attention_mask=mask)  # [B, T, C]
        last = hidden[torch.arange(len(ids), device=ids.device), last_token_index(attention_mask)]  # [B, C]
        return self.heads[k](last.to(self.heads[k].weight.dtype))[:, 0]  # in float32, whatever the trunk's dtype

    def forward(self, ids, attention_mask):
        rewards = torch.stack([self.member(k, ids, attention_mask) for k in range(len(self.heads))])  # [k, B]
        return self.gain[:, None] * rewards + self.bias[:, None]


@dataclass
class Comparisons:
    """All that was said of the responses to one prompt: texts of prompt and response as token ids, each different
    response once, and for each pair the numbers of the chosen and the rejected one."""

    texts: list = field(default_factory=list)
    chosen: list = field(default_factory=list)
    rejected: list = field(default_factory=list)
    probability: list = field(default_factory=list)
    margin: list = field(default_factory=list)
    gold: list = field(default_factory=list)  # NaN where it is not known


def comparisons(rows, tokenizer, context):
    """Rows of preferences -> (a list of `Comparisons`, one per prompt; how many pairs were dropped). A text longer than
    `context` loses the end of its response. Dropped are: "too long", pairs whose prompt alone fills the context; and
    "equal", pairs whose texts are the same (after cutting): nothing can be learned from them."""
    elements, dropped = {}, {"equal": 0, "too long": 0}
    for row in rows:
        prompt = encode_prompt(tokenizer, row["prompt"])
        texts = [
            (prompt + tokenizer.encode_ordinary(row[key]) + [tokenizer.eot_token])[:context]
            for key in ("chosen", "rejected")
        ]
        if len(prompt) >= context or texts[0] == texts[1]:
            dropped["too long" if len(prompt) >= context else "equal"] += 1
            continue
        element = elements.setdefault(show(row["prompt"]), Comparisons())
        for text, numbers in zip(texts, (element.chosen, element.rejected)):
            if text not in element.texts:
                element.texts.append(text)
            numbers.append(element.texts.index(text))
        element.probability.append(row.get("probability", 1.0))
        element.margin.append(row.get("margin", 0.0))
        element.gold.append(row.get("gold", float("nan")))
    return list(elements.values()), dropped


def pair_rewards(model, k, elements):
    """Rewards of member k for all pairs of some Comparisons -> (chosen [M], rejected [M]); each text passes once."""
    ids, mask = right_pad([text for element in elements for text in element.texts])  # [B, L]
    device = model.gain.device
    rewards = model.member(k, ids.to(device), mask.to(device))  # [B]
    chosen, rejected, first = [], [], 0
    for element in elements:
        chosen += [first + i for i in element.chosen]
        rejected += [first + i for i in element.rejected]
        first += len(element.texts)
    return rewards[chosen], rewards[rejected]


def cut(elements, responses):
    """Micro-batches of elements of like length, with about `responses` responses each."""
    longest = [max(map(len, element.texts)) for element in elements]
    most = max(len(element.texts) for element in elements)
    return [[elements[i] for i in rows] for rows in common.by_length(longest, max(1, responses // most))]


def update(model, optimizer, batches, lr, config):
    """One optimizer step: member k learns from the comparisons batches[k], each pair with the same weight. -> means
    over pairs and members: loss, margin (r_chosen - r_rejected), train_accuracy (a tie is wrong), and grad_norm."""
    stats, grad_norm = dict.fromkeys(("loss", "margin", "train_accuracy"), 0.0), 0.0
    for k, batch in enumerate(batches):
        pairs = sum(len(element.chosen) for element in batch)
        for elements in common.mine(cut(batch, config.micro_batch)):
            chosen, rejected = pair_rewards(model, k, elements)  # [M], [M]
            margin = chosen.new_tensor([m for element in elements for m in element.margin])  # [M]
            probability = chosen.new_tensor([p for element in elements for p in element.probability])  # [M]
            loss = bradley_terry_loss(chosen, rejected, margin, config.centering, probability)
            (loss * len(chosen) / pairs).backward()
            share = len(chosen) / pairs / len(batches)
            stats["loss"] += loss.item() * share
            stats["margin"] += (chosen - rejected).mean().item() * share
            stats["train_accuracy"] += (chosen > rejected).float().mean().item() * share
        grad_norm += common.finish_gradients(optimizer.param_groups[k]["params"], config.max_grad_norm) / len(batches)
    stats = {**common.sum_over_ranks(stats), "grad_norm": grad_norm}
    for group in optimizer.param_groups:
        group["lr"] = lr
    if math.isfinite(stats["loss"]) and math.isfinite(
        stats["grad_norm"]
    ):  # else the weights stay, and the caller stops
        optimizer.step()
    optimizer.zero_grad()
    return stats


def batch_of(elements, step, prompts, seed, member):
    """The comparisons of one step: the data in an order of this member's, again and again in other orders."""
    per_pass = -(-len(elements) // prompts)
    epoch, i = divmod(step, per_pass)
    order = random.Random(common.seed_of("order", seed, member, epoch)).sample(range(len(elements)), len(elements))
    return [elements[j] for j in order[i * prompts : (i + 1) * prompts]]


@torch.no_grad()
def assess(model, elements, rows=512):
    """What a reward model is worth on comparisons that it never saw, as a dictionary:

    difference           r_chosen - r_rejected of each pair [M], the members' mean, before gain and bias (only then is
                         its sigmoid a probability)
    preference_accuracy  how often it sides with the judge; a tie is wrong
    gold_accuracy        how often with the gold score, of the pairs whose gold scores are known and differ
    """
    difference, gold = [], []
    for micro_batch in cut(elements, rows):
        pairs = [pair_rewards(model, k, micro_batch) for k in range(len(model.heads))]
        difference.append(torch.stack([chosen - rejected for chosen, rejected in pairs]).mean(0).cpu())
        gold += [g for element in micro_batch for g in element.gold]
    difference, gold = torch.cat(difference), torch.tensor(gold)  # [M], [M]
    known = ~gold.isnan() & (gold != 0)
    return {
        "preference_accuracy": (difference > 0).float().mean().item(),
        "gold_accuracy": (difference * gold > 0)[known].float().mean().item(),  # NaN where nothing is known
        "difference": difference,
    }


def reliability(difference):
    """Is "80% sure" right in 80% of the cases? difference [M] -> rows (from, to, pairs, mean probability that the
    model gave the response it prefers, share of pairs in which the judge prefers that one too)."""
    sure, right = torch.sigmoid(difference.abs()), (difference > 0).float()
    rows = []
    for low in (0.5, 0.6, 0.7, 0.8, 0.9):
        inside = (sure >= low) & (sure < low + 0.1 if low < 0.9 else sure <= 1)
        if inside.any():
            rows.append((low, low + 0.1, int(inside.sum()), sure[inside].mean().item(), right[inside].mean().item()))
    return rows


@torch.no_grad()
def normalise(model, policy, prompts, max_new_tokens, eos, generator, rows=1024):
    """Sets gain and bias of each member so that the rewards of `policy`'s responses to `prompts` (token ids) have mean
    0 and std 1. `rows`: how many at once."""
    model.gain.fill_(1.0), model.bias.zero_()
    rewards = []
    for i in range(0, len(prompts), rows):
        rollout = policy.generate(prompts[i : i + rows], max_new_tokens, eos=eos, generator=generator)
        rewards.append(model(rollout.ids, rollout.attention_mask))
    gain, bias = gain_and_bias(torch.cat(rewards, 1))
    model.gain.copy_(gain), model.bias.copy_(bias)


def untrained(trunk, prompts, config):
    """A reward model on copies of `trunk`, its optimizer, and the plan for so many prompts of comparisons: prompts per
    step, and the steps of one pass."""
    torch.manual_seed(common.seed_of("heads", config.seed))
    model = RewardModel(trunk.config, config.ensemble)
    for copy in model.trunks:
        copy.load_state_dict(trunk.state_dict())
        copy.recompute = trunk.recompute
    model.trunks.to(trunk.wte.weight.dtype)
    model.to(config.device)
    members = [[*trunk.parameters(), *head.parameters()] for trunk, head in zip(model.trunks, model.heads)]
    groups = [dict(params=member) for member in members]
    optimizer = common.AdamW(groups, lr=config.lr, betas=(0.9, 0.99), weight_decay=0.01)
    per_step = max(1, min(config.prompts, prompts // 8))
    return model, optimizer, per_step, -(-prompts // per_step)


def print_curve(policy, elements, held_out, config):
    """A table: how good a reward model gets with the first 20, 100, 1000 ... pairs, one pass over them."""
    print(f"{'pairs':>7}{'prompts':>9}{'sides with judge':>18}{'with gold':>11}{'seconds':>9}")
    total = sum(len(element.chosen) for element in elements)
    for wanted in (*(n for n in (20, 100, 1000, 4000, 16000) if n < total), total):
        began, pairs, n = time.perf_counter(), 0, 0
        while pairs < wanted:
            pairs, n = pairs + len(elements[n].chosen), n + 1
        model, optimizer, per_step, steps = untrained(policy, n, config)
        for step in range(steps):
            batches = [batch_of(elements[:n], step, per_step, config.seed, k) for k in range(config.ensemble)]
            lr = common.cosine_lr(step, dataclasses.replace(config, steps=steps))
            update(model, optimizer, batches, lr, config)
        found, seconds = assess(model, held_out, rows=min(512, config.sample_rows)), time.perf_counter() - began
        print(
            f"{pairs:>7}{n:>9}{found['preference_accuracy']:>18.3f}{found['gold_accuracy']:>11.3f}{seconds:>9.1f}",
            flush=True,
        )


def main(config):
    if config.estimate:
        return memory.print_estimate("reward_model", config)
    # 0. The SFT model: the reward model starts from its transformer, and is to judge its responses
    rows = read_preferences(config.data) if config.data else []  # first, as a mistake in it should cost no time
    task = None if config.data else get_task(config)
    init, policy, tokenizer = load(config, "sft")
    policy.requires_grad_(False)

    # 1. Comparisons to train on, and others, of other prompts, to see what was learned
    equal = 0
    if config.data:
        prompts = {show(row["prompt"]): row["prompt"] for row in rows}  # a chat's messages, as text: the messages
        names = sorted(prompts)
        others = set(random.Random(common.seed_of("split", config.seed)).sample(names, max(1, len(names) // 10)))
        other_rows = [row for row in rows if show(row["prompt"]) in others][: config.evaluate]
        rows = [row for row in rows if show(row["prompt"]) not in others]
        names = random.Random(config.seed).sample([p for p in names if p not in others], len(names) - len(others))
        prompts = [prompts[name] for name in names]
    else:
        # their prompts have to fit, and the answers to them set gain and bias
        drop_long_prompts(task, tokenizer, policy.config.context - config.max_new_tokens)
        training = task.training_problems()
        require_room(policy, tokenizer, training, config.max_new_tokens)
        prompts = [problem.prompt for problem in training]

        def judged(count, held_out):
            name, noise = ("held out" if held_out else "pairs", config.seed), config.noise * (config.judge == "noisy")
            generator = common.generator(config.device, *name)
            return sample_preferences(
                policy, tokenizer, count, config.samples, noise, common.seed_of(*name), config.max_new_tokens,
                generator, held_out, task, config.sample_rows,
            )  # fmt: skip

        (rows, equal), (other_rows, _) = judged(config.pairs, held_out=False), judged(config.evaluate, held_out=True)
    elements, dropped = comparisons(rows, tokenizer, policy.config.context)
    held_out, _ = comparisons(other_rows, tokenizer, policy.config.context)
    room = policy.config.context - config.max_new_tokens
    reference_prompts = [p for p in (encode_prompt(tokenizer, prompt) for prompt in prompts) if 0 < len(p) <= room][:512]
    if not elements or not held_out or not reference_prompts:
        raise SystemExit(
            f"{config.data or 'samples of ' + init}: nothing to learn from: {len(elements)} prompts with comparisons to "
            f"train on, {len(held_out)} to test on, {len(reference_prompts)} with room for --max-new-tokens "
            f"{config.max_new_tokens} in the context of {policy.config.context}"
        )
    pairs, held_out_pairs = (sum(len(element.chosen) for element in part) for part in (elements, held_out))
    print(
        f"{pairs} pairs of responses to {len(elements)} prompts, and {held_out_pairs} held out; dropped "
        f"{equal + dropped['equal']} pairs of equal texts and {dropped['too long']} whose prompt is too long"
    )
    if config.curve:
        return print_curve(policy, elements, held_out, config)

    # 2. The reward model
    model, optimizer, per_step, steps = untrained(policy, len(elements), config)
    config.steps = config.steps or steps
    columns = "loss margin preference_accuracy gold_accuracy grad_norm lr"
    run = common.Run("reward_model", config, tokenizer, columns, init, *([config.data] if config.data else []))
    step = run.restore(model, optimizer)
    if not config.data:
        common.on_rank_0(write_preferences, run.folder / "preferences.jsonl", rows)

    @torch.no_grad()
    def held_out_scores(step):
        found = assess(model, held_out, min(512, config.sample_rows))
        lines = []
        for row in other_rows[:: max(1, len(other_rows) // 6)][:6]:  # the same ones each time
            shown, _ = comparisons([row], tokenizer, policy.config.context)
            if shown:
                ids, mask = (x.to(config.device) for x in right_pad(shown[0].texts))  # [2, L]
                chosen, rejected = model(ids, mask).mean(0).tolist()
                lines.append(
                    f"- {show(row['prompt'])}\n  chosen `{row['chosen'].strip()}` {chosen:+.2f}, "
                    f"rejected `{row['rejected'].strip()}` {rejected:+.2f}"
                )
        run.sample(step, "\n".join(lines))
        return {key: found[key] for key in ("preference_accuracy", "gold_accuracy")}

    if not config.resume:
        run.log(0, **held_out_scores(0))
        run.save(0, model, optimizer)

    while step < config.steps:
        # 3. One step: every member sees all prompts once per pass, each in its own order
        batches = [batch_of(elements, step, per_step, config.seed, k) for k in range(config.ensemble)]
        lr = common.cosine_lr(step, config)
        stats = update(model, optimizer, batches, lr, config)
        step += 1
        run.require_finite(step, loss=stats["loss"], grad_norm=stats["grad_norm"])

        # 4. After the last one, rewards of mean 0 and std 1 on the SFT model's responses; log and checkpoint
        measure, last = step % config.eval_every == 0, step == config.steps
        if last:
            generator = common.generator(config.device, "normalise", config.seed)
            normalise(
                model, policy, reference_prompts, config.max_new_tokens, tokenizer.eot_token, generator, config.sample_rows
            )
        if measure or last or step % config.log_every == 0:
            run.log(step, **stats, lr=lr, **(held_out_scores(step) if measure or last else {}))
        run.save(step, model, optimizer, config.save_every)

    # 5. What it learned
    run.plot("loss", "margin", "preference_accuracy", "gold_accuracy")
    found = assess(model, held_out, min(512, config.sample_rows))
    gold = torch.tensor([g for element in held_out for g in element.gold])
    seconds = run.metrics()[-1]["seconds"]
    print(
        f"\n{run.path}: {config.steps} steps on {pairs} pairs in {seconds:.0f} seconds. On {held_out_pairs} held-out pairs:"
    )
    print(f"  sides with the judge in       {found['preference_accuracy']:.1%}")
    if not gold.isnan().any():
        ceiling = ((gold > 0).float() + 0.5 * (gold == 0)).mean().item()  # of equal gold scores, half by chance
        print(f"  the judge sides with gold in  {ceiling:.1%}   the ceiling, on average, of siding with the judge")
        print(f"  sides with the gold score in  {found['gold_accuracy']:.1%}")
    print("  how sure it is   pairs   it says   the judge agrees")
    for low, high, n, said, seen in reliability(found["difference"]):
        print(f"    {low:4.0%} to {high:4.0%} {n:>8}{said:>9.1%}{seen:>15.1%}")
    print("next: python ppo.py")


if __name__ == "__main__":
    main(common.parse(Config, __doc__, real=REAL))
