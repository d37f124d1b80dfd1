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
import unicodedata
from pathlib import Path

import tiktoken

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

# What a ByteLevel pre-tokenizer of the `tokenizers` package cuts a text into: GPT-2's pattern (Radford et al. 2019)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # names of the token that ends a text, where nothing says which it is
CHAT_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>"),
               "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")}  # the last one ends a turn # fmt: skip


class Tokenizer(tiktoken.Encoding):
    """tiktoken's Encoding, and what it does not know:

    eot_token   the id that ends every document and every response: end-of-text, or with a chat format the end of a turn
    bos_token   the id that begins every text (Llama 3), or None
    chat        "", "chatml" or "llama3": how prompts are written
    normalize   what is done to a text first (Qwen: Unicode's NFC), or None
    """

    def __init__(self, name, pattern, ranks, special, eot, bos=None, normalize=None, chat="", fixed_name=None):
        super().__init__(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.eot, self.bos_token, self.normalize, self.chat = special.get(eot), bos, normalize, chat
        self.fixed_name = fixed_name or name  # in fingerprints: a folder may be moved

    @property
    def eot_token(self):
        return self.eot

    def encode_ordinary(self, text):
        return super().encode_ordinary(self.normalize(text) if self.normalize else text)

    def encode(self, text, **options):
        return super().encode(self.normalize(text) if self.normalize else text, **options)


def get_tokenizer(name="stories", chat=""):
    """The Tokenizer called `name`: stories, a folder with a tokenizer.json, or one of tiktoken's names. chat: "", "chatml" or
    "llama3". Raises ValueError for a name that nobody knows, a tokenizer.json that is not byte-level BPE, and a chat format
    whose control tokens the vocabulary lacks."""
    if name == "stories":
        lines = MERGES.read_text().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        parts = dict(pattern=PATTERN, ranks=ranks, special={"<|endoftext|>": len(ranks)}, eot="<|endoftext|>")
    elif Path(name).is_dir() or name.endswith(".json"):
        parts = read_folder(Path(name))
        name = Path(name).resolve().name
    else:
        if name not in tiktoken.list_encoding_names():
            raise ValueError(
                f"unknown tokenizer {name!r}: use stories, a folder with a tokenizer.json, or one of "
                f"{', '.join(tiktoken.list_encoding_names())}"
            )
        try:
            found = tiktoken.get_encoding(name)
        except Exception as problem:  # whatever the download raises
            raise ValueError(f"tokenizer {name!r} could not be loaded: {str(problem).splitlines()[0]}") from None
        special = found._special_tokens
        eot = next((end for end in ENDS if end in special), None)
        parts = dict(pattern=found._pat_str, ranks=found._mergeable_ranks, special=special, eot=eot)
    if chat:
        lacking = [token for token in CHAT_TOKENS[chat] if token not in parts["special"]]
        if lacking:
            raise ValueError(f"--chat {chat}: the vocabulary of {name} has no {lacking[0]}: its model does not know that format")
        parts["eot"] = CHAT_TOKENS[chat][-1]
    if parts["eot"] is None:
        raise ValueError(f"tokenizer {name!r} does not say which token ends a text")
    return Tokenizer(name, chat=chat, **parts)


def byte_alphabet():
    """The 256 bytes as the printable characters that stand for them in a tokenizer.json: a byte that is one already is
    itself, the others are U+0100, U+0101 ... in their order (Radford et al. 2019's code)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def read_folder(path):
    """The arguments of a Tokenizer from a folder's tokenizer.json, and from what other files say of its end-of-text."""
    folder, path = (path.parent, path) if path.suffix == ".json" else (path, path / "tokenizer.json")

    def read(name, optional=True):
        try:
            return json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if optional:
                return {}
            raise ValueError(f"{folder / name} does not exist") from None
        except (OSError, ValueError) as problem:
            raise ValueError(f"{folder / name} cannot be read: {str(problem).splitlines()[0]}") from None

    try:
        parts = from_tokenizer_json(read(path.name, optional=False))
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is not a tokenizer.json: {problem!r}") from None
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}".removeprefix(f"{path}: {path}")) from None
    special, eot = parts["special"], read("tokenizer_config.json").get("eos_token")
    if eot is None:
        ids = {i: token for token, i in special.items()}
        found = read("config.json").get("eos_token_id", read("generation_config.json").get("eos_token_id"))
        eot = ids.get(found[0] if isinstance(found, list) else found)
    eot = eot.get("content") if isinstance(eot, dict) else eot
    return {**parts, "eot": eot if eot in special else next((end for end in ENDS if end in special), None)}


def from_tokenizer_json(contents):
    """The contents of a tokenizer.json as arguments of a Tokenizer. Raises ValueError for anything but byte-level BPE, and
    for what tiktoken cannot do: it merges first what has the lowest id, `tokenizers` what comes first in the list of merges,
    so these have to be in the same order."""
    model, normalizer = contents["model"], contents.get("normalizer")
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or model.get("unk_token"):
        raise ValueError(f"only byte-level BPE is supported, not {model.get('type')} with byte_fallback or an unknown token")
    if normalizer and normalizer["type"] != "NFC":
        raise ValueError(f"normalizer {normalizer['type']!r} is not supported, only NFC")
    # the pattern
    before = contents["pre_tokenizer"]
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]:
        pattern = GPT2_PATTERN
    elif kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True) and not steps[1]["add_prefix_space"]:
        if steps[0]["behavior"] != "Isolated" or steps[0].get("invert") or "Regex" not in steps[0]["pattern"]:
            raise ValueError(f"pre_tokenizer {steps[0]} is not supported")
        pattern = steps[0]["pattern"]["Regex"]
    else:
        raise ValueError(f"pre_tokenizer {' + '.join(kinds)} is not supported, only ByteLevel, or Split and ByteLevel")
    # the vocabulary: bytes -> rank
    byte_of = {character: byte for byte, character in byte_alphabet().items()}
    added = {token["content"]: token["id"] for token in contents.get("added_tokens", [])}
    ranks = {}
    for token, i in model["vocab"].items():
        if token not in added:
            if not set(token) <= byte_of.keys():
                raise ValueError(f"token {token!r} is not written in byte-level characters")
            ranks[bytes(byte_of[character] for character in token)] = i
    last = -1
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        i = model["vocab"].get(left + right)
        if i is None or i <= last:
            raise ValueError(f"merge {left!r} + {right!r}: its result is {'missing' if i is None else 'out of order'}")
        last = i
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"the vocabulary lacks byte {missing[0]}")
    # what the post-processor puts in front of a text
    after = contents.get("post_processor") or {"type": "ByteLevel"}
    bos = None
    for step in after["processors"] if after["type"] == "Sequence" else [after]:
        if step["type"] == "TemplateProcessing" and "SpecialToken" in step["single"][0]:
            bos = step["special_tokens"][step["single"][0]["SpecialToken"]["id"]]["ids"][0]
    normalize = (lambda text: unicodedata.normalize("NFC", text)) if normalizer else None
    return dict(pattern=pattern, ranks=ranks, special=added, bos=bos, normalize=normalize, fixed_name="tokenizer.json")


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
    special = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for token, i in sorted(tokenizer._special_tokens.items(), key=lambda item: item[1])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": tokenizer._pat_str}, "behavior": "Isolated", "invert": False}
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
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
            "normalizer": {"type": "NFC"} if tokenizer.normalize else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "post_processor": after,
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": {name(token): rank for token, rank in ranks.items()}, "merges": merges,
            },
        },
        ensure_ascii=False,
    )  # fmt: skip


def chatml_prompt(tokenizer, messages):
    """Messages [{"role": ..., "content": ...}, ...] -> token ids, as Qwen's models were trained (the template in their
    tokenizer_config.json, without its default system message):

        <|im_start|>user\\nWhat is 2 + 3?<|im_end|>\\n<|im_start|>assistant\\n
    """
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

    without the line break between the two. White space around a message is dropped."""
    start, end, turn = (tokenizer._special_tokens[token] for token in CHAT_TOKENS["llama3"])
    ids = [] if tokenizer.bos_token is None else [tokenizer.bos_token]
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
