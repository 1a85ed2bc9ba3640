"""From a planned step and the rows written for it to its event. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from spool.formats.messages import join_messages
from spool.intake import Intake, content_key
from spool.model.events import Event, Single, StepCommitted, Transaction
from spool.model.fields import FieldSpec, Schema
from spool.model.refs import Extent
from spool.rollout.coverage import Range
from spool.rollout.plan import AppendPlan

if TYPE_CHECKING:
    from spool.write.stream import Run

Runs = Mapping[str, tuple["Run", ...]]
"""Rows written, by stored array."""


class StepDraft(Struct, frozen=True):
    """Everything about a step but where its rows went."""

    session_id: str
    schema: Schema
    plan: AppendPlan
    intake: Intake
    finish_reason: str | None
    signature: bytes
    inherited_messages: int
    metadata: dict[str, Any]

    def event(self, runs: Runs, stream: str) -> StepCommitted:
        """Return the event that commits the step, its rows being ``runs`` of ``stream``."""
        plan, intake = self.plan, self.intake
        return StepCommitted(
            session_id=self.session_id,
            index=plan.index,
            step_id=plan.step_id,
            at=time.time(),
            parent=plan.parent,
            base=plan.base,
            n_prompt=plan.n_prompt,
            n_tokens=plan.n_tokens,
            n_rows=plan.n_rows,
            extents=added_extents(self.schema, plan, runs, stream),
            versions=intake.versions,
            finish_reason=self.finish_reason,
            units=plan.units,
            n_nonfinite=intake.n_nonfinite,
            block_hashes=plan.block_hashes,
            prompt_hash=plan.prompt_hash,
            end_hashes=plan.end_hashes,
            signature=self.signature,
            inherited_messages=self.inherited_messages,
            messages=join_messages(intake.messages[self.inherited_messages :]),
            tools_key=content_key(intake.tools) if intake.tools else None,
            metadata=self.metadata,
            cleared=intake.cleared,
        )


def together(*events: Single | None) -> Event:
    """Return the events that are there as one that holds together."""
    present = tuple(event for event in events if event is not None)
    return present[0] if len(present) == 1 else Transaction(present)


def added_extents(schema: Schema, plan: AppendPlan, runs: Runs, stream: str) -> dict[str, tuple[Extent, ...]]:
    """Return what a step adds to its parent's chain, by stored array: the rows in ``runs`` and those it shares."""
    added: dict[str, tuple[Extent, ...]] = {}
    for spec in schema.fields:
        if not plan.shared and not spec.ragged:
            if found := place(stream, runs.get(spec.name, ()), plan.store.get(spec.name, ())):
                added[spec.name] = tuple(found)
            continue
        names = [array.name for array in spec.arrays]
        shared = zip(*(plan.shared.get(name, ()) for name in names), strict=True)
        pairs = sorted(
            [*shared, *_written(spec, plan.store.get(spec.name, ()), runs, stream)], key=lambda pair: pair[0].position
        )
        if pairs:
            added.update(zip(names, zip(*pairs, strict=True), strict=True))
    return added


def _written(spec: FieldSpec, ranges: Sequence[Range], runs: Runs, stream: str) -> list[tuple[Extent, ...]]:
    """Return the extents of a field's new rows; of a ragged one each with the whole of the values written with it."""
    if not spec.ragged:
        return [(extent,) for extent in place(stream, runs.get(spec.name, ()), ranges)]
    values = runs.get(f"{spec.name}.values", ())
    whole = Extent(stream, values[0].row, values[0].n, 0, values[0].crc) if values else Extent(stream, 0, 0, 0, 0)
    offsets = place(stream, runs.get(f"{spec.name}.offsets", ()), ranges)
    return [(extent, whole.at(extent.position)) for extent in offsets]


def place(stream: str, runs: Sequence[Run], ranges: Sequence[Range]) -> list[Extent]:
    """Lay ``ranges`` of positions, one after the other, over ``runs`` of rows."""
    extents, pending = [], list(ranges)[::-1]
    for run in runs:
        used = 0
        while used < run.n:
            wanted = pending.pop()
            n = min(wanted.n, run.n - used)
            extents.append(Extent(stream, run.row + used, n, wanted.position, run.crc, used, run.n - used - n))
            if n < wanted.n:
                pending.append(Range(wanted.position + n, wanted.n - n))
            used += n
    return extents
