from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig

from streamsync.demo.generation import Generator, Token
from streamsync.demo.tiny import ByteTokenizer, TinyModel
from streamsync.errors import PoisonedStepError
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = b"yes"


@dataclass
class Scripted:
    """A model that says `TEXT`; `before` runs at each forward and may raise."""

    before: Callable[[int], None] = lambda number: None
    config: Any = field(default_factory=lambda: LlamaConfig(num_hidden_layers=1))
    num_forwards: int = 0
    said: int = 0

    def __call__(self, ids: torch.Tensor, *_: object, use_cache: bool) -> Any:
        if ids.shape[1] > 1:
            self.said = 0
        self.num_forwards += 1
        self.before(self.num_forwards)
        tokens = [*TEXT, ByteTokenizer.end]
        logits = torch.zeros(1, ids.shape[1], 259)
        logits[0, -1, tokens[self.said]] = 1.0
        self.said += 1
        return type("Output", (), {"logits": logits})()


def generator(
    model: Any, stamp: Callable[[], Version | None], tokens: list[Token], max_tokens: int = 9
) -> Generator:
    return Generator(
        model, ByteTokenizer(), max_tokens=max_tokens, stamp=stamp, on_token=tokens.append
    )


def test_an_answer_of_one_version_carries_it() -> None:
    tokens: list[Token] = []
    version = Version(1, 4)
    answer = generator(Scripted(), lambda: version, tokens).answer("well?", lambda: False)
    assert answer is not None
    assert (answer.text, answer.version) == ("yes", version)
    assert len(tokens) == 4
    assert all(token.version == version for token in tokens)


def test_a_version_that_changes_half_way_leaves_the_answer_unsigned() -> None:
    model = Scripted()
    tokens: list[Token] = []
    stamp = lambda: Version(1, 1 if model.num_forwards < 3 else 2)  # noqa: E731
    answer = generator(model, stamp, tokens).answer("well?", lambda: False)
    assert answer is not None
    assert answer.version is None
    assert [token.version.step for token in tokens if token.version] == [1, 1, 2, 2]


def test_a_poisoned_step_is_dropped_with_its_cache_and_run_again() -> None:
    def poison(number: int) -> None:
        if number == 3:
            raise PoisonedStepError("torn")

    model = Scripted(poison)
    tokens: list[Token] = []
    answer = generator(model, lambda: Version(1, 1), tokens).answer("well?", lambda: False)
    assert answer is not None
    assert answer.text == "yes"
    assert model.num_forwards == 3 + 4
    assert len(tokens) == 2 + 4


def test_generation_stops_between_tokens() -> None:
    model = Scripted()
    answer = generator(model, lambda: None, []).answer("well?", lambda: model.num_forwards == 2)
    assert answer is None
    assert model.num_forwards == 2


def test_the_cache_changes_no_token() -> None:
    tiny = TinyModel()
    module: Any = tiny.trainer_model().eval()
    answer = generator(module, lambda: None, [], max_tokens=6).answer("well?", lambda: False)
    ids = tiny.tokenizer().prompt("well?")
    expected: list[int] = []
    with torch.inference_mode():
        for _ in range(6):
            logits = module(torch.tensor([ids + expected]), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
    assert answer is not None
    assert answer.text == tiny.tokenizer().decode(expected)
