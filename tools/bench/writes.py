"""Appending: against TransferQueue, and against the bare disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np

import spool
from spool.sizes import format_size
from tools.bench.harness import Row, cached_bytes, mean_text, pairs
from tools.bench.peers import TransferQueue, write_direct

SHAPE = spool.MoEShape(num_layers=40, num_experts=256, topk=8)
TOKENS, SMALL_TOKENS = 4096, 256
_ids = count()


def make_step(n_rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return the arrays of one step: ``n_rows`` rows of routing, one token more, logprobs of the second half."""
    rng = np.random.default_rng(seed)
    return {
        "routed_experts": rng.integers(0, 256, (n_rows, 40, 8), dtype=np.int32),
        "tokens": rng.integers(0, 150_000, n_rows + 1, dtype=np.int32),
        "logprobs": -rng.standard_exponential((n_rows + 1) // 2, np.float32),
    }


def append(sp: spool.Spool, step: dict[str, np.ndarray], session: spool.Session | None = None) -> spool.StepRef:
    """Append one step as a new session's first, or to ``session``."""
    n_prompt = len(step["tokens"]) - len(step["logprobs"])
    step["tokens"][0] = next(_ids) % 150_000  # a prompt of its own, so that nothing is shared
    session = session or sp.session(f"bench-{next(_ids)}", experts=SHAPE)
    return session.append(
        prompt_token_ids=step["tokens"][:n_prompt],
        response_token_ids=step["tokens"][n_prompt:],
        logprobs=step["logprobs"],
        routed_experts=step["routed_experts"],
        weight_version="1",
        finish_reason="stop",
    )


def against_tq(root: str, tq: TransferQueue, *, runs: int) -> Iterator[Row]:
    """Time one step, 64 steps, and small steps from many sessions."""
    with spool.open(os.path.join(root, "tq")) as sp:
        step = make_step(TOKENS, 0)
        keys: list[str] = []
        session = sp.session("one", experts=SHAPE)
        ours, theirs, ratio = pairs(
            lambda: append(sp, step, session), lambda: keys.append(tq.put(step)), runs=4 * runs, warmup=2
        )
        tq.clear(keys)
        yield Row("append_vs_tq_put", mean_text(ours, 1, "step"), f"kv_put {mean_text(theirs, 1, 'step')}", ratio, 5)

        n_batch = 64
        batch = {name: np.stack([array] * n_batch) for name, array in step.items()}
        sessions = [sp.session(f"of-64-{i}", experts=SHAPE) for i in range(n_batch)]
        keys.clear()
        ours, theirs, ratio = pairs(
            lambda: [
                append(sp, {name: array[i] for name, array in batch.items()}, session)
                for i, session in enumerate(sessions)
            ],
            lambda: keys.extend(tq.put_batch(batch)),
            runs=runs,
        )
        tq.clear(keys)
        yield Row(
            "append64_vs_tq_batch",
            mean_text(ours, n_batch, "step"),
            f"kv_batch_put {mean_text(theirs, n_batch, 'step')}",
            ratio,
            3,
        )

        small = [make_step(SMALL_TOKENS - 1, seed) for seed in range(64)]
        sessions = [sp.session(f"small-{i}", experts=SHAPE) for i in range(len(small))]
        keys.clear()
        ours, theirs, ratio = pairs(
            lambda: [append(sp, one, session) for one, session in zip(small, sessions, strict=True)],
            lambda: keys.extend(tq.put(one) for one in small),
            runs=runs,
        )
        tq.clear(keys)
        yield Row(
            "append_small_vs_tq_put",
            mean_text(ours, len(small), "step"),
            f"kv_put {mean_text(theirs, len(small), 'step')}",
            ratio,
            20,
        )


def against_disk(root: str, *, runs: int, n_bytes: int) -> Iterator[Row]:
    """Write with 8 sessions at once, and with a bare loop; also what the page cache holds afterwards."""
    folder = os.path.join(root, "disk")
    steps = [make_step(TOKENS, seed) for seed in range(8)]
    stored = TOKENS * 320 + 4 * len(steps[0]["tokens"]) + 4 * len(steps[0]["logprobs"])
    n_steps = max(n_bytes // stored // 8, 1)

    def one_session(sp: spool.Spool, step: dict[str, np.ndarray]) -> None:
        session = sp.session(f"bench-{next(_ids)}", experts=SHAPE)
        for _ in range(n_steps):
            append(sp, step, session)

    def ours() -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda step: one_session(sp, step), steps))

    cached = 0.0
    with spool.open(folder) as sp:
        mine, theirs, ratio = pairs(ours, lambda: write_direct(f"{root}/bare.bin", 8 * n_steps * stored), runs=runs)
        sp.flush()
        written = sum(row["stored_bytes"] or 0 for row in sp.usage())
        cached = cached_bytes(os.path.join(folder, "streams"))
    shutil.rmtree(folder)
    speed = [format_size(int(8 * n_steps * stored / seconds)) for seconds in (mine, theirs)]
    yield Row("append_vs_raw_disk", f"{speed[0]}/s", f"O_DIRECT pwrite {speed[1]}/s", ratio, 0.6)
    share = cached / written
    yield Row(
        "page_cache_left", format_size(int(cached)), f"{format_size(written)} written", share, 0.05, at_least=False
    )


def memory(root: str, *, n_bytes: int) -> Iterator[Row]:
    """Measure how a writer's memory grows, in a process of its own."""
    command = [sys.executable, "-m", "tools.bench.grow", os.path.join(root, "grow"), str(n_bytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown, written = map(int, done.stdout.split())
    yield Row(
        "writer_memory_growth",
        format_size(grown),
        f"{format_size(written)} written",
        grown / (64 << 20),
        1,
        at_least=False,
    )
