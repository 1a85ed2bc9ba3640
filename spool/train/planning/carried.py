"""Plans that came from elsewhere, as JSON: taken only where their parts fit each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import msgspec

from spool.errors import InputError
from spool.model.rows import MOST
from spool.train.planning.items import items_of
from spool.train.planning.padding import Layout
from spool.train.planning.planner import Plan, lengths_of
from spool.train.planning.shares import SPLITS, MicroBatch, table_of

_CUSTOM = "custom"


def plan_from_json(text: str | bytes) -> Plan:
    """Read a plan back from JSON.

    Raises:
        InputError: the text is not a plan, or one whose parts do not fit each other.
    """
    try:
        found = msgspec.json.decode(text, type=Plan)
    except (msgspec.DecodeError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise InputError(f"this is not a plan, as Plan.to_json() makes them: {error}") from error
    return check_plan(found)


def check_plan(found: Plan) -> Plan:
    """Return a plan, if its parts fit each other.

    Raises:
        InputError: they do not; says what does not.
    """
    items_of(found.items)
    sizes = {len(batches) for batches in found.batches}
    taken = sorted(number for batches in found.batches for batch in batches for number in batch.items)
    for what, fits in (
        (f"{len(found.batches)} data-parallel ranks, its mesh {found.mesh.dp}", len(found.batches) == found.mesh.dp),
        (f"{sorted(sizes)} micro-batches on its ranks", len(sizes) == 1),
        (f"{len(found.items)} items, and not each in one micro-batch", taken == list(range(len(found.items)))),
        (f"split={found.split!r:.80}", found.split in (*SPLITS, _CUSTOM)),
        (f"layout={found.layout!r:.80}", found.layout in get_args(Layout)),
        ("micro-batches with other rows than their items", all(_fits(found, each) for each in found.batches)),
    ):
        if not fits:
            raise InputError(f"this plan is damaged: it has {what}; take it from where it was made again")
    if found.split == _CUSTOM:
        table_of(lambda n_rows, _: found.table.get(n_rows, ()), lengths_of(found.batches), found.mesh.cp)
    return found


def _fits(found: Plan, batches: Iterable[MicroBatch]) -> bool:
    return all(
        batch.rows == tuple(found.items[number].n_rows for number in batch.items)
        and len(batch.padded) == len(batch.rows)
        and all(rows <= padded for rows, padded in zip(batch.rows, batch.padded, strict=True))
        and sum(batch.padded) <= batch.n_rows < MOST
        for batch in batches
    )
