"""Reading: against TransferQueue, bare preadv, zarr-python and tensorstore."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from itertools import cycle

import numpy as np

import spool
from tools.bench.harness import Row, mean_text, pairs, read_bytes_so_far
from tools.bench.peers import BareReader, TransferQueue
from tools.bench.writes import SHAPE, TOKENS, append, make_step

SLICE_ROWS, LONG_ROWS = 300, 65_536


def whole_segments(root: str, tq: TransferQueue | None, *, runs: int, n_segments: int = 64) -> Iterator[Row]:
    """Read whole segments to int32."""
    steps = [make_step(TOKENS, seed) for seed in range(n_segments)]
    with spool.open(os.path.join(root, "whole")) as sp:
        refs = []
        for step in steps:
            session = sp.session(experts=SHAPE)
            append(sp, step, session)
            refs += session.finalize()
        sp.flush()
        if tq is not None:
            keys = [tq.put(step) for step in steps]
            ours, theirs, ratio = pairs(lambda: sp.read(refs), lambda: tq.get(keys), runs=runs)
            tq.clear(keys)
            against = f"kv_batch_get {mean_text(theirs, n_segments, 'segment')}"
            yield Row("read_vs_tq_get", mean_text(ours, n_segments, "segment"), against, ratio, 5)
        ranges = [found for ref in refs for found in sp.locate(ref, fields=["routed_experts"])]
        bare = BareReader(ranges, (40, 8), "uint8")
        ours, theirs, ratio = pairs(lambda: sp.read(refs, fields=["routed_experts"]), bare.read, runs=2 * runs)
        bare.close()
        against = f"preadv + widen {mean_text(theirs, n_segments, 'segment')}"
        yield Row("read_vs_preadv", mean_text(ours, n_segments, "segment"), against, ratio, 0.7)
        sizes = [len(pickle.dumps(ref)) for ref in refs]
        allowed = [400 + 64 * sum(map(len, ref.extents.values())) for ref in refs]
        worst = max(size / bound for size, bound in zip(sizes, allowed, strict=True))
        yield Row("ref_bytes", f"{max(sizes)} B", f"{min(allowed)} B allowed", worst, 1, at_least=False)


def slices(root: str, *, runs: int) -> Iterator[Row]:
    """Read 300 rows out of 64K, from a sealed stream, at random places."""
    import tensorstore
    import zarr

    folder = os.path.join(root, "slices")
    with spool.open(folder) as sp:
        ref = append(sp, make_step(LONG_ROWS - 1, 1))
        sp.flush()
        (found,) = {found.stream for found in sp.locate(ref, fields=["routed_experts"])}
        path = os.path.join(folder, "streams", found, "routed_experts")
        array = zarr.open_array(path, mode="r")
        store = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}, "recheck_cached_data": False}, read=True
        ).result()
        starts = cycle(np.random.default_rng(0).integers(0, LONG_ROWS - 1 - SLICE_ROWS, 64).tolist())
        n = 64

        def ours() -> None:
            for _ in range(n):
                start = next(starts)
                sp.read(ref, fields=["routed_experts"], tokens=slice(start, start + SLICE_ROWS), dtype="stored")

        def with_zarr() -> None:
            for _ in range(n):
                start = next(starts)
                array[start : start + SLICE_ROWS]

        def with_tensorstore() -> None:
            for _ in range(n):
                start = next(starts)
                store[start : start + SLICE_ROWS].read().result()

        mine, theirs, ratio = pairs(ours, with_zarr, runs=runs)
        yield Row(
            "slice_vs_zarr", mean_text(mine, n, "slice"), f"zarr-python {mean_text(theirs, n, 'slice')}", ratio, 20
        )
        mine, theirs, ratio = pairs(ours, with_tensorstore, runs=2 * runs)
        against = f"tensorstore {mean_text(theirs, n, 'slice')}"
        yield Row("slice_vs_tensorstore", mean_text(mine, n, "slice"), against, ratio, 5)


def amplification(root: str, *, cp: int = 2, n_segments: int = 4) -> Iterator[Row]:
    """Count the bytes that all context-parallel ranks of a mini-batch read, zigzag, against what they consume."""
    with spool.open(os.path.join(root, "cp")) as sp:
        refs = []
        for seed in range(n_segments):
            session = sp.session(experts=SHAPE)
            append(sp, make_step(TOKENS - 1, seed), session)
            refs += session.finalize()
        sp.flush()
        sp.read(refs, fields=["routed_experts"], tokens=[slice(0, 1)] * n_segments)
        before, consumed = read_bytes_so_far(), 0
        part = TOKENS // (2 * cp)
        for rank in range(cp):
            mine = [slice(i * part, (i + 1) * part) for i in (rank, 2 * cp - 1 - rank)]
            samples = sp.read(refs, fields=["routed_experts"], tokens=[mine] * n_segments, dtype="stored")
            consumed += sum(sample["routed_experts"].nbytes for sample in samples)
        read = read_bytes_so_far() - before
    yield Row(
        "cp_read_amplification", f"{read} B read", f"{consumed} B consumed", read / consumed, 1.02, at_least=False
    )
