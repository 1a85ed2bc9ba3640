"""The terminal browser on a million sessions: from the start of the process to the first rows on the screen."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl

import spool
from spool.catalog import Catalog, LogItem
from spool.model.events import Annotated, SessionFinalized, SessionOpened, Single, StepCommitted
from spool.model.fields import TOKEN_IDS
from spool.model.refs import Extent, SegmentRef, VersionSpan
from tools.bench.harness import Row

STREAM, STEPS, BATCH = "20260101T000000-00000000", 3, 5000
PATIENCE_S, ROWS, COLUMNS = 120.0, 48, 160


def browsing(root: str, *, n_sessions: int, runs: int) -> Iterator[Row]:
    """Start the browser on ``n_sessions`` sessions; the bound is a second, and 256 MiB."""
    place = os.path.join(root, "browse")
    spool.open(place).close()
    _fill(place, n_sessions)
    newest = f"s{n_sessions - 1:07}".encode()
    _start(place, newest)  # its modules are compiled, its pages cached
    found = [_start(place, newest) for _ in range(runs)]
    seconds, memory = min(took for took, _ in found), max(peak for _, peak in found)
    yield Row(
        "browse_start", f"{seconds:.2f} s to the first of {n_sessions} sessions", "1 s", seconds, 1, at_least=False
    )
    yield Row(
        "browse_memory",
        f"{memory >> 20} MiB, {n_sessions} sessions",
        "256 MiB",
        memory / (256 << 20),
        1,
        at_least=False,
    )


def _start(place: str, awaited: bytes) -> tuple[float, int]:
    """Start the browser in a terminal of its own; return the seconds until ``awaited`` is shown, and peak memory."""
    began = time.perf_counter()
    pid, terminal = pty.fork()
    if not pid:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "spool", "browse", place])
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    shown = b""
    try:
        while awaited not in shown:
            if not select.select([terminal], [], [], PATIENCE_S)[0]:
                raise RuntimeError(f"the browser showed no {awaited!r} for {PATIENCE_S:g} s")
            shown += os.read(terminal, 1 << 16)
        seconds = time.perf_counter() - began
        time.sleep(1.0)  # all sessions are in order by now
        return seconds, _peak_bytes(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def _peak_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _fill(place: str, n_sessions: int) -> None:
    """Fill the index of a spool with finalised, rewarded sessions, as a writer's events would."""
    catalog, items = Catalog.open(os.path.join(place, "catalog.sqlite")), list[LogItem]()
    seq = start = offset = 0
    for number in range(n_sessions):
        for event in _events(number):
            items.append(LogItem(seq, offset, event))
            seq, offset = seq + 1, offset + 300
        if len(items) >= BATCH or number == n_sessions - 1:
            catalog.ingest(STREAM, 0, start=start, end=offset, items=items)
            items, start = [], offset
    catalog.close()


def _events(number: int) -> Iterator[Single]:
    name, at, row = f"s{number:07}", 1.7e9 + number, number * 100 * STEPS
    yield SessionOpened(
        name, at, group_id=f"p{number // 8}", sample_index=number % 8, rollout_step=number // 4096,
        source=("swe", "math", "web")[number % 3], fields=(TOKEN_IDS,),
    )  # fmt: skip
    for index in range(STEPS):
        start, stop = 100 * index, 100 * (index + 1)
        yield StepCommitted(
            name, index, str(index), at + index / 10, index - 1 if index else None, start, stop - 50, stop, stop,
            {"token_ids": (Extent(STREAM, row + start, 100, start, 7),)},
            versions=(VersionSpan(str(number // 4096), stop - 50, stop),), finish_reason="stop",
        )  # fmt: skip
    segment = SegmentRef(
        spool_id="0" * 16, session_id=name, n_tokens=100 * STEPS, n_rows=100 * STEPS, response_start=50, view="lineage",
        steps=tuple(range(STEPS)), outcome="completed",
        extents={"token_ids": (Extent(STREAM, row, 100 * STEPS, 0, 7),)},
    )  # fmt: skip
    yield SessionFinalized(name, at + 1, "completed", "lineage", (segment,))
    if number % 10:
        yield Annotated(name, at + 2, {"reward": number % 97 / 97})
