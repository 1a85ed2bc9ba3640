"""Tools of the writer's tests: known data, a dummy space, and reading with nothing but ``os.pread``."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import numpy as np
from crc32c import crc32c

from spool.formats.frames import encode_event
from spool.formats.shard import shard_key
from spool.model.events import StepCommitted, Transaction
from spool.model.fields import LOGPROBS, TOKEN_IDS, FieldSpec, Schema, numpy_dtype
from spool.model.refs import Extent
from spool.write.stream import Rows, create_stream

EXPERTS = FieldSpec(name="routed_experts", dtype="uint8", align="forward", shape=(40, 8), bound=256, num_layers=40)
SCHEMA = Schema.of(EXPERTS, TOKEN_IDS, LOGPROBS)
SMALL = Schema.of(FieldSpec(name="wide", dtype="uint8", align="token", shape=(59,)), TOKEN_IDS)


class Free:
    """A hot tier with ``limit`` bytes."""

    def __init__(self, limit=1 << 60):
        self.limit, self.reserved, self.grants = limit, 0, []

    def reserve(self, stream, n_bytes):
        if self.reserved + n_bytes > self.limit:
            return False
        self.reserved += n_bytes
        self.grants.append(n_bytes)
        return True

    def settle(self, stream, n_bytes):
        self.reserved -= n_bytes

    def totals(self):
        return self.limit, self.reserved


def stream(root, schema=SCHEMA, **options):
    options.setdefault("space", Free())
    os.makedirs(root, exist_ok=True)
    return create_stream(str(root), schema, **options)


def data(schema, seed, n, **counts):
    """Rows that are known from ``seed``: ``n`` of each array, or what ``counts`` says by array."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for spec in schema.arrays:
        dtype = numpy_dtype(spec.dtype)
        raw = rng.integers(0, 256, counts.get(spec.name, n) * spec.row_bytes, dtype=np.uint8)
        if spec.dtype == "bool":
            raw &= 1
        arrays[spec.name] = raw.view(dtype).reshape(-1, *spec.shape)
    return arrays


def rows_of(arrays):
    def filler(array):
        def fill(dst, first):
            dst[...] = array[first : first + len(dst)]

        return fill

    return {name: Rows(len(array), filler(array)) for name, array in arrays.items()}


def event_of(name, runs, session="s", index=0, metadata=None):
    extents = {array: tuple(Extent(name, r.row, r.n, 0, r.crc) for r in found) for array, found in runs.items()}
    return StepCommitted(
        session_id=session, index=index, step_id=str(index), at=1.0, parent=None, base=0, n_prompt=0, n_tokens=1,
        n_rows=1, extents=extents, metadata=metadata or {},
    )  # fmt: skip


def put(writer, arrays, session="s", index=0, metadata=None):
    """Append ``arrays`` as one step; return its runs."""
    return writer.append(
        rows_of(arrays), lambda runs: encode_event(event_of(writer.name, runs, session, index, metadata))
    )


def together(*events):
    return encode_event(Transaction(events))


def folder(root, name):
    return f"{root}/streams/{name}"


def read_bytes(root, name, spec, pack, start, stop, *, patience_s=5.0):
    """Bytes of a shard, by the rule: below ``st_size`` from the shard file, the rest from the tail of that size."""
    base = folder(root, name)
    path = f"{base}/{shard_key(spec.name, len(spec.shape) + 1, pack)}"
    deadline = time.monotonic() + patience_s
    while True:
        try:
            shard = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            shard, size = None, 0
        try:
            size = os.fstat(shard).st_size if shard is not None else 0
            below = os.pread(shard, max(0, min(stop, size) - start), start) if shard is not None else b""
        finally:
            if shard is not None:
                os.close(shard)
        if len(below) == stop - start:
            return below
        got = below
        if start + len(below) >= size:  # else it was cut since
            with suppress(FileNotFoundError), open(f"{base}/{spec.name}/tail-{pack}-{size}", "rb") as tail:
                got += os.pread(tail.fileno(), stop - start - len(below), start + len(below) - size)
        if len(got) == stop - start and (os.stat(path).st_size if os.path.exists(path) else 0) == size:
            return got
        assert time.monotonic() < deadline, f"{path}: [{start}, {stop}) cannot be read: shard {size}, got {len(got)}"
        time.sleep(0.0005)


def read_run(root, writer_or_name, schema, sizes, array, run):
    """Rows of a run as an array; its checksum is checked."""
    name = getattr(writer_or_name, "name", writer_or_name)
    spec = next(spec for spec in schema.arrays if spec.name == array)
    pack, first = divmod(run.row, sizes.shard_rows[array])
    assert first + run.n <= sizes.shard_rows[array], "a run crosses a pack"
    raw = read_bytes(root, name, spec, pack, first * spec.row_bytes, (first + run.n) * spec.row_bytes)
    assert crc32c(raw) == run.crc, f"{array} {run}: the checksum differs"
    return np.frombuffer(raw, numpy_dtype(spec.dtype)).reshape(-1, *spec.shape)


def check(root, writer, runs, arrays):
    """Assert that ``runs`` hold ``arrays``."""
    check_stored(root, writer.name, writer.schema, writer.layout, runs, arrays)


def check_stored(root, name, schema, sizes, runs, arrays):
    for array, expected in arrays.items():
        parts = [read_run(root, name, schema, sizes, array, run) for run in runs[array]]
        got = np.concatenate(parts) if parts else expected[:0]
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert got.tobytes() == expected.tobytes(), f"{array}: other bytes"


def files(root, name):
    base = folder(root, name)
    return sorted(os.path.relpath(os.path.join(at, f), base) for at, _, found in os.walk(base) for f in found)
