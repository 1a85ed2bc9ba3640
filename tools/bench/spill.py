"""The spiller, against a real S3 server of its own: throughput, memory, what it costs writers, and publishing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import s3fs

import spool
from spool.logs.streams import stream_names
from spool.spiller import elect
from spool.spiller.upload import Uploader
from spool.stores.hot import HotStore
from spool.stores.objects import Objects, open_objects
from tools.bench.harness import Row, pairs
from tools.bench.writes import TOKENS, append, make_step
from tools.s3_server import S3Server

PART_BYTES = 16 << 20
MEMORY_BOUND = 384 << 20
FEW_HUNDRED = 600
_numbers = count()


def spilling(root: str, *, runs: int, n_bytes: int) -> Iterator[Row]:
    """Bring sealed packs over, against s3fs putting the same files in parts; then the memory that a spiller takes."""
    with S3Server() as server:
        server.make_bucket("bench")
        os.environ.update(server.environment())
        for skewed in (False, True):
            hot = os.path.join(root, f"spill-{skewed}")
            record(f"{hot}?spill_when=pressure", n_bytes, skewed=skewed)
            yield _throughput(hot, server, runs=runs, skewed=skewed)
        yield _memory(os.path.join(root, "spill-False"))


def record(uri: str, n_bytes: int, *, skewed: bool = False) -> None:
    """Record steps of about ``n_bytes`` in all; ``skewed`` routing compresses, other does not."""
    step = make_step(TOKENS, 0)
    if skewed:
        step["routed_experts"] = step["routed_experts"] // 16 * 16
    with spool.open(uri) as sp:
        for _ in range(n_bytes // (TOKENS * 320)):
            append(sp, step)


def _throughput(hot: str, server: S3Server, *, runs: int, skewed: bool) -> Row:
    files = [str(path) for path in Path(hot, "streams").rglob("c/*/0/0*") if path.is_file()]
    size = sum(map(os.path.getsize, files))
    theirs_fs = s3fs.S3FileSystem(endpoint_url=server.endpoint, key=server.key, secret=server.secret)
    mine, theirs, ratio = pairs(lambda: _spill(hot), lambda: _upload(theirs_fs, files), runs=runs)
    name = "spill_zstd_vs_upload" if skewed else "spill_vs_upload"
    what = "compressed" if skewed else "raw"
    return Row(
        name,
        f"{size / mine / 1e6:.0f} MB/s of hot bytes, {what}",
        f"s3fs put in parts {size / theirs / 1e6:.0f} MB/s",
        ratio,
        0.0 if skewed else 0.8,
    )


def _spill(hot: str) -> None:
    objects = open_objects(f"s3://bench/spool-{next(_numbers)}")
    uploader = Uploader(hot, HotStore(hot), objects)
    for stream in stream_names(hot):
        records = Path(hot, "streams", stream, "records")
        packs = sorted(int(path.stem) for path in records.glob("*.arrow"))
        uploader.upload(stream, packs)
        for path in records.glob("*.cold"):
            path.unlink()
    uploader.close()
    _clear(objects)


def _upload(fs: Any, files: list[str]) -> None:
    prefix = f"bench/plain-{next(_numbers)}"
    for number, path in enumerate(files):
        fs.put_file(path, f"{prefix}/{number}", chunksize=PART_BYTES)
    for number in range(len(files)):
        fs.rm_file(f"{prefix}/{number}")  # deleting many at once is not what every server takes from it


def _clear(objects: Objects) -> None:
    objects.delete(found.key for found in objects.list(""))
    objects.close()


def _memory(hot: str) -> Row:
    """Let a spiller of its own process work the backlog off; its peak, which it reads itself: getrusage adds ours."""
    code = (
        "from spool.cli import root; root.main(standalone_mode=False); "
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    command = [sys.executable, "-c", code, "spill", f"{hot}?spill=s3://bench/memory"]
    n_bytes = sum(path.stat().st_size for path in Path(hot, "streams").rglob("*") if path.is_file())
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    peak = int(told.split()[-1]) << 10
    value = f"{peak / 2**20:.0f} MiB at most, over a backlog of {n_bytes / 2**20:.0f} MiB"
    return Row("spiller_memory", value, f"{MEMORY_BOUND >> 20} MiB", peak / MEMORY_BOUND, 1, at_least=False)


def appending(root: str, *, runs: int, n_bytes: int) -> Iterator[Row]:
    """Append while a spiller brings a backlog over, against appending alone."""
    step = make_step(TOKENS, 0)
    n_steps = n_bytes // (TOKENS * 320)
    with S3Server(elsewhere=True) as server:
        server.make_bucket("bench")
        os.environ.update(server.environment())

        def run(options: str) -> float:
            """Return the seconds that ``n_steps`` take, in a spool that has as many packs waiting."""
            uri = os.path.join(root, f"append-{next(_numbers)}?{options}")
            with spool.open(uri) as sp:
                for _ in range(n_steps // 2):
                    append(sp, step)
                sp.flush()
                if "pressure" not in options:
                    _wait_for_work(uri.partition("?")[0])
                started = time.perf_counter()
                for _ in range(n_steps):
                    append(sp, step)
                seconds = time.perf_counter() - started
            _wait_for_end(uri.partition("?")[0])
            return seconds

        ratios, rates = [], []
        for _ in range(runs):
            alone = run("spill_when=pressure")
            beside = run(f"spill=s3://bench/{next(_numbers)}")
            ratios.append(alone / beside)
            rates.append((n_steps * TOKENS * 320 / beside, n_steps * TOKENS * 320 / alone))
    ratio = sorted(ratios)[len(ratios) // 2]
    mine, theirs = sorted(rates)[len(rates) // 2]
    yield Row("append_while_spilling", f"{mine / 1e6:.0f} MB/s stored", f"{theirs / 1e6:.0f} MB/s alone", ratio, 0.8)


def _wait_for_work(hot: str) -> None:
    """Wait until a spiller has brought its first pack over."""
    while not any(Path(hot, "streams").rglob("*.cold")):
        time.sleep(0.02)


def _wait_for_end(hot: str) -> None:
    """Wait until no spiller works on a root any more: it would slow down what is measured next."""
    while elect.is_running(hot):
        time.sleep(0.1)


def publishing(root: str, *, n_writers: int, n_sessions: int) -> Iterator[Row]:
    """Publish sessions one by one from many processes at once; count what that leaves in the cold root."""
    hot = os.path.join(root, "publish")
    with S3Server() as server:
        server.make_bucket("bench")
        os.environ.update(server.environment())
        uri = f"{hot}?spill=s3://bench/publish"
        spool.open(uri).close()
        each = n_sessions // n_writers
        command = [sys.executable, "-m", "tools.bench.publisher", uri, str(each)]
        writers = [
            subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for n in range(n_writers)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline()
        started = time.perf_counter()
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        told = [json.loads(writer.communicate()[0]) for writer in writers]
        seconds = time.perf_counter() - started
        objects = open_objects("s3://bench/publish")
        n_objects = len(objects.list(""))
        _clear(objects)
    threads, wait_s = max(one["threads"] for one in told), sum(one["wait_s"] for one in told) / len(told)
    yield Row(
        "publish_objects",
        f"{n_objects} objects for {n_sessions} sessions of {n_writers} processes in {seconds:.1f} s",
        f"a few hundred ({FEW_HUNDRED}); a publish took {wait_s:.1f} s on average, {threads} threads a process",
        n_objects / FEW_HUNDRED,
        1,
        at_least=False,
    )
    with suppress(FileNotFoundError):
        os.unlink(f"{hot}/spiller.log")
