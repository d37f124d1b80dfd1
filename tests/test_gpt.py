"""The transformer against transformers' GPT-2 and against itself: cache, padding, sampling."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import gpt
from gpt import GPT, GPTConfig, KVCache, Rollout, right_pad

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6, 7], [15, 16]]


def hf_gpt2(model):
    """transformers' GPT-2 with the weights of `model`."""
    transformers = pytest.importorskip("transformers")
    c = model.config
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.context, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    hf = transformers.GPT2LMHeadModel(config).eval()
    weights = model.state_dict()
    for name in hf.state_dict():
        ours = weights[name.removeprefix("transformer.")]
        linear = name.endswith("weight") and any(part in name for part in ("c_attn", "c_proj", "c_fc"))
        hf.state_dict()[name].copy_(ours.T if linear else ours)  # transformers keeps these transposed
    return hf


def test_logits_equal_transformers(tiny_model):
    ids = torch.randint(0, 61, (3, 40))
    with torch.no_grad():
        torch.testing.assert_close(tiny_model(ids), hf_gpt2(tiny_model)(ids).logits, rtol=0, atol=1e-5)


def test_padded_vocabulary(tiny_model, tmp_path):
    """61 tokens, 64 rows: the padding is never sampled, enters no softmax, gets no gradient and is in no checkpoint."""
    model = tiny_model
    rows = model.wte.weight
    assert rows.shape[0] == 64 and rows[61:].eq(0).all()
    ids = torch.randint(0, 61, (4, 12))
    before = model(ids).detach()
    with torch.no_grad():
        rows[61:] = 1e3 * torch.sign(model.hidden(ids)[0, 0])  # padding whose logits would win
    assert model(ids).shape[-1] == 61 and torch.equal(model(ids), before)
    for temperature, top_k in ((1.0, None), (0, None), (5.0, 62)):
        rollout = model.generate([[1, 2, 3]] * 64, 20, temperature, top_k, generator=torch.Generator().manual_seed(0))
        assert rollout.ids.max() < 61
        flat = model(rollout.ids)[:, 2:-1] / (temperature or 1)
        expected = flat.log_softmax(-1).gather(-1, rollout.ids[:, 3:, None])[..., 0]
        torch.testing.assert_close(rollout.logp, expected.detach(), rtol=0, atol=1e-4)
    logp, entropy = model.token_logprobs_and_entropy(model.hidden(ids[:, :-1]), ids[:, 1:])
    log_p = before[:, :-1].log_softmax(-1)
    torch.testing.assert_close(logp, log_p.gather(-1, ids[:, 1:, None])[..., 0])
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
    assert torch.equal(logp, model.token_logprobs(model.hidden(ids[:, :-1]), ids[:, 1:]))
    (logp.sum() + entropy.sum()).backward()
    assert rows.grad[61:].eq(0).all() and rows.grad[:61].abs().sum() > 0
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name in ("wte.weight", "lm_head.weight"):
        assert saved[name].shape == (61, 32) and saved[name].untyped_storage().nbytes() == 61 * 32 * 4
    other = GPT(GPTConfig(vocab_size=61, context=40, n_layer=2, n_head=2, n_embd=32))
    other.load_state_dict(saved)
    assert torch.equal(other(ids), before) and other.wte.weight is other.lm_head.weight
    assert other.wte.weight[61:].eq(0).all() and saved["wte.weight"].shape == (61, 32)  # the caller's are left alone


def test_greedy_equals_transformers(tiny_model):
    hf = hf_gpt2(tiny_model)
    for prompt in PROMPTS:
        rollout = tiny_model.generate([prompt], 20, temperature=0)
        theirs = hf.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert rollout.ids[0].tolist() == theirs[0].tolist()


def test_causal(tiny_model):
    ids = torch.randint(0, 61, (2, 20))
    changed = ids.clone()
    changed[:, 12:] = 3
    torch.testing.assert_close(tiny_model(ids)[:, :12], tiny_model(changed)[:, :12], rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 13], [5, 1, 1, 13]])
@torch.no_grad()
def test_cached_equals_uncached(tiny_model, chunks):
    ids = torch.randint(0, 61, (3, 20))
    cache = KVCache(tiny_model.config, 3, 20, tiny_model.wte.weight)
    parts = [tiny_model(part, cache=cache) for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), tiny_model(ids), rtol=0, atol=1e-5)


@torch.no_grad()
def test_left_padding_changes_nothing(tiny_model):
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    logits = tiny_model(ids, attention_mask=mask)
    assert logits.isfinite().all()
    for row, prompt in zip(logits, PROMPTS):
        torch.testing.assert_close(row[width - len(prompt) :], tiny_model(torch.tensor([prompt]))[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature, top_k, eos", list(itertools.product([0.0, 0.7, 1.0, 1.5], [None, 5], [None, 3])))
def test_generated_logprobs_equal_a_fresh_pass(tiny_model, temperature, top_k, eos):
    rollout = tiny_model.generate(PROMPTS * 8, 12, temperature, top_k, eos, torch.Generator().manual_seed(1))
    fresh = (
        tiny_model(rollout.ids, rollout.positions, rollout.attention_mask)[:, rollout.prompt_len - 1 : -1]
        / (temperature or 1)
    ).log_softmax(-1)
    fresh = fresh.gather(-1, rollout.ids[:, rollout.prompt_len :, None])[..., 0] * rollout.mask
    torch.testing.assert_close(rollout.logp, fresh, rtol=0, atol=1e-5)
    # and one by one, without padding
    for i, prompt in enumerate(PROMPTS):
        n = int(rollout.mask[i].sum())
        row = rollout.ids[i, rollout.prompt_len :][:n]
        logp = (
            tiny_model(torch.tensor([prompt + row.tolist()]))[0, len(prompt) - 1 : -1] / (temperature or 1)
        ).log_softmax(-1)
        torch.testing.assert_close(rollout.logp[i, :n], logp.gather(-1, row[:, None])[:, 0], rtol=0, atol=1e-5)


def test_mask_ends_with_the_first_eos(tiny_model):
    rollout = tiny_model.generate(PROMPTS * 40, 15, eos=3, generator=torch.Generator().manual_seed(0))
    lengths = set()
    for prompt, ids, mask, attention, positions in zip(
        PROMPTS * 40, rollout.ids, rollout.mask, rollout.attention_mask, rollout.positions
    ):
        response, n = ids[rollout.prompt_len :].tolist(), int(mask.sum())
        lengths.add(n)
        assert mask.tolist() == [1] * n + [0] * (len(mask) - n)
        assert 3 not in response[: n - 1]
        assert response[n - 1] == 3 or n == 15
        assert ids[rollout.prompt_len - len(prompt) : rollout.prompt_len].tolist() == prompt
        assert attention.sum() == len(prompt) + n
        assert positions[attention.bool()].tolist() == list(range(len(prompt) + n))
    assert len(lengths) > 5  # rows did finish at different times
    assert rollout.mask[:, -1].any()  # no column that nobody uses


@pytest.mark.parametrize("every", [3, 4, 100])
def test_asking_rarely_who_has_finished(tiny_model, monkeypatch, every):
    """As on a GPU: rows go on after their EOS until somebody asks. Nothing of that shows in the result."""
    monkeypatch.setitem(gpt.ASK_EVERY, "cpu", every)
    test_mask_ends_with_the_first_eos(tiny_model)
    test_generated_logprobs_equal_a_fresh_pass(tiny_model, 0.7, None, 3)


def test_finished_rows_cost_nothing(tiny_model):
    """A row that has ended is not computed again."""
    computed, plain = [], tiny_model.hidden
    tiny_model.hidden = lambda ids, *args, **kw: computed.append(ids.shape) or plain(ids, *args, **kw)
    rollout = tiny_model.generate(PROMPTS * 40, 15, eos=3, generator=torch.Generator().manual_seed(0))
    assert computed[0] == (len({tuple(p) for p in PROMPTS}), 6)  # each different prompt once
    lengths = rollout.mask.sum(1)
    assert [rows for rows, _ in computed[1:]] == [int((lengths > t).sum()) for t in range(1, len(computed))]


def test_sampling_follows_the_distribution(tiny_model):
    """Frequencies of the first token against its probabilities, chi-squared at 5 sigma."""
    for temperature, top_k in ((1.0, None), (0.6, None), (1.0, 4)):
        n = 20_000
        rollout = tiny_model.generate(
            [[5, 6, 7]] * n, 1, temperature, top_k, generator=torch.Generator().manual_seed(0)
        )
        logits = tiny_model(torch.tensor([[5, 6, 7]]))[0, -1].detach() / temperature
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
        p = logits.softmax(-1)
        counts = torch.bincount(rollout.ids[:, 3], minlength=61).float()
        assert counts[p == 0].sum() == 0
        seen = p * n > 5
        chi2, k = ((counts - p * n)[seen] ** 2 / (p * n)[seen]).sum(), seen.sum()
        assert chi2 < k + 5 * (2 * k) ** 0.5


def test_same_seed_same_text(tiny_model):
    a, b, c = (
        tiny_model.generate(PROMPTS, 10, eos=3, generator=torch.Generator().manual_seed(s)).ids for s in (1, 1, 2)
    )
    assert torch.equal(a, b) and not (a.shape == c.shape and torch.equal(a, c))


@pytest.mark.parametrize("prompts", [PROMPTS, [[5, 6, 7], [8, 9, 10]], [[4]]])
def test_shared_prompts_change_neither_values_nor_gradient(tiny_model, prompts):
    """response_states against the plain pass over prompt + response, one row at a time."""
    tiny_model.double()
    rollout = tiny_model.generate(prompts * 4, 10, eos=3, generator=torch.Generator().manual_seed(2))
    rows = [r for r in (7, 1, 4, 12, 6, 2, 11) if r < len(rollout.ids)]
    computed, plain = [], tiny_model.hidden
    tiny_model.hidden = lambda ids, *args, **kw: computed.append(ids.numel()) or plain(ids, *args, **kw)
    hidden, tokens = tiny_model.response_states(rollout, rows)
    tiny_model.hidden = plain
    P, lengths = rollout.prompt_len, rollout.mask[rows].sum(1)
    different = {tuple(prompts[r % len(prompts)]) for r in rows}
    sampled = [rollout.ids[row, P : P + n] for row, n in zip(rows, lengths.tolist())]
    assert torch.equal(tokens, torch.cat(sampled))
    assert sum(computed) == len(different) * max(map(len, different)) + len(rows) * (int(lengths.max()) - 1)
    weight = torch.randn(hidden.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(value):
        tiny_model.zero_grad()
        (value * weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in tiny_model.parameters() if p.grad is not None])

    shared = gradient(hidden)
    alone = []
    for row, n in zip(rows, lengths.tolist()):
        prompt = prompts[row % len(prompts)]
        ids = torch.tensor([prompt + rollout.ids[row, P : P + n].tolist()])
        alone.append(tiny_model.hidden(ids)[0, len(prompt) - 1 : -1])
    torch.testing.assert_close(hidden, torch.cat(alone))
    torch.testing.assert_close(shared, gradient(torch.cat(alone)))


def test_cat_and_select():
    torch.manual_seed(0)
    model = GPT(GPTConfig(20, 30, 1, 1, 8))
    a = model.generate([[1, 2], [3]], 4, eos=0, generator=torch.Generator().manual_seed(0))
    b = model.generate([[4, 5, 6, 7]], 9, generator=torch.Generator().manual_seed(0))
    both = Rollout.cat([a, b])
    assert both.prompt_len == 4 and both.mask.shape == (3, 9)
    for i, (source, row) in enumerate(((a, 0), (a, 1), (b, 0))):
        assert (
            both.ids[i][both.attention_mask[i].bool()].tolist()
            == source.ids[row][source.attention_mask[row].bool()].tolist()
        )
        assert both.logp[i][both.mask[i].bool()].tolist() == source.logp[row][source.mask[row].bool()].tolist()
    assert torch.equal(both.select([2, 0]).ids, both.ids[[2, 0]])


def test_gradients_reach_everything_and_ignore_right_padding(tiny_model):
    texts = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 13]]

    def gradient(batches):
        tiny_model.zero_grad()
        for batch in batches:
            ids, mask = right_pad(batch)
            logp = tiny_model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(logp * mask[:, 1:]).sum()).backward()
        return torch.cat([p.grad.flatten() for p in tiny_model.parameters()])

    together = gradient([texts])
    assert all(p.grad.abs().sum() > 0 for p in tiny_model.parameters())
    torch.testing.assert_close(together, gradient([[t] for t in texts]), rtol=1e-4, atol=1e-5)


def test_bad_calls(tiny_model):
    for prompts, n, options in (
        ([], 3, {}),
        ([[]], 3, {}),
        ([[1]], 0, {}),
        ([[1] * 38], 3, {}),
        ([[1]], 3, dict(temperature=-1.0)),
    ):
        with pytest.raises(ValueError):
            tiny_model.generate(prompts, n, **options)
    with pytest.raises(ValueError, match="context of 40"):
        tiny_model(torch.zeros(1, 41, dtype=torch.long))
    with pytest.raises(ValueError):
        GPT(GPTConfig(n_embd=30, n_head=4))


def test_padded_logits_are_an_ordinary_softmax():
    """half precision in, float32 maths: log-probs are those of the rounded logits."""
    from gpt import _sample

    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    token, logp = _sample(logits, 1.0, None, torch.Generator().manual_seed(0))
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, F.log_softmax(logits.double(), -1).gather(-1, token[:, None])[:, 0].float())
