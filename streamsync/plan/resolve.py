"""Where the pieces of a share lie at one end: boxes back to views, through that end's layout. Pure.

A source resolves what a sink asks for through its own layout alone, so that nothing else can ever
be read or sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamsync.layout.region import Layout, View
    from streamsync.plan.plan import Share

Views = list[list["View"]]
"""One view per piece, in lists per bucket."""


def resolve(share: Share, layout: Layout, *, at_source: bool) -> Views:
    """The view of every piece of `share` in `layout`: of its source name there, or of its own name
    at the sink; an alias resolves to the memory it is tied to.

    Raises `PlanError` for a box that no single entry of the layout contains, and for a tensor of
    another shape or dtype.
    """
    raise NotImplementedError
