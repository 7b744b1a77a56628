"""The models that the demo can train and serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from streamsync.demo import smollm2

if TYPE_CHECKING:
    from torch import nn

    from streamsync.demo.instructions import Tokenizer
    from streamsync.demo.options import ModelName


class DemoModel(Protocol):
    """One model: how to build it at both ends and how to train it so that the answers change."""

    name: str
    steps_per_sync: int
    """Optimizer steps between two versions."""
    learning_rate: float
    answer_tokens: int
    """Longest answer, in tokens."""
    example_tokens: int
    """Length of one training example, in tokens."""
    batch_size: int
    """Examples of one rank in one step."""

    def tokenizer(self) -> Tokenizer:
        """A new tokenizer."""

    def trainer_model(self) -> nn.Module:
        """A new causal language model in fp32 on the CPU, with equal weights in every process."""

    def engine_model(self) -> nn.Module:
        """A new bf16 model of the same shapes whose weights are random and not the trainer's."""


def prepare(name: ModelName) -> str:
    """Makes the model's files if they are missing; returns their folder, or '' when it has none.

    Raises `ConfigError` naming the package or extra to install.
    """
    return str(smollm2.converted()) if name == "smollm2" else ""


def demo_model(name: ModelName, folder: str) -> DemoModel:
    """The model `name`, with the folder that `prepare` returned."""
    if name == "smollm2":
        return smollm2.SmolLM2Model(Path(folder))
    from streamsync.demo.tiny import TinyModel

    return TinyModel()


def version_steps(model: DemoModel, syncs: int) -> range:
    """The optimizer steps after which the trainer publishes; the first is the checkpoint itself."""
    return range(0, syncs * model.steps_per_sync, model.steps_per_sync)
