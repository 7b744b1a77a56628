"""A plan, told to a person. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from streamsync.plan.refusal import head

if TYPE_CHECKING:
    from streamsync.plan.plan import Plan

_MAX_LINES: Final = 20


def explain(plan: Plan) -> str:
    """A report of several lines: totals, sources and their balance, opaque tensors, groups, casts,
    ties, and what stays as it is."""
    shares = plan.shares
    num_buckets = sum(len(share.buckets) for share in shares)
    index, count = plan.slot
    lines = [
        f"plan of {plan.sink}, slot {index} of {count}: {size(plan.needed_bytes)} of "
        f"{len(plan.tensors)} tensors in {len(plan.groups)} groups, {num_buckets} buckets from "
        f"{len(shares)} sources (membership epoch {plan.membership_epoch})"
    ]
    if shares:
        most = max(share.nbytes for share in shares)
        ratio = most * len(shares) / plan.needed_bytes
        lines.append(f"sources (the busiest sends {ratio:.2f} x the mean):")
        lines += _list(
            [
                f"{share.source}: {size(share.nbytes)} in {len(share.buckets)} buckets, "
                f"largest {size(share.max_bucket_bytes)}"
                for share in shares
            ]
        )
    if plan.opaque:
        lines.append(
            f"opaque, sent whole for the sink's own loader: {len(plan.opaque)} tensors, "
            f"{size(plan.opaque_bytes)}"
        )
        lines += _list(list(plan.opaque))
    nbytes: Counter[str] = Counter()
    buckets: Counter[str] = Counter()
    for share in shares:
        for bucket in share.buckets:
            nbytes[share.groups[bucket.group]] += bucket.nbytes
            buckets[share.groups[bucket.group]] += 1
    lines.append("groups, in forward order:")
    lines += _list([f"{g}: {size(nbytes[g])} in {buckets[g]} buckets" for g in plan.groups])
    casts: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    made = [tensor.name for tensor in plan.tensors if tensor.conversion is not None]
    if made:
        lines.append(f"quantised at the source: {len(made)} tensors, scales counted")
        lines += _list(made)
    if plan.wide:
        lines.append("quantised at the sink, as a cut of the sources goes through their blocks:")
        lines += _list(
            [f"{wide.values or wide.scales}, sent in {wide.dtype}" for wide in plan.wide]
        )
    for tensor in plan.tensors:
        if tensor.source_dtype != tensor.wire_dtype and tensor.conversion is None:
            casts[tensor.source_dtype, tensor.wire_dtype].append(tensor.name)
    for (source, sink), names in sorted(casts.items()):
        lines.append(
            f"cast at the source, {source} to {sink}: {len(names)} tensors, {names[0]} ..."
        )
    if plan.aliases:
        lines.append("tied at the sink, sent once:")
        lines += _list([f"{alias} is {name}" for alias, name in sorted(plan.aliases.items())])
    if plan.shadowed:
        lines.append("tied at the sink, but held apart at a source, whose values go unused:")
        lines += _list([f"{alias} (fed by {n})" for alias, n in sorted(plan.shadowed.items())])
    if plan.left:
        lines.append(f"left as they are: {len(plan.left)} tensors")
        lines += _list([f"{name}: {reason}" for name, reason in sorted(plan.left.items())])
    if plan.unused:
        lines.append(f"held by a source and not used: {len(plan.unused)} tensors")
        lines += _list(list(plan.unused))
    return "\n".join(lines)


def size(nbytes: int) -> str:
    """`513 B`, `4.0 MiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}"


def _list(items: list[str]) -> list[str]:
    return [f"  {item}" for item in head(items, _MAX_LINES)]
