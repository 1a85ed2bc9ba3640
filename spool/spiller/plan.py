"""What a spiller does next. Pure: `spool spill --dry-run` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spool.catalog import PackRow
    from spool.config import SpillWhen

ROUND_PACKS = 8
"""Packs of one stream brought over together: their arrays' documents are written once for all."""


def packs_to_spill(
    packs: Iterable[PackRow],
    *,
    when: SpillWhen,
    requested: Mapping[str, int],
    pressed: bool,
    round_packs: int = ROUND_PACKS,
) -> dict[str, list[int]]:
    """Return which sealed packs go to the cold root now, by stream, each stream's in order.

    Streams come in the order in which their first pack was sealed; those that someone waits for come first.

    Args:
        packs: the sealed ones, in any order.
        when: ``sealed``: all of them; ``pressure``: those that someone waits for, and all where room is short.
        requested: by stream, the last pack that someone waits for.
        pressed: room is short.
        round_packs: most packs of a stream.
    """
    chosen: dict[str, list[PackRow]] = {}
    for row in packs:
        if when == "sealed" or pressed or row.pack <= requested.get(row.stream, -1):
            chosen.setdefault(row.stream, []).append(row)
    for rows in chosen.values():
        rows.sort(key=lambda row: row.pack)
    order = sorted(chosen, key=lambda stream: (stream not in requested, chosen[stream][0].sealed_at or 0.0, stream))
    return {stream: [row.pack for row in chosen[stream][:round_packs]] for stream in order}
