"""Writing a report: whole or not at all, and over nothing that is there."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from spool.errors import InputError, StorageError
from spool.report.gather import gather
from spool.report.page import page
from spool.report.svg import drawing

if TYPE_CHECKING:
    from spool.handle import Spool


def write_report(sp: Spool, path: str, where: str | None = None, *, force: bool = False) -> int:
    """Write the report of a spool to a file, which gets its name when all is in it; return its size in bytes.

    Args:
        sp: the spool.
        path: the file.
        where: a filter of sessions.
        force: take the place of what is there.

    Raises:
        ConfigError: matplotlib is not installed.
        InputError: the filter does not parse, or there is something at ``path``.
        StorageError: the spool cannot be read, or the file cannot be written.
    """
    _check_free(path, force=force)
    with drawing(0):
        pass  # without matplotlib nothing is gathered
    data = page(gather(sp, where)).encode("utf-8")
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        _check_free(path, force=force)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write {path!r}: {error.strerror or error}", path=path) from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    return len(data)


def _check_free(path: str, *, force: bool) -> None:
    if force and os.path.lexists(path) and not os.path.isfile(path):
        raise InputError(f"{path!r} is not a file that a report can take the place of", path=path)
    if not force and os.path.lexists(path):
        raise InputError(f"there is something at {path!r}: name another file, or pass --force", path=path)
