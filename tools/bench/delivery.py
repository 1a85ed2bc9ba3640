"""What a step waits for its rows: every rank fetching whole samples, reading its own at need, and being delivered them.

Eight ranks, ``cp=4 tp=2``, each a process; computing is simulated by sleeping. All three are given the same samples.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

import spool
from spool.train import Mesh, Plan, connect, plan
from spool.train.delivery.filling import fill, prepare
from spool.train.delivery.work import Settings, work_of
from tools.bench.harness import Row
from tools.bench.peers import TransferQueue
from tools.bench.writes import SHAPE, append, make_step

MESH = Mesh(cp=4, tp=2)
N_MICRO = 4
FIELDS = ("token_ids", "logprobs", "routed_experts")
Waits = list[list[float]]
"""Of each rank, for each step, how long it waited, in seconds."""


class Job:
    """Mini-batches, the same for all.

    Attributes:
        uri: of the spool that has them.
        plans: one for each step.
        refs: of each.
        compute_s: how long a micro-batch is computed with.
    """

    def __init__(self, uri: str, refs: Sequence[spool.SegmentRef], n_steps: int, compute_s: float) -> None:
        each = len(refs) // n_steps
        self.uri, self.compute_s = uri, compute_s
        self.refs = [list(refs[at * each : (at + 1) * each]) for at in range(n_steps)]
        self.plans = [plan(own, MESH, n_micro=N_MICRO, mini_batch=step) for step, own in enumerate(self.refs)]


def delivery(root: str, *, n_steps: int, n_samples: int, n_tokens: int, compute_s: float) -> Iterator[Row]:
    """Train some steps on eight ranks in three ways."""
    folder = os.path.join(root, "delivery")
    samples = [make_step(n_tokens - 1, seed) for seed in range(n_samples)]
    with spool.open(folder) as sp:
        refs = []
        for number in range(n_steps * n_samples):
            session = sp.session(f"s{number}", experts=SHAPE)
            append(sp, samples[number % n_samples], session)
            refs += session.finalize(outcome="completed")
        sp.flush()
    job = Job(f"file://{folder}", refs, n_steps, compute_s)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:  # Ray starts once a process
        fetching = _steps(apart.submit(_from_tq, job, samples).result())
    against = f"TransferQueue, whole samples {_mean(fetching) * 1e3:.0f} ms"
    for name, run, how, bound in (
        ("eager_wait_vs_tq", _eager, "each rank reads at need", 1),
        ("delivery_begun_wait_vs_tq", _delivered, "planned when the step begins", 10),
        ("delivery_wait_vs_tq", _delivered_ahead, "planned a step ahead", 50),
    ):
        found = _on_ranks(run, job)
        waits = _steps([own for own, _ in found])
        yield Row(name, f"{_mean(waits) * 1e3:.2f} ms a step, {how}", against, _mean(fetching) / _mean(waits), bound)
    yield from _bytes([stats for _, stats in found], sum(map(_stored_bytes, refs)))


def _bytes(stats: Sequence[dict[str, int]], consumed: int) -> Iterator[Row]:
    """Say what was read for all ranks, and what memory they took."""
    fetched = sum(found["fetched_bytes"] for found in stats) // MESH.tp
    yield Row("delivery_read_amplification", f"{fetched} B for all ranks", f"{consumed} B consumed",
              fetched / consumed, 1.02, at_least=False)  # fmt: skip
    pss, micro, reader = (max(found[name] for found in stats) for name in ("pss_bytes", "micro_bytes", "reader_bytes"))
    yield Row("delivery_rank_memory", f"{pss >> 10} KiB a rank; {reader >> 20} MiB the process that reads for two",
              f"{micro >> 10} KiB a micro-batch", pss / micro, 1.25, at_least=False)  # fmt: skip


def _steps(waits: Waits) -> list[float]:
    """Return for each step but the first how long the rank waited that waited longest: the others wait for it."""
    return [max(step) for step in zip(*waits, strict=True)][1:]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _stored_bytes(ref: spool.SegmentRef) -> int:
    """Return the stored bytes of what is delivered of a reference."""
    routed = (ref.n_rows - 1) * SHAPE.num_layers * SHAPE.topk
    return ref.n_tokens * 4 + ref.response_length * 4 + routed


# -- ranks -------------------------------------------------------------------------------------------------------------


def _on_ranks(run: Callable[..., Any], job: Job) -> list[Any]:
    """Run each rank in a process of its own; return what they returned."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(MESH.size), context.Queue()
    ranks = [context.Process(target=_rank, args=(run, job, rank, barrier, results)) for rank in range(MESH.size)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join()
    return [found[rank] for rank in range(MESH.size)]


def _rank(run: Callable[..., Any], job: Job, rank: int, barrier: Any, results: Any) -> None:
    barrier.wait(120)
    results.put((rank, run(job, rank, barrier)))


def _eager(job: Job, rank: int, barrier: Any) -> tuple[list[float], None]:
    """Read the rank's rows of each micro-batch when it is to be computed with."""
    settings, waits = Settings(uri=job.uri, n_ranks=1, fields=FIELDS), []
    with spool.open(job.uri, create=False) as sp:
        for planned, refs in zip(job.plans, job.refs, strict=True):
            barrier.wait(120)
            waited = 0.0
            for number in range(N_MICRO):
                began = time.perf_counter()
                prepared = prepare(sp, work_of(planned, MESH.place(rank), 0, refs, None), settings)
                fill(sp, prepared, number, settings, bytearray(prepared.arrangements[number].n_bytes))
                waited += time.perf_counter() - began
                time.sleep(job.compute_s)
            waits.append(waited)
    return waits, None


def _delivered(job: Job, rank: int, barrier: Any, *, ahead: int = 0) -> tuple[list[float], dict[str, int]]:
    """Take micro-batches from a feed; a mini-batch is planned ``ahead`` steps before it begins."""
    waits, most = [], {"pss_bytes": 0, "micro_bytes": 0}
    planned = iter(zip(job.plans, job.refs, strict=True))
    with connect(job.uri, MESH, rank, fields=FIELDS, framework="numpy") as feed:
        before = _pss()
        for own in islice(planned, ahead):
            feed.submit(*own)
        for _ in job.plans:
            barrier.wait(120)
            for own in islice(planned, 1):
                feed.submit(*own)
            waited = feed.stats.waited_s
            for micro in feed.mini_batch():
                for array in micro.values():
                    array.reshape(-1).view(np.uint8)[::4096].sum()  # computing reads it
                most["pss_bytes"] = max(most["pss_bytes"], _pss() - before)
                most["micro_bytes"] = max(most["micro_bytes"], micro.n_bytes)
                time.sleep(job.compute_s)
            waits.append(feed.stats.waited_s - waited)
        barrier.wait(120)
        return waits, {**most, "reader_bytes": _pss(feed.reader_pid), "fetched_bytes": feed.stats.fetched_bytes}


_delivered_ahead = partial(_delivered, ahead=1)


def _pss(pid: int | str | None = "self") -> int:
    """Return the memory of a process, of pages that several have its part."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


# -- as frameworks do --------------------------------------------------------------------------------------------------


def _from_tq(job: Job, samples: Sequence[dict[str, np.ndarray]]) -> Waits:
    """Let every rank get all samples of its data-parallel rank when a step begins, and cut out its rows."""
    import ray

    tq = TransferQueue()
    try:
        keys = [tq.put(sample) for sample in samples]
        actor = ray.remote(num_cpus=0)(_Fetching)
        ranks = [actor.remote(rank) for rank in range(MESH.size)]
        ray.get([rank.ready.remote() for rank in ranks])
        steps = [ray.get([rank.step.remote(keys, planned, job.compute_s) for rank in ranks]) for planned in job.plans]
        return [list(waits) for waits in zip(*steps, strict=True)]
    finally:
        tq.close()


class _Fetching:
    """A rank that fetches whole samples."""

    def __init__(self, rank: int) -> None:
        import transfer_queue

        transfer_queue.init()
        self._tq, self._rank = transfer_queue, rank

    def ready(self) -> bool:
        return True

    def step(self, keys: list[str], planned: Plan, compute_s: float) -> float:
        began = time.perf_counter()
        got = self._tq.kv_batch_get(keys=keys, partition_id="bench")
        fields = {name: [value.numpy() for value in got[name].unbind(0)] for name in ("tokens", "routed_experts")}
        waited = time.perf_counter() - began
        for share in planned.rank(self._rank).shares:
            began = time.perf_counter()
            for rows in fields.values():
                out = np.zeros((share.n_rows, *rows[0].shape[1:]), rows[0].dtype)
                for piece in share.pieces:
                    cut = rows[piece.item][piece.tokens]
                    out[piece.to : piece.to + len(cut)] = cut
            waited += time.perf_counter() - began
            time.sleep(compute_s)
        return waited
