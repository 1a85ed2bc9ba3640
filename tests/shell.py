"""Runs the command line: the installed script, as a user does, or a fork of a process that has it imported already."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from typing import NamedTuple

SCRIPT = shutil.which("spool", path=os.path.dirname(sys.executable)) or shutil.which("spool")
HOSTILE = ("\x1b", "\x07", "\x00", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b", "\ufeff")
"""Characters that have an effect on a terminal, or on how what follows is read."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["spool.cli", "spool.handle", "spool.importers", "spool.cli.facts", "rich.table"])


class Result(NamedTuple):
    """What a run of the command line left."""

    code: int
    out: bytes
    err: str

    @property
    def text(self):
        return self.out.decode()

    @property
    def json(self):
        """Stdout as JSON, by a strict reading: no NaN, no lone surrogates, no key twice."""
        found = json.loads(self.out.decode("utf-8", "strict"), parse_constant=_refuse, object_pairs_hook=_once)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
        return found

    @property
    def rows(self):
        """Stdout as the rows of a tab-separated table."""
        heading, *lines = self.text.splitlines()
        rows = [line.split("\t") for line in lines]
        names = heading.split("\t")
        assert all(len(row) == len(names) for row in rows), self.text
        return [dict(zip(names, row, strict=True)) for row in rows]


def _refuse(name):
    raise AssertionError(f"{name} is not JSON")


def _once(pairs):
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name not in ("SPOOL_URI", "SPOOL_ROOTS", "COLUMNS")}
    return {**kept, "TERM": "xterm", **{name: str(value) for name, value in more.items()}}


def spool(*args, code=0, env=None, **options):
    """Run the installed script; the exit code must be ``code``."""
    assert SCRIPT, "the script `spool` is not installed: pip install -e ."
    done = subprocess.run(
        [SCRIPT, *map(str, args)], env=environment(**(env or {})), capture_output=True, timeout=120, **options
    )
    found = Result(done.returncode, done.stdout, done.stderr.decode(errors="replace"))
    assert found.code == code, found
    return found


def run(*args, code=0, env=None, stdin="", cwd=None):
    """Run the command line in a fork, as fast as that is; the exit code must be ``code`` (None: any)."""
    ends = [os.memfd_create(name) for name in ("in", "out", "err")]
    os.write(ends[0], stdin.encode())
    os.lseek(ends[0], 0, os.SEEK_SET)
    paths = [f"/proc/{os.getpid()}/fd/{end}" for end in ends]
    process = _forks.Process(target=_main, args=(list(map(str, args)), paths, environment(**(env or {})), cwd))
    process.start()
    process.join(60)
    out, err = (_content(end) for end in ends[1:])
    for end in ends:
        os.close(end)
    found = Result(process.exitcode, out, err.decode(errors="replace"))
    assert found.code == code or code is None, found
    return found


def _content(end):
    os.lseek(end, 0, os.SEEK_SET)
    with open(end, "rb", closefd=False) as file:
        return file.read()


def _main(args, paths, env, cwd):
    for number, path in enumerate(paths):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd or "/")
    streams = [open(end, "r" if end == 0 else "w", closefd=False) for end in range(3)]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.argv = ["spool", *args]
    from spool.cli import main

    main()


def on_terminal(*args, columns=80, code=0, env=None):
    """Run the command line in a fork on a terminal of its own; return what it showed, escape sequences included."""
    parent, child = pty.openpty()
    ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    paths = [os.ttyname(child)] * 3
    process = _forks.Process(target=_main, args=(list(map(str, args)), paths, environment(**(env or {})), None))
    process.start()
    shown = b""
    while True:
        ended = not process.is_alive()
        if select.select([parent], [], [], 0 if ended else 0.05)[0]:
            shown += os.read(parent, 1 << 16)
        elif ended:
            break
    os.close(parent)
    os.close(child)
    assert process.exitcode == code, shown
    return shown.decode().replace("\r\n", "\n")
