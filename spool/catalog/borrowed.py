"""A catalog file that other processes feed, read where it lies until this one has something of its own to take in."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import apsw

from spool.catalog import schema, snapshot
from spool.catalog.database import Database, _Link
from spool.catalog.schema import DamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator


class BorrowedDatabase(Database):
    """Reads the file, and writes only into a copy of it, made when something is written for the first time.

    Where the file cannot be read in place, it begins with the copy; where there is no sound file, with nothing. Then
    ``path`` is None.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._links(_Link(), None)

    @property
    def is_borrowed(self) -> bool:
        """The file is read where it lies; false once there is a copy."""
        return self.path is not None

    @contextmanager
    def writing(self) -> Iterator[apsw.Connection]:
        """See `Database.writing`; of a copy."""
        with self._writer.lock:
            if self.path is not None:
                self._copy(self.path)
        with super().writing() as connection:
            yield connection

    def move_aside(self, damage: DamagedError) -> str | None:
        """Go on with a copy, or with nothing, where that is what is damaged; the file stays."""
        if self.path is None:
            return super().move_aside(damage)
        self.damage = None
        with self._writer.lock:
            self._copy(self.path)
        return None

    def _copy(self, path: str) -> None:
        link = self._writer
        link.close()
        self.path = None
        self._memory_epoch += 1
        link.connection = snapshot.load(path)

    def _connection(self, link: _Link) -> apsw.Connection:
        if self.path is None:
            return super()._connection(self._writer)
        if link.connection is not None and (
            schema.identity(self.path) != link.identity or schema.has_wal(self.path) != link.has_wal
        ):
            link.close()
        if link.connection is None:
            try:
                link.identity, link.has_wal = schema.identity(self.path), schema.has_wal(self.path)
                link.connection = schema.connect_readonly(self.path)
            except (DamagedError, OSError, apsw.Error):
                with self._writer.lock:
                    if self.path is not None:
                        self._copy(self.path)
                return super()._connection(self._writer)
        return link.connection
