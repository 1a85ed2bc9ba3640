"""A stream's folder: its name, its lock, its metadata, and how it comes to be.

``lock`` holds a copy of the group's ``zarr.json``: neither is ever rewritten, and recovery makes one from the other.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time

from msgspec import Struct

from spool import locks
from spool.errors import IntegrityError, LockedError, SpoolError
from spool.formats.shard import array_metadata, group_metadata, parse_group, shard_key
from spool.model.fields import ArraySpec, Layout, Schema
from spool.stores.local import make_dirs, map_os_error, pwrite_all, read_file, sync_dir, write_atomic

NEW = ".new-"
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")
_ATTEMPTS = 3


class Folder(Struct, frozen=True):
    """A stream on disk.

    Attributes:
        root: the hot root.
        name: of the stream.
        schema: its fields.
        layout: rows a chunk and a shard of each array.
    """

    root: str
    name: str
    schema: Schema
    layout: Layout

    @property
    def path(self) -> str:
        """The stream's folder."""
        return f"{self.root}/streams/{self.name}"

    def shard_path(self, spec: ArraySpec, pack: int) -> str:
        """Return the shard file of an array in a pack."""
        return f"{self.path}/{shard_key(spec.name, len(spec.shape) + 1, pack)}"

    def shard_folders(self, spec: ArraySpec, pack: int) -> list[str]:
        """Return the folders whose names and files lead to a shard from the array's own, the innermost first."""
        path, top = self.shard_path(spec, pack), f"{self.path}/{spec.name}"
        folders = []
        while (path := os.path.dirname(path)) != top:
            folders.append(path)
        return folders

    def metadata(self, spec: ArraySpec, valid_rows: list[tuple[int, int]]) -> bytes:
        """Return an array's ``zarr.json``; it ends with the last of ``valid_rows``, each ``(start, count)``."""
        return array_metadata(
            spec,
            chunk_rows=self.layout.chunk_rows[spec.name],
            shard_rows=self.layout.shard_rows[spec.name],
            n_rows=sum(valid_rows[-1]) if valid_rows else 0,
            valid_rows=valid_rows,
        )


def new_name() -> str:
    """Return a name for a new stream: UTC time and a random part."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


def is_stream_name(name: str) -> bool:
    """Whether ``name`` is one that `new_name` makes."""
    return _NAME.fullmatch(name) is not None


def lock_folder(path: str, *, create: bool = True) -> int:
    """Take the lock of a stream's folder; return the descriptor that holds it until `locks.release`.

    Args:
        path: the folder.
        create: make the file where it is missing. Of a stream that is there it says whether the writer lives, so a new
            one would say nothing.

    Raises:
        IntegrityError: the file is missing and not to be made.
        LockedError: its writer, or a recovery, lives.
        SpoolError: the lock file cannot be opened.
    """
    file = f"{path}/lock"
    try:
        fd = locks.take(file, os.O_RDWR | (os.O_CREAT if create else 0))
    except FileNotFoundError as error:
        if create or not os.path.isdir(path):
            raise map_os_error(error, what="open", path=file) from error
        raise IntegrityError(
            f"{file} is missing: nobody can tell whether the stream's writer lives, and sealing under a live one loses "
            "what it writes; if you are sure that no process writes it, make an empty file of that name and try again",
            path=file,
        ) from error
    except OSError as error:
        raise map_os_error(error, what="open", path=file) from error
    if fd is None:
        raise LockedError(
            f"stream {path} has a live writer: a stream has exactly one; open a stream of your own, or wait", path=path
        )
    return fd


def make_folder(root: str, schema: Schema, sizes: Layout, spool_id: str | None = None) -> tuple[Folder, int]:
    """Make and lock the folder of a new stream.

    It is built under a temporary name and renamed: whoever sees the stream sees it locked and whole.

    Returns:
        The folder, and the descriptor that holds its lock.

    Raises:
        SpoolError: it cannot be made.
    """
    streams = f"{root}/streams"
    try:
        make_dirs(root, streams)
    except OSError as error:
        raise map_os_error(error, what="make", path=streams) from error
    for attempt in range(1, _ATTEMPTS + 1):
        folder = Folder(root, new_name(), schema, sizes)
        temp = f"{streams}/{NEW}{folder.name}"
        try:
            return folder, _build(folder, temp, spool_id)
        except (FileNotFoundError, SpoolError, OSError) as error:
            # a recovery may have taken the half-made folder for a dead writer's: then another name will do
            swept = isinstance(error, LockedError) or not os.path.exists(f"{temp}/lock")
            shutil.rmtree(temp, ignore_errors=True)
            if swept and attempt < _ATTEMPTS:
                continue
            raise (error if isinstance(error, SpoolError) else map_os_error(error, what="make", path=temp)) from error
    raise AssertionError("unreachable")


def _build(folder: Folder, temp: str, spool_id: str | None) -> int:
    own = {} if spool_id is None else {"id": spool_id}
    os.mkdir(temp)
    fd = lock_folder(temp)
    try:
        group = group_metadata(folder.schema, folder.layout, stream=folder.name, created=time.time(), **own)
        pwrite_all(fd, group, 0)
        os.fsync(fd)
        os.mkdir(f"{temp}/records")
        for spec in folder.schema.arrays:
            os.mkdir(f"{temp}/{spec.name}")
            write_atomic(f"{temp}/{spec.name}/zarr.json", folder.metadata(spec, []))
        write_atomic(f"{temp}/zarr.json", group)
        os.rename(temp, folder.path)
        sync_dir(os.path.dirname(folder.path))
    except BaseException:
        locks.release(fd)
        raise
    return fd


def open_folder(root: str, name: str) -> tuple[Folder, bytes | None]:
    """Return the folder of an existing stream, and the group's metadata where ``zarr.json`` must be rewritten.

    Raises:
        SpoolError: neither ``zarr.json`` nor the copy of it in ``lock`` can be used.
    """
    path = f"{root}/streams/{name}"
    try:
        return Folder(root, name, *parse_group(read_file(f"{path}/zarr.json"), f"{path}/zarr.json")), None
    except SpoolError as error:
        copy = read_file(f"{path}/lock")
        try:
            return Folder(root, name, *parse_group(copy)), copy
        except SpoolError:
            raise error from None


def unlink_quietly(path: str, *, dir_fd: int | None = None) -> None:
    """Remove a file that nobody needs any more, if it is there and can be removed; ``dir_fd`` is its folder's."""
    with contextlib.suppress(OSError):
        os.unlink(path, dir_fd=dir_fd)
