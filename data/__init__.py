"""Tokenizers, the embedded task, real data, verifiers. Imports nothing of ours but its own files."""

from data.rewards import accuracy_reward, extract_answer, format_reward, last_boxed, last_number, pass_at_k
from data.tokenizer import encode_prompt, get_tokenizer

__all__ = [
    "accuracy_reward",
    "encode_prompt",
    "extract_answer",
    "format_reward",
    "get_tokenizer",
    "last_boxed",
    "last_number",
    "pass_at_k",
]
