"""Which file holds which bytes, for people and for ``dd``: a shard's last bytes may still lie in its tail."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from spool.errors import AbsentError, IntegrityError
from spool.read.sample import ByteRange
from spool.stores.local import parse_tail, tail_site

if TYPE_CHECKING:
    from spool.read.select import Run
    from spool.read.streams import Source
    from spool.stores.hot import HotStore

_ROUNDS = 8


class FileRange(NamedTuple):
    """``length`` bytes at ``offset`` of ``file``."""

    file: str
    offset: int
    length: int


def byte_ranges(source: Source, run: Run, store: HotStore) -> list[ByteRange]:
    """Return where the rows of ``run`` lie: one range, or two where they begin in the shard and end in its tail.

    Raises:
        IntegrityError: the files do not hold them.
    """
    if not run.n:
        return []
    key, base = source.locate(run.extent)
    width, start = source.row_bytes, (run.row - base) * source.row_bytes
    ranges, at = [], start
    for part in files(store, key, start, run.n * width):
        rows = base + at // width, base - (-(at + part.length) // width)
        ranges.append(ByteRange(*part, source.field.name, rows, source.stream))
        at += part.length
    return ranges


def files(store: HotStore, key: str, offset: int, length: int) -> list[FileRange]:
    """Return the files that hold ``length`` bytes at ``offset`` of ``key`` at this moment.

    Raises:
        IntegrityError: none do.
    """
    path, head = store.path(key), 0
    for _ in range(_ROUNDS):  # a writer may move bytes from a tail to the shard between two looks
        size = _size(path)
        head = min(max(size - offset, 0), length)
        ranges = [FileRange(path, offset, head)] if head else []
        if head == length:
            return ranges
        tail = _tail(store, key, offset + head, offset + length)
        if tail is not None:
            return [*ranges, tail]
    if not head and not os.path.exists(path):
        raise AbsentError(f"{path} is missing", file=path)
    raise IntegrityError(
        f"{path} and its tails do not hold bytes [{offset}, {offset + length}); if their writer was killed, run "
        "`spool recover`",
        file=path, offset=offset, expected=length, got=head,
    )  # fmt: skip


def _tail(store: HotStore, key: str, start: int, stop: int) -> FileRange | None:
    site = tail_site(key)
    if site is None:
        return None
    folder = store.path(site[0])
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        pack, begin = parse_tail(name) or (-1, 0)
        path = os.path.join(folder, name)
        if pack == site[1] and begin <= start and begin + _size(path) >= stop:
            return FileRange(path, start - begin, stop - start)
    return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
