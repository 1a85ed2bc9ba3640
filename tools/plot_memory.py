"""What memory a rollout batch takes on its way to the trainer: through Ray objects, and through a spool.

    python -m tools.plot_memory [--sessions N] [--tokens N] [--json FILE] [--plot FILE.png]

Two rollout workers make sessions (routing of 40 layers, top 8 of 256 experts), a manager gathers and splits them over
two data-parallel groups, and two tensor-parallel ranks of each train them in micro-batches.
Through Ray each hands arrays on as frameworks do: int32, as objects. Through a spool they append, and references
travel. Each process is a Ray actor in both; what is counted is the growth of its proportional set size (PSS) from just
before, of the processes that read for trainers all of it, and of the object store what lies in its shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import spool
from spool.sizes import format_size
from spool.train import Mesh, Place, connect, plan

SHAPE = spool.MoEShape(num_layers=40, num_experts=256, topk=8)
MESH = Mesh(dp=2, tp=2)
N_WORKERS = 2
FIELDS = ["token_ids", "loss_mask", "logprobs", "routed_experts"]
EVERY_S = 0.02
LEAST_SAVED = 0.95


def make_session(n_tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Return what an engine gives for a session: int32 routing, tokens, logprobs of the second half."""
    rng = np.random.default_rng(seed)
    routing = np.empty((n_tokens - 1, 40, 8), np.int32)
    for start in range(0, n_tokens - 1, 512):
        part = routing[start : start + 512]
        part[:] = rng.integers(0, 256, part.shape, np.uint8)
    return {
        "tokens": rng.integers(0, 150_000, n_tokens, dtype=np.int32),
        "logprobs": -rng.standard_exponential(n_tokens // 2, np.float32),
        "routed_experts": routing,
    }


class Component:
    """A process of the path."""

    def pid(self) -> int:
        return os.getpid()


# -- through Ray objects -----------------------------------------------------------------------------------------------


class ObjectWorker(Component):
    """A rollout worker that returns the arrays."""

    def rollout(self, n_tokens: int, seed: int) -> dict[str, np.ndarray]:
        return make_session(n_tokens, seed)


class ObjectManager(Component):
    """Gathers samples, converts them, and puts each data-parallel rank's part, as slime's rollout manager does."""

    def gather(self, samples: list[Any]) -> list[Any]:
        import ray

        got = [ray.get(sample) for sample in samples]
        converted = [{name: np.array(array) for name, array in sample.items()} for sample in got]
        del got, samples
        return [ray.put(converted[rank :: MESH.dp]) for rank in range(MESH.dp)]


class ObjectTrainer(Component):
    """A rank that gets all of its data-parallel rank's samples and packs each micro-batch."""

    def train(self, part: Any, n_micro: int, place: Place) -> int:
        samples, n = part, 0
        planned = plan([len(sample["tokens"]) for sample in samples], Mesh(tp=MESH.tp), n_micro=n_micro)
        for share in planned.rank(Place(tp=place.tp)).shares:
            out = np.zeros((share.n_rows, 40, 8), np.int32)
            for piece in share.pieces:
                rows = samples[piece.item]["routed_experts"][piece.tokens]
                out[piece.to : piece.to + len(rows)] = rows
            n += int(out[:, 0, 0].sum())
            time.sleep(0.05)
        return n


def through_objects(ray: Any, n_sessions: int, n_tokens: int, watch: Callable[..., None]) -> None:
    workers, manager, trainers = _actors(ray, ObjectWorker, ObjectManager, ObjectTrainer)
    watch(workers, manager, trainers)
    samples = [workers[seed % N_WORKERS].rollout.remote(n_tokens, seed) for seed in range(n_sessions)]
    parts = ray.get(manager.gather.remote(samples))
    del samples
    ray.get([
        trainer.train.remote(parts[place.dp], n_sessions // MESH.dp // 2, place)
        for trainer, place in zip(trainers, _places(), strict=True)
    ])  # fmt: skip


# -- through a spool ---------------------------------------------------------------------------------------------------


class SpoolWorker(Component):
    """A rollout worker that appends, and returns references."""

    def open(self, uri: str) -> None:
        self._spool = spool.open(uri)

    def rollout(self, n_tokens: int, seed: int) -> list[spool.SegmentRef]:
        step = make_session(n_tokens, seed)
        session = self._spool.session(f"s{seed}", experts=SHAPE)
        n_prompt = len(step["tokens"]) - len(step["logprobs"])
        session.append(
            prompt_token_ids=step["tokens"][:n_prompt], response_token_ids=step["tokens"][n_prompt:],
            logprobs=step["logprobs"], routed_experts=step["routed_experts"],
        )  # fmt: skip
        return session.finalize(outcome="completed")


class SpoolManager(Component):
    """Plans over references."""

    def gather(self, refs: list[Any], n_micro: int) -> Any:
        import ray

        got = [ref for own in ray.get(refs) for ref in own]
        return plan(got, MESH, n_micro=n_micro), got


class SpoolTrainer(Component):
    """A rank that takes micro-batches from a feed."""

    def train(self, uri: str, planned: Any, refs: Sequence[spool.SegmentRef], place: Place) -> int:
        n = 0
        with connect(uri, MESH, place, fields=FIELDS, framework="numpy") as feed:
            feed.submit(planned, refs)
            feed.finish()
            for micro in feed:
                for layer in micro.layers:
                    n += int(micro.read(layer)[:, 0].sum())
                time.sleep(0.05)
        return n


def through_spool(ray: Any, n_sessions: int, n_tokens: int, watch: Callable[..., None], folder: str) -> None:
    uri = f"file://{folder}/spool"
    workers, manager, trainers = _actors(ray, SpoolWorker, SpoolManager, SpoolTrainer)
    ray.get([worker.open.remote(uri) for worker in workers])
    watch(workers, manager, trainers)
    refs = [workers[seed % N_WORKERS].rollout.remote(n_tokens, seed) for seed in range(n_sessions)]
    planned, got = ray.get(manager.gather.remote(refs, n_sessions // MESH.dp // 2))
    ray.get([
        trainer.train.remote(uri, planned, got, place) for trainer, place in zip(trainers, _places(), strict=True)
    ])  # fmt: skip


def _places() -> list[Place]:
    return [MESH.place(rank) for rank in range(MESH.size)]


def _actors(ray: Any, worker: type, manager: type, trainer: type) -> tuple[list[Any], Any, list[Any]]:
    make = [ray.remote(num_cpus=0)(kind) for kind in (worker, manager, trainer)]
    return [make[0].remote() for _ in range(N_WORKERS)], make[1].remote(), [make[2].remote() for _ in _places()]


# -- what is measured --------------------------------------------------------------------------------------------------


class Watcher:
    """Looks every 20 ms at what memory each component takes."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._stop = ray, threading.Event()
        self._pids: dict[str, list[int]] = {}
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self.times: list[float] = []
        self.samples: list[dict[str, int]] = []

    def watch(self, workers: Sequence[Any], manager: Any, trainers: Sequence[Any]) -> None:
        """Begin with these components, once they are there."""
        parts = {"rollout workers": workers, "manager": [manager], "trainer ranks": trainers}
        self._pids = {name: self._ray.get([actor.pid.remote() for actor in actors]) for name, actors in parts.items()}
        self._before = {name: self._pss(name) for name in self._pids}
        self._store = _object_store_fds()
        self._began = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._stop.wait(EVERY_S):
            found = {name: max(self._pss(name) - before, 0) for name, before in self._before.items()}
            found["reading for ranks"] = sum(map(_pss, _reorganisers()))
            found["object store"] = sum(_size(path) for path in self._store)
            self.times.append(time.monotonic() - self._began)
            self.samples.append(found)

    def _pss(self, name: str) -> int:
        return sum(map(_pss, self._pids[name]))

    def peaks(self) -> dict[str, int]:
        """Return the most that each component took, and all together at one time."""
        found = {name: max(sample[name] for sample in self.samples) for name in self.samples[0]}
        return {**found, "all": max(sum(sample.values()) for sample in self.samples)}


def _pss(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/smaps", encoding="ascii") as lines:
        return _pss_without_store(lines)
    return 0


def _pss_without_store(lines: Any) -> int:
    """Return the PSS of a process without what it maps of the object store, which is counted for itself."""
    total, counts = 0, True
    for line in lines:
        if line[0] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]:
            counts = "plasma" not in line
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


def _object_store_fds() -> list[str]:
    """Return the object store's files: deleted ones in shared memory that this process's raylet holds."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                name, rest = file.read().rsplit(")", 1)
            if not name.endswith("(raylet") or int(rest.split()[1]) != os.getpid():
                continue
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if "plasma" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                        found.append(f"/proc/{pid}/fd/{fd}")
    return found


def _size(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_blocks * 512
    return 0


def _reorganisers() -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"spool.train.delivery" in file.read().split(b"\0"):
                found.append(int(pid))
    return found


# -- the table and the plot --------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.plot_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="a picture of both over time")
    options = parser.parse_args()
    watchers = {name: _measured(name, options.sessions, options.tokens) for name in ("Ray objects", "a spool")}
    peaks = {name: watcher.peaks() for name, watcher in watchers.items()}
    objects, ours = peaks.values()
    payload = options.sessions * (options.tokens - 1) * 320 * 4
    print(
        f"{options.sessions} sessions of {options.tokens} tokens, {format_size(payload)} of int32 routing: peak memory"
    )
    print(f"{'':20} {'Ray objects':>12} {'a spool':>12}")
    for name in objects:
        print(f"{name:20} {format_size(objects[name]):>12} {format_size(ours[name]):>12}")
    saved = 1 - ours["all"] / objects["all"]
    print(f"a spool's path holds {saved:.1%} less (at least {LEAST_SAVED:.0%})")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"payload_bytes": payload, "peaks": peaks, "saved": saved}, file, indent=1)
    if options.plot:
        draw(watchers, options.plot)
    return 0 if saved >= LEAST_SAVED else 1


def _measured(name: str, n_sessions: int, n_tokens: int) -> Watcher:
    import ray

    folder = tempfile.mkdtemp(prefix="spool-memory-")
    payload = n_sessions * n_tokens * 320 * 4
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=3 * payload + (1 << 30),
    )  # fmt: skip
    watcher = Watcher(ray)
    try:
        if name == "Ray objects":
            through_objects(ray, n_sessions, n_tokens, watcher.watch)
        else:
            through_spool(ray, n_sessions, n_tokens, watcher.watch, folder)
        watcher.stop()
        return watcher
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def draw(watchers: dict[str, Watcher], path: str) -> None:
    """Draw what each component took over time, one picture for each way, to one scale."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(watchers), sharey=True, figsize=(11, 4), layout="constrained")
    for axis, (name, watcher) in zip(axes, watchers.items(), strict=True):
        parts = list(watcher.samples[0])
        rows = [[sample[part] / (1 << 30) for sample in watcher.samples] for part in parts]
        axis.stackplot(watcher.times, rows, labels=parts)
        axis.set(title=f"through {name}", xlabel="seconds")
    axes[0].set_ylabel("GiB")
    axes[0].legend(loc="upper left")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
