"""One array in one pack: whole blocks in the shard file, the rest in the tail file beside the array.

Offsets are bytes in the shard. In order::

    0 ......... size ................... written ......... ready ............... filled
     shard file | tail file, and in the ring | in the ring: published | not yet published |

``whole`` is the end of the last complete append and ``kept`` the end of what must stay whatever fails: what was
committed, or is held by a transaction. One thread fills (it holds the stream's fill lock), one writes (it leads the
group); a rewind needs both. The ring keeps what lies behind the size that was last settled, so that a flush can be
undone until the events that refer to it are committed.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from spool.model.fields import ArraySpec
from spool.stores.local import BLOCK, open_direct, pwrite_all, sync_dir, tail_name
from spool.write.folder import Folder, unlink_quietly
from spool.write.ring import Fill, Ring


class _Tail(NamedTuple):
    fd: int
    path: str


class Tape:
    """The rows of one array in one open pack.

    Args:
        folder: the stream.
        spec: the array.
        pack: number of the pack.
        ring: memory for what the shard file does not hold; free for this tape's use.
        direct: write past the page cache where the file system allows it.
    """

    def __init__(self, folder: Folder, spec: ArraySpec, pack: int, ring: Ring, *, direct: bool) -> None:
        self._folder = folder
        self._pack = pack
        self._ring = ring
        self._direct = direct
        self._row_bytes = spec.row_bytes
        self._spec = spec
        self._array_path = f"{folder.path}/{spec.name}"
        self._first_row = pack * folder.layout.shard_rows[spec.name]
        self.limit = folder.layout.shard_rows[spec.name] * spec.row_bytes
        self.filled = self.ready = self.whole = self.kept = 0
        self._size = self._written = 0
        self._settled_size = self._stale_written = 0
        self._shard: int | None = None
        self._tail: _Tail | None = None
        self._stale: _Tail | None = None
        self._new_names = False

    @property
    def n_rows(self) -> int:
        """Rows up to the last complete append."""
        return self.whole // self._row_bytes

    @property
    def room(self) -> int:
        """Rows that the pack still takes."""
        return (self.limit - self.filled) // self._row_bytes

    @property
    def next_row(self) -> int:
        """The row of the array that is filled next."""
        return self._first_row + self.filled // self._row_bytes

    @property
    def tail_bytes(self) -> int:
        """What the tail file may take at most."""
        return self._ring.flush_bytes

    def piece(self, n: int) -> int:
        """Return how many of ``n`` rows to fill at once: all, or what half the ring holds."""
        return min(n, max(1, self._ring.n_bytes // 2 // self._row_bytes))

    def fits(self, n: int) -> bool:
        """Whether the ring has room for ``n`` rows now."""
        return self.filled + n * self._row_bytes - self._settled_size <= self._ring.n_bytes

    def fill(self, n: int, fill: Fill, first: int, crc: int) -> int:
        """Fill ``n`` rows that fit; return ``crc`` continued over them. See `Ring.fill`."""
        crc = self._ring.fill(self.filled, n, fill, first, crc)
        self.filled += n * self._row_bytes
        return crc

    def write(self, stop: int) -> None:
        """Write out all bytes below ``stop``: to the tail, or whole blocks to the shard where there are enough.

        Raises:
            OSError: they are not all written; what was on disk before still is, and a later call begins again.
        """
        if stop - self._size >= self._ring.flush_bytes:
            self._flush(stop)
        elif stop > self._written:
            if self._tail is None:
                self._tail = self._new_tail(self._size, stop)
            else:
                self._copy(self._tail.fd, self._written, stop, self._size)
            self._written = stop

    def sync(self) -> None:
        """Make all that was written durable.

        Raises:
            OSError: it may not be.
            SpoolError: a new file's name may not be.
        """
        if self._tail is not None:
            os.fdatasync(self._tail.fd)
        if self._shard is not None:
            os.fdatasync(self._shard)
        if self._new_names:
            sync_dir(self._array_path)
            if self._shard is not None:
                sync_dir(os.path.dirname(self._folder.shard_path(self._spec, self._pack)))
            self._new_names = False

    def settle(self) -> None:
        """What was written is committed: let go of the tail whose bytes are in the shard file by now."""
        self._settled_size = self._size
        tail, self._stale = self._stale, None
        if tail is not None:
            os.close(tail.fd)
            unlink_quietly(tail.path)

    def rewind(self) -> None:
        """Forget what was filled behind ``whole``, on disk too.

        A flush that is not settled is undone. One that is (of the first pieces of a long append) cannot be: the shard
        file is cut to the block that ``whole`` ends in, and the few rows up to there are never referred to.

        Raises:
            OSError: the shard file cannot be cut.
        """
        end = self.whole
        if self._size > self._settled_size and self._shard is not None:
            self._undo_flush(self._shard)
        if self._size > end and self._shard is not None:
            size = min(self._size, -(-end // BLOCK) * BLOCK)
            os.ftruncate(self._shard, size)
            self._drop_tail()
            self._size = self._settled_size = self._written = size
            end = min(-(-size // self._row_bytes) * self._row_bytes, self.limit)
        self.filled = self.ready = self.whole = end
        self.kept = max(self.kept, end)
        self._written = min(self._written, end)

    def close(self) -> None:
        """Close the files; what they hold stays."""
        tails, self._stale, self._tail = (self._stale, self._tail), None, None
        for tail in tails:
            if tail is not None:
                os.close(tail.fd)
        fd, self._shard = self._shard, None
        if fd is not None:
            os.close(fd)

    def _flush(self, stop: int) -> None:
        """Move whole blocks below ``stop`` to the shard file; the next tail comes first, so nothing is ever missing."""
        assert self._stale is None, "a flush must be settled or undone before the next"
        shard, cut = self._open_shard(), stop - stop % BLOCK
        tail = self._new_tail(cut, stop) if stop > cut else None
        try:
            self._copy(shard, self._size, cut, 0, direct=self._direct)
        except BaseException:
            os.ftruncate(shard, self._size)
            if tail is not None:
                os.close(tail.fd)
                unlink_quietly(tail.path)
            raise
        self._stale, self._tail = self._tail, tail
        self._stale_written = self._written
        self._size, self._written = cut, stop

    def _undo_flush(self, shard: int) -> None:
        os.ftruncate(shard, self._settled_size)
        self._drop_tail()
        self._tail, self._stale = self._stale, None
        self._size, self._written = self._settled_size, self._stale_written

    def _copy(self, fd: int, start: int, stop: int, base: int, *, direct: bool = False) -> None:
        """Write bytes ``[start, stop)`` of the ring to a file whose first byte is byte ``base`` of the shard."""
        for part in self._ring.parts(start, stop):
            pwrite_all(fd, part, start - base, direct=direct)
            start += len(part)

    def _new_tail(self, size: int, stop: int) -> _Tail:
        path = f"{self._array_path}/{tail_name(self._pack, size)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._copy(fd, size, stop, size)
        except BaseException:
            os.close(fd)
            unlink_quietly(path)
            raise
        self._new_names = True
        return _Tail(fd, path)

    def _drop_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            os.close(tail.fd)
            unlink_quietly(tail.path)

    def _open_shard(self) -> int:
        if self._shard is None:
            path = self._folder.shard_path(self._spec, self._pack)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._shard, self._direct = open_shard(path, self._folder.root, direct=self._direct)
            self._new_names = True
        return self._shard


def open_shard(path: str, root: str, *, direct: bool) -> tuple[int, bool]:
    """Open a shard file for writing, made where it is not there; return the descriptor and whether it is direct.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT
    if direct:
        return open_direct(path, flags, root=root)
    return os.open(path, flags | os.O_CLOEXEC, 0o644), False
