"""How a session ended."""

from __future__ import annotations

from typing import Literal, get_args

from spool.errors import InputError

Outcome = Literal["completed", "truncated", "context_overflow", "aborted", "failed", "timeout"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)


def check_outcome(outcome: str) -> Outcome:
    """Return ``outcome`` if it is one of `OUTCOMES`.

    Raises:
        InputError: it is not.
    """
    if outcome not in OUTCOMES:
        raise InputError(f"outcome {outcome!r} is not one of {', '.join(OUTCOMES)}", got=outcome)
    return outcome  # type: ignore[return-value]
