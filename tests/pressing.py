"""Writers that fill a small hot tier, and what it takes on disk meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time

import numpy as np

import spool

SHAPE = spool.MoEShape(num_layers=40, num_experts=256, topk=8)
N_TOKENS = 4097
STEP_BYTES = 4096 * 320 + 4097 * 4


def step(seed):
    """Return the arguments of an append of about 1.3 MiB."""
    rng = np.random.default_rng(seed)
    return {
        "prompt_token_ids": rng.integers(0, 100_000, 97, dtype=np.int32),
        "response_token_ids": rng.integers(0, 100_000, 4000, dtype=np.int32),
        "routed_experts": rng.integers(0, 256, (4096, 40, 8), dtype=np.int32),
        "weight_version": "1",
    }


def digest(sample):
    """Return a digest of a sample's arrays."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(sample):
        found.update(name.encode() + np.ascontiguousarray(sample[name]).tobytes())
    return found.hexdigest()


def disk_bytes(root, *, streams_only=False):
    """Return what a folder takes on disk."""
    total = 0
    for folder, _, files in os.walk(f"{root}/streams" if streams_only else root):
        for name in files:
            try:
                total += os.lstat(f"{folder}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Peak:
    """Measures a folder again and again; a context manager.

    Attributes:
        most: bytes of the streams at the worst moment.
    """

    def __init__(self, root):
        self.root, self.most, self._stop = root, 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._stop.wait(0.005):
            self.most = max(self.most, disk_bytes(self.root, streams_only=True))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def main():
    """Append ``N`` steps as sessions of writer ``NUMBER``, one after the other; print what was acknowledged."""
    uri, number, n_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    told, slowest = [], 0.0
    with spool.open(uri) as sp:
        for index in range(n_steps):
            began = time.monotonic()
            session = sp.session(f"w{number}-{index}", experts=SHAPE)
            session.append(**step(number * 1000 + index))
            told.append(session.finalize()[0].id)
            slowest = max(slowest, time.monotonic() - began)
    print(json.dumps({"sessions": told, "slowest_s": slowest}))


if __name__ == "__main__":
    main()
