"""Tokenizers. Every tokenizer in this project is a `tiktoken.Encoding`, whoever made its merges.

`get_tokenizer("stories")` is the embedded one: byte-level BPE with 506 tokens, made by data/make_tokenizer.py from
the embedded task's corpus and stored in data/stories.tiktoken. Any other name ("gpt2", "r50k_base", "cl100k_base"
...) is one of tiktoken's own, which it downloads once.
"""

import base64
import hashlib
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


def get_tokenizer(name="stories"):
    """The `tiktoken.Encoding` called `name`. Its `eot_token` ends every document and every response. Raises
    ValueError for a name that nobody knows."""
    if name == "stories":
        lines = MERGES.read_text().splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        return tiktoken.Encoding(
            name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
        )
    if name not in tiktoken.list_encoding_names():
        raise ValueError(
            f"unknown tokenizer {name!r}: use stories or one of {', '.join(tiktoken.list_encoding_names())}"
        )
    try:
        return tiktoken.get_encoding(name)
    except Exception as problem:  # whatever the download raises
        raise ValueError(f"tokenizer {name!r} could not be loaded: {str(problem).splitlines()[0]}") from None


def fingerprint(tokenizer):
    """Name and checksum of a vocabulary, kept in checkpoints: a model speaks only the tokenizer it was trained with."""
    tokens = hashlib.sha256()
    for token in range(tokenizer.n_vocab):
        try:
            tokens.update(tokenizer.decode_single_token_bytes(token))
        except KeyError:  # some encodings leave ids unused
            pass
        tokens.update(b" %d " % token)
    return f"{tokenizer.name}:{tokenizer.n_vocab}:{tokens.hexdigest()[:12]}"
