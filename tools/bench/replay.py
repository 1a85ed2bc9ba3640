"""Replaying a recorded run: against reading the same bytes with preadv alone."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace

import spool
from spool.model.refs import Extent
from spool.stores.local import aligned_buffer
from spool.train.dataset import SegmentDataset
from spool.train.snapshot import snapshot_of
from tools.bench.harness import Row, pairs, timed
from tools.bench.writes import SHAPE, TOKENS, append, make_step

FIELDS = ("token_ids", "logprobs", "routed_experts")
BATCH_TOKENS = 8 * TOKENS


class Bare:
    """``preadv`` of all the files' bytes that an epoch reads, range by range, into one buffer that is used again."""

    def __init__(self, ranges: list[Any]) -> None:
        self._fds = {found.file: os.open(found.file, os.O_RDONLY | os.O_DIRECT) for found in ranges}
        spans = [(found.file, found.offset & ~4095, (found.offset + found.length + 4095) & ~4095) for found in ranges]
        self._spans = sorted(spans)
        self._buffer = aligned_buffer(max(stop - start for _, start, stop in spans))

    def read(self) -> None:
        for file, start, stop in self._spans:
            os.preadv(self._fds[file], [self._buffer[: stop - start]], start)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


def replay(root: str, *, runs: int, n_segments: int) -> Iterator[Row]:
    """Go over a run in packed batches, each in one of the two dtypes, and by number; and weigh its references."""
    folder = os.path.join(root, "replay")
    with spool.open(folder) as sp:
        for seed in range(n_segments):
            session = sp.session(f"replay-{seed}", experts=SHAPE)
            append(sp, make_step(TOKENS - 1, seed % 8), session)
            session.finalize(outcome="completed")
        sp.flush()
        ranges = [found for ref in sp.segments() for found in sp.locate(ref, fields=FIELDS)]
    stored = sum(found.length for found in ranges)
    bare = Bare(ranges)
    for name, order, dtype in (
        ("replay_vs_preadv", "recorded", "stored"),
        ("replay_shuffled_vs_preadv", "shuffled", "stored"),
        ("replay_train_vs_preadv", "recorded", "train"),
    ):
        more: dict[str, Any] = {"order": order, "dtype": dtype}
        with SegmentDataset(folder, fields=FIELDS, framework="numpy", **more) as dataset:
            batches = dataset.batches(max_tokens=BATCH_TOKENS, fill=0)

            def epoch(batches: Any = batches) -> None:
                for batch in batches:
                    assert len(batch.refs) == 8

            yield _row(name, epoch, bare, stored, n_segments, runs)
    with SegmentDataset(folder, fields=FIELDS, dtype="stored", framework="numpy") as dataset:
        numbers = np.random.default_rng(0).permutation(n_segments).reshape(-1, 8)
        yield _row(
            "replay_by_number_vs_preadv",
            lambda: [dataset.__getitems__(part) for part in numbers],
            bare, stored, n_segments, runs,
        )  # fmt: skip
        yield _reference_bytes(dataset.ref(0))
    bare.close()


def against_litdata(root: str, python: str, *, runs: int, n_segments: int) -> Iterator[Row]:
    """Go over the same samples with LitData, which ``python`` has, and with Spool."""
    steps = [make_step(TOKENS - 1, seed) for seed in range(8)]
    folder = os.path.join(root, "replay-litdata")
    with spool.open(folder) as sp:
        for number in range(n_segments):
            session = sp.session(f"replay-{number}", experts=SHAPE)
            append(sp, steps[number % 8], session)
            session.finalize(outcome="completed")
    samples = os.path.join(root, "samples.npz")
    np.savez(
        samples,
        token_ids=np.stack([step["tokens"] for step in steps]),
        logprobs=np.stack([step["logprobs"] for step in steps]),
        routed_experts=np.stack([step["routed_experts"].astype(np.uint8) for step in steps]),
    )
    script = os.path.join(os.path.dirname(__file__), "litdata_peer.py")
    with subprocess.Popen(
        [python, script, samples, os.path.join(root, "litdata"), str(n_segments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as peer, SegmentDataset(folder, fields=FIELDS, dtype="stored", framework="numpy") as dataset:  # fmt: skip
        answers, asks = peer.stdout, peer.stdin
        assert answers is not None and asks is not None
        while "ready" not in (line := answers.readline()):
            assert line, "LitData's process ended"
        batches = dataset.batches(max_tokens=BATCH_TOKENS, fill=0)
        seen: list[int] = []

        def ours() -> None:
            seen.append(sum(len(batch.refs) for batch in batches))

        def theirs() -> float:
            asks.write("epoch\n")
            asks.flush()
            n, n_bytes, took = answers.readline().split()
            assert int(n) == seen[-1] == n_segments
            assert int(n_bytes) == n_segments * sum(array[:1].nbytes for array in np.load(samples).values())
            return float(took)

        times = [(timed(ours), theirs()) for _ in range(runs + 1)][1:]
        asks.close()
    mine, peers = (statistics.median(took) for took in zip(*times, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in times)
    value, against = (f"{n_segments / took:.0f} segments/s" for took in (mine, peers))
    yield Row("replay_vs_litdata", f"packed batches, {value}", f"LitData and np.concatenate {against}", ratio, 1)


def _row(name: str, epoch: Any, bare: Bare, n_bytes: int, n_segments: int, runs: int) -> Row:
    mine, theirs, ratio = pairs(epoch, bare.read, runs=runs)
    ours, against = (f"{n_segments / took:.0f} segments/s, {n_bytes / took / 1e9:.2f} GB/s" for took in (mine, theirs))
    return Row(name, ours, f"preadv {against}", ratio, 0.6)


def _reference_bytes(ref: spool.SegmentRef, n: int = 20_000, n_steps: int = 4) -> Row:
    """Weigh the references of a dataset of sessions of four steps, each of names and checksums of its own."""
    rng = np.random.default_rng(0)

    def another(number: int) -> spool.SegmentRef:
        extents = {
            name: tuple(
                Extent(extent.stream, number * TOKENS + 1024 * step, 1024, 1024 * step, int(rng.integers(1 << 32)))
                for step in range(n_steps)
            )
            for name, (extent, *_) in ref.extents.items()
        }
        return replace(ref, session_id=rng.bytes(16).hex(), group_id=f"p{number // 8}@4", extents=extents)

    found = snapshot_of(another(number) for number in range(n))
    each, extents = found.n_bytes / n, n_steps * len(ref.extents)
    allowed = 128 + 16 * extents
    value = f"{each:.0f} B a segment of {extents} extents"
    return Row("replay_ref_bytes", value, f"{allowed} B allowed", each / allowed, 1, at_least=False)
