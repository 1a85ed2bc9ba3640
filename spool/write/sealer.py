"""The thread that seals the packs of a stream while it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from spool.errors import IntegrityError, SpoolError
from spool.write import seal
from spool.write.folder import Folder
from spool.write.log import log_path, read_log

log = logging.getLogger("spool.write")


class Finished(NamedTuple):
    """A pack that takes no more rows.

    Attributes:
        number: of the pack.
        rows: rows that count, by array.
        log_end: bytes of its log.
        taken_bytes: room that was taken for it.
    """

    number: int
    rows: Mapping[str, int]
    log_end: int
    taken_bytes: int


class Sealer:
    """Seals the packs of one stream in their order, in a thread that lives while there are some.

    The thread is not a daemon: the interpreter waits for it.

    Args:
        folder: the stream.
        direct: write past the page cache where the file system allows it.
        settle: told of each sealed pack the room that was taken for it, and the bytes of its files.
        confirm: raises where another folder than the stream's own is at its path by now.
    """

    def __init__(
        self, folder: Folder, *, direct: bool, settle: Callable[[int, int], None], confirm: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._confirm = confirm
        self._direct = direct
        self._settle = settle
        self._queue: deque[Finished] = deque()
        self._working = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, pack: Finished, *, background: bool) -> None:
        """Queue a pack; with ``background``, have it sealed soon."""
        self._queue.append(pack)
        alone = len(self._queue) == 1  # otherwise a thread that is sealing will see it, unless it has failed
        if background and (alone or self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name=f"spool-seal-{self._folder.name}")
            with contextlib.suppress(RuntimeError):  # no thread to be had, or the interpreter ends: `drain` will do it
                self._thread.start()

    def drain(self) -> None:
        """Seal all that is queued, in this thread.

        Raises:
            SpoolError: a pack could not be sealed; it stays queued, and so do those behind it.
        """
        with self._working:
            while self._queue:
                self._seal(self._queue[0])
                self._queue.popleft()

    def _run(self) -> None:
        try:
            self.drain()
        except SpoolError as error:
            log.warning("stream %s: a pack waits to be sealed: %s", self._folder.name, error)

    def _seal(self, pack: Finished) -> None:
        self._confirm()
        path = log_path(self._folder.path, pack.number)
        with seal.mapped(path):
            contents = read_log(path)
            damaged = contents.torn_bytes or contents.damaged_bytes or os.stat(path).st_size != pack.log_end
        if damaged:
            raise IntegrityError(
                f"the commit log {path} is not as it was written: {contents.torn_bytes} bytes torn, "
                f"{contents.damaged_bytes} damaged; check the disk, then run `spool recover`",
                path=path,
                torn_bytes=contents.torn_bytes,
                damaged_bytes=contents.damaged_bytes,
            )
        n_bytes = seal.seal_pack(self._folder, pack.number, pack.rows, contents, direct=self._direct)
        self._settle(pack.taken_bytes, n_bytes)
