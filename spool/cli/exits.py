"""Exit codes, and how an error becomes one."""

from __future__ import annotations

import os
import sys
from enum import IntEnum

import click

from spool import errors


class Exit(IntEnum):
    """What a verb's exit code says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    INTEGRITY = 5
    INTERRUPTED = 130


_CODES: tuple[tuple[type[errors.SpoolError], Exit], ...] = (
    (errors.IntegrityError, Exit.INTEGRITY),
    (errors.NotFoundError, Exit.NOT_FOUND),
    (errors.StorageError, Exit.UNAVAILABLE),
    (errors.CapacityError, Exit.UNAVAILABLE),
    (errors.InputError, Exit.USAGE),
)


def report(error: BaseException) -> Exit:
    """Print ``error`` on stderr as one line and return its exit code; an unforeseen one keeps its traceback."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return Exit.INTERRUPTED
    if isinstance(error, click.ClickException):
        error.show()
        return Exit.USAGE
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    if isinstance(error, errors.SpoolError):
        click.echo(f"spool: {error.kind}: {error}", err=True)
        return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.FAILED)
    raise error
