"""The standard streams of a process that was started without some of them, as a daemon may be."""

from __future__ import annotations

import os
import sys

_MISSING = (
    ("stdin", os.O_WRONLY, "r"),
    ("stdout", os.O_RDONLY, "w"),
    ("stderr", os.O_WRONLY, "w"),
)


def fill_in() -> None:
    """Open ``/dev/null`` where a standard stream is closed, before a file of a spool gets its number.

    Data that cannot be read or written is an error then, as of other tools: stdin and stdout are opened the wrong way
    round. What is said on stderr is lost.
    """
    for name, flags, mode in _MISSING:
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free
            os.set_inheritable(number, True)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def show_escapes() -> None:
    """Have what a locale cannot say shown as an escape."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
