"""Several files put in place together, each of them whole or not at all."""

from __future__ import annotations

import os
import secrets
from types import TracebackType
from typing import Self

from spool.stores.local import pwrite_all, sync_dir
from spool.write.folder import unlink_quietly


class Replacements:
    """Files that will replace what is at their paths: written, synced, renamed, and their folders synced.

    As `spool.stores.local.write_atomic` for each, but one kind of step after the other: what makes the first durable
    mostly does it for all. A ``with`` block removes what was not put in place.
    """

    def __init__(self) -> None:
        self._made: list[tuple[str, str, int]] = []

    def __enter__(self) -> Self:
        return self

    def add(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Write the file that shall be at ``path``, beside it.

        Raises:
            OSError: it could not be.
        """
        folder, name = os.path.split(path)
        temp = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._made.append((temp, path, fd))
        pwrite_all(fd, data, 0)

    def sync(self) -> None:
        """Make their bytes durable.

        Raises:
            OSError: they may not be.
        """
        for _, _, fd in self._made:
            os.fsync(fd)

    def publish(self) -> None:
        """Put them in place, in the order in which they were added, and make that durable before the last is.

        Raises:
            OSError, SpoolError: not all are there for good; each is whole, or as it was.
        """
        renames = [(temp, path) for temp, path, _ in self._made]
        for group in (renames[:-1], renames[-1:]):
            for temp, path in group:
                os.rename(temp, path)
            for folder in dict.fromkeys(os.path.dirname(path) for _, path in group):
                sync_dir(folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for temp, _, fd in self._made:
            os.close(fd)
            if kind is not None:
                unlink_quietly(temp)
