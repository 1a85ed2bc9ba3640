"""How far a verb is, on stderr, where that is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from spool.sizes import format_size

_FIRST_S, _PERIOD_S = 0.5, 0.1


class Progress:
    """A line that is written over and over, and wiped at the end; none for what is done at once.

    Args:
        verb: what is done to the bytes.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._next = time.monotonic() + _FIRST_S
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Say that ``done_bytes`` of ``total_bytes`` are done."""
        now = time.monotonic()
        if now < self._next or not sys.stderr.isatty():
            return
        self._next, self._shown = now + _PERIOD_S, True
        share = 100 * done_bytes // max(total_bytes, 1)
        sys.stderr.write(f"\r\x1b[K{self._verb} {format_size(done_bytes)} of {format_size(total_bytes)}, {share}%")
        sys.stderr.flush()
