"""Greedy answers, token by token, each stamped with the version that computed it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from streamsync.errors import PoisonedStepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamsync.demo.instructions import Tokenizer
    from streamsync.types import Version

_PIECE_TOKENS: Final = 2
"""How much of the next prompt is read beside each token of this answer. On a CPU a forward costs
what its tokens cost, so that a prompt read at once would be a gap between tokens that looks like a
stall, and would keep a new version waiting for the end of that forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward that returned: it began at `started_at` (monotonic seconds) and ran on `version`.

    `text` is the answer so far when it made a token that may leave, None when it read a piece of a
    prompt.
    """

    started_at: float
    seconds: float
    version: Version | None
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer. `version` is the one that computed all of it, None when it is mixed."""

    question: str
    text: str
    version: Version | None


class _Sequence:
    """One question, what was read and said of it, and its key/value cache."""

    def __init__(self, question: str, prompt: list[int], config: Any) -> None:
        self.question = question
        self._prompt, self._config = prompt, config
        self.reset()

    def reset(self) -> None:
        """Drops the cache and all that was said."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self._config)
        self.unread = list(self._prompt)
        self.said: list[int] = []
        self.versions: set[Version | None] = set()


class Generator:
    """Generates with a Hugging Face model and key/value caches of its own.

    `stamp` tells which version the forward that just returned in this thread ran on, `on_forward`
    is told each. A version may change in the middle of an answer: the rest is then computed with
    the new weights on the old cache, as engines do that keep it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        stamp: Callable[[], Version | None],
        on_forward: Callable[[Forward], None],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._stamp = stamp
        self._on_forward = on_forward

    def answers(self, questions: Iterator[str], stopped: Callable[[], bool]) -> Iterator[Answer]:
        """The answers to `questions` (endless), until `stopped` turns true between two forwards.

        A poisoned forward's output is dropped and so is the cache that it wrote into: that question
        begins again. Other engine errors pass.
        """
        current, following = self._open(next(questions)), self._open(next(questions))
        while not stopped():
            if len(current.unread) > 1:
                self._read(current)
                continue
            if self._say(current):
                yield Answer(
                    question=current.question,
                    text=self._tokenizer.decode(current.said),
                    version=current.versions.pop() if len(current.versions) == 1 else None,
                )
                current, following = following, self._open(next(questions))
            elif len(following.unread) > 1 and not stopped():
                self._read(following)

    def _open(self, question: str) -> _Sequence:
        return _Sequence(question, self._tokenizer.prompt(question), self._model.config)

    def _read(self, sequence: _Sequence) -> None:
        """Reads a piece of the prompt, but not its last token, which makes the first answer's."""
        piece = sequence.unread[: min(_PIECE_TOKENS, len(sequence.unread) - 1)]
        if self._forward(sequence, piece, None) is not None:
            del sequence.unread[: len(piece)]

    def _say(self, sequence: _Sequence) -> bool:
        """Says one token; returns whether the answer is finished."""
        token = self._forward(sequence, sequence.unread or sequence.said[-1:], sequence.said)
        if token is None:
            return False
        sequence.unread = []
        return token == self._tokenizer.end or len(sequence.said) == self._max_tokens

    def _forward(
        self, sequence: _Sequence, tokens: list[int], said: list[int] | None
    ) -> int | None:
        """The likeliest token after `tokens`, appended to `said`; None when poisoned."""
        began = time.monotonic()
        try:
            # Positional: newer releases call the argument `cache`, older ones `past_key_values`.
            with torch.inference_mode():
                output = self._model(
                    torch.tensor([tokens]), None, None, sequence.cache, use_cache=True
                )
        except PoisonedStepError:
            sequence.reset()
            return None
        token = int(output.logits[0, -1].argmax())
        seconds = time.monotonic() - began
        version = self._stamp()
        sequence.versions.add(version)
        if said is not None and token != self._tokenizer.end:
            said.append(token)
        text = None if said is None else self._tokenizer.decode(said)
        self._on_forward(Forward(started_at=began, seconds=seconds, version=version, text=text))
        return token
