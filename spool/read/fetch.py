"""The thin executor of a plan: read each range once, check it, put its rows where they belong."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from crc32c import crc32c

from spool.errors import IntegrityError
from spool.read.checks import Check, Part, total
from spool.read.plan import Fetch, Piece, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from spool.model.refs import Extent
    from spool.read.assemble import Target
    from spool.read.select import Run
    from spool.read.streams import Source

Verify = Literal["whole", "always", "never"]
"""What is checked: extents read whole; every extent touched, which are then read whole; none."""

GAP_BYTES = 4096
FETCH_BYTES = 8 << 20
THREAD_BYTES = 4 << 20

_DISCARD = memoryview(bytearray(GAP_BYTES))


class Tier(Protocol):
    """Bytes at keys, as a reader needs them."""

    def read(self, key: str) -> bytes:
        """Return a whole object."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` from ``offset`` on, or raise."""

    def borrow(self, key: str, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Lend ``length`` bytes, read-only, inside the context."""

    def path(self, key: str) -> str:
        """Return the object's path or URL, for people."""

    def close(self) -> None:
        """Let go of what is open."""


class Batch:
    """What one pass over the store brings: pieces, the arrays that take them, and their checksums.

    Args:
        verify: what is checked.
    """

    def __init__(self, verify: Verify) -> None:
        self.pieces: list[Piece] = []
        self.targets: list[Target] = []
        self.checks: list[Check] = []
        self.sources: dict[str, Source] = {}
        self.parts: dict[int, list[Part]] = {}
        self._verify = verify
        self._known: set[tuple[str, int, int]] = set()

    def want(self, sources: Mapping[str, Source], runs: Iterable[Run], target: Target) -> None:
        """Add the rows of ``runs``, of the stored array that ``sources`` has for their stream, for ``target``."""
        number = len(self.targets)
        self.targets.append(target)
        for extent, _, row, n, to in runs:
            source = sources[extent.stream]
            key, base = source.locate(extent)
            self.sources[key] = source
            width = source.row_bytes
            check = -1 if self._verify == "never" else self._check(source, extent, n, key, base)
            self.pieces.append(Piece(key, (row - base) * width, n * width, width, number, to, check))

    def _check(self, source: Source, extent: Extent, n: int, key: str, base: int) -> int:
        """Return the number of the check that the ``n`` asked rows make up alone, adding one where it is new; or -1."""
        n_rows = extent.before + extent.n + extent.after
        if not n or (n < n_rows and self._verify == "whole"):
            return -1
        first = extent.row - extent.before
        if (key, first, extent.crc) in self._known:
            return -1
        self._known.add((key, first, extent.crc))
        width, number = source.row_bytes, len(self.checks)
        self.checks.append(
            Check(key, n_rows * width, extent.crc, source.stream, source.field.name, first, first + n_rows)
        )
        if n == n_rows:
            return number
        self.pieces.append(Piece(key, (first - base) * width, n_rows * width, width, -1, 0, number))
        return -1


def execute(batch: Batch, store: Tier, workers: Workers) -> None:
    """Read all of ``batch`` into its targets.

    Raises:
        IntegrityError: bytes do not have the checksum they were written with.
    """
    fetches = plan(batch.pieces, gap=GAP_BYTES, limit=FETCH_BYTES)
    if len(fetches) > 1 and sum(fetch.length for fetch in fetches) > THREAD_BYTES:
        workers.each(lambda fetch: _fetch(fetch, batch, store), fetches)
    else:
        for fetch in fetches:
            _fetch(fetch, batch, store)
    for number, parts in batch.parts.items():
        _compare(batch.checks[number], total(parts), store)


def _fetch(fetch: Fetch, batch: Batch, store: Tier) -> None:
    source = batch.sources[fetch.key]
    buffers = _scatter(fetch, source, batch.targets)
    if buffers is not None:
        store.read_into(fetch.key, fetch.offset, buffers)
        for piece in fetch.pieces:
            if piece.check >= 0:
                _note(piece, batch.targets[piece.target].slot(source, piece.row, piece.length), batch, store)
        return
    with store.borrow(fetch.key, fetch.offset, fetch.length) as view:
        _spread(fetch, np.frombuffer(view, np.uint8), batch, store)


def _spread(fetch: Fetch, data: NDArray[np.uint8], batch: Batch, store: Tier) -> None:
    source = batch.sources[fetch.key]
    for piece in fetch.pieces:
        start = piece.offset - fetch.offset
        part = data[start : start + piece.length]
        if piece.check >= 0:
            _note(piece, part.data, batch, store)
        if piece.target >= 0:
            batch.targets[piece.target].put(source, piece.row, part)


def _scatter(fetch: Fetch, source: Source, targets: Sequence[Target]) -> list[memoryview] | None:
    """Return the memory that ``fetch`` can be read into as it is, or None where rows must be converted or copied."""
    buffers: list[memoryview] = []
    at = fetch.offset
    for piece in fetch.pieces:
        if piece.target < 0 or piece.offset < at or not targets[piece.target].takes(source):
            return None
        if piece.offset > at:
            buffers.append(_DISCARD[: piece.offset - at])
        buffers.append(targets[piece.target].slot(source, piece.row, piece.length))
        at = piece.offset + piece.length
    return buffers


def _note(piece: Piece, data: memoryview, batch: Batch, store: Tier) -> None:
    check, crc = batch.checks[piece.check], crc32c(data)
    if piece.length == check.length:
        _compare(check, crc, store)
    else:
        batch.parts.setdefault(piece.check, []).append(Part(piece.offset, piece.length, crc))


def _compare(check: Check, crc: int, store: Tier) -> None:
    if crc != check.crc:
        file = store.path(check.key)
        raise IntegrityError(
            f"rows [{check.start}, {check.stop}) of {check.field} in stream {check.stream} sum up to {crc:#010x}, "
            f"but {check.crc:#010x} was written; {file} is damaged: restore it from a copy, or look at what is there "
            "with verify='never'",
            stream=check.stream, field=check.field, rows=[check.start, check.stop], file=file,
            expected=check.crc, got=crc,
        )  # fmt: skip


class Workers:
    """The threads that share large reads; made on first use, again after a fork. The caller's thread is one of them.

    Args:
        threads: how many; twice the CPUs, at most 8, where None.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(8, 2 * (os.cpu_count() or 1))
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def each(self, function: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call ``function`` with every item; return when all calls have.

        Raises:
            Exception: the first that a call raised; items not yet begun are then left out.
        """
        feed = _Feed(items)
        pool = self._threads()
        futures = [pool.submit(feed.drain, function) for _ in range(min(self.threads, len(items)) - 1)]
        try:
            feed.drain(function)
        finally:
            wait([future for future in futures if not future.cancel()])
        for future in futures:
            if not future.cancelled():
                future.result()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pid != os.getpid():
            self._pool = ThreadPoolExecutor(max(self.threads - 1, 1), thread_name_prefix="spool-read")
            self._pid = os.getpid()
        return self._pool

    def close(self) -> None:
        """End the threads; the next large read makes new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown()


class _Feed:
    """Items handed out one by one to several threads, until there are none or one fails."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def drain(self, function: Callable[[Any], None]) -> None:
        try:
            while True:
                with self._lock:
                    item = next(self._items, None)
                if item is None:
                    return
                function(item)
        except BaseException:
            with self._lock:
                self._items = iter(())
            raise
