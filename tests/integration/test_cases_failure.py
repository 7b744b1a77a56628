"""Cases 28, 31, 33, 35 and 42 over whole syncs: what fails, where it is said, and what heals it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from streamsync.config import Config, Deadlines
from streamsync.engines.torch_module import TorchEngine
from streamsync.errors import (
    ConfigError,
    EngineError,
    PlanError,
    PoisonedStepError,
    QuarantinedError,
    VersionError,
)
from streamsync.session import links
from streamsync.stages.copies import BucketCopies
from streamsync.testing.job import LocalJob
from streamsync.transports.faulty import Fault, FaultPlan, FaultyTransport
from tests.sync_rig import StillEngine, bits, differing, fill, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamsync.types import Apply, Outcome

SHORT = Deadlines(connect=8, progress=4, total=12, gate=8, lag=3)
FAST = Config(transport="tcp", bucket_bytes=256, deadlines=SHORT)


def layers(num_layers: int = 6) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.zeros(16, 8) for i in range(num_layers)}


def failed_outcome(job: LocalJob, step: int) -> str:
    """Publishes; the version must fail at the one replica. Returns what the source says of it."""
    version = job.publish(step)
    with pytest.raises(VersionError) as error:
        job.wait(version, timeout=30)
    (outcome,) = job.publishers[0].wait(version, require=0)
    assert outcome.state == "failed"
    assert outcome.text in str(error.value)
    return outcome.text


def heal(job: LocalJob, source: dict[str, torch.Tensor], sink: dict[str, torch.Tensor]) -> None:
    """The next sync, published at once, brings every byte."""
    fill(source, 999)
    version = job.publish()
    outcomes: list[Outcome] = job.publishers[0].wait(version, timeout=30)
    assert [outcome.state for outcome in outcomes] == ["committed"]
    assert differing(source, sink) == []


# --- case 28 ------------------------------------------------------------------------------------


def test_a_pool_too_small_at_the_source_is_refused_with_the_number() -> None:
    """Case 28: the source's pool can't hold one bucket: both sides say the bytes needed."""
    with LocalJob(Config(transport="tcp", bucket_bytes=512, pool_bytes=448)) as job:
        job.add_sources([layers()])
        (subscriber,) = job.add_replica(
            [StillEngine(layers())], config=Config(transport="tcp", bucket_bytes=512)
        )
        with pytest.raises(PlanError, match=r"pool_bytes=448.*at least 576"):
            job.wait_for_replicas(timeout=20)
        with pytest.raises((PlanError, ConfigError), match=r"at least 576"):
            subscriber.wait(timeout=20)


@pytest.mark.parametrize("apply", ["layer", "version"])
def test_a_pool_too_small_at_the_sink_is_refused_with_the_number(apply: Apply) -> None:
    """Case 28: one bucket (`layer`) or the whole share (`version`) must fit the sink's pool."""
    pool, needed = (448, 576) if apply == "layer" else (1024, 6 * 576)
    with LocalJob(Config(transport="tcp", bucket_bytes=512)) as job:
        job.add_sources([layers()])
        (subscriber,) = job.add_replica(
            [StillEngine(layers())],
            apply=apply,
            config=Config(transport="tcp", bucket_bytes=512, pool_bytes=pool),
        )
        with pytest.raises(ConfigError, match=rf"at least {needed}"):
            subscriber.wait(timeout=20)
        with pytest.raises(PlanError, match=rf"at least {needed}"):
            job.wait_for_replicas(timeout=20)


# --- cases 31 and 33 ----------------------------------------------------------------------------


@pytest.mark.parametrize("apply", ["layer", "version"])
@pytest.mark.parametrize("call", ["arm", "post_load", "open_gate", "commit"])
def test_an_engine_that_raises(call: str, apply: Apply) -> None:
    """Case 31: the source learns the sink's own words and rank; case 33: the version does not
    advance; case 35: after GO the replica is quarantined; the next sync heals."""
    source, sink = layers(), layers()
    engine = StillEngine(sink)
    with LocalJob(FAST) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([engine], apply=apply)
        job.wait_for_replicas()
        fill(source, 0)
        first = job.sync(0)
        before = {name: bits(tensor) for name, tensor in sink.items()}
        fill(source, 1)
        engine.fail = [call]
        text = failed_outcome(job, 1)
        assert "the loader choked on layer 7" in text
        assert "engine/0" in text
        if call == "arm":
            assert subscriber.version == first
            assert {name: bits(tensor) for name, tensor in sink.items()} == before
            assert not engine.quarantined
        else:
            until(lambda: engine.quarantined)
            assert subscriber.version is None
            assert subscriber.state == "quarantined"
            assert engine.committed == first
        heal(job, source, sink)
        assert subscriber.wait(2).step >= 2
        assert not engine.quarantined


def test_one_rank_that_raises_quarantines_its_replica_only() -> None:
    """Case 31: rank 1 of one replica raises after GO: both its ranks are quarantined, the other
    replica commits."""
    from tests.integration.test_cases_arming import rows

    source = {"layers.0.weight": torch.zeros(8, 4)}
    sinks = [torch.zeros(8, 4) for _ in range(2)]
    other = {"layers.0.weight": torch.zeros(8, 4)}
    engines = [StillEngine(rows(sinks[i], 4 * i, 4 * i + 4)) for i in range(2)]
    with LocalJob(FAST) as job:
        job.add_sources([source])
        pair = job.add_replica(engines, name="pair")
        job.add_replica([StillEngine(other)], name="other")
        job.wait_for_replicas(2)
        job.sync(0)
        engines[1].fail = ["open_gate"]
        fill(source, 1)
        version = job.publish(1)
        outcomes = job.publishers[0].wait(version, require="any", timeout=30)
        assert {o.replica: o.state for o in outcomes} == {"pair": "failed", "other": "committed"}
        assert "rank=pair/1" in next(o.text for o in outcomes if o.replica == "pair")
        until(lambda: all(engine.quarantined for engine in engines))
        assert [subscriber.version for subscriber in pair] == [None, None]
        assert differing(source, other) == []
        fill(source, 2)
        states = [o.state for o in job.publishers[0].wait(job.publish(2), timeout=30)]
        assert states == ["committed", "committed"]
        assert bits(torch.cat([sinks[0][:4], sinks[1][4:]])) == bits(source["layers.0.weight"])


def test_sync_heals_by_itself() -> None:
    """The blocking form publishes the same parameters once more under a new step."""
    source, sink = layers(), layers()
    engine = StillEngine(sink)
    with LocalJob(FAST) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([engine])
        job.wait_for_replicas()
        fill(source, 0)
        engine.fail = ["post_load"]
        version = job.publishers[0].sync(0)
        assert version.step == 1
        assert subscriber.wait(1) == version
        assert differing(source, sink) == []


# --- case 42 ------------------------------------------------------------------------------------


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FaultPlan]:
    """Makes every transport opened from now on faulty."""

    def arrange(kind: str, frame: int) -> FaultPlan:
        plan = FaultPlan([Fault(kind=kind, frame=frame)], seed=frame)  # type: ignore[arg-type]
        real = links.open_transport
        monkeypatch.setattr(
            links, "open_transport", lambda *args: FaultyTransport(real(*args), source_plan=plan)
        )
        return plan

    return arrange


class Net(nn.Module):
    """Four layers that each change what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def parameters(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in net.named_parameters()}


class Generator:
    """Calls a model over and over, as an engine does; keeps every output and every refusal."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.outputs: list[torch.Tensor] = []
        self.refused: list[EngineError] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with torch.no_grad():
            while not self._stop.is_set():
                try:
                    self.outputs.append(self.net(torch.ones(2, 8)))
                except EngineError as error:
                    self.refused.append(error)

    def __enter__(self) -> Generator:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()


def _outputs(net: nn.Module, wanted: Any) -> torch.Tensor:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(wanted[name])
        return net(torch.ones(2, 8))


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("kind", ["corrupt", "corrupt_header"])
@pytest.mark.parametrize("apply", ["version", "layer"])
def test_one_flipped_bit(
    apply: Apply, kind: str, transport: str, strike: Callable[..., FaultPlan]
) -> None:
    """Case 42: one bit flipped on the way, in a payload or a header. `apply="version"` notices
    before GO: the old version stays bit for bit and generates on. `apply="layer"` notices before
    the gate of that layer: no output of the torn model ever leaves. The next publish heals."""
    source, sink, reference = Net(), Net(), Net()
    config = Config(transport=transport, bucket_bytes=256, deadlines=SHORT)  # type: ignore[arg-type]
    events: dict[str, torch.Tensor] = {}
    with LocalJob(config) as job:
        plan = strike(kind, 1 << 30)
        job.add_sources([source])
        (subscriber,) = job.add_replica([TorchEngine(sink, gate_seconds=20)], apply=apply)
        job.wait_for_replicas()
        fill(parameters(source), 0)
        first = job.sync(0)
        assert subscriber.plan is not None
        per_sync = sum(len(share.buckets) for share in subscriber.plan.shares)
        # Both ends share the plan of faults; only the source's end damages.
        plan.faults = [Fault(kind=kind, frame=per_sync + per_sync // 2)]  # type: ignore[arg-type]
        events["0"] = _outputs(reference, parameters(source))
        old = {name: bits(p) for name, p in parameters(sink).items()}
        with Generator(sink) as generator:
            until(lambda: len(generator.outputs) > 3)
            fill(parameters(source), 1)
            text = failed_outcome(job, 1)
            assert plan.happened, "the fault did not strike"
            assert "IntegrityError" in text
            if apply == "version":
                assert subscriber.version == first
                assert {name: bits(p) for name, p in parameters(sink).items()} == old
                seen = len(generator.outputs)
                until(lambda: len(generator.outputs) > seen + 3)
                assert generator.refused == []
            fill(parameters(source), 2)
            events["2"] = _outputs(reference, parameters(source))
            version = job.publish(2)
            assert [o.state for o in job.publishers[0].wait(version, timeout=30)] == ["committed"]
            seen = len(generator.outputs)
            until(lambda: len(generator.outputs) > seen + 3)
        assert differing(parameters(source), parameters(sink)) == []
    for output in generator.outputs:
        assert any(torch.equal(output, known) for known in events.values()), "a torn output left"
    assert torch.equal(generator.outputs[-1], events["2"])
    for error in generator.refused:
        assert isinstance(error, PoisonedStepError | QuarantinedError)


@pytest.mark.parametrize("digest", [True, False])
def test_a_wrong_byte_written_while_loading(digest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 42: the copy into the live parameter goes wrong in one bit. The digest is of the loaded
    bytes, so it catches that; without digests it passes, which shows that nothing else would."""
    source, sink = layers(), layers()
    real = BucketCopies.scatter
    struck: list[BucketCopies] = []

    def scatter(self: BucketCopies, payload: torch.Tensor) -> None:
        real(self, payload)
        if armed and not struck:
            struck.append(self)
            self._runs[0].live[0].view(-1)[:1].view(torch.uint8)[0] ^= 1

    armed = False
    monkeypatch.setattr(BucketCopies, "scatter", scatter)
    with LocalJob(Config(transport="tcp", bucket_bytes=256, deadlines=SHORT, digest=digest)) as job:
        job.add_sources([source])
        (subscriber,) = job.add_replica([StillEngine(sink)])
        job.wait_for_replicas()
        fill(source, 0)
        job.sync(0)
        armed = True
        fill(source, 1)
        if not digest:
            job.sync(1)
            assert len(differing(source, sink)) == 1
            return
        text = failed_outcome(job, 1)
        assert "IntegrityError" in text
        assert "layers." in text
        assert subscriber.state == "quarantined"
        heal(job, source, sink)


@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "disconnect", "stall"])
def test_what_else_a_wire_can_do(kind: str, strike: Callable[..., FaultPlan]) -> None:
    """A frame lost, doubled, swapped or stuck, or the link cut: the version fails within its
    deadlines and the next one heals."""
    plan = strike(kind, 15)
    source, sink = layers(), layers()
    with LocalJob(FAST) as job:
        job.add_sources([source])
        job.add_replica([StillEngine(sink)])
        job.wait_for_replicas()
        fill(source, 0)
        job.sync(0)
        fill(source, 1)
        assert failed_outcome(job, 1)
        assert plan.happened
        heal(job, source, sink)


def test_what_waits_behind_a_failed_version_heals_too() -> None:
    """The next version is queued already when the sink fails one: it waits for that sink."""
    source, sink = {"norm.weight": torch.zeros(8)}, {"norm.weight": torch.zeros(8)}
    engine = StillEngine(sink)
    with LocalJob(Config(transport="tcp")) as job:
        job.add_sources([source])
        job.add_replica([engine])
        job.wait_for_replicas()
        job.sync(0)
        engine.slow_seconds = 0.3
        engine.fail = ["post_load"]
        fill(source, 1)
        first = job.publish(1)
        fill(source, 2)
        second = job.publish(2)  # waits in the queue until the first has failed
        with pytest.raises(VersionError, match="choked"):
            job.wait(first)
        (outcome,) = job.wait(second)
        assert outcome.state == "committed"
        assert differing(source, sink) == []
