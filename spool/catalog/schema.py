"""The tables of a catalog, their version, and what the numbers in them mean."""

from __future__ import annotations

import apsw

from spool.catalog.rows import PackState

APPLICATION_ID = 0x53504F4C
VERSION = 5
CACHE, BULK_CACHE = -2000, -262_144
"""KiB, negative as SQLite takes them; in a large transaction pages that do not fit are written and read again."""

# Slots of a session's events: steps and their withdrawals have the step's index, the others these.
LATE, OPEN, FINAL, DISCARD = -4, -3, -2, -1

# What a pack has become; it only goes forward.
STATES: tuple[PackState, ...] = ("open", "sealed", "spilled", "evicted", "gone")
OPENED, SEALED, SPILLED, EVICTED, GONE = range(5)

# Numbers of sessions and segments are never used again within a generation: who iterates fetches by number, page after
# page. SQLite keeps the last one used in a table of its own, which is where the generation is kept, too.
TABLES = """
CREATE TABLE packs(
    id INTEGER PRIMARY KEY, stream TEXT NOT NULL, pack INTEGER NOT NULL, state INTEGER,
    hot_bytes INTEGER, stored_bytes INTEGER, opened_at REAL, sealed_at REAL, gone_at REAL, reason TEXT,
    UNIQUE(stream, pack));
CREATE TABLE logs(
    id INTEGER PRIMARY KEY, stream TEXT NOT NULL, pack INTEGER NOT NULL, offset INTEGER NOT NULL DEFAULT 0,
    n_events INTEGER NOT NULL DEFAULT 0, sealed INTEGER NOT NULL DEFAULT 0, UNIQUE(stream, pack));
CREATE TABLE uses(
    pack INTEGER NOT NULL, sid INTEGER NOT NULL, via INTEGER NOT NULL, data INTEGER NOT NULL,
    PRIMARY KEY(pack, sid, via)) WITHOUT ROWID;
CREATE INDEX uses_of ON uses(sid);
CREATE INDEX uses_via ON uses(via) WHERE via <> pack;
CREATE TABLE sessions(
    sid INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE,
    group_id TEXT, sample_index INTEGER, rollout_step INTEGER, source TEXT, prompt_id TEXT, split TEXT, attempt INTEGER,
    prefer TEXT, trim INTEGER, idle_s REAL, metadata BLOB,
    outcome TEXT, view TEXT, finish_reason TEXT, last_index INTEGER,
    opened_at REAL, last_at REAL, finished_at REAL, discarded_at REAL,
    n_steps INTEGER NOT NULL DEFAULT 0, n_tokens INTEGER NOT NULL DEFAULT 0, n_generated INTEGER NOT NULL DEFAULT 0,
    n_segments INTEGER NOT NULL DEFAULT 0, n_nonfinite INTEGER NOT NULL DEFAULT 0,
    contested INTEGER NOT NULL DEFAULT 0);
CREATE INDEX sessions_group ON sessions(group_id) WHERE group_id IS NOT NULL;
CREATE INDEX sessions_rollout ON sessions(rollout_step) WHERE rollout_step IS NOT NULL;
CREATE INDEX sessions_open ON sessions(last_at) WHERE finished_at IS NULL AND discarded_at IS NULL;
CREATE TABLE events(
    id INTEGER PRIMARY KEY, sid INTEGER NOT NULL, slot INTEGER NOT NULL, kind TEXT NOT NULL, live INTEGER NOT NULL,
    at REAL, log INTEGER NOT NULL, seq INTEGER NOT NULL, inner INTEGER NOT NULL, offset INTEGER NOT NULL,
    n_new INTEGER NOT NULL, n_generated INTEGER NOT NULL, n_nonfinite INTEGER NOT NULL,
    parent INTEGER, n_bytes INTEGER NOT NULL, first_version, last_version, event BLOB NOT NULL);
CREATE INDEX events_of ON events(sid, slot);
CREATE TABLE segments(
    id INTEGER PRIMARY KEY AUTOINCREMENT, sid INTEGER NOT NULL, view TEXT NOT NULL, idx INTEGER NOT NULL,
    target TEXT NOT NULL,
    count INTEGER, n_tokens INTEGER, n_rows INTEGER, response_start INTEGER, response_length INTEGER,
    trainable_tokens INTEGER, n_steps INTEGER, finish_reason TEXT, n_nonfinite INTEGER, cut_tokens INTEGER,
    superseded INTEGER, first_version, last_version, ref BLOB NOT NULL, UNIQUE(sid, view, idx));
CREATE TABLE facts(
    sid INTEGER NOT NULL, key TEXT NOT NULL, target TEXT NOT NULL, value, packed BLOB NOT NULL,
    at REAL, log INTEGER NOT NULL, seq INTEGER NOT NULL, inner INTEGER NOT NULL,
    PRIMARY KEY(sid, key, target)) WITHOUT ROWID;
CREATE TABLE attachments(
    sid INTEGER NOT NULL, target TEXT NOT NULL, field TEXT NOT NULL, event BLOB NOT NULL,
    at REAL, log INTEGER NOT NULL, seq INTEGER NOT NULL, inner INTEGER NOT NULL,
    PRIMARY KEY(sid, target, field)) WITHOUT ROWID;
CREATE TABLE releases(
    sid INTEGER NOT NULL, target TEXT NOT NULL, tag NOT NULL, at REAL, PRIMARY KEY(sid, target, tag)) WITHOUT ROWID;
CREATE TABLE checkpoints(tag TEXT NOT NULL, log INTEGER NOT NULL, at REAL, PRIMARY KEY(tag, log)) WITHOUT ROWID;
CREATE TABLE tools(
    key TEXT NOT NULL, log INTEGER NOT NULL, seq INTEGER NOT NULL, inner INTEGER NOT NULL, offset INTEGER NOT NULL,
    PRIMARY KEY(key, log)) WITHOUT ROWID;
CREATE TABLE units(
    log INTEGER NOT NULL, sid INTEGER NOT NULL, key TEXT NOT NULL, PRIMARY KEY(log, sid, key)) WITHOUT ROWID;
CREATE INDEX units_of ON units(sid);
CREATE TABLE objects(key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE requests(stream TEXT PRIMARY KEY, pack INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE space(stream TEXT PRIMARY KEY, n_bytes INTEGER NOT NULL) WITHOUT ROWID;
"""

FED = (
    "packs", "logs", "uses", "sessions", "events", "segments", "facts", "attachments", "releases", "checkpoints",
    "tools", "units", "objects",
)  # fmt: skip
"""The tables that files make again; `space` and `requests` are not among them."""

NEEDED = ("events_of", "uses_via")
"""Indexes that feeding itself looks up in."""


def begin_generation(connection: apsw.Connection) -> None:
    """Note that numbers of sessions and segments mean others from now on."""
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'generation'")
    connection.execute("INSERT INTO sqlite_sequence(name, seq) VALUES('generation', random())")


GENERATION = "SELECT seq FROM sqlite_sequence WHERE name = 'generation'"
"""Something that changes with what the numbers mean, and stays the same in a copy."""


def drop_indexes(connection: apsw.Connection) -> list[str]:
    """Drop the indexes of an empty catalog that filling it does not need; return the statements that make them."""
    if connection.execute("SELECT EXISTS(SELECT 1 FROM events)").get:
        return []
    sql = "SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL"
    chosen = [(str(name), str(made)) for name, made in connection.execute(sql) if name not in NEEDED]
    for name, _ in chosen:
        connection.execute(f"DROP INDEX {name}")
    return [made for _, made in chosen]


def make_indexes(connection: apsw.Connection, statements: list[str]) -> None:
    """Make the indexes that `drop_indexes` dropped."""
    for statement in statements:
        connection.execute(statement)


def check(connection: apsw.Connection, *, whole: bool) -> list[str]:
    """Return what is wrong with the database, nothing where it is sound; ``whole`` compares the indexes too."""
    found = connection.execute(f"PRAGMA {'integrity_check' if whole else 'quick_check'}").fetchall()
    return [str(text) for (text,) in found if text != "ok"]
