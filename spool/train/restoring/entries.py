"""The places of a batch: references, and what stands for samples that failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spool.arguments import instance, listed, names, refused
from spool.errors import InputError
from spool.model.outcome import OUTCOMES
from spool.model.refs import Ref, SegmentRef
from spool.model.rows import MOST

if TYPE_CHECKING:
    from spool.train.restoring.versions import VersionOrder

DROPS = (*OUTCOMES, "superseded", "nonfinite", "untrained")
"""Why a segment may be dropped: its outcome, a repeated request, NaN or infinite logprobs, nothing to train in it."""

Lengths = Sequence[tuple[int, int] | None]


class Entry(NamedTuple):
    """One place of a batch.

    Attributes:
        number: which of the references that were given it is.
        ref: the reference; of a failed sample one that has nothing but lengths.
        failed: nothing is read for it: every field is 0, and so is the mask.
    """

    number: int
    ref: Ref
    failed: bool


def entries_of(refs: object, lengths: Lengths | None) -> list[Entry]:
    """Return the places of a batch.

    Args:
        refs: a reference, or references and None.
        lengths: for each None ``(n_tokens, response_length)``, at the same place.

    Raises:
        InputError: something else, or a None without lengths.
    """
    wanted = "references, and None with lengths= for a sample that failed"
    given = listed("refs", [refs] if isinstance(refs, Ref) else refs, (Ref, type(None)), wanted)
    pairs: list[Any] = [None] * len(given)
    if lengths is not None:
        pairs = listed("lengths", lengths, object, "one entry for each of refs: None, or (n_tokens, response_length)")
    if len(pairs) != len(given):
        raise InputError(
            f"lengths= has {len(pairs)} entries for {len(given)} references; pass one for each, None but for a "
            "sample that failed",
            expected=len(given), got=len(pairs),
        )  # fmt: skip
    return [
        Entry(index, ref, failed=False) if ref is not None else Entry(index, _stand_in(index, pair), failed=True)
        for index, (ref, pair) in enumerate(zip(given, pairs, strict=True))
    ]


def _stand_in(index: int, pair: Any) -> Ref:
    fits = isinstance(pair, Sequence) and len(pair) == 2 and all(type(n) is int for n in pair)
    if not fits or not 0 <= pair[1] <= pair[0] < MOST:
        wanted = f"(n_tokens, response_length), both below {MOST}, where refs has None"
        raise refused("lengths", wanted, pair, entry=index)
    n_tokens, response = pair
    return Ref(spool_id="", session_id="", n_tokens=n_tokens, n_rows=n_tokens, response_start=n_tokens - response)


def check_drop(drop: object) -> list[str]:
    """Return the reasons to drop a segment.

    Raises:
        InputError: one is unknown.
    """
    chosen = names("drop", drop)
    unknown = [name for name in chosen if name not in DROPS]
    if unknown:
        raise InputError(f"drop={unknown[0]!r} is none of {', '.join(DROPS)}", argument="drop", got=unknown[0])
    return chosen


def kept(entries: Iterable[Entry], drop: Sequence[str], max_staleness: int | None, order: VersionOrder) -> list[Entry]:
    """Return the entries that stay.

    Args:
        entries: of a batch.
        drop: reasons, of `DROPS`; a failed sample's outcome is ``failed``.
        max_staleness: how far behind the current weights the oldest ones of a segment may be.
        order: of the weights.
    """
    left = [entry for entry in entries if not any(_applies(reason, entry) for reason in drop)]
    if max_staleness is None:
        return left
    return [entry for entry in left if _staleness(entry.ref, order) <= max_staleness]


def _applies(reason: str, entry: Entry) -> bool:
    ref = entry.ref
    if reason == "untrained":
        return ref.trainable_tokens == 0
    if reason == "nonfinite":
        return ref.n_nonfinite > 0
    if reason == "superseded":
        return isinstance(ref, SegmentRef) and ref.superseded
    outcome = "failed" if entry.failed else getattr(ref, "outcome", None)
    return reason == outcome


def _staleness(ref: Ref, order: VersionOrder) -> int:
    current = instance("version", order.current, int, "the current weights' version, where max_staleness= is given")
    return max((current - order.number(span.version) for span in ref.versions), default=0)
