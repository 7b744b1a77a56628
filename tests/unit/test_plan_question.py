"""What a sink asks for: everything that could feed it, by whatever name, and nothing else."""

from __future__ import annotations

from streamsync.layout.region import Box, Entry, Layout, TensorSpec, View
from streamsync.plan.plan import Rename, Rules
from streamsync.plan.question import question, source_names

EMBED, HEAD = "model.embed.weight", "lm_head.weight"


def layout(*names: str, ties: dict[str, str] | None = None, numel: int = 4) -> Layout:
    box = Box((0,), (numel,))
    return Layout(
        tensors=tuple(TensorSpec(name, (4,), "bfloat16") for name in names),
        entries=tuple(
            Entry(i, box, View(i, 0, (1,)))
            for i, name in enumerate(names)
            if name not in (ties or {})
        ),
        ties=ties or {},
    )


def asked(sink: Layout, rules: Rules) -> set[str]:
    return {name for record in question(sink, rules) for name in record.names()}


def test_only_what_has_entries_is_asked_for() -> None:
    sink = layout("layers.0.w", "layers.1.w")
    sink = Layout(tensors=sink.tensors, entries=sink.entries[:1])
    (record,) = question(sink, Rules())
    assert list(record.names()) == ["layers.0.w"]
    assert record.boxes == (Box((0,), (4,)),)
    assert question(layout("w", numel=0), Rules()) == ()


def test_layers_that_are_cut_alike_are_one_record() -> None:
    assert len(question(layout(*[f"layers.{i}.w" for i in range(9)]), Rules())) == 1


def test_a_renamed_tensor_is_asked_for_by_the_sources_name() -> None:
    rules = Rules(renames=(Rename(source="a.", sink="b."), Rename(source="c.", sink="b.")))
    assert source_names("b.w", rules) == ["b.w", "a.w", "c.w"]
    assert source_names("a.w", rules) == [], "a source's a.w is called b.w here"
    assert source_names("d.w", rules) == ["d.w"]


def test_a_rename_behind_an_earlier_one_is_not_asked_for() -> None:
    """The first rule that matches is applied."""
    rules = Rules(renames=(Rename(source="a.x.", sink="c."), Rename(source="a.", sink="b.")))
    assert source_names("b.x.w", rules) == ["b.x.w"], "a.x.w becomes c.w"
    assert source_names("b.y.w", rules) == ["b.y.w", "a.y.w"]


def test_a_tie_is_asked_for_by_both_names() -> None:
    """Case 12."""
    assert asked(layout(EMBED, HEAD, ties={HEAD: EMBED}), Rules()) == {EMBED, HEAD}
    assert asked(layout(HEAD), Rules(ties={HEAD: EMBED})) == {EMBED, HEAD}
    rules = Rules(ties={HEAD: EMBED}, renames=(Rename(source="policy.", sink="model."),))
    assert asked(layout(HEAD), rules) == {HEAD, EMBED, "policy.embed.weight"}


def test_what_is_outside_of_the_subset_is_not_asked_for() -> None:
    """Case 13."""
    assert asked(layout("a.w", "b.w"), Rules(subset=("b.*",))) == {"b.w"}
