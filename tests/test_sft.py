"""The prompt mask, the normaliser, and that a short run learns."""

import pytest
import torch

import common
import gpt
import sft


def test_mask_covers_first_response_token_and_eos_and_never_the_prompt():
    prompts, responses = [[1, 2, 3], [4]], [[5, 6, 0], [7, 8, 9, 0]]
    ids, attention = gpt.right_pad([p + r for p, r in zip(prompts, responses)])
    mask = sft.predicts_response(torch.tensor([3, 1]), attention.sum(1), ids.shape[1])
    assert [row[m].tolist() for row, m in zip(ids.roll(-1, 1), mask)] == responses  # what the marked slots predict
    assert mask[:, -1].eq(False).all()  # the last column predicts nothing


@pytest.mark.parametrize("split", [[1] * 8, [3, 5], [2, 2, 4]])
def test_any_split_gives_the_same_gradient(tiny_model, split):
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(1, 61, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 9, (8,), generator=generator)
    ]
    responses = [
        torch.randint(1, 61, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 15, (8,), generator=generator)
    ]

    def gradient(parts):
        tiny_model.zero_grad()
        for rows in parts:
            ids, attention = gpt.right_pad([prompts[i] + responses[i] for i in rows])
            mask = sft.predicts_response(torch.tensor([len(prompts[i]) for i in rows]), attention.sum(1), ids.shape[1])
            logp = tiny_model.token_logprobs(tiny_model.hidden(ids)[mask], ids.roll(-1, 1)[mask])
            sft.token_mean(-logp, tokens=sum(map(len, responses))).backward()
        return torch.cat([p.grad.flatten() for p in tiny_model.parameters()])

    whole = gradient([list(range(8))])
    parts = [list(range(sum(split[:i]), sum(split[: i + 1]))) for i in range(len(split))]
    torch.testing.assert_close(gradient(parts), whole, rtol=1e-4, atol=1e-6)
    shuffled = common.by_length([len(p) + len(r) for p, r in zip(prompts, responses)], 3)
    torch.testing.assert_close(gradient(shuffled), whole, rtol=1e-4, atol=1e-6)
    # the plain definition: token after token, no batch at all
    total = 0.0
    for prompt, response in zip(prompts, responses):
        logp = tiny_model(torch.tensor([prompt + response]))[0].log_softmax(-1)
        total -= sum(logp[len(prompt) + t - 1, token] for t, token in enumerate(response))
    tiny_model.zero_grad()
    (total / sum(map(len, responses))).backward()
    torch.testing.assert_close(
        torch.cat([p.grad.flatten() for p in tiny_model.parameters()]), whole, rtol=1e-4, atol=1e-6
    )


def test_token_mean_is_not_the_mean_of_row_means():
    values, mask = torch.tensor([[2.0, 9.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert sft.token_mean(values, mask) == pytest.approx(4 / 3)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_short_runs_learn(tmp_path, seed):
    """A few steps of pretraining and of SFT lower their losses; SFT teaches the marker, which half of the corpus does
    not use."""
    gpt.main(
        gpt.Config(
            seed=seed,
            steps=80,
            out=str(tmp_path),
            device="cpu",
            warmup=10,
            lr=1e-2,
            n_embd=32,
            n_layer=1,
            n_head=2,
            log_every=20,
            evaluate=8,
        )
    )
    base = common.load_checkpoint(tmp_path / "base.pt")
    sft.main(sft.Config(seed=seed, steps=40, out=str(tmp_path), device="cpu", lr=3e-3, evaluate=64))
    tuned = common.load_checkpoint(tmp_path / "sft.pt")
    run = common.Run.__new__(common.Run)
    losses = {}
    for name in ("base", "sft"):
        run.folder = tmp_path / name
        losses[name] = [line["loss"] for line in run.metrics() if "loss" in line]
    assert losses["base"][-1] < 3.0 < losses["base"][0] and losses["sft"][-1] < losses["sft"][0]
    tokenizer = gpt.get_tokenizer()
    prompt, (first,) = (
        tokenizer.encode_ordinary(
            "The fox has 7 nuts. It naps. It naps. It naps. It naps. It naps. It naps. How many?"
        ),
        tokenizer.encode_ordinary(" Answer:"),
    )
    chance = []
    for checkpoint in (base, tuned):
        model = gpt.GPT(gpt.GPTConfig(**checkpoint["model_config"]))
        model.load_state_dict(checkpoint["model"])
        chance.append(model(torch.tensor([prompt]))[0, -1].softmax(-1)[first].item())
    assert chance[1] < 0.2 * chance[0]
