"""Which transport is taken, and what is said when one can't be."""

from __future__ import annotations

import itertools

import pytest

from streamsync.config import Config
from streamsync.errors import ConfigError
from streamsync.transports.choice import Choice, choose, open_transport


def _choose(name: str, **known: bool) -> Choice:
    facts = dict.fromkeys(("same_process", "same_host", "has_ucx", "has_rdma"), False) | known
    return choose(name, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "taken"),
    [
        ({"same_process": True, "same_host": True, "has_ucx": True, "has_rdma": True}, "memory"),
        ({"same_host": True, "has_ucx": True, "has_rdma": True}, "shm"),
        ({"has_ucx": True, "has_rdma": True}, "ucx"),
        ({"has_ucx": True}, "tcp"),
        ({}, "tcp"),
    ],
)
def test_auto_takes_the_closest(known: dict[str, bool], taken: str) -> None:
    choice = _choose("auto", **known)
    assert choice.name == taken
    assert choice.reason.endswith(".")


@pytest.mark.parametrize(
    ("name", "text"), [("memory", "one process"), ("shm", "one host"), ("ucx", "both ends")]
)
def test_what_cannot_work_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _choose(name)


def test_an_explicit_name_is_kept() -> None:
    for values in itertools.product([True], [True], [True], [False, True]):
        known = dict(zip(("same_process", "same_host", "has_ucx", "has_rdma"), values, strict=True))
        for name in ("memory", "shm", "tcp", "ucx"):
            assert _choose(name, **known).name == name


@pytest.mark.parametrize("name", ["memory", "shm", "tcp", "ucx"])
def test_each_name_opens_its_transport(name: str) -> None:
    assert open_transport(name, Config(), None).name == name  # type: ignore[arg-type]


def test_an_unknown_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="carrier pigeon"):
        open_transport("carrier pigeon", Config(), None)  # type: ignore[arg-type]
