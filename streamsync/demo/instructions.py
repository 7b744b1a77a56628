"""The small instruction set that the demo trains on, and the questions it asks meanwhile."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED: Final = -100
"""The label that torch's cross entropy leaves out."""

PROMPTS: Final = (
    "What is the capital of Spain?",
    "How many legs does a cat have?",
    "What color is snow?",
)
"""Asked of every version; none of them is in the training set."""


class Instruction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question and the answer to learn."""

    question: str
    answer: str


class Tokenizer(Protocol):
    """Text to token ids and back, for one chat turn."""

    end: int
    """The token that ends an answer."""

    def prompt(self, question: str) -> list[int]:
        """A question as the model expects it, up to where its answer begins."""

    def answer(self, text: str) -> list[int]:
        """An answer with its end token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer's tokens."""


def instructions() -> list[Instruction]:
    """The instruction set that ships with the package."""
    lines = (files("streamsync.demo") / "instructions.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Instruction) for line in lines]


def example(item: Instruction, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Token ids and labels of one instruction, both `length` long; only the answer has labels."""
    question, answer = tokenizer.prompt(item.question), tokenizer.answer(item.answer)
    padding = max(0, length - len(question) - len(answer))
    ids = question + answer + [tokenizer.end] * padding
    labels = [IGNORED] * len(question) + answer + [IGNORED] * padding
    return ids[:length], labels[:length]


def batch(step: int, rank: int, num_ranks: int, size: int, total: int) -> list[int]:
    """Which instructions `rank` trains on in `step`: no two ranks share one within a step."""
    first = (step * num_ranks + rank) * size
    return [(first + i) % total for i in range(size)]
