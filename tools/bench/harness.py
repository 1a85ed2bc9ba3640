"""Timing in pairs, and the rows of the table."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row of the table.

    ``ratio`` is compared with ``bound``: at least it where ``at_least``, else at most.
    """

    name: str
    value: str
    against: str
    ratio: float
    bound: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.ratio >= self.bound if self.at_least else self.ratio <= self.bound

    def as_json(self) -> dict[str, Any]:
        facts = asdict(self)
        facts["bound"] = f"{'>=' if self.at_least else '<='} {self.bound:g}"
        del facts["at_least"]
        return {**facts, "ratio": round(self.ratio, 4), "holds": self.holds}


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def pairs(
    ours: Callable[[], Any], peer: Callable[[], Any], *, runs: int, warmup: int = 1
) -> tuple[float, float, float]:
    """Run both in turn; return the medians of their times and the median of peer / ours, pair by pair."""
    for _ in range(warmup):
        ours(), peer()
    times = [(timed(ours), timed(peer)) for _ in range(runs)]
    mine, theirs = zip(*times, strict=True)
    return statistics.median(mine), statistics.median(theirs), statistics.median(b / a for a, b in times)


def read_bytes_so_far() -> int:
    """Return the bytes that this process has read by system calls."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def cached_bytes(folder: str) -> int:
    """Return how many bytes of the files below ``folder`` are in the page cache."""
    return sum(_cached(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)


def _cached(path: str) -> int:
    size = os.path.getsize(path)
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        vector = (ctypes.c_ubyte * pages)()
        view = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), vector)
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(entry & 1 for entry in vector) * mmap.PAGESIZE


def mean_text(seconds: float, n: int, what: str) -> str:
    each = seconds / n
    return f"{each * 1e6:.0f} us a {what}" if each < 1e-3 else f"{each * 1e3:.2f} ms a {what}"
