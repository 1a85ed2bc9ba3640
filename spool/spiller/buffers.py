"""Memory that shards are encoded into, used again and again, and never more of it than was set aside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]


class Buffers:
    """A bounded pool of buffers; whoever asks for more than is left waits. Thread-safe.

    Args:
        most_bytes: lent out and idle together. One buffer that is larger is lent while no other is.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._left = most_bytes
        self._idle: list[Memory] = []
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, n_bytes: int) -> Iterator[Memory]:
        """Lend a buffer of at least ``n_bytes`` of arbitrary contents; nothing made of it may outlive the block.

        Ask for no second one inside the block: two that wait for each other would wait for ever.
        """
        share = min(n_bytes, self._most_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= share)
            self._left -= share
            buffer = self._reuse(n_bytes)
        if buffer is None:
            buffer = np.empty(n_bytes, np.uint8)
        try:
            yield buffer
        finally:
            with self._changed:
                self._left += share
                self._idle.append(buffer)
                self._trim()
                self._changed.notify_all()

    def _reuse(self, n_bytes: int) -> Memory | None:
        fitting = [number for number, buffer in enumerate(self._idle) if buffer.size >= n_bytes]
        best = min(fitting, key=lambda number: self._idle[number].size, default=None)
        buffer = None if best is None or self._idle[best].size > 2 * n_bytes + (1 << 20) else self._idle.pop(best)
        self._trim()
        return buffer

    def _trim(self) -> None:
        while self._idle and sum(buffer.size for buffer in self._idle) > self._left:
            self._idle.pop(0)
