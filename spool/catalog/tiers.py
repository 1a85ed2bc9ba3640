"""Queries about packs and about which sessions they matter to."""

# ruff: noqa: S608 - every part of these queries is a constant of this module

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spool.catalog.database import Execute
from spool.catalog.rows import PackRow, PackState, PackUse, SessionEnd
from spool.catalog.schema import GONE, STATES

PAGE = 256

_ROW = (
    "SELECT p.stream, p.pack, p.state, p.hot_bytes, p.stored_bytes, p.opened_at, p.sealed_at, p.gone_at, p.reason, "
    "ifnull(l.n_events, 0), ifnull(l.sealed, 0), p.id FROM packs p LEFT JOIN logs l ON l.id = p.id "
    "WHERE p.state IS NOT NULL"
)
_USES = """
SELECT u.pack, s.session_id, max(u.data) FROM uses u JOIN sessions s ON s.sid = u.sid GROUP BY u.pack, u.sid"""
_HELD = """
SELECT g.sid, count(*) FROM segments g JOIN sessions s ON s.sid = g.sid AND s.view = g.view
WHERE NOT EXISTS(SELECT 1 FROM releases r WHERE r.sid = g.sid AND r.target = g.target
    AND (r.tag = 0 OR EXISTS(SELECT 1 FROM checkpoints c WHERE c.tag = r.tag)))
GROUP BY g.sid"""
_ENDS = """
SELECT sid, session_id, CASE WHEN discarded_at IS NOT NULL THEN 'discarded' WHEN opened_at IS NULL THEN 'unknown'
    WHEN finished_at IS NOT NULL THEN 'final' ELSE 'open' END, outcome, finished_at, last_at, contested FROM sessions"""


def pack_rows(run: Execute, state: PackState | None, stream: str | None) -> list[PackRow]:
    """Return packs by stream and number, of one state or all, of one stream or all."""
    sql, values = _ROW, list[Any]()
    if state is not None:
        sql, values = f"{sql} AND p.state = ?", [STATES.index(state)]
    if stream is not None:
        sql, values = f"{sql} AND p.stream = ?", [*values, stream]
    return [_row(row) for row in run(f"{sql} ORDER BY p.stream, p.pack", values)]


def pack_row(run: Execute, stream: str, pack: int) -> PackRow | None:
    """Return a pack, or None where nothing is known of it."""
    found = run(f"{_ROW} AND p.stream = ? AND p.pack = ?", (stream, pack))
    return _row(found[0]) if found else None


def _row(row: tuple[Any, ...]) -> PackRow:
    stream, pack, state, hot_bytes, stored_bytes, opened_at, sealed_at, gone_at, reason, n_events, known, _ = row
    return PackRow(
        stream=stream,
        pack=pack,
        state=STATES[state],
        hot_bytes=hot_bytes,
        stored_bytes=stored_bytes,
        opened_at=opened_at,
        sealed_at=sealed_at,
        gone_at=gone_at,
        reason=reason,
        n_events=n_events,
        known=bool(known),
    )


def packs_of(run: Execute, session_ids: Sequence[str]) -> set[tuple[str, int]]:
    """Return the packs that sessions use and that are not gone."""
    found: set[tuple[str, int]] = set()
    for start in range(0, len(session_ids), PAGE):
        page = session_ids[start : start + PAGE]
        found.update(
            run(
                "SELECT DISTINCT p.stream, p.pack FROM sessions s JOIN uses u ON u.sid = s.sid "
                f"JOIN packs p ON p.id = u.pack WHERE s.session_id IN ({', '.join('?' * len(page))}) "
                f"AND p.state IS NOT {GONE}",
                page,
            )
        )
    return found


def uses(run: Execute, first: int, last: int) -> list[PackUse]:
    """Return the packs of states ``first`` to ``last`` and the sessions that they matter to."""
    data: dict[int, list[str]] = {}
    facts: dict[int, list[str]] = {}
    for pack, session_id, is_data in run(_USES):
        (data if is_data else facts).setdefault(pack, []).append(session_id)
    tags: dict[int, list[str]] = {}
    for log, tag in run("SELECT log, tag FROM checkpoints ORDER BY log, tag"):
        tags.setdefault(log, []).append(tag)
    rows = run(f"{_ROW} AND p.state BETWEEN ? AND ? ORDER BY p.stream, p.pack", (first, last))
    return [
        PackUse(_row(row), tuple(data.get(row[-1], ())), tuple(facts.get(row[-1], ())), tuple(tags.get(row[-1], ())))
        for row in rows
    ]


def session_ends(run: Execute) -> dict[str, SessionEnd]:
    """Return how far each session is from being over, by id."""
    held: dict[int, int] = dict(run(_HELD))
    tags: dict[int, list[str]] = {}
    for sid, tag in run("SELECT DISTINCT sid, tag FROM releases WHERE tag <> 0 ORDER BY sid, tag"):
        tags.setdefault(sid, []).append(tag)
    return {
        session_id: SessionEnd(
            state, outcome, ended_at, held.get(sid, 0), tuple(tags.get(sid, ())), last_at, bool(contested)
        )
        for sid, session_id, state, outcome, ended_at, last_at, contested in run(_ENDS)
    }
