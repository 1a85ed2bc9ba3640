"""Tokens and rows of the forward: a multimodal placeholder is one token and the rows it expands to."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from spool.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spool.model.refs import Unit


MOST = 1 << 31
"""Tokens, rows and positions of a reference are fewer."""


def row_at(units: Iterable[Unit], token: int) -> int:
    """Return the first row of ``token``; at the number of tokens, the number of rows."""
    return token + sum([unit.n_rows - 1 for unit in units if unit.position < token])


def forward_rows(units: Iterable[Unit], n_tokens: int) -> int:
    """Return how many rows the forward over ``n_tokens`` tokens leaves: those of all tokens, less the last one."""
    return max(row_at(units, n_tokens) - 1, 0)


def tokens_within(units: Iterable[Unit], n_rows: int) -> int:
    """Return the most tokens whose forward needs no more than ``n_rows`` rows.

    Args:
        units: by ascending position.
        n_rows: rows that are there, from row 0 on.
    """
    extra = 0
    for unit in units:
        if unit.position + extra > n_rows:
            break
        if unit.position + extra + unit.n_rows > n_rows + 1:
            return unit.position
        extra += unit.n_rows - 1
    return n_rows + 1 - extra


def check_units(units: Sequence[Unit], n_tokens: int) -> tuple[Unit, ...]:
    """Return ``units`` by position.

    Raises:
        InputError: two units share a token, a unit lies outside the tokens or expands to no row.
    """
    if not units:
        return ()
    ordered = tuple(sorted(units, key=lambda unit: unit.position))
    for unit in ordered:
        if not 0 <= unit.position < n_tokens:
            raise InputError(
                f"unit {unit.key!r} is at token {unit.position}, outside the {n_tokens} tokens of its step",
                unit=unit.key,
                token=unit.position,
            )
        if unit.n_rows < 1:
            raise InputError(f"unit {unit.key!r} must expand to at least one row, not {unit.n_rows}", unit=unit.key)
    for left, right in pairwise(ordered):
        if left.position == right.position:
            raise InputError(f"units {left.key!r} and {right.key!r} share token {left.position}", token=left.position)
    return ordered
