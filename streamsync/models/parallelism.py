"""How many ranks a side has along each axis, and where each rank stands. Pure.

Trainers are numbered as Megatron-Core numbers them by default (`tp-cp-ep-dp-pp`: tp fastest, then
dp, then pp; within a stage, experts by etp, then ep, then the rest). Engines as vLLM numbers them:
tp fastest, then pp, then dp; experts go over tp x dp of a stage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from streamsync.errors import ConfigError

_WORD: Final = re.compile(r"(tp|pp|vpp|ep|etp|dp|fsdp|replicas)([1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes along the axes; 1 where there is no cut. `ep` of 0: experts are cut as other layers
    are. `fsdp` shards every tensor's first dim and goes alone. `replicas` are copies of all that:
    engines, or the outer axis of hybrid sharding."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 0
    etp: int = 0
    dp: int = 1
    fsdp: int = 0
    replicas: int = 1

    @classmethod
    def parse(cls, text: str) -> Parallelism:
        """`tp8 pp8 vpp2 ep32 etp1 dp4`, `tp16 ep16 replicas128` or `fsdp32 replicas4`.

        Raises `ConfigError` for other words, for an axis named twice, and for sizes that do not go
        together.
        """
        sizes: dict[str, int] = {}
        for word in text.split():
            found = _WORD.fullmatch(word)
            if found is None or found[1] in sizes:
                what = (
                    "named twice" if found else "none of tp, pp, vpp, ep, etp, dp, fsdp, replicas"
                )
                raise ConfigError(f"{word!r} in {text!r} is {what}; write it like 'tp8 pp4 dp2'")
            sizes[found[1]] = int(found[2])
        made = cls(**sizes)
        if made.fsdp and set(sizes) - {"fsdp", "replicas"}:
            raise ConfigError(f"fsdp goes with replicas alone, {text!r} has other axes, too")
        if made.etp and not made.ep:
            raise ConfigError(f"etp needs ep, {text!r} has none")
        if made.ep and made.stage_ranks % made.expert_ranks:
            raise ConfigError(
                f"{text!r}: the {made.stage_ranks} ranks of a stage (tp x dp) are no multiple of "
                f"the {made.expert_ranks} that experts are spread over (ep x etp)"
            )
        return made

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage of one replica."""
        return self.tp * self.dp

    @property
    def expert_ranks(self) -> int:
        """Ranks that one set of all experts of a layer is spread over."""
        return self.ep * max(self.etp, 1)

    @property
    def replica_ranks(self) -> int:
        """Ranks of one replica."""
        return self.fsdp or self.stage_ranks * self.pp

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.replica_ranks * self.replicas

    def check_rank(self, rank: int) -> None:
        """Raises `ConfigError` for a rank that there is not."""
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {rank} is not among the {self.num_ranks} of this parallelism")


def even_part(total: int, num_parts: int, part: int) -> range:
    """Part number `part` of `total` items in runs as equal as can be."""
    return range(total * part // num_parts, total * (part + 1) // num_parts)
