from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig

from streamsync.demo.generation import Forward, Generator
from streamsync.demo.tiny import ByteTokenizer, TinyModel
from streamsync.errors import PoisonedStepError
from streamsync.types import Version

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.demo.generation import Answer

TEXT = b"yes"


@dataclass
class Scripted:
    """A model that says `TEXT` to "?", and only to it; `before` runs at each forward, may raise.

    What it has seen of a sequence hangs on the cache object, as with a real model.
    """

    before: Callable[[int], None] = lambda number: None
    config: Any = field(default_factory=lambda: LlamaConfig(num_hidden_layers=1))
    num_forwards: int = 0

    def __call__(self, ids: torch.Tensor, _mask: None, _at: None, cache: Any, **_: bool) -> Any:
        self.num_forwards += 1
        seen = getattr(cache, "seen", []) + ids[0].tolist()
        cache.seen = seen
        self.before(self.num_forwards)
        script = [*TEXT, ByteTokenizer.end]
        spoken = seen[seen.index(ord("?")) + 1 :] if ord("?") in seen else None
        logits = torch.zeros(1, ids.shape[1], 259)
        if spoken is not None:
            assert spoken == script[: len(spoken)]
            logits[0, -1, script[len(spoken)]] = 1.0
        return type("Output", (), {"logits": logits})()


def generated(
    model: Any,
    stamp: Callable[[], Version | None],
    forwards: list[Forward],
    number: int,
    *,
    max_tokens: int = 9,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    generator = Generator(
        model, ByteTokenizer(), max_tokens=max_tokens, stamp=stamp, on_forward=forwards.append
    )
    questions = itertools.cycle(["well?", "what now?"])
    return list(itertools.islice(generator.answers(questions, stopped), number))


def test_answers_of_one_version_carry_it() -> None:
    forwards: list[Forward] = []
    version = Version(1, 4)
    answers = generated(Scripted(), lambda: version, forwards, 3)
    assert [(a.question, a.text, a.version) for a in answers] == [
        ("well?", "yes", version),
        ("what now?", "yes", version),
        ("well?", "yes", version),
    ]
    said = [forward.text for forward in forwards if forward.text is not None]
    assert said == ["y", "ye", "yes", "yes"] * 3
    assert all(forward.version == version for forward in forwards)


def test_the_next_prompt_is_read_beside_the_answer() -> None:
    """Else reading it would be a gap between tokens, much longer than a token."""
    forwards: list[Forward] = []
    generated(Scripted(), lambda: None, forwards, 4, max_tokens=3)
    kinds = "".join("t" if forward.text is not None else "p" for forward in forwards)
    # 10 tokens of a prompt are 5 pieces and the last token; two pieces find room beside 3 tokens.
    assert kinds.removeprefix("ppp").startswith("tptptppptptpt")


def test_a_version_that_changes_half_way_leaves_both_open_answers_unsigned() -> None:
    model, forwards = Scripted(), []
    stamp = lambda: Version(1, 1 if model.num_forwards < 6 else 2)  # noqa: E731
    answers = generated(model, stamp, forwards, 3)
    assert [answer.version for answer in answers] == [None, None, Version(1, 2)]
    steps = [forward.version.step for forward in forwards if forward.version]
    assert steps == sorted(steps)


def test_a_poisoned_forward_is_dropped_with_its_cache_and_run_again() -> None:
    for poisoned in range(1, 12):
        counted: list[int] = []

        def poison(number: int, poisoned: int = poisoned, counted: list[int] = counted) -> None:
            counted.append(number)
            if number == poisoned:
                raise PoisonedStepError("torn")

        forwards: list[Forward] = []
        answers = generated(Scripted(poison), lambda: Version(1, 1), forwards, 2)
        assert [answer.text for answer in answers] == ["yes", "yes"]
        assert len(forwards) == len(counted) - 1


def test_generation_stops_between_forwards() -> None:
    model = Scripted()
    stopped = lambda: model.num_forwards == 2  # noqa: E731
    assert generated(model, lambda: None, [], 1, stopped=stopped) == []
    assert model.num_forwards == 2


def test_pieces_and_caches_change_no_token() -> None:
    tiny = TinyModel()
    module: Any = tiny.trainer_model().eval()
    answers = generated(module, lambda: None, [], 3, max_tokens=6)
    for answer in answers:
        ids = tiny.tokenizer().prompt(answer.question)
        expected: list[int] = []
        with torch.inference_mode():
            for _ in range(6):
                logits = module(torch.tensor([ids + expected]), use_cache=False).logits
                expected.append(int(logits[0, -1].argmax()))
        assert answer.text == tiny.tokenizer().decode(expected)
