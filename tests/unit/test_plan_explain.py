"""The report tells what a person would ask."""

from __future__ import annotations

from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.plan.explain import explain, size
from streamsync.plan.holders import holders_of
from streamsync.plan.plan import CastRule, Rules, Waiver
from streamsync.plan.planner import make_plan


def test_a_report_names_everything_that_is_not_plain() -> None:
    def tensors(*specs: tuple[str, str], ties: dict[str, str] | None = None) -> Layout:
        return Layout(
            tensors=tuple(TensorSpec(name, (1024,), dtype) for name, dtype in specs),
            entries=tuple(
                Entry(i, Box((0,), (1024,)), View(i, 0, (1,)))
                for i, (name, _) in enumerate(specs)
                if name not in (ties or {})
            ),
            ties=ties or {},
            opaque=("model.layers.1.w",) if ties else (),
        )

    source = tensors(*[(f"model.layers.{i}.w", "float32") for i in range(40)], ("value.w", "int8"))
    sink = tensors(
        *[(f"model.layers.{i}.w", "bfloat16") for i in range(40)],
        ("tied.w", "bfloat16"),
        ("draft.w", "bfloat16"),
        ties={"tied.w": "model.layers.0.w"},
    )
    plan = make_plan(
        sink="engine0/0",
        sink_layout=sink,
        holders=holders_of({"trainer/0": source, "trainer/1": source}),
        rules=Rules(
            casts=(CastRule(source="float32", sink="bfloat16"),),
            waivers=(Waiver(pattern="draft.*", reason="no draft model is trained"),),
            unused=("value.*",),
        ),
        bucket_bytes=1 << 20,
        slot=(1, 2),
        membership_epoch=3,
    )
    text = explain(plan)
    for part in (
        "plan of engine0/0, slot 1 of 2: 80.0 KiB of 40 tensors in 40 groups, 40 buckets from 1 "
        "sources",
        "(membership epoch 3)",
        "the busiest sends 1.00 x the mean",
        "trainer/1: 80.0 KiB in 40 buckets, largest 2.0 KiB",
        "opaque, sent whole for the sink's own loader: 1 tensors, 2.0 KiB\n  model.layers.1.w",
        "model.layers.7: 2.0 KiB in 1 buckets",
        "... and 20 more",
        "cast at the source, float32 to bfloat16: 40 tensors",
        "tied.w is model.layers.0.w",
        "draft.w: no draft model is trained",
        "held by a source and not used: 1 tensors\n  value.w",
    ):
        assert part in text, text


def test_an_empty_plan_can_be_told() -> None:
    nothing = Layout(tensors=(), entries=())
    plan = make_plan(
        sink="e/0", sink_layout=nothing, holders=holders_of({}), rules=Rules(), bucket_bytes=1
    )
    assert "0 B of 0 tensors" in explain(plan)


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 29)] == ["0 B", "1023 B", "1.0 KiB", "2.5 GiB"]
