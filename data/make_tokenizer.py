"""Makes data/stories.tiktoken: byte-level byte-pair encoding of the embedded task's corpus. Run once: python -m
data.make_tokenizer

Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909): start from the 256 bytes; again and again, merge the most
frequent pair of neighbours into a new token. A token's rank is the order in which it was made, and that is all an
encoder needs to know.
"""

import base64
import random
from collections import Counter
from itertools import pairwise

import regex  # installed with tiktoken; like tiktoken's own engine it knows the pattern's syntax

from data.stories import base_document
from data.tokenizer import MERGES, PATTERN

VOCABULARY = 512  # at most: 256 bytes, up to 255 merges, <|endoftext|>
DOCUMENTS = 20_000


def train(pieces, merges):
    """pieces: Counter of bytes. Returns the list of tokens in order of rank: the 256 bytes, then at most `merges`
    merged ones."""
    tokens = [bytes([b]) for b in range(256)]
    split = {piece: [bytes([b]) for b in piece] for piece in pieces}
    for _ in range(merges):
        pairs = Counter()
        for piece, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += pieces[piece]
        if not pairs:
            break
        best = max(
            pairs, key=lambda pair: (pairs[pair], pair)
        )  # ties: the later in byte order, so that it is reproducible
        merged = best[0] + best[1]
        tokens.append(merged)
        for parts in split.values():
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [merged]
                i += 1
    return tokens


def main():
    rng = random.Random(0)
    documents = ("".join(base_document(rng)) for _ in range(DOCUMENTS))
    pieces = Counter(piece.encode() for document in documents for piece in regex.findall(PATTERN, document))
    tokens = train(pieces, VOCABULARY - 256 - 1)
    MERGES.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    print(f"{MERGES.name}: {len(tokens)} tokens from {len(pieces)} different pieces of {DOCUMENTS} documents")


if __name__ == "__main__":
    main()
