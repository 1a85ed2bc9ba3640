"""Rows -> structs. Every query is read to its end before anything is yielded, so no cursor outlives its lock."""

# ruff: noqa: S608 - every part of these queries is a constant, or made by `where` from constants

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from spool.catalog.database import Execute
from spool.catalog.fold import decode_event, decode_ref
from spool.catalog.rows import LogState, Place, Release, SessionRow, State, Totals, as_reward
from spool.catalog.schema import EVICTED, GONE, SPILLED
from spool.catalog.where import Columns, Filter, check_names, compile_where
from spool.errors import InputError
from spool.model.events import Attached
from spool.model.refs import SegmentRef

PAGE = 256
"""Rows fetched at once while iterating."""

_PLAIN = ("session_id", "group_id", "sample_index", "rollout_step", "source", "prompt_id", "split", "attempt", "prefer",
          "trim", "idle_s", "outcome", "view", "finish_reason", "opened_at", "last_at", "finished_at", "n_steps",
          "n_tokens", "n_generated", "n_segments", "n_nonfinite")  # fmt: skip
_SHARED = ("session_id", "group_id", "sample_index", "rollout_step", "source", "prompt_id", "split", "attempt",
           "outcome", "opened_at", "last_at", "finished_at")  # fmt: skip
_OF_SEGMENT = ("view", "count", "n_tokens", "n_rows", "response_start", "response_length", "trainable_tokens",
               "n_steps", "finish_reason", "n_nonfinite", "cut_tokens", "superseded", "first_version",
               "last_version")  # fmt: skip
_STATE = (
    "(CASE WHEN s.discarded_at IS NOT NULL THEN 'discarded' "
    "WHEN s.finished_at IS NOT NULL THEN 'final' ELSE 'open' END)"
)
_FACT = "(SELECT f.value FROM facts f WHERE f.sid = s.sid AND f.key = ? AND f.target = '')"
_SEGMENT_FACT = (
    "(SELECT f.value FROM facts f WHERE f.sid = g.sid AND f.key = ? AND f.target IN ('', g.target) "
    "ORDER BY f.target DESC LIMIT 1)"
)
_RELEASED = "EXISTS(SELECT 1 FROM releases r WHERE r.sid = g.sid AND r.target = g.target)"

_LIVE = "FROM events e WHERE e.sid = s.sid AND e.slot >= 0 AND e.live"


def _version_of(column: str, pick: str, order: str) -> str:
    """Return the SQL of a session's oldest or newest weight version: by number, else by first appearance."""
    by_step = f"SELECT e.{column} {_LIVE} AND e.{column} IS NOT NULL ORDER BY e.slot {order} LIMIT 1"
    return f"(SELECT iif(max(typeof(e.{column}) = 'text'), ({by_step}), {pick}(e.{column})) {_LIVE})"


OF_STEPS = {
    "n_branches": f"(SELECT count(*) - count(DISTINCT e.parent) {_LIVE})",
    "stored_bytes": f"(SELECT CAST(total(e.n_bytes) AS INTEGER) {_LIVE})",
    "first_version": _version_of("first_version", "min", "ASC"),
    "last_version": _version_of("last_version", "max", "DESC"),
    "n_released": f"(SELECT count(*) FROM segments g WHERE g.sid = s.sid AND g.view = s.view AND {_RELEASED})",
    "tier": (
        "(SELECT CASE WHEN count(p.state) = 0 THEN NULL "
        f"WHEN min(p.state) = {GONE} THEN 'gone' WHEN max(p.state) < {SPILLED} THEN 'hot' "
        f"WHEN min(p.state) = {SPILLED} AND max(p.state) = {SPILLED} THEN 'both' "
        f"WHEN min(p.state) = {EVICTED} AND max(p.state) = {EVICTED} THEN 'cold' ELSE 'mixed' END "
        "FROM uses u JOIN packs p ON p.id = u.pack WHERE u.sid = s.sid AND u.data)"
    ),
}
"""What is worked out from a session's steps, segments and packs whenever it is asked for."""

_OWN_SESSION = (*_PLAIN, "state", "reward", *OF_STEPS)
_OWN_SEGMENT = (*_SHARED, *_OF_SEGMENT, "index", "released", "reward")

_TIMES = ("opened_at", "last_at", "finished_at")
_NUMBERS = ("sample_index", "rollout_step", "attempt", "trim", "idle_s", "n_steps", "n_tokens", "n_generated",
            "n_segments", "n_nonfinite", "count", "n_rows", "response_start", "response_length", "trainable_tokens",
            "cut_tokens", "superseded", "index", "released", "reward", "n_branches", "stored_bytes",
            "n_released")  # fmt: skip
_KINDS: dict[str, Literal["number", "time"]] = {**dict.fromkeys(_NUMBERS, "number"), **dict.fromkeys(_TIMES, "time")}

SESSION = Columns(
    {**{name: f"s.{name}" for name in _PLAIN}, "state": _STATE, "reward": _FACT.replace("?", "'reward'"), **OF_STEPS},
    _FACT,
    {name: "segments" for name in _OWN_SEGMENT if name not in _OWN_SESSION},
    _KINDS,
)
SEGMENT = Columns(
    {
        **{name: f"s.{name}" for name in _SHARED},
        **{name: f"g.{name}" for name in _OF_SEGMENT},
        "index": "g.idx",
        "released": _RELEASED,
        "reward": _SEGMENT_FACT.replace("?", "'reward'"),
    },
    _SEGMENT_FACT,
    {name: "sessions" for name in _OWN_SESSION if name not in _OWN_SEGMENT},
    _KINDS,
)

MOST_NAMES = 100
"""Names of late facts that an error lists."""

LOG = """
SELECT p.id, p.state, ifnull(l.offset, 0), ifnull(l.n_events, 0), ifnull(l.sealed, 0)
FROM packs p LEFT JOIN logs l ON l.id = p.id WHERE p.stream = ? AND p.pack = ?"""
ADD_LOG = "INSERT INTO logs(id, stream, pack) VALUES(?, ?, ?) ON CONFLICT DO NOTHING"
SET_LOG = "UPDATE logs SET offset = ?2, n_events = n_events + ?3, sealed = ?4 WHERE id = ?1"
SET_PACK = """
UPDATE packs SET state = max(ifnull(state, 0), ?2), opened_at = ifnull(opened_at, ?3) WHERE id = ?1"""


def log_states(run: Execute, streams: Sequence[str] | None) -> dict[tuple[str, int], LogState]:
    """Return what is known of each pack's log, of all streams or some; of one that is gone there is nothing to add."""
    sql = (
        "SELECT * FROM (SELECT stream, pack, offset, n_events, sealed FROM logs "
        f"UNION ALL SELECT stream, pack, -1, 0, 1 FROM packs WHERE state = {GONE})"
    )
    if streams is not None:
        found = [row for name in streams for row in run(f"{sql} WHERE stream = ?", (name,))]
    else:
        found = run(sql)
    return {(stream, pack): LogState(offset, n, bool(sealed)) for stream, pack, offset, n, sealed in found}


def session_ids(run: Execute, where: str | None, order: Sequence[str], limit: int | None) -> list[int]:
    """Return the numbers of the opened sessions that match.

    Raises:
        InputError: the filter or the order does not parse.
    """
    match = session_filter(where)
    terms = [order_term(term, SESSION.known) for term in order]
    sql = (
        f"SELECT s.sid FROM sessions s WHERE s.opened_at IS NOT NULL AND {match.sql} "
        f"ORDER BY {', '.join([*terms, 's.session_id'])} LIMIT ?"
    )
    return [sid for (sid,) in run(sql, (*match.values, -1 if limit is None else limit))]


def order_term(term: str, columns: Mapping[str, str]) -> str:
    """Return the SQL of a name to order by.

    Args:
        term: the name, ``-`` in front for descending.
        columns: SQL by name.

    Raises:
        InputError: there is no such column.
    """
    name, descending = (term[1:], " DESC") if term.startswith("-") else (term, "")
    column = columns.get(name)
    if column is None:
        raise InputError(
            f"cannot order by {name!r}; columns: {', '.join(sorted(columns))}, with - in front for descending",
            columns=sorted(columns),
        )
    return column + descending


def session_filter(where: str | None) -> Filter:
    """Return a filter of sessions; of all where None."""
    return _filter(where, SESSION)


def _filter(where: str | None, columns: Columns) -> Filter:
    return compile_where(where, columns) if where is not None else Filter("1")


def check_filter(run: Execute, where: str, columns: Columns) -> None:
    """Refuse a filter that does not parse, or has a name that is neither a column nor a recorded late fact.

    Raises:
        InputError: lists the names there are.
    """

    def is_fact(name: str) -> bool:
        return bool(run("SELECT 1 FROM facts WHERE key = ? LIMIT 1", (name,)))

    def facts() -> list[str]:
        return [key for (key,) in run("SELECT DISTINCT key FROM facts ORDER BY key LIMIT ?", (MOST_NAMES,))]

    check_names(where, columns, is_fact, facts)


def session_rows(run: Execute, sids: Sequence[int]) -> list[SessionRow]:
    """Return sessions by number, in the order given; those whose opening is not known are left out."""
    return list(rows_by_number(run, sids).values())


def rows_by_number(run: Execute, sids: Sequence[int]) -> dict[int, SessionRow]:
    """Return `session_rows` by number."""
    names = ", ".join(f"s.{name}" for name in _PLAIN)
    found = {
        row[0]: row[1:]
        for row in by_id(
            run,
            f"SELECT s.sid, {names}, {_STATE}, s.metadata FROM sessions s",
            "s.opened_at IS NOT NULL AND s.sid",
            sids,
        )
    }
    facts = _facts(run, sids)
    return {sid: _session(found[sid], facts.get((sid, ""), {})) for sid in sids if sid in found}


def _session(row: tuple[Any, ...], facts: dict[str, Any]) -> SessionRow:
    *plain, state, metadata = row
    kind: State = state
    return SessionRow(
        **dict(zip(_PLAIN, plain, strict=True)), state=kind, metadata=msgspec.msgpack.decode(metadata), facts=facts
    )


def segment_ids(run: Execute, where: str | None, view: str | None) -> list[int]:
    """Return the numbers of the segments of opened, finalised, not discarded sessions that match.

    Raises:
        InputError: the filter does not parse.
    """
    match = _filter(where, SEGMENT)
    of_view, values = ("AND g.view = ?", (view,)) if view is not None else ("", ())
    sql = (
        "SELECT g.id FROM segments g JOIN sessions s ON s.sid = g.sid "
        f"WHERE s.discarded_at IS NULL AND s.opened_at IS NOT NULL {of_view} AND {match.sql} "
        "ORDER BY s.finished_at, s.session_id, g.view, g.idx"
    )
    return [number for (number,) in run(sql, (*values, *match.values))]


def segment_refs(run: Execute, ids: Sequence[int]) -> list[SegmentRef]:
    """Return segments by number, in the order given, with what became known later."""
    found = {row[0]: row[1:] for row in by_id(run, "SELECT g.id, g.sid, g.target, g.ref FROM segments g", "g.id", ids)}
    sids = list({sid for sid, _, _ in found.values()})
    facts, attached = _facts(run, sids), _attached(run, sids)
    refs = []
    for number in ids:
        if number in found:
            sid, target, data = found[number]
            late = {**facts.get((sid, ""), {}), **facts.get((sid, target), {})}
            refs.append(with_late(decode_ref(data), late, attached.get((sid, target), ())))
    return refs


def with_late(ref: SegmentRef, facts: dict[str, Any], attached: Iterable[Attached]) -> SegmentRef:
    """Return the reference with late facts and the extents of late arrays merged in."""
    changes: dict[str, Any] = {}
    if facts:
        reward = as_reward(facts.get("reward"))
        if "reward" in facts and (reward is not None or facts["reward"] is None):
            changes["reward"] = reward
            facts = {key: value for key, value in facts.items() if key != "reward"}
        changes["facts"] = {**ref.facts, **facts}
    for event in attached:
        changes["extents"] = {**changes.get("extents", ref.extents), **event.extents}
    return replace(ref, **changes) if changes else ref


def _facts(run: Execute, sids: Sequence[int]) -> dict[tuple[int, str], dict[str, Any]]:
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for sid, target, key, packed in by_id(run, "SELECT sid, target, key, packed FROM facts", "sid", sids):
        merged.setdefault((sid, target), {})[key] = msgspec.msgpack.decode(packed)
    return merged


def _attached(run: Execute, sids: Sequence[int]) -> dict[tuple[int, str], list[Attached]]:
    found: dict[tuple[int, str], list[Attached]] = {}
    for sid, target, data in by_id(run, "SELECT sid, target, event FROM attachments", "sid", sids):
        event = decode_event(data)
        assert isinstance(event, Attached)
        found.setdefault((sid, target), []).append(event)
    return found


def facts_of(run: Execute, sid: int, target: str) -> dict[str, Any]:
    """Return the late facts of a session (``target`` empty) or of one of its segments."""
    return _facts(run, [sid]).get((sid, target), {})


def attachments_of(run: Execute, sid: int) -> tuple[Attached, ...]:
    """Return a session's late arrays, by target and field."""
    return tuple(event for events in _attached(run, [sid]).values() for event in events)


def releases_of(run: Execute, sid: int) -> tuple[Release, ...]:
    """Return a session's releases, by segment and tag."""
    sql = (
        "SELECT r.target, r.tag, r.at, r.tag = 0 OR EXISTS(SELECT 1 FROM checkpoints c WHERE c.tag = r.tag) "
        "FROM releases r WHERE r.sid = ? ORDER BY r.target, r.tag"
    )
    return tuple(Release(target, tag if tag != 0 else None, at, bool(due)) for target, tag, at, due in run(sql, (sid,)))


def n_tagged(run: Execute, tag: str) -> int:
    """Return how many segments are released under a tag."""
    return int(run("SELECT count(*) FROM releases WHERE tag = ?", (tag,))[0][0])


def place_of_tools(run: Execute, key: str) -> Place | None:
    """Return the first place by stream and pack where tool schemas are stored."""
    sql = (
        "SELECT l.stream, l.pack, t.seq, t.offset, t.inner FROM tools t JOIN logs l ON l.id = t.log "
        "WHERE t.key = ? ORDER BY l.stream, l.pack LIMIT 1"
    )
    for stream, pack, seq, offset, inner in run(sql, (key,)):
        return Place(stream=stream, pack=pack, seq=seq, offset=offset, inner=inner)
    return None


def idle_ids(run: Execute, now: float) -> list[str]:
    """Return the ids of open sessions whose last event is older than their ``idle_s``."""
    sql = (
        "SELECT session_id FROM sessions WHERE finished_at IS NULL AND discarded_at IS NULL AND opened_at IS NOT NULL "
        "AND idle_s IS NOT NULL AND last_at + idle_s < ? ORDER BY last_at, session_id"
    )
    return [session_id for (session_id,) in run(sql, (now,))]


def totals(run: Execute, without: str) -> Totals:
    """Return counts over the whole spool, leaving out streams whose names begin with ``without``, if that is a name."""
    logs = "FROM logs WHERE ?1 = '' OR substr(stream, 1, length(?1)) <> ?1"
    kept = "opened_at IS NOT NULL AND discarded_at IS NULL"
    counts = run(
        f"""
        SELECT (SELECT count(DISTINCT stream) {logs}), (SELECT count(*) {logs}), (SELECT total(sealed) {logs}),
            count(*) FILTER (WHERE {kept}), count(*) FILTER (WHERE {kept} AND finished_at IS NULL),
            count(*) FILTER (WHERE {kept} AND finished_at IS NOT NULL),
            count(*) FILTER (WHERE opened_at IS NOT NULL AND discarded_at IS NOT NULL),
            total(n_steps) FILTER (WHERE {kept}), total(n_tokens) FILTER (WHERE {kept}),
            total(n_generated) FILTER (WHERE {kept}), total(n_segments) FILTER (WHERE {kept}) FROM sessions""",
        (without,),
    )[0]
    return Totals(**{name: int(n) for name, n in zip(Totals.__struct_fields__, counts, strict=True)})


def by_id(run: Execute, sql: str, column: str, ids: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield what ``sql`` selects where a column is one of ``ids``, a page of them at a time."""
    for start in range(0, len(ids), PAGE):
        page = ids[start : start + PAGE]
        yield from run(f"{sql} WHERE {column} IN ({', '.join('?' * len(page))})", page)
