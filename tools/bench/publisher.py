"""One of many processes that publish sessions one by one: ``python -m tools.bench.publisher URI N NUMBER``."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

import spool
from tools.bench.writes import SHAPE, make_step

N_ROWS = 255


async def work(sp: spool.Spool, n_sessions: int, number: int) -> dict[str, float]:
    step, waits, threads = make_step(N_ROWS, number), list[float](), 0

    async def one(index: int) -> None:
        session = sp.session(f"w{number}-{index}", experts=SHAPE)
        tokens = step["tokens"] + number * 1000 + index
        await session.append_async(
            prompt_token_ids=tokens[:128],
            response_token_ids=tokens[128:],
            logprobs=step["logprobs"],
            routed_experts=step["routed_experts"],
            weight_version="1",
            finish_reason="stop",
        )
        refs = await session.finalize_async()
        began = time.perf_counter()
        await sp.publish_async(refs)
        waits.append(time.perf_counter() - began)

    tasks = [asyncio.ensure_future(one(index)) for index in range(n_sessions)]
    while not all(task.done() for task in tasks):
        threads = max(threads, threading.active_count())
        await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    return {"wait_s": sum(waits) / len(waits), "threads": threads}


def main() -> None:
    uri, n_sessions, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with spool.open(uri) as sp:
        print("ready", flush=True)
        sys.stdin.readline()
        told = asyncio.run(work(sp, n_sessions, number))
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
