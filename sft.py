"""Stage 2, supervised fine-tuning: imitate demonstrations, with the prompt masked.

The pretrained model continues a story in any of its corpus' formats. SFT shows it prompt-response pairs in one format
(the answer behind "####", then end-of-text) and minimises the token mean over the whole optimizer step

    loss = sum_{i,t} mask * -log p(response_t | prompt, response_<t) / sum_{i,t} mask

where the mask is 1 for response tokens, the first one and the end-of-text token included, and 0 for the prompt: nobody
wants the model to learn to ask. A mean of per-row means would be another objective, with more weight on the tokens of
short answers.

    python sft.py            ten seconds on two CPU cores, and before them out/base.pt if it is missing: out/sft.pt

What to expect: held-out accuracy stays at about 0.5. The demonstrations have the corpus' habits (45% answer at once,
and a quarter of those who work it out slip), so the model keeps them too, now always behind "####"; ppo.py, dpo.py and
grpo.py shift them. A third of the demonstrations do not answer a story but judge two answers to it (data/stories.py:
`sft_example`), so that `dpo.py --judge self` can ask the model.

Sources: Ouyang et al. 2022 (InstructGPT, arXiv:2203.02155), section 3.5, stage 1. Deliberately left out: several
epochs, packing several demonstrations into one row (rows of like length share a micro-batch instead).
"""

import random
import time
from dataclasses import dataclass
from typing import Literal

import torch

import common
import memory
from data import encode_prompt, stories
from data.evaluation import evaluate, habits, require_room
from data.tasks import get_task
from gpt import load, right_pad

# Defaults for pretrained weights and real data, from what others use; no GPU was at hand to tune them
REAL = dict(steps=200, examples=32, micro_batch=4, lr=1e-5, max_new_tokens=300, evaluate=200)


@dataclass
class Config:
    seed: int = 0  # of the demonstrations
    steps: int = 60  # optimizer steps
    out: str = "out"  # folder for sft.pt and sft/
    device: str = "auto"  # auto, cpu, cuda, mps
    resume: bool = False  # continue from the checkpoint; give the other flags again
    init: str = ""  # checkpoint, folder of a pretrained model or its name on the hub; empty: <out>/base.pt, made if it is missing
    tokenizer: str = ""  # must be the one that --init was trained with; empty: what --init says
    chat: Literal["none", "chatml", "llama3"] | None = None  # how prompts are written for a chat model; if not given, as for --init
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the models; auto: on a GPU as stored, else float32
    recompute: bool = False  # activation checkpointing: less memory, a third more time
    task: Literal["stories", "gsm8k"] = "stories"  # where demonstrations come from
    data: str = ""  # your own: a file with {"prompt": ..., "response": ...} a line, a tenth of whose prompts is held out
    data_dir: str = ""  # folder with GSM8K's train.jsonl and test.jsonl; empty: downloaded once
    estimate: bool = False  # only print how much memory this needs with known models
    examples: int = 96  # demonstrations per step
    micro_batch: int = 32  # demonstrations per forward and backward pass
    lr: float = 5e-4  # peak learning rate
    warmup: int = 10  # steps of linear warm-up (1: none); then a cosine down to a tenth
    max_new_tokens: int = 16  # longest sampled response at evaluation
    log_every: int = 10  # steps between two lines
    save_every: int = 20  # steps between two checkpoints
    evaluate: int = 512  # held-out problems, sampled before and after


def predicts_response(prompt_lengths, lengths, width):
    """Which positions of right-padded rows predict a response token, [B, width] bool: prompt_len - 1 .. length - 2.
    So the last prompt token predicts the first response token, and the last response token but one predicts EOS.
    prompt_lengths, lengths [B]: of the prompt, of the whole row."""
    column = torch.arange(width)
    return (column >= prompt_lengths[:, None] - 1) & (column < lengths[:, None] - 1)


def token_mean(values, mask=None, tokens=None):
    """sum(values * mask) / tokens -> scalar. values [B, T] or [N]; mask of the same shape, None: all ones; `tokens`
    is mask.sum() unless this is a micro-batch: then the token count of the whole optimizer step, so that the
    micro-batches' losses (and gradients) add up to the step's, however it is cut."""
    mask = torch.ones_like(values) if mask is None else mask
    return (values * mask).sum() / (mask.sum() if tokens is None else tokens)


def batch_loss(model, texts, prompt_lengths, micro_batch, train=True):
    """The loss of these texts (prompt + response as token ids, with the length of each one's prompt). train: adds its
    gradient, micro-batch by micro-batch; nothing larger than a micro-batch is in memory."""
    lengths, device, total = list(map(len, texts)), model.wte.weight.device, 0.0
    n_targets = sum(lengths) - sum(prompt_lengths)  # tokens in the loss
    for rows in common.mine(common.by_length(lengths, micro_batch)):
        ids, attention = right_pad([texts[i] for i in rows])  # [b, L]
        prompts = torch.tensor([prompt_lengths[i] for i in rows])  # [b]
        predicts = predicts_response(prompts, attention.sum(1), ids.shape[1])  # [b, L]
        ids, predicts = ids.to(device), predicts.to(device)
        with torch.set_grad_enabled(train):
            hidden = model.hidden(ids)[predicts]  # [N, C], N response tokens: only they go through the head
            # [N] the next token; the column that wraps around is never selected
            targets = ids.roll(-1, dims=1)[predicts]
            logp = model.token_logprobs(hidden, targets)  # [N]
            loss = token_mean(-logp, tokens=n_targets)
        if train:
            loss.backward()
        total += loss.item()
    return common.sum_over_ranks(total)


def main(config):
    if config.estimate:
        return memory.print_estimate("sft", config)
    # data and model
    task = get_task(config, "response")
    init, model, tokenizer = load(config, "gpt")

    def encode(pairs):
        """(prompt, response) pairs -> texts, and the lengths of their prompts. The two are tokenised apart, as they are when
        sampling."""
        prompts = [encode_prompt(tokenizer, prompt) for prompt, _ in pairs]
        responses = [tokenizer.encode_ordinary(response) + [tokenizer.eot_token] for _, response in pairs]
        return [prompt + response for prompt, response in zip(prompts, responses)], list(map(len, prompts))

    if config.task != "stories" or config.data:
        room = model.config.context
        too_long = task.drop(lambda p: p.response is None or len(encode([(p.prompt, p.response)])[0][0]) > room)
        print(
            f"{len(task.training)} demonstrations, {len(task.held_out)} held out; {too_long} left out, as they do not fit the "
            f"context of {room} tokens"
        )
        if not task.training:
            raise SystemExit("nothing is left to learn from")
    longest = max(map(len, encode(task.demonstrations())[0]))
    if longest > model.config.context:
        raise SystemExit(
            f"a demonstration of {longest} tokens does not fit the context of {model.config.context} that {init} has"
        )
    optimizer = common.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.01)
    held_out = [problem for problem in task.held_out_problems(config.evaluate) if problem.answer is not None]
    if task is not stories:
        room = model.config.context - config.max_new_tokens
        held_out = [problem for problem in held_out if len(encode_prompt(tokenizer, problem.prompt)) <= room]
    if held_out:
        require_room(model, tokenizer, held_out, config.max_new_tokens)
    others = encode(task.held_out_demonstrations(config.evaluate))  # of the stories none: there accuracy says more
    columns = "loss held_out_loss accuracy" if others[0] else "loss accuracy"
    run = common.Run("sft", config, tokenizer, f"{columns} length grad_norm lr tokens_per_second", init)
    step = run.restore(model, optimizer)

    def held_out_scores():
        generator = common.generator(config.device, "held out", config.seed)
        scores = evaluate(model, tokenizer, held_out, config.max_new_tokens, generator=generator) if held_out else {}
        if others[0]:
            scores["held_out_loss"] = batch_loss(model, *others, config.micro_batch, train=False)
        return scores

    measured = ("accuracy", "length", "held_out_loss")
    if not config.resume:
        scores = held_out_scores()
        run.log(0, **{name: scores.get(name) for name in measured})
        run.save(0, model, optimizer)

    final, tokens, busy = {}, 0, 0.0
    while step < config.steps:
        began = time.perf_counter()
        # demonstrations of this step, and their loss
        rng = random.Random(common.seed_of("sft", config.seed, step))
        texts, prompt_lengths = encode([task.sft_example(rng) for _ in range(config.examples)])
        total = batch_loss(model, texts, prompt_lengths, config.micro_batch)
        grad_norm = common.finish_gradients(optimizer.parameters(), 1.0)
        run.require_finite(step + 1, loss=total, grad_norm=grad_norm)
        lr = common.cosine_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

        # log and checkpoint
        step += 1
        tokens, busy = tokens + sum(map(len, texts)), busy + time.perf_counter() - began
        if step % config.log_every == 0 or step == config.steps:
            final = held_out_scores() if step == config.steps else {}
            run.log(
                step,
                loss=total,
                **{name: final.get(name) for name in measured},
                grad_norm=grad_norm,
                lr=lr,
                tokens_per_second=tokens / busy,
            )
            tokens, busy = 0, 0.0
        run.save(step, model, optimizer, config.save_every)

    # what it learned
    run.plot("loss", "grad_norm")
    scores, first = final or held_out_scores(), run.metrics()[0]
    print(f"\n{run.path}: {config.steps} steps in {run.metrics()[-1]['seconds']:.0f} seconds.", end=" ")
    if others[0]:
        print(f"On {len(others[0])} held-out demonstrations:")
        print(f"  loss {first['held_out_loss']:.4f} -> {scores['held_out_loss']:.4f}")
    if held_out:
        print(f"Sampled on {len(held_out)} held-out {task.NAME}:")
        if task is stories:
            print(habits(scores))
        print(f"  accuracy (pass@1) {first['accuracy']:.3f} -> {scores['accuracy']:.3f}")
    print(f"next: {common.next_command('grpo', config, run.path)}")


if __name__ == "__main__":
    main(common.parse(Config, __doc__, real=REAL))
