"""Sealing a pack: pad and index its shards, describe them in ``zarr.json``, turn its log into Arrow.

All of it works from what is on disk and from the number of rows that count, may break off anywhere and may be done
again: the log goes last, and while it is there the pack is not sealed. Readers never notice: bytes of rows stay where
they are, and a shard file grows the way it does when it is appended to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from spool.errors import SpoolError
from spool.formats import records
from spool.formats.shard import padded_bytes, parse_rows, shard_index
from spool.model.fields import ArraySpec
from spool.points import reach
from spool.stores.local import (
    BLOCK,
    aligned_buffer,
    make_dirs,
    map_os_error,
    parse_tail,
    pwrite_all,
    read_file,
    set_direct,
    spare_prefix,
    sync_dir,
    tail_name,
    write_atomic,
)
from spool.write.folder import Folder, unlink_quietly
from spool.write.log import LogContents, log_path
from spool.write.replace import Replacements
from spool.write.tape import find_tails, open_shard


class Shortfall(Struct, frozen=True):
    """Rows that events refer to and that are not on disk.

    Attributes:
        array: the stored array.
        pack: the pack.
        expected_bytes: of the shard, up to the last row referred to.
        got_bytes: what is there.
    """

    array: str
    pack: int
    expected_bytes: int
    got_bytes: int


class Payload(NamedTuple):
    """Where the bytes of a shard are before it is sealed.

    Attributes:
        size: bytes in the shard file.
        tail_start: the tail's first byte, or ``size`` where there is none.
        end: one past the last byte that is there.
        tail_path: the tail file, or empty.
    """

    size: int
    tail_start: int
    end: int
    tail_path: str


def find_payload(folder: Folder, spec: ArraySpec, pack: int) -> Payload:
    """Return where the rows of a shard are: of several tails the one that begins last, at the file's end or before."""
    size = _size(folder.shard_path(spec, pack))
    starts = [start for start, _ in find_tails(f"{folder.path}/{spec.name}", pack) if start <= size]
    if not starts:
        return Payload(size, size, size, "")
    path = f"{folder.path}/{spec.name}/{tail_name(pack, max(starts))}"
    return Payload(size, max(starts), max(size, max(starts) + _size(path)), path)


def packs_of(folder: Folder, suffix: str) -> list[int]:
    """Return the packs of which there is a file ``records/<n><suffix>``, in order."""
    names = (name.removesuffix(suffix) for name in os.listdir(f"{folder.path}/records") if name.endswith(suffix))
    return sorted(int(name) for name in names if name.isdecimal())


def seal_pack(folder: Folder, pack: int, rows: Mapping[str, int], contents: LogContents, *, direct: bool) -> int:
    """Seal a pack whose writer is done with it; return the bytes that its files take on disk.

    An array with fewer bytes than ``rows`` says gets what is there and no index, so that neither a reference nor Zarr
    reads zeros for what is missing.

    Args:
        folder: the stream.
        pack: number of the pack.
        rows: rows that count, by array; what lies behind them on disk is cut off.
        contents: of its log.
        direct: write past the page cache where the file system allows it.

    Raises:
        SpoolError: something failed; the pack is not sealed, and nothing is lost.
    """
    with mapped(folder.path):
        n_bytes, documents = _complete_shards(folder, pack, rows, direct=direct), Replacements()
        reach("seal.shards")
        with documents:
            for spec in folder.schema.arrays:
                _describe(folder, spec, pack, rows.get(spec.name, 0), documents)
            if contents.payloads or any(rows.values()):
                table = records.encode(contents.payloads)
                documents.add(f"{folder.path}/records/{pack}.arrow", table)  # the last one, so the last to be seen
                n_bytes += -(-len(table) // BLOCK) * BLOCK
            documents.sync()
            documents.publish()
        reach("seal.documents")
        for spec in folder.schema.arrays:
            _remove_tails(folder, spec, pack)
        os.unlink(log_path(folder.path, pack))
        sync_dir(f"{folder.path}/records")
        return n_bytes


def _complete_shards(folder: Folder, pack: int, rows: Mapping[str, int], *, direct: bool) -> int:
    """Complete the shards and make them durable, all together: the file system's journal is written once for many."""
    n_bytes, folders = 0, []
    with contextlib.ExitStack() as stack:
        fds = []
        for spec in folder.schema.arrays:
            n = rows.get(spec.name, 0)
            if n == 0:
                remove_shard(folder, spec, pack)
                continue
            path = folder.shard_path(spec, pack)
            make_dirs(f"{folder.path}/{spec.name}", os.path.dirname(path))
            fd, is_direct = open_shard(path, folder.root, direct=direct)
            stack.callback(os.close, fd)
            _complete_shard(fd, folder, spec, pack, n, direct=is_direct)
            fds.append(fd)
            folders += folder.shard_folders(spec, pack)
        for fd in fds:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            n_bytes += os.fstat(fd).st_blocks * 512
    for path in folders:
        sync_dir(path)
    return n_bytes


def _complete_shard(fd: int, folder: Folder, spec: ArraySpec, pack: int, n_rows: int, *, direct: bool) -> None:
    """Write what a shard file lacks: rows, padding, index."""
    payload, rows_end = find_payload(folder, spec, pack), n_rows * spec.row_bytes
    index, index_start = b"", payload.end
    if payload.end >= rows_end:
        chunk_rows = folder.layout.chunk_rows[spec.name]
        chunk_bytes = chunk_rows * spec.row_bytes
        n_chunks = folder.layout.shard_rows[spec.name] // chunk_rows
        index = shard_index(rows_end, chunk_bytes=chunk_bytes, n_chunks=n_chunks)
        index_start = padded_bytes(rows_end, chunk_bytes=chunk_bytes)
    final = index_start + len(index)
    base = min(payload.size, payload.tail_start, rows_end) // BLOCK * BLOCK
    cut = final // BLOCK * BLOCK
    buffer = aligned_buffer(-(-(final - base) // BLOCK) * BLOCK)
    _load(fd, payload, base, min(rows_end, payload.end), buffer, direct=direct)
    buffer[index_start - base : final - base] = index
    if cut < rows_end:  # readers find the rest there until it is in the shard file
        write_atomic(f"{folder.path}/{spec.name}/{tail_name(pack, cut)}", buffer[cut - base : final - base], sync=False)
    pwrite_all(fd, buffer[: cut - base], base, direct=direct)
    if direct:
        set_direct(fd, on=False)
    if payload.size > final:
        os.ftruncate(fd, final)
    pwrite_all(fd, buffer[cut - base : final - base], cut)


def _load(fd: int, payload: Payload, base: int, stop: int, buffer: memoryview, *, direct: bool) -> None:
    """Read bytes ``[base, stop)`` of a shard into ``buffer``: from the tail what it holds, the rest from the file."""
    below = min(payload.size, stop) - base
    if below > 0:
        length = -(-below // BLOCK) * BLOCK if direct else below
        os.preadv(fd, [buffer[:length]], base)
        buffer[below:length] = bytes(length - below)
    if payload.tail_path and stop > payload.tail_start:
        with open(payload.tail_path, "rb", buffering=0) as file:
            file.readinto(buffer[payload.tail_start - base : stop - base])


def _describe(folder: Folder, spec: ArraySpec, pack: int, n_rows: int, documents: Replacements) -> None:
    """Say in an array's ``zarr.json`` which rows of a pack are valid."""
    path, start = f"{folder.path}/{spec.name}/zarr.json", pack * folder.layout.shard_rows[spec.name]
    complete = n_rows and find_payload(folder, spec, pack).size > n_rows * spec.row_bytes
    before = parse_rows(read_file(path), path)[1]
    valid = {first: count for first, count in before if first != start}
    if complete:
        valid[start] = n_rows
    after = sorted(valid.items())
    if after != before:
        documents.add(path, folder.metadata(spec, after))


def remove_shard(folder: Folder, spec: ArraySpec, pack: int) -> None:
    """Remove the shard of an array that has no rows in a pack, and its folders."""
    path = folder.shard_path(spec, pack)
    unlink_quietly(path)
    with contextlib.suppress(OSError):
        while os.path.basename(path) != str(pack):
            path = os.path.dirname(path)
            os.rmdir(path)


def _remove_tails(folder: Folder, spec: ArraySpec, pack: int) -> None:
    """Remove the tails of a complete shard, and what a writer that was killed kept to make tails of."""
    path = f"{folder.path}/{spec.name}"
    for name in os.listdir(path):
        tail = parse_tail(name)
        if (tail and tail[0] == pack) or name.startswith(spare_prefix(pack)):
            os.unlink(f"{path}/{name}")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def mapped(path: str) -> Iterator[None]:
    """Turn what the operating system raises while a pack is sealed into Spool's errors."""
    try:
        yield
    except SpoolError:
        raise
    except OSError as error:
        raise map_os_error(error, what="seal a pack of", path=path) from error
