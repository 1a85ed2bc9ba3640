"""Reading from the cold tier on a real S3 server, against s3fs on the same server in the same run."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator

import ml_dtypes
import msgspec
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import s3fs

import spool
from spool.formats import manifest
from spool.formats.frames import encode_event
from spool.formats.manifest import PackEntry
from spool.model.events import SessionOpened
from spool.model.fields import TOKEN_IDS
from spool.stores.objects import Objects, open_objects
from tools.bench.harness import Row, pairs
from tools.bench.scale import STEPS_A_SESSION, step_events
from tools.s3_server import S3Server

SHAPE = spool.MoEShape(num_layers=40, num_experts=256, topk=8)
HIDDEN = spool.FieldSpec(name="hidden", dtype="bfloat16", align="token", shape=(256,))
SLICE_ROWS, STRIDE_ROWS, STRIDE_GAP = 300, 40, 11
STAGES = 4
SESSIONS_A_MANIFEST = 1000


class _Requests:
    """What a cold root was asked for while `counted`."""

    def __init__(self) -> None:
        self.n = self.n_bytes = 0

    def __call__(self, _kind: str, _key: str, n_bytes: int, _seconds: float) -> None:
        self.n += 1
        self.n_bytes += n_bytes

    def counted(self, call: Callable[[], object]) -> tuple[int, int]:
        """Return the requests and bytes that ``call`` makes."""
        self.n = self.n_bytes = 0
        call()
        return self.n, self.n_bytes


def reads(root: str, *, runs: int, n_tokens: int) -> Iterator[Row]:
    """Read slices, stages' layers and whole segments of ``n_tokens`` tokens."""
    with _server() as url, _segment(os.path.join(root, "cold-reads"), url, n_tokens) as ref, _opened(url) as opened:
        sp, requests = opened
        yield from _amplification(sp, ref, requests)
        yield _stages(sp, ref, requests)
        yield from _against_cat_file(sp, ref, requests, runs)


def _amplification(sp: spool.Spool, ref: spool.SegmentRef, requests: _Requests) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, ref.n_tokens - SLICE_ROWS, 32).tolist()
    slices = [[slice(start, start + SLICE_ROWS)] for start in starts]
    strides = [
        [slice(at, at + STRIDE_ROWS) for at in range(0, ref.n_tokens, STRIDE_ROWS + gap)] for gap in (2, STRIDE_GAP)
    ]
    for what, asked in (("slices of 300 rows", slices), ("strides", strides)):
        n_requests = fetched = needed = 0
        for tokens in asked:
            n, n_bytes = requests.counted(lambda tokens=tokens: sp.read(ref, fields=["hidden"], tokens=tokens))
            n_requests, fetched = n_requests + n, fetched + n_bytes
            needed += sum(len(range(ref.n_tokens)[part]) for part in tokens) * 2 * HIDDEN.shape[0]
        value = f"{what}: {fetched} B in {n_requests} requests"
        yield Row("s3_read_amplification", value, f"{needed} B needed", fetched / needed, 1.1, at_least=False)


def _stages(sp: spool.Spool, ref: spool.SegmentRef, requests: _Requests) -> Row:
    fields, share = ["routed_experts"], SHAPE.num_layers // STAGES
    _, whole = requests.counted(lambda: sp.read(ref, fields=fields))
    worst = max(
        requests.counted(lambda first=first: sp.read(ref, fields=fields, layers=slice(first, first + share)))[1]
        for first in range(0, SHAPE.num_layers, share)
    )
    against = f"{whole // STAGES} B are 1/{STAGES} of all layers"
    return Row("cold_stage_layers_share", f"{worst} B", against, worst * STAGES / whole, 1.2, at_least=False)


def _against_cat_file(sp: spool.Spool, ref: spool.SegmentRef, requests: _Requests, runs: int) -> Iterator[Row]:
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    for field, codec, bound in (("hidden", "raw", 0.8), ("routed_experts", "zstd", 0.0)):
        spans: dict[str, tuple[int, int]] = {}
        for part in sp.locate(ref, fields=[field]):
            start, stop = spans.get(part.file, (part.offset, 0))
            spans[part.file] = min(start, part.offset), max(stop, part.offset + part.length)
        places = [(file.removeprefix("s3://"), start, stop) for file, (start, stop) in spans.items()]

        def read(field: str = field) -> None:
            sp.read(ref, fields=[field], dtype="stored")

        def cat(places: list[tuple[str, int, int]] = places) -> None:
            for path, start, stop in places:
                fs.cat_file(path, start=start, end=stop)

        n, n_bytes = requests.counted(read)
        mine, theirs, ratio = pairs(read, cat, runs=runs)
        value = f"{codec}, {n} requests, {n_bytes / mine / 1e6:.0f} MB/s"
        yield Row("cold_segment_vs_cat_file", value, f"cat_file {n_bytes / theirs / 1e6:.0f} MB/s", ratio, bound)


def opening(*, runs: int, n_steps: int) -> Iterator[Row]:
    """Open a cold root with ``n_steps`` steps in its manifests and find one session."""
    with _server() as url:
        objects = open_objects(url)
        n_sessions, n_objects = n_steps // STEPS_A_SESSION, _write_manifests(objects, n_steps)
        objects.close()
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        folder, wanted = f"{url.removeprefix('s3://')}/manifests", f"s{n_sessions // 2}"

        def ours() -> None:
            with spool.open(url, readonly=True) as sp:
                found = sp.find_session(wanted)
                assert found is not None
                assert found.n_steps == STEPS_A_SESSION

        def theirs() -> None:
            bodies = fs.cat(fs.ls(folder, detail=False, refresh=True)).values()
            tables = (pq.read_table(io.BytesIO(data), columns=["session_id", "event"]) for data in bodies)
            found = [table.filter(pc.field("session_id") == wanted).num_rows for table in tables]
            assert sum(found) == STEPS_A_SESSION + 1

        mine, other, ratio = pairs(ours, theirs, runs=runs)
        value = f"{mine:.2f} s, {n_steps} steps in {n_objects} manifests"
        yield Row("cold_open_1m_steps", value, f"s3fs and pyarrow {other:.2f} s", ratio, 0.0)


def _write_manifests(objects: Objects, n_steps: int) -> int:
    identity = {"format": 1, "id": "0123456789abcdef", "created": 0.0, "tier": "cold"}
    objects.put("spool.json", msgspec.json.encode(identity))
    n_sessions = n_steps // STEPS_A_SESSION
    n_packs = -(-n_sessions // SESSIONS_A_MANIFEST)
    for pack in range(n_packs):
        events: list[bytes] = []
        stream = f"20260101T000000-{pack:08x}"
        for number in range(
            pack * SESSIONS_A_MANIFEST, min((pack + 1) * SESSIONS_A_MANIFEST, n_steps // STEPS_A_SESSION)
        ):
            events.append(encode_event(SessionOpened(f"s{number}", float(number), fields=(TOKEN_IDS,))))
            events += map(encode_event, step_events(number, stream, number % SESSIONS_A_MANIFEST))
        entry = PackEntry(stream, 0, len(events), float(pack), {}, {}, 0, 0, {})
        objects.put(f"manifests/{pack:013d}-{stream}-0.parquet", manifest.encode([(entry, events)]))
    return n_packs


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Start a server, lead the environment to it, and give the URL of an empty cold root."""
    with S3Server() as server:
        server.make_bucket("bench")
        before = dict(os.environ)
        os.environ.update(server.environment())
        try:
            yield f"s3://bench/{secrets.token_hex(4)}"
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def _segment(folder: str, url: str, n_tokens: int) -> Iterator[spool.SegmentRef]:
    """Publish a segment to a cold root, and forget the hot one."""
    rng = np.random.default_rng(0)
    with spool.open(f"file://{folder}?spill={url}", fields=(HIDDEN,)) as sp:
        session = sp.session(experts=SHAPE)
        order = np.argsort(rng.random((n_tokens // 8, SHAPE.num_layers, 32)), -1)[..., : SHAPE.topk]
        tokens = rng.integers(0, 150_000, n_tokens).astype("i4")
        bits = rng.integers(0, 1 << 15, (n_tokens, HIDDEN.shape[0])).astype("u2")
        session.append(
            prompt_token_ids=tokens[: n_tokens // 2],
            response_token_ids=tokens[n_tokens // 2 :],
            logprobs=rng.standard_normal(n_tokens - n_tokens // 2).astype("f4"),
            routed_experts=np.tile((order * 8).astype("u1"), (8, 1, 1))[: n_tokens - 1],
            fields={"hidden": bits.view(ml_dtypes.bfloat16)},
        )
        (ref,) = session.finalize()
        sp.publish([ref], timeout_s=300)
    shutil.rmtree(folder)
    yield ref


@contextlib.contextmanager
def _opened(url: str) -> Iterator[tuple[spool.Spool, _Requests]]:
    """Open a cold root whose requests are counted; what is read once and kept is read."""
    import spool.root as opening_root

    requests, plain = _Requests(), opening_root.open_objects
    opening_root.open_objects = lambda place, **options: plain(place, **{**options, "observer": requests})
    try:
        with spool.open(url, readonly=True) as sp:
            for ref in sp.segments():
                sp.read(ref)
            yield sp, requests
    finally:
        opening_root.open_objects = plain
