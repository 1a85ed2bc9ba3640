"""How other tools say that a run ended -> `spool.model.outcome`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spool.model.outcome import Outcome

# The first rule with a word in the status holds: "submitted (exit_context)" was submitted for want of context.
_RULES: tuple[tuple[Outcome, tuple[str, ...]], ...] = (
    ("context_overflow", ("context",)),
    ("timeout", ("timeout", "timed out", "execution_time")),
    ("truncated", ("cost", "budget", "limit", "max_", "maximum", "iteration", "length", "truncat", "incomplete")),
    ("aborted", ("abort", "cancel", "early_exit", "interrupt", "stopped", "forfeit", "skipped", "kill")),
    ("failed", ("error", "fail", "exception", "format", "exit_api", "crash", "reject")),
    ("completed", ("submit", "complete", "finish", "done", "stop")),
)


def outcome_of(status: str | None, *, otherwise: Outcome) -> Outcome:
    """Return the outcome that a tool's exit status means.

    Args:
        status: as recorded; any case.
        otherwise: where there is no status, or an empty one. A status that no rule knows means ``failed``: nothing
            shows that the run came to its end.
    """
    if not status:
        return otherwise
    text = status.lower()
    return next((outcome for outcome, words in _RULES if any(word in text for word in words)), "failed")
