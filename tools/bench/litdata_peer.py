"""LitData on the same samples, in an interpreter of its own, which has litdata and need not have Spool.

    PYTHON tools/bench/litdata_peer.py SAMPLES.npz FOLDER N

Writes ``N`` samples, a multiple of eight, as an optimised dataset, then goes over it once for each line on standard
input, in packed batches, and answers with how many samples and bytes it saw, and how long that took. Each time is a
process of its own, as LitData keeps files mapped, which would come from the page cache: Spool reads past that.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

import litdata
import numpy as np

_loaded: dict = {}


def sample(path: str, number: int) -> dict:
    """Return one sample; `litdata.optimize` calls it in its own process."""
    if path not in _loaded:
        with np.load(path) as arrays:
            _loaded[path] = {name: arrays[name] for name in arrays.files}
    arrays = _loaded[path]
    n = len(arrays["token_ids"])
    return {name: array[number % n] for name, array in arrays.items()}


def drop_cache(folder: str) -> None:
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def epoch(folder: str) -> str:
    """Pack batches of eight samples, one array a field; say how many samples and bytes these were."""
    n = n_bytes = 0
    batch = []
    for found in litdata.StreamingDataset(folder):  # which may not be asked for more than it has
        batch.append(found)
        if len(batch) == 8:
            packed = {name: np.concatenate([each[name] for each in batch]) for name in found}
            n += len(batch)
            n_bytes += sum(array.nbytes for array in packed.values())
            batch = []
    return f"{n} {n_bytes}"


def main() -> None:
    path, folder, n = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # LitData prints, too
    litdata.optimize(partial(sample, path), list(range(int(n))), folder, num_workers=1, chunk_bytes="64MB")
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        drop_cache(folder)
        if os.fork() == 0:
            drop_cache(folder)
            began = time.perf_counter()
            print(epoch(folder), time.perf_counter() - began, file=answers, flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
