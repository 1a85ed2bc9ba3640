"""Which segments are trained at all: chosen before a mini-batch is planned, so that every rank plans the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spool.arguments import integer, listed, optional, refused
from spool.errors import InputError
from spool.model.refs import Ref
from spool.train.restoring.entries import Entry, check_drop, kept
from spool.train.restoring.versions import version_order

if TYPE_CHECKING:
    from typing import TypeVar

    R = TypeVar("R", bound=Ref)


def select(
    refs: Sequence[R],
    *,
    drop: Sequence[str] = (),
    max_staleness: int | None = None,
    version: str | int | Sequence[str] | None = None,
) -> list[R]:
    """Return the references that are to be trained, in their order; nothing is read.

    Args:
        refs: references.
        drop: segments to leave out, by outcome, or as ``superseded``, ``nonfinite`` (log probabilities) or
            ``untrained``: those of which no token can train (``trainable_tokens`` is 0).
        max_staleness: segments to leave out too: whose oldest weights are further behind ``version``.
        version: of the current weights, or all versions, oldest first, where they are no numbers.

    Raises:
        InputError: an argument does not fit, or ``max_staleness`` is given and nobody says what is current.
    """
    given = listed("refs", refs, Ref, "references")
    reasons, most = check_drop(drop), optional(integer, "max_staleness", max_staleness)
    if most is not None and most < 0:
        raise refused("max_staleness", "a number of versions, at least 0", most)
    order = version_order(given, version)
    if most is not None and order.current is None:
        raise InputError("max_staleness= counts from the current weights; say which these are (version=)")
    entries = [Entry(number, ref, failed=False) for number, ref in enumerate(given)]
    return [refs[entry.number] for entry in kept(entries, reasons, most, order)]
