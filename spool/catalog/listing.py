"""Queries of who looks at sessions a page at a time, in any order, however many there are."""

# ruff: noqa: S608 - every part of these queries is a constant, or made by `where` from constants

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from spool.catalog.database import Execute
from spool.catalog.query import OF_STEPS, SESSION, by_id, order_term, rows_by_number, session_filter
from spool.catalog.rows import GroupLook, SessionLook
from spool.catalog.where import Value

_OPENED = "s.opened_at IS NOT NULL"
_REWARD = "CASE WHEN typeof({0}) IN ('integer', 'real') THEN {0} END".format(SESSION.known["reward"])
_OF_GROUP = {
    "group_id": "group_id",
    "n_sessions": "total(kept)",
    "n_final": "total(kept AND finished_at IS NOT NULL)",
    "n_discarded": "total(NOT kept)",
    "n_rewards": "count(reward)",
    "reward_min": "min(reward)",
    "reward_mean": "avg(reward)",
    "reward_max": "max(reward)",
    "reward_std": "sqrt(avg((reward - mean) * (reward - mean)))",
    "n_steps": "total(iif(kept, n_steps, 0))",
    "n_tokens": "total(iif(kept, n_tokens, 0))",
    "opened_at": "min(opened_at)",
    "last_at": "max(last_at)",
}
_SUMS = ("n_sessions", "n_final", "n_discarded", "n_rewards", "n_steps", "n_tokens")


def numbers_query(
    where: str | None, order: Sequence[str], *, after: int, discarded: bool, limit: int | None
) -> tuple[str, tuple[Value, ...]]:
    """Return a statement and its values that give the numbers of opened sessions that match, in an order.

    Args:
        where: a filter.
        order: names of columns, or ``number``; ``-`` in front for descending; ties go by arrival.
        after: only those that arrived after this one.
        discarded: withdrawn ones too.
        limit: at most so many.

    Raises:
        InputError: the filter or the order does not parse.
    """
    match = session_filter(where)
    terms = [order_term(term, {**SESSION.known, "number": "s.sid"}) for term in order]
    live = "" if discarded else "AND s.discarded_at IS NULL"
    sql = (
        f"SELECT s.sid FROM sessions s WHERE {_OPENED} AND s.sid > ? {live} AND {match.sql} "
        f"ORDER BY {', '.join([*terms, 's.sid'])} LIMIT ?"
    )
    return sql, (after, *match.values, -1 if limit is None else limit)


def session_looks(run: Execute, numbers: Sequence[int]) -> list[SessionLook]:
    """Return sessions by number, in the order given, as they are now; those that are gone are left out."""
    more = {
        number: values
        for number, *values in by_id(
            run, f"SELECT s.sid, {', '.join(OF_STEPS.values())} FROM sessions s", "s.sid", numbers
        )
    }
    return [
        SessionLook(**msgspec.structs.asdict(row), number=number, **dict(zip(OF_STEPS, more[number], strict=True)))
        for number, row in rows_by_number(run, numbers).items()
        if number in more
    ]


def groups_query(where: str | None, order: Sequence[str], limit: int | None) -> tuple[str, tuple[Value, ...]]:
    """Return a statement and its values that give the groups of opened sessions that match, in an order.

    Raises:
        InputError: the filter or the order does not parse.
    """
    match = session_filter(where)
    terms = [order_term(term, {name: name for name in _OF_GROUP}) for term in order]
    columns = ", ".join(f"{sql} AS {name}" for name, sql in _OF_GROUP.items())
    inner = (
        "SELECT s.group_id, s.n_steps, s.n_tokens, s.opened_at, s.last_at, s.finished_at, "
        f"s.discarded_at IS NULL AS kept, iif(s.discarded_at IS NULL, {_REWARD}, NULL) AS reward "
        f"FROM sessions s WHERE {_OPENED} AND {match.sql}"
    )
    sql = (
        f"SELECT {columns} FROM (SELECT *, avg(reward) OVER (PARTITION BY group_id) AS mean FROM ({inner})) "
        f"GROUP BY group_id ORDER BY {', '.join([*terms, 'group_id'])} LIMIT ?"
    )
    return sql, (*match.values, -1 if limit is None else limit)


def group(row: Sequence[Any]) -> GroupLook:
    """Return a row of `groups_query`."""
    facts = dict(zip(_OF_GROUP, row, strict=True))
    return GroupLook(**{**facts, **{name: int(facts[name]) for name in _SUMS}})


def newest(run: Execute) -> int:
    """Return the number of the session that arrived last; 0 where there is none."""
    return int(run("SELECT ifnull(max(sid), 0) FROM sessions")[0][0])
