"""Greedy answers, token by token, each stamped with the version that computed it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from streamsync.errors import PoisonedStepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamsync.demo.instructions import Tokenizer
    from streamsync.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token that may leave: its forward began at `started_at` (monotonic) and took `seconds`."""

    token: int
    text: str
    """The answer so far."""
    started_at: float
    seconds: float
    version: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer. `version` is the one that computed all of it, None when it is mixed."""

    text: str
    version: Version | None


class Generator:
    """Generates with a Hugging Face model and a key/value cache of its own.

    `stamp` tells which version the forward that just returned in this thread ran on, `on_token` is
    told each token. A version may change in the middle of an answer: the rest is then computed with
    the new weights on the old cache, as engines do that keep it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        stamp: Callable[[], Version | None],
        on_token: Callable[[Token], None],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._stamp = stamp
        self._on_token = on_token

    def answer(self, question: str, stopped: Callable[[], bool]) -> Answer | None:
        """The answer to `question`; None when `stopped` turned true before its end.

        A poisoned step's output is dropped and so is the cache that it wrote into: the answer
        begins again. Other engine errors pass.
        """
        while not stopped():
            try:
                tokens: list[Token] = []
                for token in self._tokens(self._tokenizer.prompt(question)):
                    if stopped():
                        return None
                    tokens.append(token)
            except PoisonedStepError:
                continue
            versions = {token.version for token in tokens}
            return Answer(
                text=tokens[-1].text,
                version=versions.pop() if len(versions) == 1 else None,
            )
        return None

    def _tokens(self, prompt: list[int]) -> Iterator[Token]:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        ids = torch.tensor([prompt])
        said: list[int] = []
        for _ in range(self._max_tokens):
            began = time.monotonic()
            # Positional: newer releases call the argument `cache`, older ones `past_key_values`.
            with torch.inference_mode():
                logits = self._model(ids, None, None, cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            if token != self._tokenizer.end:
                said.append(token)
            made = Token(
                token=token,
                text=self._tokenizer.decode(said),
                started_at=began,
                seconds=time.monotonic() - began,
                version=self._stamp(),
            )
            self._on_token(made)
            yield made
            if token == self._tokenizer.end:
                return
            ids = torch.tensor([[token]])
