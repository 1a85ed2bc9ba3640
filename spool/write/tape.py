"""One array in one pack: whole blocks in the shard file, the rest in the tail file beside the array.

Offsets are bytes in the shard. In order::

    0 ......... size ................... written ......... ready ............... filled
     shard file | tail file, and in the ring | in the ring: published | not yet published |

``whole`` is the end of the last complete append and ``kept`` the end of what must stay whatever fails: what was
committed, or is held by a transaction. One thread fills (it holds the stream's fill lock), one writes (it leads the
group); a rewind needs both.

Large appends are flushed: whole blocks go from the ring to the shard file before their events are committed. The ring
keeps what lies behind the size that was last settled, so that a flush can be undone until then. Small ones are written
to the tail, and when that is long enough the committed blocks of it are moved to the shard file by a thread of the
stream; until the move has landed, what is appended goes to the old tail and to the next.

A tail that is done with is used again under the next name: some file systems make new files slowly where many were
removed. Its bytes change only after the shard file has grown past them, so a reader that sees the size of the shard
unchanged after it has read a tail has read the right one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from spool.model.fields import ArraySpec
from spool.stores.local import BLOCK, make_dirs, open_direct, parse_tail, pwrite_all, spare_prefix, sync_dir, tail_name
from spool.write.folder import Folder, unlink_quietly
from spool.write.mover import Mover
from spool.write.ring import Fill, Ring


class _Tail(NamedTuple):
    fd: int
    name: str


class _Move:
    """Committed blocks on their way to the shard file, which they will make ``cut`` bytes long."""

    def __init__(self, cut: int, tail: _Tail | None, copy: Callable[[], None]) -> None:
        self.cut = cut
        self.tail = tail
        self.done = self.failed = False
        self._copy = copy
        self._lock = threading.Lock()

    def run(self) -> None:
        """Copy them, or wait until another thread has; whoever comes first does it, and again where it broke off."""
        with self._lock:
            if not self.done:
                try:
                    self._copy()
                except Exception:  # noqa: BLE001 - `_land` tries again and says why
                    self.failed = True
                self.done = True


class Tape:
    """The rows of one array in one open pack.

    Args:
        folder: the stream.
        spec: the array.
        pack: number of the pack.
        ring: memory for what the shard file does not hold; free for this tape's use.
        direct: write past the page cache where the file system allows it.
        mover: its thread moves blocks of long tails; None where all must be on disk when it is written.
    """

    def __init__(
        self, folder: Folder, spec: ArraySpec, pack: int, ring: Ring, *, direct: bool, mover: Mover | None
    ) -> None:
        self._folder = folder
        self._pack = pack
        self._ring = ring
        self._direct = direct
        self._row_bytes = spec.row_bytes
        self._spec = spec
        self._array_path = f"{folder.path}/{spec.name}"
        # names are made and taken in the folder itself: by its path another one may be found, once the root was moved
        self._dir: int | None = os.open(self._array_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._first_row = pack * folder.layout.shard_rows[spec.name]
        self.limit = folder.layout.shard_rows[spec.name] * spec.row_bytes
        self.filled = self.ready = self.whole = self.kept = 0
        self._size = self._written = 0
        self._settled_size = self._stale_written = 0
        self._shard: int | None = None
        self._tail: _Tail | None = None
        self._stale: _Tail | None = None
        self._spares: list[_Tail] = []
        self._n_spares = 0
        self._new_names = False
        self._mover = mover
        self._move: _Move | None = None
        self._move_failed = False

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
        new, half = stop - self._written, self._ring.n_bytes // 2
        long = new >= self._ring.flush_bytes // 2 or stop - self._size > half
        if self._move is not None and (long or self._move.done):
            self._land(self._move)
        if self._move is None and stop - self._size >= self._ring.flush_bytes:
            if long or self._mover is None or self._move_failed:
                self._flush(stop)
                self._move_failed = False
                return
            self._start_move(self._mover)
        if new > 0:
            self._extend(stop)

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
            if self._shard is not None:
                for folder in self._folder.shard_folders(self._spec, self._pack):
                    sync_dir(folder)
            sync_dir(self._array_path)
            self._new_names = False

    def settle(self) -> None:
        """What was written is committed: let go of the tail whose bytes are in the shard file by now."""
        self._settled_size = self._size
        tail, self._stale = self._stale, None
        if tail is not None:
            self._retire(tail)

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
        """Close the files, behind a move that is on its way; what they hold stays, and no tail but the last one."""
        with contextlib.suppress(OSError):  # sealing finds its way through what is left
            if self._move is not None:
                self._land(self._move)
            for _, name in tails_in(self._dir, self._pack):
                if self._tail is None or name != self._tail.name:
                    os.unlink(name, dir_fd=self._dir)
        for spare in self._spares:
            unlink_quietly(spare.name, dir_fd=self._dir)
        self.abandon()

    def abandon(self) -> None:
        """Close the files and change nothing, in a forked child too."""
        if self._move is not None and self._move.tail is not None:
            os.close(self._move.tail.fd)
        self._move = None
        tails, self._stale, self._tail, self._spares = (self._stale, self._tail, *self._spares), None, None, []
        for tail in tails:
            if tail is not None:
                os.close(tail.fd)
        for fd in (self._shard, self._dir):
            if fd is not None:
                os.close(fd)
        self._shard = self._dir = None

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
                unlink_quietly(tail.name, dir_fd=self._dir)
            raise
        self._stale, self._tail = self._tail, tail
        self._stale_written = self._written
        self._size, self._written = cut, stop

    def _extend(self, stop: int) -> None:
        """Write what is new to the tail, and to the next one where a move is on its way."""
        self._tail = self._append(self._tail, self._size, stop)
        if self._move is not None:
            self._move.tail = self._append(self._move.tail, self._move.cut, stop)
        self._written = stop

    def _append(self, tail: _Tail | None, base: int, stop: int) -> _Tail:
        if tail is None:
            return self._new_tail(base, stop)
        self._copy(tail.fd, self._written, stop, base)
        return tail

    def _start_move(self, mover: Mover) -> None:
        """Have the committed whole blocks of the tail moved to the shard file; the next tail comes first."""
        end = min(self.kept, self._written)
        cut = end - end % BLOCK
        if cut - self._size < self._ring.flush_bytes - BLOCK:
            return
        shard, start = self._open_shard(), self._size

        def copy() -> None:
            try:
                self._copy(shard, start, cut, 0, direct=self._direct)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(shard, start)
                raise

        # known before it is handed over: where that is broken off, `_land` does the work
        self._move = _Move(cut, self._new_tail(cut, self._written) if self._written > cut else None, copy)
        mover.submit(self._move.run)

    def _land(self, move: _Move) -> None:
        """Wait for a move and let go of the old tail; or of the next one, where the shard file could not be written."""
        move.run()
        if move.failed:
            os.ftruncate(self._open_shard(), self._size)
            stale = move.tail
        else:
            stale, self._tail = self._tail, move.tail
            self._size = self._settled_size = move.cut
        self._move, self._move_failed = None, move.failed
        if stale is not None:
            self._retire(stale)

    def _undo_flush(self, shard: int) -> None:
        os.ftruncate(shard, self._settled_size)
        self._drop_tail()
        self._tail, self._stale = self._stale, None
        self._size, self._written = self._settled_size, self._stale_written

    def _copy(self, fd: int, start: int, stop: int, base: int, *, direct: bool = False) -> None:
        """Write bytes ``[start, stop)`` of the ring to a file whose first byte is byte ``base`` of the shard."""
        parts = self._ring.parts(start, stop)
        if len(parts) > 1:  # one call, so that a reader does not see a size without a tail to it
            n = os.pwritev(fd, parts, start - base)
            start += n - n % BLOCK if direct else n
            parts = self._ring.parts(start, stop)
        for part in parts:
            pwrite_all(fd, part, start - base, direct=direct)
            start += len(part)

    def _new_tail(self, size: int, stop: int) -> _Tail:
        name = tail_name(self._pack, size)
        spare = self._spares.pop() if self._spares else self._make_spare()
        try:
            self._copy(spare.fd, size, stop, size)
            self._rename(spare.name, name)
        except BaseException:
            os.close(spare.fd)
            unlink_quietly(spare.name, dir_fd=self._dir)
            raise
        self._new_names = True
        return _Tail(spare.fd, name)

    def _make_spare(self) -> _Tail:
        name = self._spare_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return _Tail(os.open(name, flags, 0o644, dir_fd=self._dir), name)

    def _spare_name(self) -> str:
        self._n_spares += 1
        return f"{spare_prefix(self._pack)}{self._n_spares}"

    def _rename(self, name: str, to: str) -> None:
        os.rename(name, to, src_dir_fd=self._dir, dst_dir_fd=self._dir)

    def _retire(self, tail: _Tail) -> None:
        """Take a tail out of readers' sight and keep its file, emptied, for the next."""
        name = self._spare_name()
        try:
            self._rename(tail.name, name)
            os.ftruncate(tail.fd, 0)
        except OSError:  # what is committed stays committed; a tail too many does no harm
            os.close(tail.fd)
            unlink_quietly(name, dir_fd=self._dir)
            return
        self._spares.append(_Tail(tail.fd, name))

    def _drop_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            os.close(tail.fd)
            unlink_quietly(tail.name, dir_fd=self._dir)

    def _open_shard(self) -> int:
        if self._shard is None:
            path = os.path.relpath(self._folder.shard_path(self._spec, self._pack), self._array_path)
            make_dirs(".", os.path.dirname(path), dir_fd=self._dir)
            self._shard, self._direct = open_shard(path, self._folder.root, direct=self._direct, dir_fd=self._dir)
            self._new_names = True
        return self._shard


def find_tails(array_path: str, pack: int) -> list[tuple[int, str]]:
    """Return ``(first byte, path)`` of the tails of a pack that are in an array's folder."""
    return [(start, f"{array_path}/{name}") for start, name in tails_in(array_path, pack)]


def tails_in(folder: str | int | None, pack: int) -> list[tuple[int, str]]:
    """Return ``(first byte, name)`` of the tails of a pack that are in an array's folder, or its descriptor."""
    if folder is None:
        return []
    found = ((parse_tail(name), name) for name in os.listdir(folder))
    return [(tail[1], name) for tail, name in found if tail and tail[0] == pack]


def open_shard(path: str, root: str, *, direct: bool, dir_fd: int | None = None) -> tuple[int, bool]:
    """Open a shard file for writing, made where it is not there; return the descriptor and whether it is direct.

    ``path`` is relative to the folder of ``dir_fd``, where that is given.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT
    if direct:
        return open_direct(path, flags, root=root, dir_fd=dir_fd)
    return os.open(path, flags | os.O_CLOEXEC, 0o644, dir_fd=dir_fd), False
