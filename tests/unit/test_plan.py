"""What a plan refuses and what it lets pass, by name."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from streamsync.errors import LayoutError, PlanError
from streamsync.layout.outline import Record
from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View, contiguous_strides
from streamsync.plan.check import check_share, check_source
from streamsync.plan.explain import explain
from streamsync.plan.holders import HolderClass, Holders, holders_of
from streamsync.plan.plan import CastRule, Plan, Rename, Rules, Waiver
from streamsync.plan.planner import make_plan
from streamsync.plan.resolve import resolve

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def layout(
    *tensors: tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], str],
    rows: dict[str, tuple[int, int]] | None = None,
    ties: dict[str, str] | None = None,
) -> Layout:
    """Whole contiguous tensors, or of those in `rows` only rows [a, b); aliases without entries."""
    specs, entries = [], []
    for i, (name, shape, *dtype) in enumerate(tensors):
        specs.append(TensorSpec(name, shape, dtype[0] if dtype else "bfloat16"))
        if name in (ties or {}):
            continue
        box = Box.whole(shape)
        if rows and name in rows:
            a, b = rows[name]
            box = Box((a, *box.start[1:]), (b - a, *shape[1:]))
        entries.append(Entry(i, box, View(i, 0, contiguous_strides(box.shape))))
    return Layout(tensors=tuple(specs), entries=tuple(entries), ties=ties or {})


def plan(
    sink: Layout, *sources: Layout, rules: Rules | None = None, bucket_bytes: int = 1 << 22
) -> Plan:
    return make_plan(
        sink="engine0/0",
        sink_layout=sink,
        holders=holders_of({f"trainer/{k}": source for k, source in enumerate(sources)}),
        rules=rules or Rules(),
        bucket_bytes=bucket_bytes,
    )


def storages(done: Plan, layout: Layout, *, at_source: bool) -> list[int]:
    """The storages that the plan's only share touches at one end, in the order of its pieces."""
    (share,) = done.shares
    views = resolve(share, layout, at_source=at_source)
    return [view.storage for bucket in views for view in bucket]


def refusal(*args: Layout, rules: Rules | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        plan(*args, rules=rules)
    assert caught.value.where["rank"] == "engine0/0"
    return str(caught.value)


def test_a_hole_names_the_missing_rows() -> None:
    """Case 5: one of four shards is missing."""
    name = "model.layers.3.mlp.up_proj.weight"
    shards = [layout((name, (32, 8)), rows={name: (8 * k, 8 * k + 8)}) for k in range(4) if k != 1]
    text = refusal(layout((name, (32, 8))), *shards)
    assert f"{name} bfloat16[32, 8]: no source holds rows 8:16 of 32" in text
    assert "the sink needs everything" in text
    assert "the sources hold rows 0:8 of 32 by trainer/0, rows 16:24 of 32 by trainer/1, " in text
    assert f"tensor={name}" in text


def test_a_hole_in_columns_names_the_box() -> None:
    whole = layout(("w", (4, 6)))
    part = Layout(
        tensors=whole.tensors, entries=(Entry(0, Box((0, 0), (4, 5)), View(0, 0, (5, 1))),)
    )
    assert "no source holds box [0:4, 5:6]" in refusal(whole, part)


def test_a_tensor_nobody_holds_a_byte_of_is_a_hole() -> None:
    empty = Layout(tensors=layout(("w", (4, 6))).tensors, entries=())
    text = refusal(layout(("w", (4, 6))), empty)
    assert "no source holds everything; the sink needs everything; held by nobody" in text


def test_a_prefix_between_names_is_refused_with_the_rule_that_helps() -> None:
    """Case 10: both lists are shown; with the suggested rule it works."""
    names = [f"layers.{i}.weight" for i in range(30)]
    source = layout(*[("model." + name, (4,)) for name in names], (HEAD, (8,)))
    sink = layout(*[("language_model.model." + name, (4,)) for name in names], (HEAD, (8,)))
    text = refusal(sink, source)
    assert "30 of 31 tensors needed by the sink, held by no source" in text
    assert "  language_model.model.layers.0.weight bfloat16[4]" in text
    assert "30 tensors held by a source, needed by no sink" in text
    assert "  model.layers.0.weight bfloat16[4]" in text
    assert text.count("... and 20 more") == 2
    assert 'add Rename(source="model.", sink="language_model.model.") (pairs 30 of them)' in text
    rules = Rules(renames=(Rename(source="model.", sink="language_model.model."),))
    done = plan(sink, source, rules=rules)
    assert done.needed_bytes == 30 * 8 + 16
    assert {t.name for t in done.tensors} == {t.name for t in sink.tensors}


@pytest.mark.parametrize(
    ("source", "sink", "rule"),
    [
        ("model.a.w", "a.w", ("model.a.", "a.")),
        ("a.w", "model.a.w", ("a.", "model.a.")),
        ("policy.model.a.w", "model.a.w", ("policy.model.", "model.")),
    ],
)
def test_the_suggested_rename_never_has_an_empty_side(
    source: str, sink: str, rule: tuple[str, str]
) -> None:
    text = refusal(layout((sink, (4,))), layout((source, (4,))))
    assert f'Rename(source="{rule[0]}", sink="{rule[1]}")' in text
    plan(
        layout((sink, (4,))),
        layout((source, (4,))),
        rules=Rules(renames=(Rename(source=rule[0], sink=rule[1]),)),
    )


def test_renaming_two_tensors_to_one_name_is_refused() -> None:
    rules = Rules(renames=(Rename(source="a.", sink="b."),))
    text = refusal(layout(("b.w", (4,))), layout(("a.w", (4,)), ("b.w", (4,))), rules=rules)
    assert "two names of the sources are renamed to it" in text


def test_112_of_113_tensors_are_not_enough() -> None:
    """Case 11: refused, unless the missing name is waived with a reason."""
    tensors = [(f"model.layers.{i}.w", (4,)) for i in range(113)]
    sink, source = layout(*tensors), layout(*tensors[:-1])
    text = refusal(sink, source)
    assert "1 of 113 tensors needed by the sink, held by no source" in text
    assert "model.layers.112.w bfloat16[4]" in text
    waiver = Waiver(pattern="model.layers.112.*", reason="frozen")
    done = plan(sink, source, rules=Rules(waivers=(waiver,)))
    assert done.left == {"model.layers.112.w": "frozen"}
    assert done.needed_bytes == 112 * 8
    assert "model.layers.112" not in done.groups


def test_a_waived_tensor_that_a_source_sends_is_sent() -> None:
    both = layout(("a.w", (4,)), ("b.w", (4,)))
    waiver = Waiver(pattern="*", reason="may stay")
    assert plan(both, both, rules=Rules(waivers=(waiver,))).left == {}
    rules = Rules(waivers=(waiver,), unused=("b.*",))
    done = plan(both, both, rules=rules)
    assert done.left == {"b.w": "may stay"}
    assert done.unused == ()
    assert done.needed_bytes == 8


def test_a_waiver_does_not_hide_a_hole() -> None:
    waiver = Waiver(pattern="*", reason="any")
    part = layout(("w", (4,)), rows={"w": (0, 2)})
    assert "rows 2:4 of 4" in refusal(layout(("w", (4,))), part, rules=Rules(waivers=(waiver,)))


def test_extra_source_tensors_need_a_rule() -> None:
    sink, source = layout(("a.w", (4,))), layout(("a.w", (4,)), ("value_head.w", (2, 2), "float32"))
    text = refusal(sink, source)
    assert "value_head.w float32[2, 2]" in text
    assert "Rules.unused" in text
    done = plan(sink, source, rules=Rules(unused=("value_head.*",)))
    assert done.unused == ("value_head.w",)


def test_a_tensor_listed_without_entries_is_needed_elsewhere() -> None:
    """Another rank of the replica holds it: neither missing nor extra here."""
    sink = layout(("a.w", (4,)), ("b.w", (4,)))
    sink = Layout(tensors=sink.tensors, entries=sink.entries[:1])
    done = plan(sink, layout(("a.w", (4,)), ("b.w", (4,))))
    assert [t.name for t in done.tensors] == ["a.w"]
    plan(sink, layout(("a.w", (4,))))


SMALL = (EMBED, (6, 4))
OTHER = (HEAD, (6, 4))


def test_tied_at_the_sink_is_sent_once() -> None:
    """Case 12: whichever of the two names the source has."""
    sink = layout(SMALL, OTHER, ties={HEAD: EMBED})
    for source in (layout(SMALL), layout(OTHER), layout(SMALL, OTHER, ties={HEAD: EMBED})):
        done = plan(sink, source)
        assert done.needed_bytes == 48
        assert [t.name for t in done.tensors] == [EMBED]
        assert done.aliases == {HEAD: EMBED}
        assert done.shadowed == {}


def test_untied_at_the_source_and_tied_at_the_sink() -> None:
    """Case 12: the sink's own name decides; the other source tensor's values go unused, and the
    plan says so."""
    source = layout(SMALL, OTHER)
    done = plan(layout(SMALL, OTHER, ties={HEAD: EMBED}), source)
    assert done.shadowed == {HEAD: EMBED}
    assert f"{HEAD} (fed by {EMBED})" in explain(done)
    assert storages(done, source, at_source=True) == [0]


@pytest.mark.parametrize("ties", [{HEAD: EMBED}, {EMBED: HEAD}])
def test_tied_at_the_source_and_untied_at_the_sink(ties: dict[str, str]) -> None:
    """Case 12: both copies are fed from the one memory."""
    sink, source = layout(SMALL, OTHER), layout(SMALL, OTHER, ties=ties)
    done = plan(sink, source)
    assert done.needed_bytes == 96
    assert [t.name for t in done.tensors] == [EMBED, HEAD]
    assert len(set(storages(done, source, at_source=True))) == 1
    assert storages(done, sink, at_source=False) == [0, 1]


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_the_other_name_of_a_tied_source_is_not_extra(name: str) -> None:
    """Case 12: a sink that knows only one of the two names."""
    source = layout(SMALL, OTHER, ties={HEAD: EMBED})
    assert plan(layout((name, (6, 4))), source).needed_bytes == 48


def test_a_rule_ties_what_the_source_does_not_list() -> None:
    rules = Rules(ties={HEAD: EMBED})
    assert HEAD in refusal(layout(SMALL, OTHER), layout(SMALL))
    done = plan(layout(SMALL, OTHER), layout(SMALL), rules=rules)
    assert done.needed_bytes == 96
    source = layout(SMALL, OTHER)
    done = plan(layout(SMALL, OTHER), source, rules=rules)
    assert set(storages(done, source, at_source=True)) == {0}


def test_a_partial_update_must_be_declared() -> None:
    """Case 13: what belongs to the subset is proved as ever, all else stays as it is."""
    sink, source = layout(("a.w", (4,)), ("b.w", (4,))), layout(("b.w", (4,)))
    assert "Rules.subset" in refusal(sink, source)
    done = plan(sink, source, rules=Rules(subset=("b.*",)))
    assert done.left == {"a.w": "outside of the declared subset"}
    assert done.groups == ("b",)
    assert done.needed_bytes == 8
    assert plan(sink, sink, rules=Rules(subset=("b.*",))).left == done.left, "also if it is sent"


def test_a_subset_is_covered_or_refused() -> None:
    """Case 9, 13: neither a hole in it, nor a missing tensor, nor a pattern of nothing passes."""
    names = ("model.layers.0.w", "mtp.layers.0.w")
    sink = layout(*[(name, (4,)) for name in names])
    rules = Rules(subset=("mtp.*",))
    part = layout((names[1], (4,)), rows={names[1]: (0, 3)})
    assert "rows 3:4 of 4" in refusal(sink, part, rules=rules)
    assert names[1] in refusal(sink, layout((names[0], (4,))), rules=rules)
    text = refusal(sink, sink, rules=Rules(subset=("draft.*",)))
    assert "draft.*" in text
    assert "would move nothing" in text


def test_a_subset_may_name_either_of_two_tied_tensors() -> None:
    """Case 12, 13."""
    sink = layout(SMALL, OTHER, ("a.w", (4,)), ties={HEAD: EMBED})
    for name in (EMBED, HEAD):
        done = plan(sink, layout(SMALL), rules=Rules(subset=(name,)))
        assert done.needed_bytes == 48
        assert list(done.left) == ["a.w"]


def test_absent_experts_are_told_apart_from_unknown_names() -> None:
    """Case 4: an engine with redundant experts (EPLB), or a trainer rank that is absent."""
    names = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(6)]
    sink = layout(*[(name, (4,)) for name in names])
    text = refusal(sink, layout(*[(name, (4,)) for name in names[:4]]))
    assert f"2 of 6 tensors needed by the sink, held by no source:\n  {names[4]}" in text
    assert "the sources number others of them" in text
    assert "EPLB" in text
    assert "EPLB" not in refusal(layout(("a.w", (4,))), layout(("b.w", (4,))))


def test_fp32_masters_need_a_cast_rule() -> None:
    """Case 16, and 15: a pattern keeps the router's bias out of it."""
    bias = "model.layers.0.gate.e_score_correction_bias"
    sink = layout(("a.w", (4,)), (bias, (4,), "float32"))
    source = layout(("a.w", (4,), "float32"), (bias, (4,), "float32"))
    text = refusal(sink, source)
    assert "1 of 2 tensors of another dtype at the source" in text
    assert "a.w bfloat16[4], float32 at the sources" in text
    assert 'CastRule(source="float32", sink="bfloat16", pattern="...")' in text
    rules = Rules(casts=(CastRule(source="float32", sink="bfloat16", pattern="*.w"),))
    done = plan(sink, source, rules=rules)
    assert [(t.source_dtype, t.wire_dtype) for t in done.tensors] == [
        ("float32", "bfloat16"),
        ("float32", "float32"),
    ]
    assert done.needed_bytes == 8 + 16


def test_tensors_that_are_cut_alike_may_differ_in_dtype() -> None:
    """One record at the source, cast for one layer only."""
    names = [f"layers.{i}.w" for i in range(2)]
    source = layout(*[(name, (16,), "float32") for name in names])
    sink = layout((names[0], (16,)), (names[1], (16,), "float32"))
    rules = Rules(casts=(CastRule(source="float32", sink="bfloat16"),))
    done = plan(sink, source, rules=rules, bucket_bytes=16)
    (share,) = done.shares
    check_share(share)
    assert [bucket.nbytes for bucket in share.buckets] == [16] * 6


def test_integers_keep_their_dtype() -> None:
    """Case 20: a rule for floats says nothing of an index map."""
    rules = Rules(casts=(CastRule(source="float32", sink="bfloat16"),))
    text = refusal(layout(("m", (4,), "int32")), layout(("m", (4,), "int64")), rules=rules)
    assert "m int32[4], int64 at the sources" in text


def test_shapes_must_agree() -> None:
    text = refusal(layout((EMBED, (64, 8))), layout((EMBED, (60, 8))))
    assert f"{EMBED} bfloat16[64, 8], bfloat16[60, 8] at the sources" in text
    assert "factor" not in text


def test_head_counts_that_do_not_fit_are_told() -> None:
    """Case 3: key value heads that one side counts once and the other once per rank."""
    name = "model.layers.0.self_attn.k_proj.weight"
    text = refusal(layout((name, (64, 8))), layout((name, (16, 8))))
    assert f"{name} bfloat16[64, 8], bfloat16[16, 8] at the sources" in text
    assert "dim 0 differs by a factor of 4: compare the numbers of heads" in text


def test_sources_must_agree_with_each_other() -> None:
    text = refusal(layout(("w", (8,))), layout(("w", (8,))), layout(("w", (8,), "float32")))
    assert "w bfloat16[8] at trainer/0, w float32[8] at trainer/1" in text


def test_one_source_with_two_values_for_one_box_is_refused() -> None:
    """Case 4: an expert's local number was taken for its global one."""
    one = layout(("w", (8,)))
    again = Entry(0, one.entries[0].box, View(7, 0, (1,)))
    twice = Layout(tensors=one.tensors, entries=(*one.entries, again))
    with pytest.raises(LayoutError, match=r"\[0:8\] of it is held in two places") as caught:
        check_source("trainer/0", twice)
    assert caught.value.where["tensor"] == "w"
    same = Layout(tensors=one.tensors, entries=one.entries * 2)
    check_source("trainer/0", same)
    assert plan(one, same).needed_bytes == 16


def test_a_sink_that_asks_twice_is_refused() -> None:
    one = layout(("w", (8, 2)))
    more = Entry(0, Box((3, 0), (2, 2)), View(1, 0, (2, 1)))
    twice = Layout(tensors=one.tensors, entries=(*one.entries, more))
    text = refusal(twice, one)
    assert (
        "w: rows 3:5 of 8 in two of its entries; the sink lists everything, rows 3:5 of 8" in text
    )
    alike = [(f"layers.{i}.w", (8,)) for i in range(3)]
    doubled = layout(*alike)
    doubled = Layout(tensors=doubled.tensors, entries=doubled.entries * 2)
    assert "3 tensors asked for twice" in refusal(doubled, layout(*alike))
    scalar = layout(("s", ()))
    assert "s: everything in two" in refusal(
        Layout(tensors=scalar.tensors, entries=scalar.entries * 2), scalar
    )


@pytest.mark.parametrize(
    "entry",
    [
        Entry(1, Box((0,), (4,)), View(0, 0, (1,))),
        Entry(-1, Box((0,), (4,)), View(0, 0, (1,))),
        Entry(0, Box((0,), (5,)), View(0, 0, (1,))),
        Entry(0, Box((-1,), (4,)), View(0, 0, (1,))),
        Entry(0, Box((0, 0), (4,)), View(0, 0, (1,))),
        Entry(0, Box((0,), (4,)), View(0, 0, ())),
    ],
)
def test_a_malformed_layout_is_refused(entry: Entry) -> None:
    """Case 41: a layout may come from anybody."""
    good = layout(("w", (4,)))
    bad = Layout(tensors=good.tensors, entries=(entry,))
    with pytest.raises(LayoutError, match="of trainer/0: "):
        check_source("trainer/0", bad)
    assert "malformed layout" in refusal(bad, good)


@pytest.mark.parametrize(
    "record",
    [
        Record("w", (), (4,), "bfloat16", (Box((0,), (5,)),)),
        Record("w", (), (4,), "bfloat16", (Box((-1,), (4,)),)),
        Record("w", (), (4,), "bfloat16", (Box((0, 0), (4, 1)),)),
        Record("w", (), (4,), "bfloat16", (Box((0,), (4, 1)),)),
        Record("w.{}", (), (4,), "bfloat16", (Box((0,), (4,)),)),
        Record("w", (((0, 1),),), (4,), "bfloat16", (Box((0,), (4,)),)),
    ],
)
def test_malformed_outlines_are_refused(record: Record) -> None:
    """Case 41: what the hub answers may come from anybody."""
    listed = Record("w", (), (4,), "bfloat16")
    for held, catalogue, ranks in (
        ((record,), (listed,), (0,)),
        ((listed,), (record,), (0,)),
        ((listed,), (listed,), (1,)),
        ((listed,), (listed,), (-1,)),
    ):
        holders = Holders(
            ranks=("trainer/0",),
            classes=(HolderClass(ranks, "", held),),
            catalogue=catalogue,
        )
        with pytest.raises(PlanError, match="malformed layout"):
            make_plan(
                sink="e/0",
                sink_layout=layout(("w", (4,))),
                holders=holders,
                rules=Rules(),
                bucket_bytes=64,
            )


def test_a_malformed_tie_or_name_is_refused() -> None:
    good = layout(("w", (4,)))
    for ties in ({"v": "w"}, {"w": "v"}, {"w": "w"}):
        bad = Layout(tensors=good.tensors, entries=(), ties=ties)
        assert "tied to" in refusal(bad, good)
        with pytest.raises(LayoutError, match="tied to"):
            check_source("trainer/0", bad)
    assert "listed twice" in refusal(layout(("w", (4,)), ("w", (4,))), good)
    assert "entries of its own" in refusal(
        msgspec.structs.replace(layout(SMALL, OTHER), ties={HEAD: EMBED}), layout(SMALL)
    )
    odd = layout(SMALL, (HEAD, (6, 5)), ties={HEAD: EMBED})
    assert "is tied to" in refusal(odd, layout(SMALL))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PlanError, match="complex64"):
        plan(layout(("w", (4,), "complex64")), layout(("w", (4,), "complex64")))


def test_bucket_bytes_below_one_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 1"):
        plan(layout(("w", (4,))), layout(("w", (4,))), bucket_bytes=0)


def test_all_findings_are_told_at_once() -> None:
    text = refusal(
        layout(("a", (4,)), ("b", (4,)), ("c", (4,))),
        layout(("b", (5,)), ("c", (4,), "float32"), ("d", (4,))),
    )
    for part in ("a bfloat16[4]", "bfloat16[5]", "float32 at", "d bfloat16[4]"):
        assert part in text


def test_scalars_and_empty_tensors() -> None:
    """Case 24."""
    tensors = [("s", ()), ("e", (0,)), ("f", (0, 4)), ("w", (3, 4))]
    done = plan(layout(*tensors), layout(*tensors), layout(*tensors, rows={"w": (3, 3)}))
    assert done.needed_bytes == 2 + 24
    assert [t.name for t in done.tensors] == ["s", "e", "f", "w"]
    assert done.groups == ("s", "w")
    nothing = plan(Layout(tensors=(), entries=()), Layout(tensors=(), entries=()))
    assert nothing.needed_bytes == 0
    assert nothing.shares == ()


def test_an_empty_tensor_does_not_bring_its_group_forward() -> None:
    """Case 24: groups are in the order in which bytes of them are needed."""
    tensors = [("layers.0.e", (0, 4)), ("b.w", (4,)), ("layers.0.w", (4,))]
    done = plan(layout(*tensors), layout(*tensors))
    assert done.groups == done.shares[0].groups == ("b", "layers.0")


def test_a_huge_embedding_with_default_settings() -> None:
    """Case 22: 2.5 GiB in buckets of 4 MiB."""
    rows, columns = 262_144, 5_120
    done = plan(layout((EMBED, (rows, columns))), layout((EMBED, (rows, columns))))
    (share,) = done.shares
    assert share.nbytes == 5 << 29
    assert share.max_bucket_bytes <= 1 << 22
    assert len(share.buckets) < 660


def test_20000_tiny_tensors_stay_linear() -> None:
    """Case 25: function calls, not seconds: 4 times the tensors cost about 4 times the calls."""

    def tiny(num_tensors: int) -> Layout:
        return layout(*[(f"model.layers.{i // 10}.w{i % 10}", (24,)) for i in range(num_tensors)])

    def num_calls(num_tensors: int) -> int:
        tensors = layout(
            *[(f"model.layers.{i // 10}.w{i % 10}", (24,)) for i in range(num_tensors)]
        )
        count = 0

        def called(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(called)
        try:
            plan(tensors, tensors, tensors)
        finally:
            sys.setprofile(None)
        return count

    num_calls(10)
    assert num_calls(800) < 4.5 * num_calls(200)
    tensors = tiny(20_000)
    assert plan(tensors, tensors).needed_bytes == 20_000 * 48


def test_both_ends_know_their_share_by_one_digest() -> None:
    sink, source = layout(("a.w", (4, 4)), ("b.w", (4,))), layout(("a.w", (4, 4)), ("b.w", (4,)))
    moved = layout(("b.w", (4,)), ("a.w", (4, 4)))
    one, other = plan(sink, source), plan(sink, moved)
    assert one.shares[0].digest == other.shares[0].digest, "where it lies doesn't count"
    assert one.layout_digests["engine0/0"] == other.layout_digests["engine0/0"]
    assert one.layout_digests["trainer/0"] != other.layout_digests["trainer/0"]
    smaller = plan(sink, source, bucket_bytes=8)
    assert smaller.shares[0].digest != one.shares[0].digest


def test_replicas_of_equal_layout_share_their_frames() -> None:
    """Neither the ranks' names nor the membership epoch count."""
    tensors = layout(("a.w", (4,)))
    digests = [
        make_plan(
            sink=sink,
            sink_layout=tensors,
            holders=holders_of({"trainer/0": tensors}),
            rules=Rules(),
            bucket_bytes=64,
            membership_epoch=epoch,
        )
        .shares[0]
        .digest
        for sink, epoch in (("engine0/0", 1), ("engine1/0", 1), ("engine1/0", 2))
    ]
    assert len(set(digests)) == 1


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "from streamsync.layout.region import *\n"
        "from streamsync.plan.holders import holders_of\n"
        "from streamsync.plan.plan import Rules\n"
        "from streamsync.plan.planner import make_plan\n"
        "a = Layout(tensors=(TensorSpec('a.w', (4,), 'bfloat16'),),"
        " entries=(Entry(0, Box((0,), (4,)), View(0, 0, (1,))),))\n"
        "p = make_plan(sink='engine0/0', sink_layout=a, holders=holders_of({'trainer/0': a}),"
        " rules=Rules(), bucket_bytes=64)\n"
        "print(p.shares[0].digest)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    tiny = layout(("a.w", (4,)))
    assert int(ran.stdout) == plan(tiny, tiny).shares[0].digest


def test_a_plan_survives_the_wire() -> None:
    tensors = layout(("a.w", (4, 4)), ("s", ()))
    done = plan(tensors, tensors)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(done), type=Plan) == done
