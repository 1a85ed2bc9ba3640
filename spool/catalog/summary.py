"""Totals, shares, histograms and series over all sessions, counted by SQLite: a row of a bin or a name comes back."""

# ruff: noqa: S608 - every part of these queries is a constant, or made by `where` from constants

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spool.catalog.bins import EXACT, edges, filled, gathered, steps
from spool.catalog.database import Execute
from spool.catalog.fold import version_column
from spool.catalog.query import SESSION
from spool.catalog.shape import (
    Bin,
    Counts,
    Histogram,
    Period,
    RolloutPoint,
    Share,
    Staleness,
    Summary,
    Timeline,
)
from spool.catalog.where import Filter, Value, compile_where

MOST_NAMES = 20
"""Sources or finish reasons that are told apart; the rest are counted together."""
MOST_BINS = 24
MOST_STEPS = 200
MOST_PERIODS = 120
"""Most bins of a distribution, of a series by rollout step, and of one by time."""
_PERIODS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400, 604_800)
_REWARD = "LEFT JOIN facts f ON f.sid = s.sid AND f.key = 'reward' AND f.target = ''"
_IS_REWARD = "typeof(f.value) IN ('integer', 'real')"
_KEPT = "s.opened_at IS NOT NULL AND s.discarded_at IS NULL"


def summary(run: Execute, where: str | None = None, current_version: str | None = None) -> Summary:
    """Return the shape of a run; memory does not grow with it.

    Args:
        run: runs a statement.
        where: a filter of sessions; see `spool.catalog.where`.
        current_version: what staleness is counted from; the newest at the time of each segment where None.

    Raises:
        InputError: the filter does not parse.
    """
    match = compile_where(where, SESSION) if where is not None else Filter("1")
    asked = _Asked(run, match)
    return Summary(
        where=where,
        totals=_totals(asked),
        outcomes=_shares(asked, "s.outcome"),
        sources=_shares(asked, "s.source"),
        finish_reasons=_shares(asked, "s.finish_reason"),
        tokens=_growing(asked, "s.n_tokens", asked.sessions),
        steps=_growing(asked, "s.n_steps", asked.sessions),
        rewards=_rewards(asked),
        segment_tokens=_growing(asked, "g.n_tokens", asked.segments),
        staleness=_staleness(asked, current_version),
        rollout=_rollout(asked),
        timeline=_timeline(asked),
    )


def slowest(run: Execute, where: str | None = None, limit: int = 10) -> list[int]:
    """Return the numbers of the sessions with most time between their opening and their last event, the longest first.

    Raises:
        InputError: the filter does not parse.
    """
    match = compile_where(where, SESSION) if where is not None else Filter("1")
    sql = (
        f"SELECT s.sid FROM sessions s WHERE {_KEPT} AND {match.sql} "
        "ORDER BY s.last_at - s.opened_at DESC, s.session_id LIMIT ?"
    )
    return [int(sid) for (sid,) in run(sql, (*match.values, max(limit, 0)))]


def sample(run: Execute, n: int, where: str | None = None) -> list[int]:
    """Return the numbers of at most ``n`` segments of two tokens and more, spread over all; the same ones each time.

    Args:
        run: runs a statement.
        n: how many.
        where: a filter of sessions.

    Raises:
        InputError: the filter does not parse.
    """
    asked = _Asked(run, compile_where(where, SESSION) if where is not None else Filter("1"))
    # a multiplicative hash spreads what a plain LIMIT would take from the beginning
    sql = f"SELECT g.id {asked.segments} AND g.n_tokens > 1 ORDER BY (g.id * 2654435761) % 4294967296, g.id LIMIT ?"
    return sorted(int(number) for (number,) in run(sql, (*asked.values, max(n, 0))))


class _Asked:
    """What is asked: the sessions that match, and their segments, as the tail of a query."""

    def __init__(self, run: Execute, match: Filter) -> None:
        self._run = run
        self.values: tuple[Value, ...] = match.values
        self.match = match.sql
        self.sessions = f"FROM sessions s WHERE {_KEPT} AND {match.sql}"
        self.segments = f"FROM segments g JOIN sessions s ON s.sid = g.sid WHERE {_KEPT} AND {match.sql}"
        self.rewarded = f"FROM sessions s {_REWARD} WHERE {_KEPT} AND {match.sql}"

    def rows(self, sql: str, *, first: Sequence[Value | None] = ()) -> list[tuple[Any, ...]]:
        """Run a query with one of the tails; ``first`` are the values that stand before it."""
        return self._run(sql, (*first, *self.values))

    def row(self, sql: str) -> tuple[Any, ...]:
        return self.rows(sql)[0]

    def everywhere(self, sql: str, values: Sequence[Value] = ()) -> list[tuple[Any, ...]]:
        """Run a query over all, whatever matches."""
        return self._run(sql, values)


def _totals(asked: _Asked) -> Counts:
    sessions = asked.row(
        "SELECT count(*), count(*) FILTER (WHERE s.finished_at IS NULL), "
        "count(*) FILTER (WHERE s.finished_at IS NOT NULL), count(DISTINCT s.group_id), total(s.n_steps), "
        "total(s.n_tokens), total(s.n_generated), total(s.n_nonfinite), min(s.opened_at), max(s.last_at) "
        f"{asked.sessions}"
    )
    ((n_discarded,),) = asked.rows(
        "SELECT count(*) FROM sessions s WHERE s.opened_at IS NOT NULL AND s.discarded_at IS NOT NULL "
        f"AND {asked.match}"
    )
    segments = asked.row(
        f"SELECT count(*), total(g.n_tokens), total(g.trainable_tokens), total(g.cut_tokens) {asked.segments}"
    )
    ((n_equal,),) = asked.rows(
        f"SELECT count(*) FROM (SELECT 1 {asked.rewarded} AND s.group_id IS NOT NULL AND {_IS_REWARD} "
        "GROUP BY s.group_id HAVING count(*) > 1 AND min(f.value) = max(f.value))"
    )
    names = ("n_sessions", "n_open", "n_final", "n_groups", "n_steps", "n_tokens", "n_generated", "n_nonfinite")
    counted = {name: int(value) for name, value in zip(names, sessions, strict=False)}
    of_segments = ("n_segments", "n_segment_tokens", "n_trainable", "n_cut")
    counted.update({name: int(value) for name, value in zip(of_segments, segments, strict=True)})
    counted |= {"n_discarded": n_discarded, "n_equal_groups": n_equal}
    return Counts(**counted, opened_at=sessions[-2], last_at=sessions[-1])


def _shares(asked: _Asked, column: str) -> tuple[Share, ...]:
    """Return shares by a column; past `MOST_NAMES` they are one."""
    inner = (
        f"SELECT {column} AS name, count(*) AS n, total(s.n_tokens) AS tokens, "
        f"count(*) FILTER (WHERE {_IS_REWARD}) AS n_rewards, total(f.value) FILTER (WHERE {_IS_REWARD}) AS reward "
        f"{asked.rewarded} GROUP BY 1"
    )
    ranked = f"SELECT *, min(row_number() OVER (ORDER BY n DESC, name), ?) AS place FROM ({inner})"
    sql = (
        "SELECT max(name), count(*), sum(n), sum(tokens), sum(n_rewards), sum(reward) "
        f"FROM ({ranked}) GROUP BY place ORDER BY place"
    )
    return tuple(
        Share(
            name=name if n_names == 1 else None,
            n_sessions=int(n),
            n_tokens=int(tokens),
            n_rewards=int(n_rewards),
            reward=reward / n_rewards if n_rewards else None,
            n_names=int(n_names),
        )
        for name, n_names, n, tokens, n_rewards, reward in asked.rows(sql, first=(MOST_NAMES,))
    )


def _growing(asked: _Asked, value: str, tail: str) -> Histogram:
    """Return the distribution of whole numbers >= 0 in bins that double."""
    found = asked.rows(
        f"SELECT iif({value} < 1, -1, CAST(log2({value}) AS INTEGER)), count(*), min({value}), max({value}), "
        f"total({value}) {tail} GROUP BY 1 ORDER BY 1"
    )
    bins = {int(power): int(n) for power, n, *_ in found}
    return gathered(found, filled(bins, lambda power: (2.0**power, 2.0 ** (power + 1)) if power >= 0 else (0.0, 1.0)))


def _rewards(asked: _Asked) -> Histogram:
    ((n, missing, low, high),) = asked.rows(
        f"SELECT count(*) FILTER (WHERE {_IS_REWARD}), count(*) FILTER (WHERE NOT ifnull({_IS_REWARD}, 0)), "
        f"min(f.value) FILTER (WHERE {_IS_REWARD}), max(f.value) FILTER (WHERE {_IS_REWARD}) {asked.rewarded}"
    )
    if not n:
        return Histogram(n_missing=missing)
    bounds = edges(float(low), float(high), MOST_BINS)
    if bounds is None:
        return Histogram(n=n, n_missing=missing, low=low, high=high, bins=(Bin(low, high, n),))
    # compared with the edges that are shown: a quotient of 0.3 and 0.05 is less than 6
    inner = bounds[1:-1]
    found = asked.rows(
        f"SELECT {' + '.join(['0', *('(f.value >= ?)' for _ in inner)])}, count(*), min(f.value), max(f.value), "
        f"total(f.value) {asked.rewarded} AND {_IS_REWARD} GROUP BY 1 ORDER BY 1",
        first=inner,
    )
    bins = {int(number): int(count) for number, count, *_ in found}
    return gathered(found, filled(bins, lambda number: (bounds[number], bounds[number + 1])), missing)


def _staleness(asked: _Asked, current: str | None) -> Staleness:
    ((n_text,),) = asked.everywhere(
        f"SELECT count(*) {_SEGMENTS} AND 'text' IN (typeof(g.first_version), typeof(g.last_version))"
    )
    n_versions, newest = asked.row(_OWN.format("count(*), max(v)", asked.segments))
    known, first, last, joined = "", "g.first_version", "g.last_version", ""
    number = version_column(current)
    against: Value | None = None if isinstance(number, str) else number
    if n_text:
        known, first, last = f"WITH seen AS MATERIALIZED ({_SEEN})", "a.rank", "b.rank"
        joined = "LEFT JOIN seen a ON a.v = g.first_version LEFT JOIN seen b ON b.v = g.last_version"
        newest, against = _by_appearance(asked, current)
    window = f"max({last}) OVER (ORDER BY s.finished_at)" if current is None else "?"
    # the newest at the time is that of the whole spool; only then come those that are asked for
    inner = (
        f"SELECT {window} - {first} AS behind, {asked.match} AS asked "
        f"FROM segments g JOIN sessions s ON s.sid = g.sid {joined} WHERE {_KEPT}"
    )
    place = f"iif(behind < {EXACT}, max(behind, -1), CAST(pow(2, CAST(log2(behind) AS INTEGER)) AS INTEGER))"
    found = asked.rows(
        f"{known} SELECT {place}, count(*), min(behind), max(behind), total(behind) "
        f"FROM ({inner}) WHERE asked GROUP BY 1 ORDER BY 1",
        first=() if current is None else (against,),
    )
    n_missing = sum(int(n) for low, n, *_ in found if low is None)
    found = [row for row in found if row[0] is not None]
    return Staleness(
        behind=gathered(found, steps({int(low): int(n) for low, n, *_ in found}), n_missing),
        against=current,
        newest=None if newest is None else str(newest),
        n_versions=int(n_versions),
        ordered=not n_text,
    )


_SEGMENTS = f"FROM segments g JOIN sessions s ON s.sid = g.sid WHERE {_KEPT}"
_OWN = """
WITH pair AS MATERIALIZED (SELECT DISTINCT g.first_version AS a, g.last_version AS b {1})
SELECT {0} FROM (SELECT a AS v FROM pair UNION SELECT b FROM pair) WHERE v IS NOT NULL"""
_SEEN = f"""
SELECT v, row_number() OVER (ORDER BY min(at), v) AS rank FROM (
    SELECT g.first_version AS v, s.finished_at AS at {_SEGMENTS}
    UNION ALL SELECT g.last_version, s.finished_at {_SEGMENTS})
WHERE v IS NOT NULL GROUP BY v"""


def _by_appearance(asked: _Asked, current: str | None) -> tuple[str | None, int]:
    """Return the version asked for that appeared last, and the place of the current one: behind all if not known."""
    own = asked.rows(
        f"SELECT v FROM ({_SEEN}) WHERE v IN ({_OWN.format('v', asked.segments)}) ORDER BY rank DESC LIMIT 1"
    )
    found = [] if current is None else asked.everywhere(f"SELECT rank FROM ({_SEEN}) WHERE v = ?", (current,))
    ((n,),) = asked.everywhere(f"SELECT count(*) FROM ({_SEEN})")
    return own[0][0] if own else None, found[0][0] if found else n + 1


def _rollout(asked: _Asked) -> tuple[RolloutPoint, ...]:
    low, high = asked.row(f"SELECT min(s.rollout_step), max(s.rollout_step) {asked.sessions}")
    if low is None:
        return ()
    width = max(-(-(high - low + 1) // MOST_STEPS), 1)
    reward = f"iif({_IS_REWARD}, f.value, NULL)"
    inner = (
        f"SELECT (s.rollout_step - ?) / ? AS bin, s.rollout_step AS step, s.n_tokens AS tokens, {reward} AS r "
        f"{asked.rewarded} AND s.rollout_step IS NOT NULL"
    )
    # two passes: the mean of squares less the square of the mean has no digits left where rewards are large
    found = asked.rows(
        "SELECT bin, min(step), max(step), count(*), total(tokens), count(r), avg(r), avg((r - mean) * (r - mean)), "
        f"min(r), max(r) FROM (SELECT *, avg(r) OVER (PARTITION BY bin) AS mean FROM ({inner})) GROUP BY 1 ORDER BY 1",
        first=(low, width),
    )
    return tuple(
        RolloutPoint(
            first=first,
            last=last,
            n_sessions=n,
            n_tokens=int(tokens),
            n_rewards=n_rewards,
            reward=mean,
            reward_std=None if variance is None else math.sqrt(variance),
            reward_low=least,
            reward_high=most,
        )
        for _, first, last, n, tokens, n_rewards, mean, variance, least, most in found
    )


def _timeline(asked: _Asked) -> Timeline:
    low, high = asked.row(f"SELECT min(s.opened_at), max(s.last_at) {asked.sessions}")
    if low is None:
        return Timeline(1.0)
    high = max(high or low, low)
    most = (high - low) / (MOST_PERIODS - 1)
    period_s = float(next((period for period in _PERIODS_S if period >= most), math.ceil(most)))
    base = math.floor(low / period_s)
    periods: dict[int, dict[str, int]] = {}

    def count(name: str, at: str, value: str) -> None:
        sql = f"SELECT CAST(floor({at} / ?) AS INTEGER), {value} {asked.sessions} AND {at} IS NOT NULL GROUP BY 1"
        for number, n in asked.rows(sql, first=(period_s,)):
            periods.setdefault(min(max(number - base, 0), MOST_PERIODS), {})[name] = int(n)

    count("n_opened", "s.opened_at", "count(*)")
    count("n_finished", "s.finished_at", "count(*)")
    count("n_tokens", "s.last_at", "total(s.n_tokens)")
    return Timeline(
        period_s,
        tuple(Period(at=(base + number) * period_s, **counted) for number, counted in sorted(periods.items())),
    )
