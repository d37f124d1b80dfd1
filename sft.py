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
epochs, packing several demonstrations into one row (rows of like length share a micro-batch instead), chat templates.
"""

import os
import random
import time
from dataclasses import dataclass

import torch

import common
from data import get_tokenizer, stories
from data.evaluation import evaluate, habits, require_room
from gpt import GPT, GPTConfig, right_pad


@dataclass
class Config:
    seed: int = 0  # of the demonstrations
    steps: int = 60  # optimizer steps
    out: str = "out"  # folder for sft.pt and sft/
    device: str = "auto"  # auto, cpu, cuda, mps
    resume: bool = False  # continue from the checkpoint
    init: str = ""  # checkpoint to start from; empty: <out>/base.pt, made if it is missing
    tokenizer: str = "stories"  # must be the one that the checkpoint was trained with
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


def main(config):
    # data and model
    tokenizer = get_tokenizer(config.tokenizer)
    init = config.init or os.path.join(config.out, "base.pt")
    if not config.init and not config.resume:
        common.make_if_missing("gpt", init, config)
    checkpoint = common.load_checkpoint(init, tokenizer)
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    model.to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    held_out = stories.held_out_problems(config.evaluate)
    require_room(model, tokenizer, held_out, config.max_new_tokens)
    run = common.Run("sft", config, tokenizer, "loss accuracy length grad_norm lr tokens_per_second", init)
    step = run.restore(model, optimizer)

    def held_out_scores():
        generator = common.generator(config.device, "held out", config.seed)
        return evaluate(model, tokenizer, held_out, config.max_new_tokens, generator=generator)

    if not config.resume:
        scores = held_out_scores()
        run.log(0, accuracy=scores["accuracy"], length=scores["length"])
        run.save(0, model, optimizer)

    final, tokens, busy = {}, 0, 0.0
    while step < config.steps:
        began = time.perf_counter()
        # demonstrations of this step; prompt and response are tokenised apart, as they are when sampling
        rng = random.Random(common.seed_of("sft", config.seed, step))
        pairs = [stories.sft_example(rng) for _ in range(config.examples)]
        prompts = [tokenizer.encode_ordinary(prompt) for prompt, _ in pairs]
        responses = [tokenizer.encode_ordinary(response) + [tokenizer.eot_token] for _, response in pairs]
        texts = [prompt + response for prompt, response in zip(prompts, responses)]
        longest = max(map(len, texts))
        if longest > model.config.context:
            raise SystemExit(
                f"a demonstration of {longest} tokens does not fit the context of {model.config.context} that {init} has"
            )
        n_targets = sum(map(len, responses))  # tokens in the loss of this step

        # loss: only response tokens go through the head
        total = 0.0
        for rows in common.by_length(list(map(len, texts)), config.micro_batch):
            ids, attention = right_pad([texts[i] for i in rows])  # [b, L]
            prompt_lengths = torch.tensor([len(prompts[i]) for i in rows])  # [b]
            predicts = predicts_response(prompt_lengths, attention.sum(1), ids.shape[1])  # [b, L]
            ids, predicts = ids.to(config.device), predicts.to(config.device)
            hidden = model.hidden(ids)[predicts]  # [N, C], N response tokens
            # [N] the next token; the column that wraps around is never selected
            targets = ids.roll(-1, dims=1)[predicts]
            logp = model.token_logprobs(hidden, targets)  # [N]
            loss = token_mean(-logp, tokens=n_targets)
            loss.backward()
            total += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
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
  accuracy (pass@1) {run.metrics()[0]["accuracy"]:.3f} -> {scores["accuracy"]:.3f}
next: python grpo.py""")


if __name__ == "__main__":
    main(common.parse(Config, __doc__))
