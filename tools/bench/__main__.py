"""``python -m tools.bench [--quick] [--only NAME] --json FILE``: print the speed table, and write it as JSON.

Exit code 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

from tools.bench import cold, cold_reads, delivery, encode, look, reads, replay, scale, spill, writes
from tools.bench.harness import Row
from tools.bench.peers import TransferQueue

GIB = 1 << 30
Part = Callable[[str], Iterator[Row]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs and less data: about three minutes")
    parser.add_argument("--json", metavar="FILE", help="write the table there")
    parser.add_argument("--only", action="append", help="only parts whose name contains this; may be repeated")
    parser.add_argument("--root", help="a folder on the disk to measure; a temporary one where left out")
    parser.add_argument("--litdata", metavar="PYTHON", help="an interpreter with litdata; its rows are left out if not")
    parser.add_argument("--routing", metavar="DIR", help="recorded routing, MODEL/*.npz; synthetic alone if left out")
    options = parser.parse_args()
    root = tempfile.mkdtemp(prefix="spool-bench-", dir=options.root)
    rows: list[Row] = []
    try:
        for row in _rows(
            root, quick=options.quick, only=options.only, routing=options.routing, litdata=options.litdata
        ):
            rows.append(row)
            print(_line(row), flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([row.as_json() for row in rows], file, indent=1)
    return 0 if all(row.holds for row in rows) else 1


def _rows(root: str, *, quick: bool, only: list[str] | None, routing: str | None, litdata: str | None) -> Iterator[Row]:
    runs = 5 if quick else 9
    parts: dict[str, Part] = {
        "memory": lambda folder: writes.memory(folder, n_bytes=GIB if quick else 10 * GIB),
        "disk": lambda folder: writes.against_disk(folder, runs=runs, n_bytes=(GIB // 4) if quick else GIB),
        "slices": lambda folder: reads.slices(folder, runs=runs),
        "cp": reads.amplification,
        "replay": lambda folder: replay.replay(folder, runs=runs, n_segments=64 if quick else 256),
        "delivery": lambda folder: delivery.delivery(
            folder, n_steps=3 if quick else 5, n_samples=8, n_tokens=4096 if quick else 16_384, compute_s=0.3
        ),
        "units": lambda _: encode.encoding(runs=min(runs, 3)),
        "cold-size": lambda _: cold.stored_size(routing),
        "cold-encode": lambda _: cold.encoding(runs=runs),
        "cold-read": lambda folder: cold_reads.reads(folder, runs=runs, n_tokens=32_768 if quick else 131_072),
        "cold-open": lambda _: cold_reads.opening(runs=1 if quick else 3, n_steps=50_000 if quick else 1_000_000),
        "spill": lambda folder: spill.spilling(folder, runs=runs, n_bytes=GIB // 4 if quick else GIB),
        "append-beside": lambda folder: spill.appending(folder, runs=runs // 2, n_bytes=GIB // 2 if quick else GIB),
        "publish": lambda folder: spill.publishing(
            folder, n_writers=4 if quick else 16, n_sessions=256 if quick else 4096
        ),
        "scale": lambda folder: scale.lookups(folder, runs=runs, n_steps=50_000 if quick else 1_000_000),
        "browse": lambda folder: look.browsing(folder, n_sessions=20_000 if quick else 1_000_000, runs=3),
    }
    if litdata:
        parts["litdata"] = lambda folder: replay.against_litdata(
            folder, litdata, runs=runs, n_segments=64 if quick else 256
        )
    for name, part in parts.items():
        if _wanted(name, only):
            yield from part(root)
    if _wanted("tq", only):
        tq = TransferQueue()
        try:
            yield from writes.against_tq(root, tq, runs=runs)
            yield from reads.whole_segments(root, tq, runs=runs, n_segments=16 if quick else 64)
        finally:
            tq.close()
    elif _wanted("read", only):
        yield from reads.whole_segments(root, None, runs=runs)


def _wanted(name: str, only: list[str] | None) -> bool:
    return not only or any(part in name for part in only)


def _line(row: Row) -> str:
    sign = ">=" if row.at_least else "<="
    verdict = "ok" if row.holds else "MISSED"
    return f"{row.name:24} {row.ratio:8.2f}  {sign} {row.bound:<5g} {verdict:7} {row.value}; {row.against}"


if __name__ == "__main__":
    sys.exit(main())
