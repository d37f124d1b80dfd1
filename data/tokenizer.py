"""Tokenizers. Every tokenizer in this project is a `tiktoken.Encoding`, whoever made its merges.

`get_tokenizer("stories")` is the embedded one: byte-level BPE with 506 tokens, made by data/make_tokenizer.py from
the embedded task's corpus and stored in data/stories.tiktoken. A folder of a pretrained model has a tokenizer.json, which
is read here (GPT-2's, Qwen's and Llama 3's are byte-level BPE, too). Any other name ("gpt2", "r50k_base", "cl100k_base"
...) is one of tiktoken's own, which it downloads once.

What a user writes is never a control token: texts are encoded with `encode_ordinary`, and only the functions that write
chat prompts put control tokens in.
"""

import base64
import hashlib
import itertools
import json
import re
import unicodedata
from pathlib import Path

import tiktoken
from tiktoken.core import raise_disallowed_special_token

MERGES = Path(__file__).with_name("stories.tiktoken")

# Merges never cross one of these pieces: an event sentence, a running total, a word. Frequent pieces end up as one token,
# so that one token is one step of the story. The last line takes whatever is left, one character at a time: any text
# encodes, and decodes to itself.
PATTERN = "|".join(
    [
        r" It [^.]{1,40}\.",  # " It finds 3."
        r" How many\?",
        r" ?[A-Za-z]+[.,:]?",  # " otter", " shells.", "Answer:"
        r" -> \d+",
        r" ?#+",
        r" ?\d+",
        r"[\s\S]",
    ]
)

# What the ByteLevel pre-tokenizer of the `tokenizers` package cuts a text into: GPT-2's pattern (Radford et al. 2019)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Names of the token that ends a text, where a folder does not say which one it is
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
# The control tokens of the chat formats, in the order of their use: the last one ends a turn
CHAT_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


class Tokenizer(tiktoken.Encoding):
    """tiktoken's Encoding, and what it does not know:

    eot_token   the id that ends every document and every response: end-of-text, or with a chat format the end of a turn
    bos_token   the id that begins every text (Llama 3), or None
    chat        "", "chatml" or "llama3": how prompts are written
    form        the Unicode normal form of a text before it is encoded (Qwen: "NFC"), or None; `encode`, `encode_ordinary`
                and their batches do that, tiktoken's other ways to encode do not
    """

    def __init__(
        self, name, *, pat_str, mergeable_ranks, special_tokens, eot, bos=None, form=None, chat="", fixed_name=None
    ):
        super().__init__(name, pat_str=pat_str, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens)
        self.eot, self.bos_token, self.form, self.chat = eot, bos, form, chat
        self.fixed_name = fixed_name or name  # in fingerprints: a folder may be moved

    def __getstate__(self):  # copies and pickles are made by __init__ with these arguments
        return dict(
            name=self.name, pat_str=self._pat_str, mergeable_ranks=self._mergeable_ranks,
            special_tokens=self._special_tokens, eot=self.eot, bos=self.bos_token, form=self.form, chat=self.chat,
            fixed_name=self.fixed_name,
        )  # fmt: skip

    @property
    def eot_token(self):
        return self._special_tokens[self.eot]

    def encode_ordinary(self, text):
        """Text -> ids. Special tokens in it are text like any other."""
        return super().encode_ordinary(unicodedata.normalize(self.form, text) if self.form else text)

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        """Text -> ids, with the special tokens of `allowed_special` (names, or "all") in it as such. ValueError for one of
        `disallowed_special` ("all": those not allowed). As `tokenizers` does it: of two special tokens at one place the
        longer one counts, and they are looked for first: what stands between them is normalised, so that an accent
        behind a control token (NFC makes one character of ">" and U+0338) does not hide it."""
        every = self.special_tokens_set
        allowed = every if allowed_special == "all" else every & set(allowed_special)
        for token in every - allowed if disallowed_special == "all" else disallowed_special:
            if token in text:
                raise_disallowed_special_token(token)
        if not allowed:
            return self.encode_ordinary(text)
        ids, pattern = [], "|".join(map(re.escape, sorted(allowed, key=len, reverse=True)))
        for i, piece in enumerate(re.split(f"({pattern})", text)):  # at odd places stands what the pattern matches
            ids += [self._special_tokens[piece]] if i % 2 else self.encode_ordinary(piece)
        return ids


def get_tokenizer(name="stories", chat=""):
    """The Tokenizer called `name`: stories, a folder with a tokenizer.json (or the path of that file), or one of tiktoken's
    names. chat: "", "chatml" or "llama3". Raises ValueError, in one line, for a name that nobody knows, a tokenizer.json
    that `from_tokenizer_json` refuses, and a chat format whose control tokens the vocabulary lacks."""
    name, path = str(name), Path(name)
    if name == "stories":
        lines = MERGES.read_text().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        parts = dict(pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
    elif path.is_dir() or path.suffix == ".json":
        path = path / "tokenizer.json" if path.is_dir() else path
        parts, name = from_tokenizer_json(path), path.resolve().parent.name
        parts["eot"] = named_end(path.parent, parts["special_tokens"])
    else:
        names = tiktoken.list_encoding_names()
        known = f"stories, a folder with a tokenizer.json, or one of {', '.join(names)}"
        need(name in names, f"unknown tokenizer {name!r}: use {known}")
        try:
            found = tiktoken.get_encoding(name)
        except Exception as problem:  # whatever the download raises
            raise ValueError(f"tokenizer {name!r} could not be loaded: {str(problem).splitlines()[0]}") from None
        ranks = found._mergeable_ranks
        parts = dict(pat_str=found._pat_str, mergeable_ranks=ranks, special_tokens=found._special_tokens)
    special = parts["special_tokens"]
    parts["eot"] = parts.get("eot") or next((end for end in ENDS if end in special), None)
    if chat:
        need(chat in CHAT_TOKENS, f"unknown chat format {chat!r}: use {' or '.join(CHAT_TOKENS)}")
        for token in CHAT_TOKENS[chat]:
            known = f"the vocabulary of {name} has no {token}: its model does not know that format"
            need(token in special, f"--chat {chat}: {known}")
        parts["eot"] = CHAT_TOKENS[chat][-1]
    need(parts["eot"], f"tokenizer {name!r} does not say which token ends a text")
    return Tokenizer(name, chat=chat, **parts)


def need(condition, otherwise):
    if not condition:
        raise ValueError(otherwise)


def byte_alphabet():
    """The 256 bytes as the printable characters that stand for them in a tokenizer.json: a byte that is one already is
    itself, the others are U+0100, U+0101 ... in their order (Radford et al. 2019's code)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def read_json(path):
    """The object in a JSON file, or ValueError in one line."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ValueError(f"{path} cannot be read: {str(problem).splitlines()[0]}") from None
    need(isinstance(contents, dict), f"{path} does not hold a JSON object")
    return contents


def named_end(folder, special):
    """The name of the token that ends a text: eos_token in tokenizer_config.json (a string, or an object with "content"),
    else eos_token_id (the first of a list) in config.json or generation_config.json, else None."""
    read = lambda name: read_json(folder / name) if (folder / name).exists() else {}  # noqa: E731
    end = read("tokenizer_config.json").get("eos_token")
    found, names = [end.get("content") if isinstance(end, dict) else end], {i: token for token, i in special.items()}
    for file in ("config.json", "generation_config.json"):
        end = read(file).get("eos_token_id")
        found += [names.get(i) for i in (end if isinstance(end, list) else [end])[:1] if isinstance(i, int)]
    return next((token for token in found if isinstance(token, str) and token in special), None)


def from_tokenizer_json(path):
    """A tokenizer.json as arguments of a Tokenizer (all but eot). Raises ValueError, in one line, for anything but
    byte-level BPE, and for what tiktoken cannot do: another order of merges than that of ids, a normalizer but NFC, added
    tokens that take the white space around them. (Added tokens for which "normalized" is true are looked for before NFC,
    too.)"""
    contents = read_json(path)
    try:
        model, normalizer, added = contents["model"], contents.get("normalizer"), {}
        kind = model.get("type", "BPE")
        need(kind == "BPE", f"only byte-level BPE is supported, not {kind}")
        for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            need(not model.get(option), f"BPE with {option} is not supported")
        need(not normalizer or normalizer["type"] == "NFC", f"normalizer {normalizer} is not supported, only NFC")
        for token in contents.get("added_tokens") or []:
            for option in ("lstrip", "rstrip", "single_word"):
                need(not token.get(option), f"added token {token['content']!r} with {option} is not supported")
            need(token["content"], "an added token is empty")
            added[token["content"]] = token["id"]
        main = dict(pat_str=pattern_of(contents), mergeable_ranks=ranks_of(model, added), special_tokens=added)
        # tiktoken drops what its pattern does not match, `tokenizers` keeps it: so everything has to match
        text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), 0x1F642, 0x20000, 0x10FFFF]))
        encoding = tiktoken.Encoding("", **main)
        complete = encoding.decode(encoding.encode_ordinary(text)) == text
        need(complete, "the pattern of the pre_tokenizer does not match every character")
        form = "NFC" if normalizer else None
        return dict(**main, bos=beginning_of(contents, added), form=form, fixed_name="tokenizer.json")
    except ValueError as problem:
        raise ValueError(f"{path}: {' '.join(str(problem).split())}") from None
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as problem:
        raise ValueError(f"{path} is not a tokenizer.json: {problem!r}") from None


def pattern_of(contents):
    """The pattern of the pieces that a text is cut into: GPT-2's (a ByteLevel pre-tokenizer), or what stands in a Split."""
    before = contents.get("pre_tokenizer") or {"type": None}
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    kinds, last = [step["type"] for step in steps], steps[-1]
    known = kinds in (["ByteLevel"], ["Split", "ByteLevel"])
    need(known, f"pre_tokenizer {kinds} is not supported, only ByteLevel, or Split and ByteLevel")
    regex = last.get("use_regex", True) == (len(steps) == 1)
    need(regex and not last.get("add_prefix_space"), f"pre_tokenizer {last} is not supported")
    if len(steps) == 1:
        return GPT2_PATTERN
    split = steps[0]
    plain = split["behavior"] == "Isolated" and not split.get("invert") and "Regex" in split["pattern"]
    need(plain, f"pre_tokenizer {split} is not supported, only a Regex, Isolated and not inverted")
    return split["pattern"]["Regex"]


def ranks_of(model, added):
    """The vocabulary as tiktoken has it: {bytes: id}.

    tiktoken merges first what makes the token with the lowest id, `tokenizers` what comes first in the list of merges. They
    agree if the tokens that the list makes have rising ids (GPT-2, Qwen), or one id for all the merges that make one token
    (Llama 3's list has every such pair), and if every token is made by some merge."""
    vocab, made, last = model["vocab"], set(), 0
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        rank = vocab.get(left + right, -1)
        if rank < last:
            why = "makes no token" if rank < 0 else "is out of order: tiktoken merges in the order of ids"
            raise ValueError(f"merge {left!r} + {right!r} {why}")
        last = rank
        made.add(left + right)
    names = {i: token for token, i in [*vocab.items(), *added.items()]}
    need(len(names) == len(vocab.keys() | added.keys()), "two tokens have the same id")
    byte_of, ranks = {character: byte for byte, character in byte_alphabet().items()}, {}
    missing = byte_of.keys() - vocab.keys()
    need(not missing, f"the vocabulary lacks {len(missing)} of the 256 bytes: it is not byte-level BPE")
    for token, rank in vocab.items():
        if token in made or token in byte_of or (token not in added and model.get("ignore_merges")):
            if not byte_of.keys() >= set(token):
                raise ValueError(f"token {token!r} is not written in the characters of byte-level BPE")
            ranks[bytes(byte_of[character] for character in token)] = rank
        elif token not in added:
            raise ValueError(f"no merge makes token {token!r}")
    return ranks


def beginning_of(contents, added):
    """The id that the post-processor puts in front of a text, or None. (What it puts behind is not used: eot_token is.)"""
    after, begin = contents.get("post_processor") or {"type": "ByteLevel"}, []
    for step in after["processors"] if after["type"] == "Sequence" else [after]:
        kind = step["type"]
        need(kind in ("ByteLevel", "TemplateProcessing"), f"post_processor {kind!r} is not supported")
        if kind == "TemplateProcessing":
            first = itertools.takewhile(lambda piece: "SpecialToken" in piece, step["single"])
            begin += [i for piece in first for i in step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]]
    need(len(begin) < 2, "a post_processor that begins a text with several tokens is not supported")
    need(set(begin) <= set(added.values()), f"the post_processor begins a text with {begin}, which is no added token")
    return begin[0] if begin else None


def to_tokenizer_json(tokenizer):
    """The way back: a Tokenizer as the text of a tokenizer.json, for other programs. The merge that makes a token is what BPE
    has cut it into just before it: the two parts that are left if only lower ranks may merge."""
    alphabet, ranks = byte_alphabet(), tokenizer._mergeable_ranks
    name = lambda token: "".join(alphabet[byte] for byte in token)  # noqa: E731
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            lowest = min(found)
            if lowest >= rank:
                break
            i = found.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append([name(part) for part in parts])
    # tiktoken gives a piece of text that is a token that token, merges or not
    unmade = len(merges) + 256 < len(ranks)
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = sorted(tokenizer._special_tokens.items(), key=lambda item: item[1])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    # \p{N}{1,3}+ takes three digits in tiktoken's patterns, in those of `tokenizers` any number of them
    pattern = re.sub(r"(\{\d+,\d*\})\+", r"\1", tokenizer._pat_str)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bos, texts = tokenizer.bos_token, [{"Sequence": {"id": "A", "type_id": 0}}]
    after = byte_level
    if bos is not None:
        begin = next(token for token, i in tokenizer._special_tokens.items() if i == bos)
        first = {"SpecialToken": {"id": begin, "type_id": 0}}
        after = {
            "type": "TemplateProcessing", "single": [first, *texts], "pair": [first, *texts, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {begin: {"id": begin, "ids": [bos], "tokens": [begin]}},
        }  # fmt: skip
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [{"id": i, "content": token, **plain} for token, i in special],
            "normalizer": {"type": tokenizer.form} if tokenizer.form else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "post_processor": after,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": unmade,
                "vocab": {name(token): rank for token, rank in ranks.items()}, "merges": merges,
            },
        },
        ensure_ascii=False,
    )  # fmt: skip


def chatml_prompt(tokenizer, messages):
    """Messages [{"role": ..., "content": ...}, ...] -> token ids, as Qwen's models were trained (the chat template in their
    tokenizer_config.json):

        <|im_start|>user\\nWhat is 2 + 3?<|im_end|>\\n<|im_start|>assistant\\n

    Qwen 2's template begins with a system message of its own where there is none: this does not, so give one if you want
    it. Only the control tokens are special; in a role or a content "<|im_end|>" is text."""
    start, end = (tokenizer._special_tokens[token] for token in CHAT_TOKENS["chatml"])
    ids = []
    for message in messages:
        ids += [start, *tokenizer.encode_ordinary(f"{message['role']}\n{message['content']}"), end]
        ids += tokenizer.encode_ordinary("\n")
    return [*ids, start, *tokenizer.encode_ordinary("assistant\n")]


def llama3_prompt(tokenizer, messages):
    """Messages -> token ids, as Llama 3's models were trained (Meta's "Llama 3 prompt formats"; 3.2's template adds a system
    message with the date, this does not):

        <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\nWhat is 2 + 3?<|eot_id|>
        <|start_header_id|>assistant<|end_header_id|>\\n\\n

    without the line break between the two. White space around a message is dropped. Only the control tokens are special."""
    begin, start, end, turn = (tokenizer._special_tokens[token] for token in CHAT_TOKENS["llama3"])
    ids = [begin]
    for message in messages:
        ids += [start, *tokenizer.encode_ordinary(message["role"]), end]
        ids += [*tokenizer.encode_ordinary("\n\n" + message["content"].strip()), turn]
    return [*ids, start, *tokenizer.encode_ordinary("assistant"), end, *tokenizer.encode_ordinary("\n\n")]


def encode_prompt(tokenizer, prompt):
    """A prompt as token ids: a text, or the messages of a chat. With a chat format a text is what the user says. Ends
    the program with one line for messages without one."""
    chat = getattr(tokenizer, "chat", "")
    if chat:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"chatml": chatml_prompt, "llama3": llama3_prompt}[chat](tokenizer, messages)
    if not isinstance(prompt, str):
        raise SystemExit("a prompt is a chat (messages): --chat chatml or --chat llama3 says how it is written")
    bos = getattr(tokenizer, "bos_token", None)
    return ([] if bos is None else [bos]) + tokenizer.encode_ordinary(prompt)


def fingerprint(tokenizer):
    """Name and checksum of a vocabulary, kept in checkpoints: a model speaks only the tokenizer it was trained with."""
    tokens = hashlib.sha256()
    for token in range(tokenizer.n_vocab):
        try:
            tokens.update(tokenizer.decode_single_token_bytes(token))
        except KeyError:  # some encodings leave ids unused
            pass
        tokens.update(b" %d " % token)
    return f"{getattr(tokenizer, 'fixed_name', tokenizer.name)}:{tokenizer.n_vocab}:{tokens.hexdigest()[:12]}"
