"""The one retry layer of a cold root: backoff with jitter inside a deadline, one log line a retry."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from spool.errors import SpoolError

log = logging.getLogger("spool.stores")

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


_limit_s: ContextVar[float] = ContextVar("spool_limit_s", default=float("inf"))


@contextmanager
def hurried(limit_s: float) -> Iterator[None]:
    """Give what this thread asks of a store inside the block at most ``limit_s`` a request."""
    token = _limit_s.set(limit_s)
    try:
        yield
    finally:
        _limit_s.reset(token)


class TransientError(Exception):
    """A failure that another try may mend; `persist` turns it into ``kind`` when patience ends.

    Args:
        reason: what happened, in a few words without anything secret, for the log and the final message.
        kind: the Spool error to raise in the end.
        advice: what the caller can do about it.
        tries: give up after so many in all, even where the deadline allows more.
        details: of the final error.
    """

    def __init__(
        self, reason: str, *, kind: type[SpoolError], advice: str, tries: int | None = None, **details: object
    ) -> None:
        super().__init__(reason)
        self.reason, self.advice, self.tries = reason, advice, tries
        self._kind, self._details = kind, details

    def final(self, what: str, n_tries: int, seconds: float) -> SpoolError:
        """Return the error for the caller of the operation ``what``."""
        text = f"cannot {what}: {self.reason}, {n_tries} tries in {seconds:.1f} s; {self.advice}"
        return self._kind(text, tries=n_tries, **self._details)


def persist(call: Callable[[float], T], *, what: str, deadline_s: float) -> T:
    """Return what ``call`` does, trying again while it raises `TransientError` and time is left.

    Args:
        call: one try; it is given the seconds that it may take. Other errors pass through.
        what: the operation for the log and the message, as in ``"cannot {what}"``.
        deadline_s: seconds for all tries and pauses together; a try is not begun after them.

    Raises:
        SpoolError: it failed for good.
    """
    began, deadline_s = time.monotonic(), min(deadline_s, _limit_s.get())
    for n_tries in itertools.count(1):
        try:
            # half of what is left: whatever hangs, there is time for another try
            return call((began + deadline_s - time.monotonic()) / 2)
        except TransientError as failure:
            # the upper half of the interval: many clients spread out, and nobody comes back at once
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(n_tries - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
            spent_s = time.monotonic() - began
            if n_tries == failure.tries or spent_s + pause_s >= deadline_s:
                raise failure.final(what, n_tries, spent_s) from None
            log.warning("cannot %s: %s; try %d follows in %.2f s", what, failure.reason, n_tries + 1, pause_s)
        time.sleep(pause_s)
    raise AssertionError
