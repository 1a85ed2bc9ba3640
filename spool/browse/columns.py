"""The columns of sessions and of groups: what is shown of each, and how."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spool.browse.table import Column
from spool.look.text import ago, one_line, short
from spool.sizes import format_size

if TYPE_CHECKING:
    from spool.browse.lines import Piece
    from spool.catalog import GroupLook, SessionLook

BAR_CELLS = 12

_OUTCOMES = {"completed": "good", "failed": "bad", "aborted": "bad", "timeout": "warn", "truncated": "warn",
             "context_overflow": "warn"}  # fmt: skip


def _text(name: str) -> Callable[[Any], Piece]:
    def cell(row: Any) -> Piece:
        value = getattr(row, name)
        # what does not fit is not looked at: an id may be a thousand characters long
        return ("", "") if value is None else (one_line(str(value)[:200]), "")

    return cell


def _count(name: str) -> Callable[[Any], Piece]:
    return lambda row: (short(getattr(row, name)), "")


def _number(name: str, tone: str = "") -> Callable[[Any], Piece]:
    def cell(row: Any) -> Piece:
        value = getattr(row, name)
        return ("-", "dim") if value is None else (f"{value:.4g}", tone)

    return cell


def _age(row: SessionLook | GroupLook) -> Piece:
    return ago(time.time() - row.last_at), ""


def _outcome(row: SessionLook) -> Piece:
    if row.outcome is None:
        return ("open", "accent") if row.state == "open" else ("", "")
    return one_line(row.outcome[:200]), _OUTCOMES.get(row.outcome, "")


def _reward(row: SessionLook) -> Piece:
    if row.reward is None:
        return "pending", "dim"
    return f"{row.reward:.4g}", "good" if row.reward > 0 else "bad" if row.reward < 0 else ""


def _state(row: SessionLook) -> Piece:
    if row.state == "discarded":
        return "discarded", "bad"
    if row.n_released:
        part = "" if row.n_released >= row.n_segments else f" {row.n_released}/{row.n_segments}"
        return f"released{part}", "dim"
    return ("expired", "warn") if row.outcome == "timeout" else ("", "")


def _bytes(row: SessionLook) -> Piece:
    return format_size(row.stored_bytes), ""


def _tier(row: SessionLook) -> Piece:
    return row.tier or "-", {"gone": "bad", "mixed": "warn"}.get(row.tier or "", "dim" if row.tier is None else "")


def _versions(row: SessionLook) -> Piece:
    low, high = row.first_version, row.last_version
    if low is None:
        return "-", "dim"
    return one_line(str(low)[:40] if low == high else f"{str(low)[:40]}..{str(high)[:40]}"), ""


SESSIONS = (
    Column("session_id", "SESSION", _text("session_id"), width=14, most=28),
    Column("outcome", "OUTCOME", _outcome, most=16),
    Column("reward", "REWARD", _reward, right=True),
    Column("n_steps", "STEPS", _count("n_steps"), right=True),
    Column("n_tokens", "TOKENS", _count("n_tokens"), right=True),
    Column("last_at", "AGE", _age, width=4, right=True),
    Column("state", "STATE", _state),
    Column("group_id", "GROUP", _text("group_id")),
    Column("sample_index", "SAMPLE", _text("sample_index"), right=True),
    Column("rollout_step", "ROLLOUT", _text("rollout_step"), right=True),
    Column("attempt", "ATTEMPT", _text("attempt"), right=True),
    Column("source", "SOURCE", _text("source"), most=16),
    Column("n_branches", "BRANCHES", _count("n_branches"), right=True),
    Column("n_segments", "SEGMENTS", _count("n_segments"), right=True),
    Column("stored_bytes", "BYTES", _bytes, right=True),
    Column("tier", "TIER", _tier),
    Column("last_version", "VERSIONS", _versions, most=16),
)
"""What is known of a session; first what fits on 80 columns."""


def _group(row: GroupLook) -> Piece:
    return ("(no group)", "dim") if row.group_id is None else (one_line(row.group_id[:200]), "")


def _finished(row: GroupLook) -> Piece:
    left = row.n_sessions - row.n_final
    gone = f" +{row.n_discarded} discarded" if row.n_discarded else ""
    return f"{row.n_final}/{row.n_sessions}{gone}", "accent" if left else ""


def has_equal_rewards(row: GroupLook) -> bool:
    """Whether a group has several rewards and all are the same: no advantage comes of it."""
    return row.group_id is not None and row.n_rewards > 1 and row.reward_min == row.reward_max


def _std(row: GroupLook) -> Piece:
    return ("equal", "warn") if has_equal_rewards(row) else _number("reward_std")(row)


def group_columns(low: float, high: float) -> tuple[Column, ...]:
    """Return the columns of groups; rewards are drawn between ``low`` and ``high``, the least and most of all."""

    def bar(row: GroupLook) -> Piece:
        return spread_bar(row, low, high), "bar"

    return (
        Column("group_id", "GROUP", _group, width=14, most=28),
        Column("n_final", "FINAL", _finished),
        Column("reward_mean", "MEAN", _number("reward_mean"), width=6, right=True),
        Column("reward_std", "STD", _std, width=6, right=True),
        Column("reward_min", "MIN", _number("reward_min"), width=6, right=True),
        Column("reward_max", "MAX", _number("reward_max"), width=6, right=True),
        Column("spread", "SPREAD", bar, width=BAR_CELLS, sorts=False),
        Column("n_rewards", "REWARDS", _count("n_rewards"), right=True),
        Column("n_discarded", "DISCARDED", _count("n_discarded"), right=True),
        Column("n_steps", "STEPS", _count("n_steps"), right=True),
        Column("n_tokens", "TOKENS", _count("n_tokens"), right=True),
        Column("last_at", "AGE", _age, width=4, right=True),
    )


def spread_bar(row: GroupLook, low: float, high: float) -> str:
    """Return a group's rewards as a line from the least to the most, with the mean on it."""
    if row.reward_min is None or row.reward_max is None or row.reward_mean is None:
        return ""
    first, mean, last = (_cell(value, low, high) for value in (row.reward_min, row.reward_mean, row.reward_max))
    return "".join("●" if at == mean else "━" if first <= at <= last else "·" for at in range(BAR_CELLS))


def _cell(value: float, low: float, high: float) -> int:
    if not high > low:
        return BAR_CELLS // 2
    # shares of the largest: the difference of two large numbers may be none, and the mean of such is infinite
    size = max(abs(low), abs(high))
    first, at, last = (number / size for number in (low, min(max(value, low), high), high))
    return round((at - first) / (last - first) * (BAR_CELLS - 1))
