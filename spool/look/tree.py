"""A session's steps as an ordered, indented tree: chains, branches and superseded retries, and which segments use them.

Where several steps extend one, all but the heaviest are shown as side branches, indented by one; the heaviest goes on
where its parent stands, last. So a chain of any length has no depth, and a tree of *n* steps is at most log2(*n*) deep.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from spool.model.fields import TOKEN_IDS
from spool.model.refs import StepRef

if TYPE_CHECKING:
    from spool.model.refs import SegmentRef

Kind = Literal["start", "branch", "next"]
"""``start``: a chain begins; ``branch``: a side branch; ``next``: its parent's chain goes on."""


class StepLook(Struct, frozen=True, kw_only=True, gc=False):
    """What is shown of a step in a tree.

    Attributes:
        index, step_id, parent: as in its reference.
        n_prompt, n_response: tokens.
        n_new: tokens of the prompt that its parent's chain does not have.
        finish_reason: as the engine gave it.
        versions: weight versions of what it generated, in order.
        n_nonfinite: NaN and infinite logprobs.
        ref: its reference with as few extents as its messages and tools are found by; it is not for reading.
    """

    index: int
    step_id: str
    parent: int | None
    n_prompt: int
    n_response: int
    n_new: int
    finish_reason: str | None
    versions: tuple[str, ...]
    n_nonfinite: int
    ref: StepRef


class TreeRow(Struct, frozen=True, kw_only=True, gc=False):
    """A line of a tree.

    Attributes:
        step: the step.
        kind: how it stands to the line above.
        depth: side branches that it is in.
        n_children: steps that extend it.
        superseded: a later step repeats its request.
        segments: indexes of the segments of the view that have it.
    """

    step: StepLook
    kind: Kind
    depth: int
    n_children: int
    superseded: bool = False
    segments: tuple[int, ...] = ()


def step_looks(steps: Sequence[StepRef]) -> list[StepLook]:
    """Return what is shown of steps. Most of their extents are let go: of a chain they grow with its square."""
    lengths = {step.index: step.n_tokens for step in steps}
    # each step's own rows come last: so all streams are seen, without a look at every extent of every chain
    streams = {extent.stream for step in steps for extents in step.extents.values() for extent in extents[-1:]}
    return [
        StepLook(
            index=step.index,
            step_id=step.step_id,
            parent=step.parent,
            n_prompt=step.response_start,
            n_response=step.response_length,
            n_new=max(step.response_start - lengths.get(-1 if step.parent is None else step.parent, 0), 0),
            finish_reason=step.finish_reason,
            versions=tuple(dict.fromkeys(span.version for span in step.versions)),
            n_nonfinite=step.n_nonfinite,
            ref=_light(step, len(streams) > 1),
        )
        for step in steps
    ]


def _light(step: StepRef, several: bool) -> StepRef:
    """Return a reference that names the same step, and the streams that it is in, by one extent each."""
    own = step.extents.get(TOKEN_IDS.name, ())[-1:]
    named = {extent.stream: extent for extents in step.extents.values() for extent in extents} if several else {}
    others = tuple(extent for stream, extent in named.items() if not own or stream != own[0].stream)
    return replace(step, extents={TOKEN_IDS.name: (*others, *own)}, inline={})


def tree_rows(
    steps: Sequence[StepLook], segments: Sequence[SegmentRef] = (), superseded: Collection[int] = ()
) -> list[TreeRow]:
    """Return the lines of a tree, from its roots.

    Args:
        steps: in the order of append: a parent comes before its children.
        segments: of a view.
        superseded: indexes of the leaves whose request a later step repeats.
    """
    by_index = {step.index: step for step in steps}
    children: dict[int | None, list[int]] = {}
    for step in steps:
        # a parent that was withdrawn with its pack leaves its children as roots
        children.setdefault(step.parent if step.parent in by_index else None, []).append(step.index)
    weights = _weights(steps)
    users = _users(segments)
    rows: list[TreeRow] = []
    waiting: list[tuple[int, int, Kind]] = [(root, 0, "start") for root in reversed(children.get(None, []))]
    while waiting:
        index, depth, kind = waiting.pop()
        below = children.get(index, [])
        rows.append(
            TreeRow(
                step=by_index[index],
                kind=kind,
                depth=depth,
                n_children=len(below),
                superseded=index in superseded,
                segments=users.get(index, ()),
            )
        )
        if below:
            main = max(below, key=lambda child: (weights[child], child))
            waiting.append((main, depth, "next"))
            waiting += [(child, depth + 1, "branch") for child in reversed(below) if child != main]
    return rows


def rails(row: TreeRow) -> str:
    """Return the lines in front of a step that say where it hangs; two cells for each branch that it is in."""
    return "│ " * (row.depth - 1) + "├─" if row.kind == "branch" else "│ " * row.depth


def glyph(row: TreeRow) -> str:
    """Return a sign for what a step is: where a chain begins, a retry that was repeated, an end, a step within."""
    if row.superseded:
        return "✗"
    if row.kind == "start":
        return "◆"
    return "●" if row.n_children else "■"


def superseded_steps(kept: Sequence[SegmentRef]) -> frozenset[int]:
    """Return the leaves that are superseded, of the ``lineage`` with ``superseded="keep"`` and ``gaps="keep"``."""
    return frozenset(segment.steps[-1] for segment in kept if segment.superseded and segment.steps)


def _weights(steps: Sequence[StepLook]) -> Mapping[int, int]:
    """Return how many steps hang on each, itself among them."""
    weights = {step.index: 1 for step in steps}
    for step in reversed(steps):
        if step.parent in weights:
            weights[step.parent] += weights[step.index]
    return weights


def _users(segments: Sequence[SegmentRef]) -> Mapping[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for segment in segments:
        for step in segment.steps:
            found.setdefault(step, []).append(segment.index)
    return {step: tuple(indexes) for step, indexes in found.items()}
