"""Writes so many bytes and prints how much the process grew: ``python -m tools.bench.grow FOLDER BYTES``."""

from __future__ import annotations

import shutil
import sys

import spool
from tools.bench.harness import resident_bytes
from tools.bench.writes import SHAPE, TOKENS, append, make_step


def main() -> None:
    folder, n_bytes = sys.argv[1], int(sys.argv[2])
    step, written, stored = make_step(TOKENS, 0), 0, TOKENS * 320
    with spool.open(folder) as sp:
        for _ in range(64):
            append(sp, step)
        before, peak = resident_bytes(), 0
        while written < n_bytes:
            session = sp.session(experts=SHAPE)
            append(sp, step, session)
            session.finalize()
            written += stored
            peak = max(peak, resident_bytes())
    shutil.rmtree(folder)
    print(max(peak - before, 0), written)


if __name__ == "__main__":
    main()
