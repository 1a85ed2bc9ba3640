"""What one read wants, and how it gets it: from each tier in turn what the ones before it do not have."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from crc32c import crc32c

from spool.errors import AbsentError, IntegrityError, ReleasedError, SpoolError
from spool.formats.layers import stored_layers
from spool.read.checks import Check, Part, total
from spool.read.plan import Piece
from spool.sizes import format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from spool.model.refs import Extent
    from spool.read.assemble import Target
    from spool.read.select import Run
    from spool.read.streams import Source
    from spool.read.tier import Tier

log = logging.getLogger("spool.read")

Verify = Literal["whole", "always", "never"]
"""What is checked: extents read whole; every extent touched, which are then read whole; none."""


class Batch:
    """What one pass over the store brings: pieces, the arrays that take them, and their checksums.

    Args:
        verify: what is checked.

    Attributes:
        fetched: tier and bytes of each range that was read.
        damage: what kept a tier from giving what another one then gave.
    """

    def __init__(self, verify: Verify) -> None:
        self.pieces: list[Piece] = []
        self.targets: list[Target] = []
        self.checks: list[Check] = []
        self.sources: dict[str, Source] = {}
        self.parts: dict[int, list[Part]] = {}
        self.fetched: list[tuple[str, int]] = []
        self.damage: list[IntegrityError] = []
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

    def asked_bytes(self) -> int:
        """Return the stored bytes of the rows and layers that are wanted."""
        return sum(self._asked(piece) for piece in self.pieces if piece.target >= 0)

    def _asked(self, piece: Piece) -> int:
        layers, source = self.targets[piece.target].layers, self.sources[piece.key]
        if layers is None or not source.shape:
            return piece.length
        chosen = stored_layers(source.field, layers)
        share: int = piece.length // source.shape[0] * (chosen.stop - chosen.start)
        return share

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


def execute(batch: Batch, tiers: Sequence[Tier], workers: Workers) -> None:
    """Read all of ``batch`` into its targets, each piece from the first tier that has its object.

    Where what is there is damaged, that object is read from the other tiers that have it, and the log says so.

    Raises:
        IntegrityError: bytes are nowhere, or do not have the checksum they were written with.
        ReleasedError: they were deleted on purpose.
        StorageError: a tier failed.
    """
    try:
        _execute(batch, batch.pieces, tiers, workers)
    except IntegrityError as damage:
        if isinstance(damage, AbsentError) or len(tiers) == 1:
            raise
        objects: dict[str, list[Piece]] = {}
        for piece in batch.pieces:
            objects.setdefault(piece.key, []).append(piece)
        workers.each(lambda pieces: _execute_around(batch, pieces, tiers, workers), list(objects.values()))


def _execute_around(batch: Batch, pieces: Sequence[Piece], tiers: Sequence[Tier], workers: Workers) -> None:
    """Read the pieces of one object, which is damaged in some tiers, perhaps: each tier is the first one in turn."""
    try:
        _execute(batch, pieces, tiers, workers)
        return
    except IntegrityError as error:
        if isinstance(error, AbsentError):
            raise
        damage, failed = error, list[SpoolError]()
    for turn in range(1, len(tiers)):
        try:
            _execute(batch, pieces, [*tiers[turn:], *tiers[:turn]], workers)
        except SpoolError as error:
            failed.append(error)
        else:
            batch.damage.append(damage)
            log.warning("%s; this read went on from %s", damage, tiers[turn].path(""))
            return
    raise damage from failed[-1]


def _execute(batch: Batch, pieces: Sequence[Piece], tiers: Sequence[Tier], workers: Workers) -> None:
    checks = {piece.check for piece in pieces if piece.check >= 0}
    for number in checks:
        batch.parts.pop(number, None)
    left = pieces
    for tier in tiers:
        left = tier.bring(left, batch, workers)
        if not left:
            break
    else:
        if left:
            piece, source = left[0], batch.sources[left[0].key]
            row = source.pack_of(piece.key) * source.shard_rows + piece.offset // source.row_bytes
            raise lost(source, row, piece.length // source.row_bytes, tiers)
    for number in checks & batch.parts.keys():
        compare(batch.checks[number], total(batch.parts[number]), tiers[0])


def spread(pieces: Iterable[Piece], offset: int, data: NDArray[np.uint8], batch: Batch, tier: Tier) -> None:
    """Put bytes of one object where they belong, and check them.

    Args:
        pieces: of one object, inside ``data``.
        offset: of the first byte of ``data`` in the object.
        data: stored rows.
        batch: whose targets take them.
        tier: where they come from.

    Raises:
        IntegrityError: a checksum does not fit.
    """
    for piece in pieces:
        start = piece.offset - offset
        part = data[start : start + piece.length]
        if piece.check >= 0:
            note(piece, crc32c(part.data), batch, tier)
        if piece.target >= 0:
            batch.targets[piece.target].put(batch.sources[piece.key], piece.row, part)


def note(piece: Piece, crc: int, batch: Batch, tier: Tier) -> None:
    """Check the crc32c of a piece's bytes, or keep it until those of its extent are together."""
    check = batch.checks[piece.check]
    if piece.length == check.length:
        compare(check, crc, tier)
    else:
        batch.parts.setdefault(piece.check, []).append(Part(piece.offset, piece.length, crc))


def compare(check: Check, crc: int, tier: Tier) -> None:
    """Raise IntegrityError where ``crc`` is not what was written."""
    if crc != check.crc:
        file = tier.path(check.key)
        raise IntegrityError(
            f"rows [{check.start}, {check.stop}) of {check.field} in stream {check.stream} sum up to {crc:#010x}, "
            f"but {check.crc:#010x} was written; {file} is damaged: restore it from a "
            "copy, or look at what is there with verify='never'",
            stream=check.stream, field=check.field, rows=[check.start, check.stop], file=file,
            expected=check.crc, got=crc,
        )  # fmt: skip


def lost(source: Source, row: int, n: int, tiers: Sequence[Tier]) -> SpoolError:
    """Return why no tier has stored rows ``[row, row + n)`` of ``source``: they were deleted, or they are lost.

    Raises:
        StorageError: a tier is not there at all, so that nothing can be said.
    """
    pack = row // source.shard_rows
    what = f"rows [{row}, {row + n}) of {source.field.name} in stream {source.stream}"
    where = {"stream": source.stream, "field": source.field.name, "rows": [row, row + n]}
    for tier in tiers:
        deletion = tier.deletion(source.stream, pack)
        if deletion is not None:
            when = format_time(deletion.at)
            return ReleasedError(f"{what} are gone: pack {pack} was deleted at {when}: {deletion.reason}", **where)
    for tier in tiers:
        tier.check()
    places = [tier.path(source.key(pack)) for tier in tiers]
    return AbsentError(
        f"{what} were recorded and are not there: {' and '.join(places)} {'is' if len(places) == 1 else 'are'} "
        "missing or without them; restore the file from a copy, or run `spool verify` to see what else is gone",
        **where, file=places[0],
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
