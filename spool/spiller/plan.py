"""What a spiller does next. Pure: `spool spill --dry-run` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from spool.write.space import GRANT_BYTES

if TYPE_CHECKING:
    from spool.catalog import PackRow
    from spool.config import SpillWhen

HIGH, LOW = 0.85, 0.75
"""Of ``hot_bytes``: above the first packs are evicted until below the second."""
DISK_LEFT, MOST_LEFT_BYTES = 0.05, 1 << 30
"""What is to be left free on the disk: a part of it, at most so much."""

ANY_PACK = 1 << 40
"""In a request: whichever pack is open; for room, and served as soon as it is rolled."""

ROUND_PACKS = 8
"""Packs of one stream brought over together: their arrays' documents are written once for all."""
ROUND_BYTES = 512 << 20
"""Of packs that are brought over before the next look at who waits and how much room there is."""


def packs_to_spill(
    packs: Iterable[PackRow],
    *,
    when: SpillWhen,
    requested: Mapping[str, int],
    pressed: bool,
    round_bytes: int = ROUND_BYTES,
) -> dict[str, list[int]]:
    """Return which sealed packs go to the cold root now, by stream, each stream's in order.

    Those that someone waits for come alone and first, then streams in the order in which their first pack was sealed.

    Args:
        packs: the sealed ones, in any order.
        when: ``sealed``: all of them; ``pressure``: those that someone waits for, and all where room is short.
        requested: by stream, the last pack that someone waits for.
        pressed: room is short.
        round_bytes: most bytes, but for the first pack.
    """
    rows = list(packs)
    waited = [row for row in rows if row.pack <= requested.get(row.stream, -1)]
    chosen: dict[str, list[PackRow]] = {}
    for row in waited or (rows if when == "sealed" or pressed else ()):
        chosen.setdefault(row.stream, []).append(row)
    for of_stream in chosen.values():
        of_stream.sort(key=lambda row: row.pack)
    order = sorted(chosen, key=lambda stream: (chosen[stream][0].sealed_at or 0.0, stream))
    return _round({stream: chosen[stream][:ROUND_PACKS] for stream in order}, round_bytes)


def _round(chosen: Mapping[str, list[PackRow]], most_bytes: int) -> dict[str, list[int]]:
    """Return the first packs of every stream, then their second ones and so on, up to ``most_bytes``."""
    left, found = most_bytes, dict[str, list[int]]()
    for turn in range(max(map(len, chosen.values()), default=0)):
        for stream, rows in chosen.items():
            if turn < len(rows) and (left > 0 or not found):
                found.setdefault(stream, []).append(rows[turn].pack)
                left -= rows[turn].hot_bytes or 0
    return found


class Pressure(NamedTuple):
    """How full the hot tier is, in bytes.

    Attributes:
        used: what is taken.
        high: above it packs are evicted.
        low: until so many are left.
        limit: what may be taken.
    """

    used: int
    high: int
    low: int
    limit: int

    @property
    def is_high(self) -> bool:
        """Whether room is to be made."""
        return self.used > self.high


def watermarks(limit: int, *, wanted: int = 0) -> tuple[int, int]:
    """Return above how many bytes of a limit packs are evicted, and until how many are left.

    Args:
        limit: ``hot_bytes``.
        wanted: bytes that somebody waits for.
    """
    low = min(int(LOW * limit), limit - 2 * GRANT_BYTES, limit - wanted - GRANT_BYTES)
    return min(int(HIGH * limit), limit - GRANT_BYTES), max(0, low)


def pressure(*, taken: int, limit: int | None, wanted: int, disk_total: int, disk_free: int) -> Pressure:
    """Return how full the hot tier is: measured against its limit, or against the disk where that is fuller.

    It counts as full when another grant would not fit, and when somebody waits for room.

    Args:
        taken: bytes that all streams have reserved.
        limit: ``hot_bytes``; None for none.
        wanted: bytes that somebody waits for; 0 where nobody does.
        disk_total, disk_free: bytes of the hot root's file system.
    """
    left = min(max(int(DISK_LEFT * disk_total), 2 * GRANT_BYTES), disk_total // 2, MOST_LEFT_BYTES)
    used, high = disk_total - disk_free, disk_total - left
    by_disk = Pressure(used, high, disk_total - left - max(left // 2, wanted), disk_total)
    if limit is None:
        return _wanted(by_disk) if wanted and disk_free < left + wanted else by_disk
    by_limit = Pressure(taken, *watermarks(limit, wanted=wanted), limit)
    if wanted and taken + wanted > limit:
        by_limit = _wanted(by_limit)
    return by_disk if by_disk.is_high and not by_limit.is_high else by_limit


def _wanted(found: Pressure) -> Pressure:
    """Return the same, high whatever the watermark says."""
    return found._replace(high=min(found.high, found.used - 1), low=min(found.low, found.used - 1))
