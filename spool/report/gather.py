"""What a report shows, gathered from a spool: counted by the index, but for the routing of a sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from spool.catalog.shape import Summary
from spool.errors import NotFoundError, ReleasedError, SpoolError
from spool.look.routing import RoutingSummary
from spool.look.stats import sample_routing

if TYPE_CHECKING:
    from spool.catalog import SessionRow
    from spool.handle import Spool

N_SAMPLED = 48
"""Segments whose routing is counted, and how many forward rows of each at most."""
MOST_ROWS = 4096
N_EXTREMES = 5

_STANDS_OUT = (
    ("n_tokens", "most tokens", "tokens", 1),
    ("n_steps", "most steps", "steps", 2),
    ("n_branches", "most branches", "branches", 2),
    ("n_nonfinite", "NaN or infinite logprobs", "values", 1),
)
"""Columns of sessions, how the most of them are called, and from how many on they are worth a line."""

_BYTES = ("sent_bytes", "stored_bytes", "file_bytes", "cold_bytes")


class FieldBytes(Struct, frozen=True, kw_only=True):
    """Bytes of a field.

    Attributes:
        field: its name.
        sent_bytes: as engines send it, routing of all layers as int32; None for what is not sent, as records.
        stored_bytes: the same rows as they are stored.
        hot_bytes, cold_bytes: what files and objects take; None where there is no such tier.
    """

    field: str
    sent_bytes: int | None
    stored_bytes: int | None
    hot_bytes: int | None
    cold_bytes: int | None


class Extreme(Struct, frozen=True, kw_only=True):
    """A session that stands out, and in what."""

    why: str
    value: str
    row: Any


class Report(Struct, frozen=True, kw_only=True):
    """What a report shows.

    Attributes:
        facts: of the spool, by name.
        made_at: seconds since the epoch.
        summary: what the index counts.
        fields: bytes of the whole spool by field, the largest first.
        routing: of the sample, by model's shape, the one with most rows first.
        n_sampled: segments of the sample.
        extremes: sessions that stand out.
        problems: what could not be looked at, and why.
    """

    facts: dict[str, Any]
    made_at: float
    summary: Summary
    fields: tuple[FieldBytes, ...] = ()
    routing: tuple[RoutingSummary, ...] = ()
    n_sampled: int = 0
    extremes: tuple[Extreme, ...] = ()
    problems: tuple[str, ...] = ()


def gather(sp: Spool, where: str | None = None) -> Report:
    """Return what a report of a spool shows; memory does not grow with it.

    Payload that was deleted or damaged, and a tier that cannot be reached, are told on the page.

    Args:
        sp: the spool.
        where: a filter of sessions; bytes are of the whole spool all the same.

    Raises:
        InputError: the filter does not parse.
        StorageError: the spool itself cannot be read.
    """
    summary = sp.summary(where)
    problems: list[str] = []
    fields = _attempt(problems, "bytes", lambda: _fields(sp.usage(quick=True)), ())
    routing, n_sampled = _routing(sp, where, problems)
    return Report(
        facts=sp.info(),
        made_at=time.time(),
        summary=summary,
        fields=fields,
        routing=routing,
        n_sampled=n_sampled,
        extremes=tuple(_extremes(sp, where)),
        problems=tuple(problems),
    )


def _attempt(problems: list[str], what: str, call: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return call()
    except SpoolError as error:
        problems.append(f"{what}: {error}")
        return otherwise


def _fields(rows: Iterable[dict[str, Any]]) -> tuple[FieldBytes, ...]:
    sums: dict[str, dict[str, int | None]] = {}
    for row in rows:
        own = sums.setdefault(row["field"], dict.fromkeys(_BYTES))
        for name in _BYTES:
            if row[name] is not None:
                own[name] = (own[name] or 0) + row[name]
    found = (
        FieldBytes(
            field=field,
            sent_bytes=own["sent_bytes"],
            stored_bytes=own["stored_bytes"],
            hot_bytes=own["file_bytes"],
            cold_bytes=own["cold_bytes"],
        )
        for field, own in sums.items()
    )
    return tuple(sorted(found, key=lambda own: -max(own.sent_bytes or 0, own.hot_bytes or 0, own.cold_bytes or 0)))


def _routing(sp: Spool, where: str | None, problems: list[str]) -> tuple[tuple[RoutingSummary, ...], int]:
    models: dict[Any, RoutingSummary] = {}
    refs, lost = sp.sample(N_SAMPLED, where), 0
    for ref in refs:
        try:
            sampled = sample_routing(sp, [ref], rows=slice(0, MOST_ROWS))
        except (ReleasedError, NotFoundError):
            lost += 1
            continue
        except SpoolError as error:
            problems.append(f"routing of {ref.id}: {error}")
            continue
        lost += sampled.n_released
        for model in sampled.models:
            models[model.shape] = models.get(model.shape, RoutingSummary.none()).add(model)
    if lost:
        problems.append(f"routing: {lost} of {len(refs)} sampled segments were deleted")
    counted = [model for model in models.values() if model.n_rows]
    return tuple(sorted(counted, key=lambda model: -model.n_rows)), len(refs)


def _extremes(sp: Spool, where: str | None) -> Iterable[Extreme]:
    for column, why, what, least in _STANDS_OUT:
        listing = sp.listing(where, order=(f"-{column}",), discarded=False, limit=N_EXTREMES)
        for row in listing.rows(0, N_EXTREMES):
            if getattr(row, column) >= least:
                yield Extreme(why=why, value=f"{getattr(row, column):,} {what}", row=row)
    for slow in sp.slowest(where, limit=N_EXTREMES):
        if slow.last_at > slow.opened_at:
            yield Extreme(why="took longest", value=_duration(slow), row=slow)


def _duration(row: SessionRow) -> str:
    seconds = row.last_at - row.opened_at
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:,.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"
