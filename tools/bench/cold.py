"""The cold tier: what routing takes there, and what encoding it costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spool.formats.cold import choose_codec, encode_shard, parse_index, place_chunks, zstd_spans
from spool.formats.cold_arrays import ZSTD_LEVEL, ColdLayout, cold_layout
from spool.model.fields import Layout, Schema, expert_field, layout
from spool.model.moe import MoEShape
from tools.bench.harness import Row, pairs

Routing = npt.NDArray[np.unsignedinteger]

ROWS, LAYERS, TOPK = 8192, 8, 8
NARROW, WIDE = 0.25, 0.35
"""Of int32: ids of 8 bits, never more than their own bytes; ids of 9 bits, whose second byte hardly counts."""


def stored_size(folder: str | None = None) -> Iterator[Row]:
    """Encode routings as the spiller does, and count bytes against the same ids as int32.

    Args:
        folder: of recorded routing, one folder a model with ``.npz`` files of ``routed_experts`` ``[rows, layers,
            topk]``; synthetic routings alone where it is None.
    """
    for name, conversations in _recorded(folder).items():
        yield _size_row(name, np.concatenate(conversations))
        yield _size_row(f"{name}, shuffled", np.concatenate([_shuffled(part) for part in conversations]))
    for num_experts in (128, 256, 384, 512):
        yield _size_row(f"synthetic, {num_experts} experts", synthetic(num_experts))


def encoding(*, runs: int) -> Iterator[Row]:
    """Encode and decode a shard of compressed routing on one thread, against the bare calls on the same chunks."""
    ids = np.tile(synthetic(256), (1, 5, 1))
    plan, _ = _plan(ids)
    codec, room = pa.Codec("zstd", compression_level=ZSTD_LEVEL), bytearray(plan.max_shard_bytes(len(ids)))
    groups = ids.reshape(-1, plan.chunk_rows, ids.shape[1], ids.shape[2])
    chunks = list(np.ascontiguousarray(groups.swapaxes(1, 2)).reshape(-1, plan.chunk_bytes).view(np.uint8))
    mine, theirs, ratio = pairs(
        lambda: encode_shard(plan, ids, into=room), lambda: [codec.compress(chunk) for chunk in chunks], runs=runs
    )
    yield Row("encode_vs_zstd", _rate(ids, mine), f"pyarrow compress {_rate(ids, theirs)}", ratio, 0.7)

    data, out = encode_shard(plan, ids), np.empty_like(ids)
    spans = zstd_spans(plan, parse_index(plan, data[: plan.index_bytes]), 0, len(ids))
    bodies = [bytes(data[span.start : span.stop - 4]) for span in spans]

    def decode() -> None:
        place_chunks(plan, ((span, data[span.start : span.stop]) for span in spans), out, 0)

    mine, theirs, ratio = pairs(
        decode, lambda: [codec.decompress(body, plan.chunk_bytes) for body in bodies], runs=2 * runs
    )
    yield Row("decode_vs_zstd", _rate(ids, mine), f"pyarrow decompress {_rate(ids, theirs)}", ratio, 0.5)


def synthetic(num_experts: int, seed: int = 0) -> Routing:
    """Return ``[ROWS, LAYERS, TOPK]`` distinct ids a row, in descending router weight.

    An expert is liked as its layer likes it, as the token does (tokens repeat as words do), and by chance.
    """
    rng = np.random.default_rng(seed)
    words = np.minimum(rng.zipf(1.2, ROWS), 1000) - 1
    ids = np.empty((ROWS, LAYERS, TOPK), np.uint8 if num_experts <= 256 else np.uint16)
    for layer in range(LAYERS):
        liked = rng.normal(0, 0.7, num_experts) + rng.normal(0, 1, (1000, num_experts))
        weights = liked.astype(np.float32)[words] + rng.standard_normal((ROWS, num_experts), np.float32)
        best = np.argpartition(weights, -TOPK, axis=1)[:, -TOPK:]
        order = np.argsort(-np.take_along_axis(weights, best, 1), axis=1)
        ids[:, layer] = np.take_along_axis(best, order, 1)
    return ids


def _recorded(folder: str | None) -> dict[str, list[Routing]]:
    found: dict[str, list[Routing]] = {}
    for path in sorted(Path(folder).glob("*/*.npz")) if folder else []:
        with np.load(path) as arrays:
            found.setdefault(path.parent.name, []).append(arrays["routed_experts"])
    if folder and not found:
        raise SystemExit(f"no */*.npz in {folder}: give a folder of recorded routing, or leave --routing out")
    return found


def _shuffled(ids: Routing) -> Routing:
    """Return the ids of a conversation with each layer's in random order: how often they come, and nothing else."""
    by_layer = ids.swapaxes(0, 1).reshape(ids.shape[1], -1)
    mixed = np.random.default_rng(0).permuted(by_layer, axis=1)
    return np.ascontiguousarray(mixed.reshape(ids.shape[1], len(ids), -1).swapaxes(0, 1))


def _size_row(name: str, ids: Routing) -> Row:
    plan, codec = _plan(ids)
    size, plain = len(encode_shard(plan, ids, workers=2)), 4 * ids.size
    bound = NARROW if ids.itemsize == 1 else WIDE
    value = f"{name}: {size} B, {codec}"
    return Row("cold_bytes_vs_int32", value, f"{plain} B as int32", size / plain, bound, at_least=False)


def _plan(ids: Routing) -> tuple[ColdLayout, str]:
    """Return how the cold tier stores ``ids``, in a shard that they fill, so that the index counts as it should."""
    num_experts = 256 if ids.itemsize == 1 else 512
    schema = Schema.of(expert_field(MoEShape(ids.shape[1], num_experts, ids.shape[2])))
    (spec,) = schema.arrays
    sizes = layout(schema)
    chunk_rows = sizes.chunk_rows[spec.name]
    fitting = Layout(sizes.chunk_rows, {spec.name: -(-len(ids) // chunk_rows) * chunk_rows})
    codec = choose_codec(spec, ids, layered=True)
    return cold_layout(spec, fitting, codec, layered=True), codec


def _rate(ids: Routing, seconds: float) -> str:
    return f"{ids.nbytes / seconds / 1e6:.0f} MB/s"
