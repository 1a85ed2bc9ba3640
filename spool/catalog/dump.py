"""A canonical picture of what the logs feed, to compare two catalogs by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LOG = "JOIN logs l ON l.id = t.log"
_SESSION = "JOIN sessions s ON s.sid = t.sid"
_OF_SESSION = (
    "session_id, group_id, sample_index, rollout_step, source, prompt_id, split, attempt, prefer, trim, idle_s, "
    "metadata, outcome, view, finish_reason, last_index, opened_at, last_at, finished_at, discarded_at, n_steps, "
    "n_tokens, n_generated, n_segments, n_nonfinite"
)
_OF_SEGMENT = (
    "t.view, t.idx, t.target, t.count, t.n_tokens, t.n_rows, t.response_start, t.response_length, t.trainable_tokens, "
    "t.n_steps, t.finish_reason, t.n_nonfinite, t.cut_tokens, t.superseded, t.first_version, t.last_version, t.ref"
)
# ruff: noqa: S608 - every part of these queries is a constant of this module
_QUERIES = {
    "logs": "SELECT stream, pack, n_events, sealed FROM logs",
    "sessions": f"SELECT {_OF_SESSION} FROM sessions",
    "events": "SELECT s.session_id, t.slot, t.kind, t.live, t.at, l.stream, l.pack, t.seq, t.inner, t.n_new, "
    f"t.n_generated, t.n_nonfinite, t.parent, t.first_version, t.last_version, t.event FROM events t {_LOG} {_SESSION}",
    "segments": f"SELECT s.session_id, {_OF_SEGMENT} FROM segments t {_SESSION}",
    "facts": "SELECT s.session_id, t.key, t.target, t.value, t.packed, t.at, l.stream, l.pack, t.seq, t.inner "
    f"FROM facts t {_LOG} {_SESSION}",
    "attachments": "SELECT s.session_id, t.target, t.field, t.event, t.at, l.stream, l.pack, t.seq, t.inner "
    f"FROM attachments t {_LOG} {_SESSION}",
    "releases": f"SELECT s.session_id, t.target, t.tag, t.at FROM releases t {_SESSION}",
    "checkpoints": f"SELECT t.tag, t.at, l.stream, l.pack FROM checkpoints t {_LOG}",
    "uses": "SELECT s.session_id, p.stream, p.pack, l.stream, l.pack, t.data FROM uses t "
    f"JOIN packs p ON p.id = t.pack JOIN logs l ON l.id = t.via {_SESSION}",
    "tools": f"SELECT t.key, l.stream, l.pack, t.seq, t.inner FROM tools t {_LOG}",
    "units": f"SELECT s.session_id, t.key, l.stream, l.pack FROM units t {_LOG} {_SESSION}",
}


def dump(run: Callable[..., list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return what events feed, numbers of the database's own replaced by names, sorted.

    The tiers that packs are in and the objects that were taken in are left out: a hot and a cold root differ there.
    """
    return {table: sorted(run(sql), key=repr) for table, sql in _QUERIES.items()}
