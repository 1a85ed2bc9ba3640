"""Exit codes, and how an error becomes one."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from enum import IntEnum

import click

from spool import errors
from spool.cli.output import say


class Exit(IntEnum):
    """What a verb's exit code says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    INTEGRITY = 5
    INTERRUPTED = 130


_CODES: tuple[tuple[type[Exception], Exit], ...] = (
    (errors.IntegrityError, Exit.INTEGRITY),
    (errors.NotFoundError, Exit.NOT_FOUND),
    (errors.StorageError, Exit.UNAVAILABLE),
    (errors.CapacityError, Exit.UNAVAILABLE),
    (errors.InputError, Exit.USAGE),
    (errors.SpoolError, Exit.FAILED),
    (OSError, Exit.UNAVAILABLE),
)


_SAID = (
    (
        "leave it out (fields=), pass missing=<number> to have them filled",
        "name other fields with --field, or pass --missing NUMBER to have them filled",
    ),
    (", or take the segment from view(gaps='cut')", ""),
    ("Store the field (?fields=), or attach it", "Name others with --field"),
    (
        "Store the field (?fields=), attach it, or pass missing=<number>",
        "Name others with --field, or pass --missing NUMBER",
    ),
    ("missing=<number>", "--missing NUMBER"),
    (": restore it from a copy, or look at what is there with verify='never'", ": restore it from a copy"),
    ("take another value, or dtype='train'", "take another --missing, or leave out --stored"),
)
"""What errors advise in Python, and what does the same on the command line."""


def report(error: BaseException) -> Exit:
    """Print ``error`` on stderr and return its exit code; an unforeseen one keeps its traceback."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return Exit.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        hush()
        return Exit.OK
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        say(error.format_message())  # type: ignore[attr-defined]
        return Exit.USAGE
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        if context is not None:
            say(context.get_usage())
        say(f"spool: usage: {error.format_message()}")
        return Exit.USAGE
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if code is None:
        raise error
    if isinstance(error, OSError) and not isinstance(error, errors.SpoolError):
        hush()
    said = str(error)
    for python, here in _SAID:
        said = said.replace(python, here)
    say(f"spool: {getattr(error, 'kind', 'storage')}: {said}")
    return code


def hush() -> None:
    """Send what is still to be written to stdout nowhere, or the interpreter's last flush finds the pipe again."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
