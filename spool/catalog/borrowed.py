"""A catalog file that other processes feed, read where it lies until this one has something of its own to take in."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import apsw

from spool.catalog import files, snapshot
from spool.catalog.database import Database, Link
from spool.catalog.files import DamagedError
from spool.errors import moved_away

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

TRIES = 5
"""How often a question is asked again because a process came, wrote into the file and went meanwhile."""


class BorrowedDatabase(Database):
    """Reads the file, and writes only into a copy of it, made when something is written for the first time.

    While a process has the file open, it is read as SQLite's readers do. While none has, it is read without a lock, so
    that an answer counts only if the file was the same afterwards (`files.mark`).

    Where the file cannot be read in place, it begins with the copy; where there is no sound file, with nothing. Then
    ``path`` is None.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._had_folder = os.path.isdir(os.path.dirname(path))
        self._links(Link(), None)

    @property
    def is_borrowed(self) -> bool:
        """The file is read where it lies; false once there is a copy."""
        return self.path is not None

    def version(self) -> tuple[object, ...]:
        """See `Database.version`."""
        path = self.path
        return *super().version(), None if path is None else files.mark(path)

    def ask(self, question: Callable[[apsw.Connection], T], *, apart: bool = False) -> T:
        """See `Database.ask`."""
        for _ in range(TRIES):
            path = self.path
            before = None if path is None else files.mark(path)
            try:
                found = super().ask(question, apart=apart)
            except DamagedError:
                if path is None or files.mark(path) == before:
                    raise
                self.damage = None
                continue
            if path is None or before is None or before.has_wal or files.mark(path) == before:
                return found
        self._go_on_with_copy()
        return super().ask(question, apart=apart)

    @contextmanager
    def writing(self) -> Iterator[apsw.Connection]:
        """See `Database.writing`; of a copy."""
        self._go_on_with_copy()
        with super().writing() as connection:
            yield connection

    def move_aside(self, damage: DamagedError) -> str | None:
        """Go on with a copy, or with nothing, where that is what is damaged; the file stays."""
        if self.path is None:
            return super().move_aside(damage)
        self.damage = None
        self._go_on_with_copy()
        return None

    def _go_on_with_copy(self) -> None:
        with self._writer.lock:
            if self.path is None:
                return
            if self._had_folder and not os.path.isdir(os.path.dirname(self.path)):
                raise moved_away(os.path.dirname(self.path))
            path, self.path = self.path, None
            self._writer.close()
            self._writer.connection = snapshot.load(path)

    def _connection(self, link: Link) -> apsw.Connection:
        if self.path is not None and link.connection is not None and not self._is_as_opened(link, self.path):
            link.close()
        if self.path is not None and link.connection is None:
            try:
                link.identity, link.mark = files.identity(self.path), files.settled_mark(self.path)
                link.connection = files.connect_readonly(self.path)
            except (DamagedError, OSError, apsw.Error):
                self._go_on_with_copy()
        return link.connection if self.path is not None and link.connection else super()._connection(self._writer)

    @staticmethod
    def _is_as_opened(link: Link, path: str) -> bool:
        now = files.mark(path)
        if now is None or link.mark is None or now.has_wal != link.mark.has_wal:
            return False
        return now.identity == link.mark.identity if now.has_wal else now == link.mark
