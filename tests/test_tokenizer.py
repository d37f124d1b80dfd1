"""data/tokenizer.py against the `tokenizers` package, whose files it reads: small vocabularies trained here and written as
GPT-2's, Qwen's and Llama 3's tokenizer.json are, and GPT-2's own vocabulary. Characters that one of the two packages or
Python does not know are left out: each is of another version of Unicode."""

import copy
import json
import pickle
import random
import sys
import time
import unicodedata

import pytest
import tiktoken
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import encode_prompt, get_tokenizer
from data.tokenizer import (
    Tokenizer,
    byte_alphabet,
    chatml_prompt,
    fingerprint,
    from_tokenizer_json,
    llama3_prompt,
    to_tokenizer_json,
)

tokenizers = pytest.importorskip("tokenizers")

STRINGS = 10_000
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(digits):
    """The pre-tokenizer of Qwen 2, 2.5 and 3 (digits: one at a time) and of Llama 3 (up to three)."""
    regex = {
        "type": "Split",
        "pattern": {"Regex": f"{WORDS}|{digits}|{SPACES}"},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [regex, {**BYTE_LEVEL, "use_regex": False}]}


def added(names, normalized=False, plain=()):
    return [
        {"content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": name not in plain}
        for name in names
    ]  # fmt: skip


PAIR = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
BEGIN = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
PUBLISHED = {
    "gpt2": dict(
        normalizer=None, pre_tokenizer=BYTE_LEVEL, post_processor=BYTE_LEVEL, added_tokens=added(["<|endoftext|>"], True)
    ),
    "qwen": dict(
        normalizer={"type": "NFC"}, pre_tokenizer=split(r"\p{N}"), post_processor=BYTE_LEVEL,
        added_tokens=added(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im_end|>!"], plain=("<think>", "</think>")),
    ),
    "llama3": dict(
        normalizer=None, pre_tokenizer=split(r"\p{N}{1,3}"),
        post_processor={
            "type": "Sequence",
            "processors": [
                BYTE_LEVEL,
                {
                    "type": "TemplateProcessing", "single": [BEGIN, PAIR[0]], "pair": [BEGIN, PAIR[0], BEGIN, PAIR[1]],
                    "special_tokens": {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [None], "tokens": ["<|begin_of_text|>"]}},
                },
            ],
        },
        added_tokens=added(["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    ),
}  # fmt: skip

# Where a random character comes from: ranges of Unicode, one of them at a time
RANGES = [
    (0x20, 0x7F), (0, 0x20), (0xA0, 0x250), (0x2B0, 0x370), (0x370, 0x590), (0x590, 0x700), (0x900, 0xE00), (0xE00, 0x1100),
    (0x1100, 0x1200), (0x1E00, 0x2070), (0x2070, 0x2C00), (0x3000, 0x3100), (0x4E00, 0xA000), (0xAC00, 0xD7A4),
    (0xF900, 0x10000), (0x1D000, 0x1D800), (0x1F300, 0x1FB00), (0x10000, 0x1D000), (0x20000, 0x2A6E0), (0xE000, 0xE010),
]  # fmt: skip
NFC = tokenizers.normalizers.NFC().normalize_str  # of Unicode 9
ASSIGNED = [chr(i) for i in range(sys.maxunicode + 1)]
ASSIGNED = [character for character in ASSIGNED if unicodedata.category(character) not in ("Cn", "Cs", "Co")]
BYTES = {bytes([byte]): byte for byte in range(256)}


def unknown():
    """The characters that are of another kind for `tokenizers` than for tiktoken (letters, numbers, white space), and those
    that do not behave in its NFC as in Python's, alone and among accents."""
    found, text = set(), "".join(ASSIGNED)
    for kind in (r"\p{L}", r"\p{N}", r"\s"):
        ours = tiktoken.Encoding(
            "", pat_str=kind, mergeable_ranks=BYTES, special_tokens={}
        )  # drops what does not match
        theirs = tokenizers.normalizers.Replace(tokenizers.Regex(f"[^{kind}]+"), "")
        found |= set(ours.decode(ours.encode_ordinary(text))) ^ set(theirs.normalize_str(text))
    for c in ASSIGNED:
        if unicodedata.combining(c) or unicodedata.decomposition(c):
            texts = [c, unicodedata.normalize("NFD", c), f"a{c}\u0334", f"a\u0345{c}"]
            if any(NFC(text) != unicodedata.normalize("NFC", text) for text in texts):
                found.add(c)
    return found


UNKNOWN = unknown()
RANGES = [[chr(i) for i in range(*ends) if unicodedata.category(chr(i)) not in ("Cn", "Cs")] for ends in RANGES]
RANGES = [[character for character in characters if character not in UNKNOWN] for characters in RANGES]
PIECES = [
    " ", "  ", "     ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\x85", "'s", "'LL", "'ve", "'\u017f", "\u212a", "don't", "I'M",
    "0", "7", "42", "2024", "1234567", "3.14", "٣٤", "²", "Ⅷ", "def f(x):\n    return x**2\n", "for i in range(10):", "!=", "...", "</", "{}", "hello", " the",
    "Hello", "HTTPServer", "naïve", "cafe\u0301", "\u0301", "\u0338", "\u0323\u0307", "A\u030a", "\u1100\u1161\u11a8", "ﬁ", "你好", "日本語", "한국어", "🙂", "👩\u200d👩\u200d👧", "🇩🇪",
    "\ufeff", "\u200b", "İ", "ß", "<", ">", "|", "<|", "|>", "im_end", "<|endoftext|", "<|unknown|>",
]  # fmt: skip


def random_text(rng, special):
    text = ""
    for _ in range(rng.randrange(1, 14)):
        kind = rng.random()
        if kind < 0.55:
            text += rng.choice(PIECES)
        elif kind < 0.65:
            text += rng.choice(special)
        else:
            text += "".join(rng.choices(rng.choice(RANGES), k=rng.randrange(1, 5)))
    return text


def write(folder, contents, **others):
    """A model's folder: its tokenizer.json, and other files as objects."""
    folder.mkdir(exist_ok=True)
    for name, content in {"tokenizer": contents, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def trained(kind):
    """The contents of a tokenizer.json of one of the three kinds, with 2000 merges."""
    published = copy.deepcopy(PUBLISHED[kind])
    maker = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Qwen's pieces are made with Llama's pattern: then there are tokens of several digits, which must not be used
    before = split(r"\p{N}{1,3}") if kind == "qwen" else published["pre_tokenizer"]
    settings = {**json.loads(maker.to_str()), "normalizer": published["normalizer"], "pre_tokenizer": before}
    maker = tokenizers.Tokenizer.from_str(json.dumps(settings))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2256, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    rng = random.Random(0)
    code = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.py"))]
    maker.train_from_iterator(code + [random_text(rng, ["x"]) for _ in range(6000)], trainer)
    contents = {**json.loads(maker.to_str()), **published}
    model = contents["model"]
    assert len(model["vocab"]) == 2256 and len(model["merges"]) == 2000
    contents["added_tokens"] = [{"id": 2256 + i, **token} for i, token in enumerate(published["added_tokens"])]
    assert {"42", "20"} <= model["vocab"].keys()
    if kind == "gpt2":  # as its file is: the special token is in the vocabulary, too; merges are written "a b"
        model["vocab"]["<|endoftext|>"] = 2256
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
    if kind == "llama3":  # as its file was made from tiktoken's ranks: every pair that makes a token
        model["ignore_merges"] = True
        vocab = model["vocab"]
        model["merges"] = [
            pair
            for token in sorted(vocab, key=vocab.get)
            for pair in sorted(
                ([token[:i], token[i:]] for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab),
                key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
            )
        ]
        assert len(model["merges"]) > 2100
        contents["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"] = [2256]
    return contents


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """kind -> (contents of tokenizer.json, folder, our Tokenizer, theirs, theirs without added tokens)"""
    made = {}
    for kind in PUBLISHED:
        contents = trained(kind)
        folder = write(tmp_path_factory.mktemp("models") / kind, contents)
        bare = {**contents, "added_tokens": [], "post_processor": None}
        theirs = [tokenizers.Tokenizer.from_str(json.dumps(c)) for c in (contents, bare)]
        made[kind] = (contents, folder, get_tokenizer(folder), *theirs)
    return made


def same(ours, theirs, bare, texts):
    """Special tokens as such, and as text; decoding gives the (normalised) text back."""
    special, plain = theirs.encode_batch(texts, add_special_tokens=False), bare.encode_batch(texts)
    for text, with_special, without in zip(texts, special, plain):
        assert ours.encode(text, allowed_special="all") == with_special.ids, ascii(text)
        ids = ours.encode_ordinary(text)
        assert ids == without.ids, ascii(text)
        assert not set(ids) & set(ours._special_tokens.values())
        assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if ours.form else text)


def test_nearly_all_characters_are_compared():
    assert len(ASSIGNED) > 140_000 and len(UNKNOWN) < 250 and min(UNKNOWN, default="\u07fd") >= "\u07fd"


@pytest.mark.parametrize("kind", PUBLISHED)
def test_ids_are_those_of_tokenizers(kinds, kind):
    _, _, ours, theirs, bare = kinds[kind]
    rng = random.Random(kind)
    special = [*ours._special_tokens, "<|im_end|>\u0338", "<|endoftext|>\u0301"]
    texts = [random_text(rng, special) for _ in range(STRINGS)]
    assert sum(any(token in text for token in ours._special_tokens) for text in texts) > STRINGS / 4
    assert sum(not unicodedata.is_normalized("NFC", text) for text in texts) > STRINGS / 10
    same(ours, theirs, bare, texts)
    same(ours, theirs, bare, [path.read_text(encoding="utf-8") for path in sorted((ROOT / "data").glob("*.py"))])


ANY = st.text(st.characters(exclude_categories=("Cs", "Cn"), exclude_characters=UNKNOWN), max_size=40)


@settings(max_examples=300, deadline=None)
@given(ANY | st.lists(ANY | st.sampled_from(PIECES + ["<|im_end|>", "<|eot_id|>", "<think>"]), max_size=8).map("".join))
@example("<|im_end|>!\u0338 <|im_end|>\u0338")
@example("")
def test_ids_of_any_text(kinds, text):
    for _, _, ours, theirs, bare in kinds.values():
        same(ours, theirs, bare, [text])


def gpt2(monkeypatch):
    cache = ROOT.parent / "shared/data/tiktoken_cache"
    if cache.exists():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    try:
        return get_tokenizer("r50k_base")
    except ValueError:
        pytest.skip("GPT-2's vocabulary is not here")


def test_the_vocabulary_of_gpt2(monkeypatch, tmp_path):
    real = gpt2(monkeypatch)
    assert (
        isinstance(real, Tokenizer) and real.eot_token == 50256 and real.encode_ordinary("hello world") == [31373, 995]
    )
    contents = json.loads(to_tokenizer_json(real))
    assert len(contents["model"]["merges"]) == 50_000 and not contents["model"]["ignore_merges"]
    contents.update(pre_tokenizer=BYTE_LEVEL, post_processor=BYTE_LEVEL)
    ours = get_tokenizer(write(tmp_path / "gpt2", contents))
    theirs, bare = (tokenizers.Tokenizer.from_str(json.dumps({**contents, **o})) for o in ({}, {"added_tokens": []}))
    rng = random.Random(2)
    texts = [random_text(rng, ["<|endoftext|>"]) for _ in range(STRINGS)]
    same(ours, theirs, bare, texts)
    assert all(ours.encode_ordinary(text) == real.encode_ordinary(text) for text in texts)
    assert ours._pat_str != real._pat_str  # written differently, the same pieces
    assert fingerprint(real) == "r50k_base:50257:d4d61173d5f4"
    assert fingerprint(ours) == "tokenizer.json:50257:d4d61173d5f4"


@pytest.mark.parametrize("kind", ["stories", *PUBLISHED])
def test_there_and_back(kinds, kind, tmp_path):
    """A Tokenizer written as a tokenizer.json is read as the same, by `tokenizers` and by us."""
    ours = get_tokenizer() if kind == "stories" else kinds[kind][2]
    contents = json.loads(to_tokenizer_json(ours))
    again = get_tokenizer(write(tmp_path / "again", contents))
    rng = random.Random(3)
    texts = [random_text(rng, list(ours._special_tokens)) for _ in range(1000)] + ["It finds 3. How many? -> 12 #### 4"]
    bare = {**contents, "added_tokens": [], "post_processor": None}
    same(again, *(tokenizers.Tokenizer.from_str(json.dumps(c)) for c in (contents, bare)), texts)
    assert all(again.encode_ordinary(text) == ours.encode_ordinary(text) for text in texts)
    assert again._special_tokens == ours._special_tokens and again.bos_token == ours.bos_token
    assert fingerprint(again).split(":")[1:] == fingerprint(ours).split(":")[1:]


def test_three_digits_stay_three(tmp_path):
    r"""tiktoken writes \p{N}{1,3}+, which `tokenizers` reads as any number of digits."""
    ranks = BYTES | {b"12": 256, b"34": 257, b"1234": 258}
    ours = Tokenizer("x", pat_str=r"\p{N}{1,3}+|\P{N}+", mergeable_ranks=ranks, special_tokens={"<e>": 259}, eot="<e>")
    theirs = tokenizers.Tokenizer.from_str(to_tokenizer_json(ours))
    assert theirs.encode("x1234 1").ids == ours.encode_ordinary("x1234 1") == [120, 256, 51, 52, 32, 49]


def test_special_tokens_first(tmp_path):
    """The trainer of `tokenizers` gives special tokens the first ids: merges then do not start at 256."""
    maker = tokenizers.Tokenizer(tokenizers.models.BPE())
    maker.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<|endoftext|>", "<|im_start|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    maker.train_from_iterator([path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.py"))], trainer)
    contents = json.loads(maker.to_str())
    ours = get_tokenizer(write(tmp_path / "first", contents))
    assert ours.eot_token == 0 and ours._mergeable_ranks[b"!"] == 2 and ours.n_vocab == 900
    bare = tokenizers.Tokenizer.from_str(json.dumps({**contents, "added_tokens": []}))
    rng = random.Random(4)
    same(ours, maker, bare, [random_text(rng, ["<|endoftext|>", "<|im_start|>"]) for _ in range(2000)])


def test_encode_says_which_special_tokens_it_takes(kinds):
    ours = kinds["qwen"][2]
    end, think = ours._special_tokens["<|im_end|>"], ours._special_tokens["<think>"]
    assert ours.encode("<|im_end|>", allowed_special={"<|im_end|>"}) == [end]
    with pytest.raises(ValueError, match=r"<\|im_end\|>"):
        ours.encode("a<|im_end|>")
    with pytest.raises(ValueError, match="<think>"):
        ours.encode("<think><|im_end|>", allowed_special={"<|im_end|>"})
    mixed = ours.encode("<think><|im_end|>", allowed_special={"<|im_end|>"}, disallowed_special=())
    assert mixed == [*ours.encode_ordinary("<think>"), end] and think not in mixed
    assert ours.encode("<think>", disallowed_special=()) == ours.encode_ordinary("<think>")
    assert ours.encode_ordinary_batch(["e\u0301"]) == [ours.encode_ordinary("é")]
    assert ours.encode("e\u0301") == ours.encode_ordinary("é") != kinds["gpt2"][2].encode("e\u0301")


def test_copies_are_the_same(kinds):
    for ours in [
        get_tokenizer(),
        *(get_tokenizer(kinds[k][1], c) for k, c in (("qwen", "chatml"), ("llama3", "llama3"))),
    ]:
        for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert fingerprint(again) == fingerprint(ours) and again.encode("e\u0301 1234") == ours.encode(
                "e\u0301 1234"
            )
            assert (again.eot_token, again.bos_token, again.chat) == (ours.eot_token, ours.bos_token, ours.chat)


# Chats

# Qwen 2's and Llama 3's chat_template, as published in their tokenizer_config.json
TEMPLATES = {
    "chatml": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
}
CHATS = {"chatml": ("qwen", chatml_prompt), "llama3": ("llama3", llama3_prompt)}


@pytest.mark.parametrize("chat", TEMPLATES)
def test_prompts_are_those_of_the_published_template(kinds, chat):
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATES[chat])
    kind, prompt = CHATS[chat]
    ours, theirs = get_tokenizer(kinds[kind][1], chat), kinds[kind][3]
    rng = random.Random(5)
    texts = [random_text(rng, ["  x \n"]) for _ in range(1100)]
    texts = [text for text in texts if not any(token in text for token in ours._special_tokens)]
    assert len(texts) > 1050
    for n in range(300):
        roles = ["system", *["user", "assistant"] * 3][: n % 6 + 1]
        messages = [{"role": role, "content": texts.pop()} for role in roles]
        text = template.render(messages=messages, bos_token="<|begin_of_text|>", add_generation_prompt=True)
        assert prompt(ours, messages) == theirs.encode(text, add_special_tokens=False).ids
        assert encode_prompt(ours, messages) == prompt(ours, messages)


def test_prompts_written_out(kinds):
    """Without a system message none is made up; white space is kept in ChatML, and dropped in Llama 3's chats."""
    qwen, llama = get_tokenizer(kinds["qwen"][1], "chatml"), get_tokenizer(kinds["llama3"][1], "llama3")
    assert qwen.decode(encode_prompt(qwen, " Hi\n")) == "<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n"
    assert llama.decode(encode_prompt(llama, " Hi\n")) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("chat", TEMPLATES)
def test_what_a_user_types_is_text(kinds, chat):
    kind, prompt = CHATS[chat]
    ours = get_tokenizer(kinds[kind][1], chat)
    control = set(ours._special_tokens.values())
    attack = "".join(ours._special_tokens)
    plain = prompt(ours, [{"role": "user", "content": "x"}])
    attacked = prompt(ours, [{"role": "user", "content": attack}])
    assert [i for i in attacked if i in control] == [i for i in plain if i in control]
    assert attack in ours.decode(attacked)
    named = prompt(ours, [{"role": attack, "content": "x"}])
    assert [i for i in named if i in control] == [i for i in plain if i in control]


def test_prompts_without_a_chat_format(kinds):
    llama, gpt = kinds["llama3"][2], kinds["gpt2"][2]
    assert llama.chat == "" and llama.bos_token == 2256 and gpt.bos_token is None
    assert encode_prompt(llama, "a <|eot_id|>") == [2256, *kinds["llama3"][4].encode("a <|eot_id|>").ids]
    assert encode_prompt(llama, "a b") == kinds["llama3"][3].encode("a b").ids
    assert encode_prompt(gpt, "a <|endoftext|>") == gpt.encode_ordinary("a <|endoftext|>")
    plain = tiktoken.Encoding("plain", pat_str=".", mergeable_ranks=BYTES, special_tokens={"<|endoftext|>": 256})
    assert encode_prompt(plain, "ab") == [97, 98]
    for tokenizer in (gpt, plain):
        with pytest.raises((ValueError, SystemExit), match=r"a prompt is a chat \(messages\): --chat chatml or"):
            encode_prompt(tokenizer, [{"role": "user", "content": "x"}])


# Which token ends a text

LLAMA_END, LLAMA_EOT = 2257, 2260


@pytest.mark.parametrize(
    "end, files",
    [
        (LLAMA_END, {}),  # the first that exists of <|endoftext|>, <|end_of_text|> ...
        (LLAMA_EOT, {"tokenizer_config": {"eos_token": "<|eot_id|>"}}),
        (
            LLAMA_EOT,
            {"tokenizer_config": {"eos_token": {"content": "<|eot_id|>"}}, "config": {"eos_token_id": LLAMA_END}},
        ),
        (LLAMA_EOT, {"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": LLAMA_EOT}}),
        (LLAMA_EOT, {"config": {"eos_token_id": [LLAMA_EOT, LLAMA_END]}}),
        (LLAMA_EOT, {"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": LLAMA_EOT}}),
        (LLAMA_END, {"tokenizer_config": {"eos_token": ["<|eot_id|>"]}, "config": {"eos_token_id": [{}]}}),  # nonsense
        (2256, {"config": {"eos_token_id": 2256}, "generation_config": {"eos_token_id": LLAMA_EOT}}),
    ],
)
def test_the_token_that_ends_a_text(kinds, tmp_path, end, files):
    folder = write(tmp_path / "model", kinds["llama3"][0], **files)
    assert get_tokenizer(folder).eot_token == end
    assert get_tokenizer(folder, "llama3").eot_token == LLAMA_EOT  # a response ends where the turn does


def test_the_ends_of_the_others(kinds):
    assert kinds["qwen"][2].eot_token == 2256 and get_tokenizer(kinds["qwen"][1], "chatml").eot_token == 2258
    assert get_tokenizer().eot_token == 505 and get_tokenizer().chat == ""


# Mistakes

SETTINGS = {  # what is done to Qwen's file, and what the error says
    "byte_fallback": lambda c: c["model"].update(byte_fallback=True),
    "not Unigram": lambda c: c["model"].update(type="Unigram"),
    "dropout": lambda c: c["model"].update(dropout=0.1),
    "end_of_word_suffix": lambda c: c["model"].update(end_of_word_suffix="</w>"),
    "normalizer .*'NFKC'": lambda c: c.update(normalizer={"type": "NFKC"}),
    "pre_tokenizer .*Metaspace": lambda c: c.update(pre_tokenizer={"type": "Metaspace"}),
    "pre_tokenizer .*None": lambda c: c.update(pre_tokenizer=None),
    "'add_prefix_space': True": lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    "'use_regex': True": lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
    "'use_regex': False": lambda c: c.update(pre_tokenizer={**BYTE_LEVEL, "use_regex": False}),
    "'behavior': 'Removed'": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "'invert': True": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(invert=True),
    "'String': 'x'": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"String": "x"}),
    "does not match every character": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\p{L}+|\s+"}),
    "tokenizer.json: .*[Rr]egex|[Pp]ars": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "(("}),
    "is out of order": lambda c: c["model"]["merges"].insert(5, c["model"]["merges"].pop(4)),
    "makes no token": lambda c: c["model"]["merges"].insert(0, ["a", "\u0100"]),
    "no merge makes token": lambda c: c["model"]["merges"].pop(),
    "characters of byte-level BPE": lambda c: (c["model"]["vocab"].update({"a▁": 9999}), c["model"]["merges"].append(["a", "▁"])),
    "lacks 1 of the 256 bytes": lambda c: c["model"]["vocab"].pop("\u0100"),
    "post_processor 'RobertaProcessing'": lambda c: c.update(post_processor={"type": "RobertaProcessing"}),
    "with several tokens": lambda c: c.update(post_processor={
        "type": "TemplateProcessing", "single": [BEGIN, BEGIN, PAIR[0]], "special_tokens": {"<|begin_of_text|>": {"ids": [2256]}},
    }),
    "an added token is empty": lambda c: c["added_tokens"][0].update(content=""),
    "with lstrip": lambda c: c["added_tokens"][0].update(lstrip=True),
    "two tokens have the same": lambda c: c["added_tokens"][0].update(id=5),
    "two tokens have the same id": lambda c: c["model"]["vocab"].update({c["model"]["merges"][1][0] + c["model"]["merges"][1][1]: 256}),
    "is not a tokenizer.json: KeyError": lambda c: c.pop("model"),
    "is not a tokenizer.json: TypeError": lambda c: c["model"].update(merges=None),
    "is not a tokenizer.json": lambda c: c["added_tokens"][0].update(id=-1),
    "does not say which token ends": lambda c: c.update(added_tokens=[]),
}  # fmt: skip


@pytest.mark.parametrize("words", SETTINGS)
def test_files_that_cannot_be_read(kinds, tmp_path, words):
    contents = copy.deepcopy(kinds["qwen"][0])  # which can be read
    SETTINGS[words](contents)
    with pytest.raises(ValueError, match=words) as problem:
        get_tokenizer(write(tmp_path / "after", contents))
    assert "\n" not in str(problem.value) and "after" in str(problem.value)


def test_merges_of_one_token_may_be_several_but_not_apart(kinds, tmp_path):
    """Llama 3's list: a token's merges stand together, in the order of ids."""
    contents = copy.deepcopy(kinds["llama3"][0])
    merges = contents["model"]["merges"]
    several = next(i for i in range(1, len(merges)) if "".join(merges[i]) == "".join(merges[i - 1]))
    merges.append(merges.pop(several))
    with pytest.raises(ValueError, match="out of order"):
        get_tokenizer(write(tmp_path / "model", contents))


def test_names_that_are_nothing(kinds, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    qwen = kinds["qwen"][1]
    (tmp_path / "config").mkdir()
    write(tmp_path / "config", kinds["qwen"][0])
    (tmp_path / "config/tokenizer_config.json").write_text("{")
    for name, chat, words in (
        ("nonsense", "", "unknown tokenizer 'nonsense'"),
        (tmp_path / "empty", "", "does not exist"),
        (tmp_path / "none.json", "", "does not exist"),
        (tmp_path / "broken.json", "", "cannot be read"),
        (tmp_path / "latin.json", "", "cannot be read"),
        (tmp_path / "list.json", "", "does not hold a JSON object"),
        (tmp_path / "config", "", "tokenizer_config.json cannot be read"),
        ("stories", "chatml", r"the vocabulary of stories has no <\|im_start\|>"),
        (qwen, "llama3", r"the vocabulary of qwen has no <\|begin_of_text\|>"),
        (qwen, "nonsense", "unknown chat format 'nonsense': use chatml or llama3"),
    ):
        with pytest.raises(ValueError, match=words) as problem:
            get_tokenizer(str(name), chat)
        assert "\n" not in str(problem.value)


def test_a_name_whose_download_fails(monkeypatch):
    def fail(name):
        raise OSError("no network\nat all")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(ValueError, match=r"'cl100k_base' could not be loaded: no network$"):
        get_tokenizer("cl100k_base")


# Names and fingerprints


def test_fingerprints_do_not_change(kinds, tmp_path):
    """They are in checkpoints. A folder may be moved and renamed; a chat format changes no id."""
    assert fingerprint(get_tokenizer("stories")) == "stories:506:e52fb5338cb9"
    contents, folder, ours, *_ = kinds["qwen"]
    moved = get_tokenizer(write(tmp_path / "elsewhere", contents) + "/tokenizer.json")
    assert ours.name == "qwen" and moved.name == "elsewhere"
    assert fingerprint(ours) == fingerprint(moved) == fingerprint(get_tokenizer(folder, "chatml"))
    assert fingerprint(ours).startswith("tokenizer.json:2262:")
    assert len({fingerprint(parts[2]) for parts in kinds.values()}) == 3


def test_the_fingerprint_of_a_large_vocabulary_is_quick():
    ranks = BYTES | {i.to_bytes(3, "big"): i for i in range(256, 150_000)}
    ours = Tokenizer("x", pat_str=".", mergeable_ranks=ranks, special_tokens={"<e>": 150_000}, eot="<e>")
    start = time.process_time()
    assert fingerprint(ours).startswith("x:150001:")
    assert time.process_time() - start < 2


def test_from_tokenizer_json_by_hand(tmp_path):
    """A vocabulary small enough to see: byte 0x20 is written U+0120; a merge is a token with the next rank."""
    alphabet = byte_alphabet()
    assert alphabet[0x20] == "\u0120" and alphabet[0x0A] == "\u010a" and len(set(alphabet.values())) == 256
    vocab = {"<s>": 0, **{alphabet[byte]: 1 + byte for byte in range(256)}, "ab": 257, "\u0120ab": 258}
    contents = {
        "model": {"vocab": vocab, "merges": ["a b", "\u0120 ab"]}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 259, "content": "</s>"}],
    }  # fmt: skip
    write(tmp_path / "hand", contents)
    parts = from_tokenizer_json(tmp_path / "hand/tokenizer.json")
    assert len(parts["mergeable_ranks"]) == 258  # without the special tokens
    assert parts["mergeable_ranks"][b" ab"] == 258 and parts["mergeable_ranks"][b"\x00"] == 1
    assert parts["special_tokens"] == {"<s>": 0, "</s>": 259} and parts["bos"] is None and parts["form"] is None
    ours = get_tokenizer(str(tmp_path / "hand"))
    assert ours.encode_ordinary("ab ab\n") == [257, 258, 11] and ours.eot_token == 259
