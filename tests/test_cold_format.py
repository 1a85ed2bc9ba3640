"""Shards of the cold tier: what other readers see, what a byte range gives, and what damage does."""

from __future__ import annotations

import warnings

import ml_dtypes
import msgspec
import numpy as np
import pyarrow as pa
import pytest
import tensorstore
import zarr
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import IntegrityError
from spool.formats import cold, shard
from spool.formats.cold_arrays import (
    ColdLayout,
    cold_array_metadata,
    cold_group_metadata,
    cold_layout,
    cold_layouts,
    parse_cold_array,
    parse_cold_group,
)
from spool.model.fields import (
    DTYPES,
    LOGPROBS,
    TOKEN_IDS,
    ArraySpec,
    FieldSpec,
    Layout,
    Schema,
    expert_field,
    layout,
    numpy_dtype,
)
from spool.model.moe import MoEShape

CODECS = ["raw", "zstd"]


def values(spec, n, seed=0):
    """Random bits of a spec's rows; they compress a little."""
    rng = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return rng.integers(0, 2, (n, *spec.shape)).astype(bool)
    plain = rng.integers(0, 100, n * spec.row_bytes, dtype=np.uint8)
    return plain.view(numpy_dtype(spec.dtype)).reshape(n, *spec.shape)


def plan_of(spec, codec, *, chunk_rows=4, shard_rows=16, layered=False):
    return cold_layout(spec, Layout({spec.name: chunk_rows}, {spec.name: shard_rows}), codec, layered=layered)


def store(root, plan, packs):
    """Write ``packs`` (pack number -> its rows); return the whole array, fill value where rows were skipped."""
    spec, valid = plan.spec, []
    n_rows = max((pack * plan.shard_rows + len(rows) for pack, rows in packs.items()), default=0)
    whole = np.zeros((n_rows, *spec.shape), numpy_dtype(spec.dtype))
    for pack, rows in sorted(packs.items()):
        start = pack * plan.shard_rows
        valid.append([start, len(rows)])
        whole[start : start + len(rows)] = rows
        path = root / shard.shard_key(spec.name, 1 + len(spec.shape), pack)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cold.encode_shard(plan, rows))
    (root / spec.name).mkdir(exist_ok=True, parents=True)
    document = cold_array_metadata(plan, n_rows=n_rows, valid_rows=valid)
    (root / spec.name / "zarr.json").write_bytes(document)
    assert parse_cold_array(plan, document) == (n_rows, [tuple(pair) for pair in valid])
    return whole


def check(root, spec, whole):
    """Both readers see ``whole``, in full and in slices that cross chunks and shards."""
    expected = whole.view(np.uint16) if whole.dtype == ml_dtypes.bfloat16 else whole
    theirs = zarr.open_array(str(root / spec.name), mode="r")
    kvstore = {"driver": "file", "path": str(root / spec.name)}
    others = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
    assert theirs.shape == others.shape == expected.shape
    assert theirs.dtype == others.dtype.numpy_dtype == expected.dtype
    if len(expected):
        third, last = len(expected) // 3, len(expected) - 1
        for rows in (slice(0, None), slice(third, 2 * third + 1), slice(last, last + 1)):
            assert theirs[rows].tobytes() == expected[rows].tobytes()
            assert others[rows].read().result().tobytes() == expected[rows].tobytes()


def read(plan, data, row, n, layers=None):
    """Read rows as a reader of byte ranges does."""
    spec = plan.spec
    if plan.codec == "raw":
        start, stop = cold.raw_span(plan, row, n)
        rows = cold.raw_rows(plan, data[start:stop], row, n)
        out = np.frombuffer(rows, numpy_dtype(spec.dtype)).reshape(n, *spec.shape)
        return out if layers is None else out[:, layers]
    index = cold.parse_index(plan, data[: plan.index_bytes])
    count = len(range(*(layers or slice(None)).indices(plan.n_layers)))
    shape = (n, count, *spec.shape[1:]) if plan.n_layers > 1 else (n, *spec.shape)
    out = np.empty(shape, numpy_dtype(spec.dtype))
    spans = cold.zstd_spans(plan, index, row, n, layers)
    cold.place_chunks(plan, ((span, data[span.start : span.stop]) for span in spans), out, row, layers)
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_readers_read_every_dtype(tmp_path, dtype, codec):
    for name, shape, layered in (("rows", (3,), False), ("layers", (3, 2), True), ("numbers", (), False)):
        spec = ArraySpec(name=name, dtype=dtype, shape=shape)
        plan = plan_of(spec, codec, layered=layered)
        assert plan.n_layers == (3 if layered and codec == "zstd" else 1)
        packs = {0: values(spec, 16), 1: values(spec, 13, 1), 3: values(spec, 1, 2)}
        check(tmp_path, spec, store(tmp_path, plan, packs))
        attributes = dict(zarr.open_array(str(tmp_path / name), mode="r").attrs)
        assert attributes["spool:rows"] == [[0, 16], [16, 13], [48, 1]]
        assert attributes.get("spool:dtype") == ("bfloat16" if dtype == "bfloat16" else None)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("dtype", "shape", "chunk_rows", "shard_rows", "sizes"),
    [
        ("uint8", (40, 8), 1024, 4096, {0: 4000, 1: 1025}),
        ("uint8", (40, 8), 4096, 4096, {0: 1, 2: 4096}),
        ("uint16", (75, 8), 512, 1024, {0: 1024, 1: 1}),
        ("int16", (1, 8), 16, 64, {0: 33}),
        ("int32", (46,), 16, 64, {1: 64}),
        ("bool", (2, 1), 1, 1, {0: 1, 1: 1, 5: 1}),
        ("int8", (2, 3, 4), 1, 8, {0: 3, 1: 8}),
        ("int32", (3, 5), 16, 16, {}),
        ("int64", (2,), 16, 16, {0: 0}),
    ],
)
def test_both_readers_read_layers_partial_and_missing_shards(
    tmp_path, dtype, shape, chunk_rows, shard_rows, sizes, codec
):
    spec = ArraySpec(name="x", dtype=dtype, shape=shape)
    plan = plan_of(spec, codec, chunk_rows=chunk_rows, shard_rows=shard_rows, layered=True)
    packs = {pack: values(spec, n, pack) for pack, n in sizes.items()}
    check(tmp_path, spec, store(tmp_path, plan, packs))


SCHEMA = Schema.of(
    TOKEN_IDS,
    LOGPROBS,
    expert_field(MoEShape(47, 512, 4, tuple(range(1, 47)))),
    FieldSpec(name="top_p", dtype="int32", align="response", ragged=True, bound=150_000),
    FieldSpec(name="probe", dtype="bfloat16", align="token", shape=(5,), train_dtype="float32"),
    FieldSpec(name="gaps", dtype="int16", align="forward", shape=(46, 4), num_layers=46, missing=-1),
)
CHOSEN = {spec.name: "raw" for spec in SCHEMA.arrays} | {
    "routed_experts": "zstd",
    "gaps": "zstd",
    "top_p.values": "zstd",
}


def test_a_cold_stream_opens_as_a_group_without_spool(tmp_path):
    sizes = layout(SCHEMA, max_shard_bytes=1 << 16)
    document = cold_group_metadata(SCHEMA, sizes, CHOSEN, stream="s1", created=1.5)
    (tmp_path / "zarr.json").write_bytes(document)
    schema, plans = parse_cold_group(document)
    assert (schema, plans) == (SCHEMA, cold_layouts(SCHEMA, sizes, CHOSEN))
    assert (plans["routed_experts"].n_layers, plans["gaps"].n_layers, plans["top_p.values"].n_layers) == (46, 46, 1)
    wholes = {}
    for name, plan in plans.items():
        packs = {0: values(plan.spec, min(plan.shard_rows, 300)), 1: values(plan.spec, 5, 1)}
        wholes[name] = store(tmp_path, plan, packs)
    (tmp_path / "records").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(str(tmp_path), mode="r")
        for name, whole in wholes.items():
            assert group[name][:].tobytes() == whole.tobytes()
    assert group.attrs["spool:codecs"] == CHOSEN


def test_values_of_a_ragged_field_have_shards_of_64_mi_rows(tmp_path):
    (offsets, numbers) = FieldSpec(name="kept", dtype="uint8", align="response", ragged=True).arrays
    sizes = layout(Schema.of(FieldSpec(name="kept", dtype="uint8", align="response", ragged=True)))
    assert sizes.shard_rows[numbers.name] == 1 << 26
    for spec in (offsets, numbers):
        plan = cold_layout(spec, sizes, "raw", layered=False)
        rows = values(spec, 70_000)
        check(tmp_path, spec, store(tmp_path, plan, {1: rows}) if spec is offsets else store(tmp_path, plan, {0: rows}))
        data = cold.encode_shard(plan, rows)
        assert len(data) == plan.max_shard_bytes(70_000)
        assert np.array_equal(read(plan, data, 4095, 60_000), rows[4095:64_095])


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 4), max_size=3),
    chunk=st.integers(0, 4),
    more=st.integers(0, 3),
    codec=st.sampled_from(CODECS),
    layered=st.booleans(),
    data=st.data(),
)
@settings(max_examples=75, deadline=None)
def test_any_rows_and_layers_come_back_by_range(dtype, shape, chunk, more, codec, layered, data):
    spec = ArraySpec(name="x", dtype=dtype, shape=tuple(shape))
    plan = plan_of(spec, codec, chunk_rows=1 << chunk, shard_rows=1 << (chunk + more), layered=layered)
    rows = values(spec, data.draw(st.integers(0, plan.shard_rows)))
    encoded = cold.encode_shard(plan, rows, workers=data.draw(st.integers(1, 2)))
    row = data.draw(st.integers(0, len(rows)))
    n = data.draw(st.integers(0, len(rows) - row))
    assert read(plan, encoded, row, n).tobytes() == rows[row : row + n].tobytes()
    if plan.n_layers > 1:
        low = data.draw(st.integers(0, plan.n_layers))
        layers = slice(low, data.draw(st.integers(low, plan.n_layers)))
        assert read(plan, encoded, row, n, layers).tobytes() == rows[row : row + n, layers].tobytes()
    if codec == "raw":
        start, stop = cold.raw_span(plan, row, n, verify=True)
        assert bytes(cold.raw_rows(plan, encoded[start:stop], row, n, verify=True)) == rows[row : row + n].tobytes()
        assert b"".join(encoded[a:b] for a, b in cold.raw_pieces(plan, row, n)) == rows[row : row + n].tobytes()


def test_a_shard_is_its_index_and_its_chunks_end_to_end():
    spec = ArraySpec(name="x", dtype="uint8", shape=(2, 3))
    rows = values(spec, 6)
    raw = plan_of(spec, "raw")
    data = bytes(cold.encode_shard(raw, rows))
    assert raw.index_bytes == 4 * 16 + 4
    none = 2**64 - 1
    index = np.frombuffer(data[:64], "<u8").tolist()
    assert index == [68, 28, 96, 28, none, none, none, none]
    assert int.from_bytes(data[64:68], "little") == crc32c(data[:64])
    second = rows[4:].tobytes() + bytes(12)
    assert data[96:] == second + crc32c(second).to_bytes(4, "little")
    packed = plan_of(spec, "zstd", layered=True)
    data = bytes(cold.encode_shard(packed, rows))
    spans = cold.zstd_spans(packed, cold.parse_index(packed, data[: packed.index_bytes]), 0, 6)
    assert [(span.group, span.layer) for span in spans] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    edges = [packed.index_bytes, *(span.stop for span in spans)]
    assert [span.start for span in spans] == edges[:-1]
    assert edges[-1] == len(data)
    body = data[spans[1].start : spans[1].stop - 4]
    assert pa.Codec("zstd").decompress(body, 12).to_pybytes() == rows[:4, 1].tobytes()


def test_no_rows_are_an_index_of_nothing():
    for codec in CODECS:
        plan = plan_of(ArraySpec(name="x", dtype="int32", shape=(2,)), codec, layered=True)
        data = cold.encode_shard(plan, np.empty((0, 2), np.int32))
        assert len(data) == plan.index_bytes
        assert (cold.parse_index(plan, data) == 2**64 - 1).all()
        assert read(plan, data, 0, 0).shape == (0, 2)
        with pytest.raises(IntegrityError, match="rows 0 to 1"):
            cold.zstd_spans(plan, cold.parse_index(plan, data), 0, 1)


def test_a_shard_is_encoded_into_memory_that_is_there():
    spec = ArraySpec(name="x", dtype="uint16", shape=(3, 4))
    for codec in CODECS:
        plan = plan_of(spec, codec, layered=True)
        memory = bytearray(b"\xff" * (plan.max_shard_bytes(16) + 100))
        for rows in (values(spec, 16), values(spec, 5, 1)):
            data = cold.encode_shard(plan, rows, into=memory)
            assert data == cold.encode_shard(plan, rows.tobytes())
            assert bytes(data) == memory[: len(data)]
        with pytest.raises(AssertionError):
            cold.encode_shard(plan, values(spec, 16), into=bytearray(plan.max_shard_bytes(16) - 1))
    with pytest.raises(AssertionError):
        cold.encode_shard(plan, values(spec, 17))


def test_what_does_not_compress_fits_the_room_that_was_made():
    rng = np.random.default_rng(0)
    for shape, chunk_rows in (((3, 1), 1), ((2, 8), 2048), ((1, 640), 2048)):
        spec = ArraySpec(name="x", dtype="uint8", shape=shape)
        plan = plan_of(spec, "zstd", chunk_rows=chunk_rows, shard_rows=2 * chunk_rows, layered=True)
        rows = rng.integers(0, 256, (2 * chunk_rows, *shape), dtype=np.uint8)
        data = cold.encode_shard(plan, rows)
        assert rows.nbytes < len(data) <= plan.max_shard_bytes(len(rows))
        assert np.array_equal(read(plan, data, 0, len(rows)), rows)


def test_a_layer_slice_of_a_row_group_is_a_smaller_range():
    plan = cold_layout(*_experts(40), "zstd", layered=True)
    assert plan.chunk_shape == (2048, 1, 8)
    data = cold.encode_shard(plan, values(plan.spec, 5000))
    index = cold.parse_index(plan, data[: plan.index_bytes])
    every = cold.zstd_spans(plan, index, 2047, 2)
    some = cold.zstd_spans(plan, index, 2047, 2, slice(10, 20))
    assert [span.start for span in every[1:]] == [span.stop for span in every[:-1]]
    assert some == every[10:20] + every[50:60]


def _experts(n_layers, num_experts=256):
    schema = Schema.of(expert_field(MoEShape(n_layers, num_experts, 8)))
    return schema.arrays[0], layout(schema)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_is_seen(codec):
    spec = ArraySpec(name="x", dtype="uint8", shape=(2, 3))
    plan, rows = plan_of(spec, codec, layered=True), values(ArraySpec(name="x", dtype="uint8", shape=(2, 3)), 14)
    good = bytes(cold.encode_shard(plan, rows))

    def whole(data):
        cold.parse_index(plan, data[: plan.index_bytes])
        if codec == "raw":
            start, stop = cold.raw_span(plan, 0, 14, verify=True)
            return bytes(cold.raw_rows(plan, data[start:stop], 0, 14, verify=True))
        return read(plan, data, 0, 14).tobytes()

    assert whole(good) == rows.tobytes()
    for place in range(len(good)):
        for bit in (1, 128):
            bad = bytearray(good)
            bad[place] ^= bit
            with pytest.raises(IntegrityError, match=r"cold shard of x: .*crc32c"):
                whole(bytes(bad))


def test_damage_names_row_group_and_layer():
    plan = plan_of(ArraySpec(name="experts", dtype="uint8", shape=(3, 2)), "zstd", layered=True)
    data = bytearray(cold.encode_shard(plan, values(plan.spec, 16)))
    spans = cold.zstd_spans(plan, cold.parse_index(plan, data[: plan.index_bytes]), 0, 16)
    data[spans[7].start] ^= 1
    out = np.empty((16, 3, 2), np.uint8)
    for span in spans:
        if span != spans[7]:
            cold.place_chunks(plan, [(span, data[span.start : span.stop])], out, 0)
            continue
        with pytest.raises(IntegrityError, match="experts: row group 2, layer 1") as caught:
            cold.place_chunks(plan, [(span, data[span.start : span.stop])], out, 0)
        assert caught.value.details["field"] == "experts"


def sealed(body):
    return body + crc32c(body).to_bytes(4, "little")


def test_a_chunk_that_is_none_is_refused_even_if_its_checksum_fits():
    plan = plan_of(ArraySpec(name="x", dtype="uint8", shape=(2,)), "zstd")
    codec = pa.Codec("zstd")
    bodies = [b"", b"hello", bytes(4), codec.compress(bytes(7), asbytes=True), codec.compress(bytes(9), asbytes=True)]
    for bad in [*map(sealed, bodies), b"", b"ab", bytes(3)]:
        with pytest.raises(IntegrityError, match="cold shard of x"):
            cold.decode_chunk(plan, bad)
    assert cold.decode_chunk(plan, sealed(codec.compress(bytes(8), asbytes=True))).shape == (4, 2)
    raw = plan_of(plan.spec, "raw")
    for bad in (sealed(bytes(7)), sealed(bytes(9)), b""):
        with pytest.raises(IntegrityError, match="cold shard of x"):
            cold.decode_chunk(raw, bad)


def test_an_index_that_is_none_is_refused_even_if_its_checksum_fits():
    plan = plan_of(ArraySpec(name="x", dtype="uint8", shape=(2,)), "zstd")
    good = bytes(cold.encode_shard(plan, values(plan.spec, 9)))[: plan.index_bytes]
    entries = np.frombuffer(good[:-4], "<u8").reshape(4, 2)
    assert cold.parse_index(plan, good).tolist() == [[pair] for pair in entries.tolist()]
    for chunk, column, value in (
        (0, 0, 0),
        (1, 0, 2**63),
        (1, 1, 4),
        (2, 1, 2**40),
        (0, 0, 2**64 - 1),
        (2, 1, 2**64 - 1),
    ):
        bad = entries.copy()
        bad[chunk, column] = value
        with pytest.raises(IntegrityError, match="cold shard of x: the index"):
            cold.parse_index(plan, sealed(bad.tobytes()))
    for short in (b"", good[:-1], good + b"\0", sealed(good[:16])):
        with pytest.raises(IntegrityError, match="cold shard of x: the index"):
            cold.parse_index(plan, short)


def test_rows_behind_the_last_and_ranges_of_another_length_are_refused():
    plan = plan_of(ArraySpec(name="x", dtype="uint8", shape=(2,)), "zstd")
    index = cold.parse_index(plan, cold.encode_shard(plan, values(plan.spec, 8))[: plan.index_bytes])
    for row, n in ((7, 2), (8, 1), (15, 2), (40, 3)):
        with pytest.raises(IntegrityError, match=f"rows {row} to {row + n}"):
            cold.zstd_spans(plan, index, row, n)
    raw = plan_of(plan.spec, "raw")
    data = cold.encode_shard(raw, values(raw.spec, 8))
    start, stop = cold.raw_span(raw, 3, 4)
    for bad in (data[start : stop - 1], data[start : stop + 1], b""):
        with pytest.raises(IntegrityError, match="rows 3 to 7 take"):
            cold.raw_rows(raw, bad, 3, 4)


def test_other_readers_see_damage_too(tmp_path):
    plan = plan_of(ArraySpec(name="x", dtype="uint8", shape=(2,)), "zstd")
    store(tmp_path, plan, {0: values(plan.spec, 16)})
    path = tmp_path / "x/c/0/0"
    good = path.read_bytes()
    for place in (3, len(good) - 2):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        with pytest.raises(Exception, match=r"(?i)crc|checksum"):
            zarr.open_array(str(tmp_path / "x"), mode="r")[:]


def test_documents_of_another_array_or_none_are_refused():
    plan = plan_of(ArraySpec(name="x", dtype="uint8", shape=(3, 2)), "zstd", layered=True)
    document = cold_array_metadata(plan, n_rows=5, valid_rows=[[0, 5]])
    assert parse_cold_array(plan, document) == (5, [(0, 5)])
    hot = shard.array_metadata(plan.spec, chunk_rows=4, shard_rows=16, n_rows=5, valid_rows=[[0, 5]])
    others = [
        plan_of(plan.spec, "raw"),
        plan_of(plan.spec, "zstd"),
        plan_of(plan.spec, "zstd", chunk_rows=8, layered=True),
        plan_of(ArraySpec(name="x", dtype="int8", shape=(3, 2)), "zstd", layered=True),
        plan_of(ArraySpec(name="x", dtype="uint8", shape=(3, 4)), "zstd", layered=True),
    ]
    for other in others:
        with pytest.raises(IntegrityError, match=r"zarr.json"):
            parse_cold_array(other, document)
    for bad in (hot, b"", document[:-9], b"{}"):
        with pytest.raises(IntegrityError, match=r"zarr.json"):
            parse_cold_array(plan, bad)
    sizes = layout(SCHEMA)
    group = cold_group_metadata(SCHEMA, sizes, CHOSEN, stream="s", created=0.0)
    without = shard.group_metadata(SCHEMA, sizes, stream="s", created=0.0)
    alien = group.replace(b'"zstd"', b'"lzma"')
    lacking = msgspec.json.decode(group)
    del lacking["attributes"]["spool:codecs"]["gaps"]
    for bad in (without, alien, msgspec.json.encode(lacking), group[:-7]):
        with pytest.raises(IntegrityError, match=r"zarr.json"):
            parse_cold_group(bad)


# -- choosing a codec ------------------------------------------------------------------------------------------------


def skewed(spec, n, num_experts, seed=0):
    """Routing in which some experts are chosen far more often than others."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.geometric(8 / num_experts, (n, *spec.shape)) - 1, num_experts - 1)
    return ids.astype(spec.dtype)


def test_the_codec_is_what_the_rows_are_worth():
    spec, _ = _experts(12)
    uniform = np.random.default_rng(0).integers(0, 256, (4096, *spec.shape), dtype=np.uint8)
    assert cold.choose_codec(spec, skewed(spec, 4096, 256), layered=True) == "zstd"
    assert cold.choose_codec(spec, uniform, layered=True) == "raw"
    ids = ArraySpec(name="token_ids", dtype="int32")
    assert (
        cold.choose_codec(ids, np.random.default_rng(0).integers(0, 150_000, 40_000, dtype=np.int32), layered=False)
        == "raw"
    )
    mask = ArraySpec(name="loss_mask", dtype="uint8")
    assert cold.choose_codec(mask, np.repeat(np.arange(2, dtype=np.uint8), 50_000), layered=False) == "zstd"
    # saves more than a tenth and less than a third
    other = ArraySpec(name="other", dtype="uint8", shape=spec.shape)
    assert cold.choose_codec(other, skewed(spec, 4096, 256), layered=True) == "raw"


def test_few_rows_say_nothing_about_the_codec():
    spec, _ = _experts(12)
    for rows in (
        np.empty((0, 12, 8), np.uint8),
        np.random.default_rng(0).integers(0, 256, (50, 12, 8), dtype=np.uint8),
    ):
        assert cold.choose_codec(spec, rows, layered=True) == "zstd"
    assert cold.choose_codec(TOKEN_IDS.arrays[0], np.zeros(100, np.int32), layered=False) == "raw"


def test_the_sample_is_spread_over_the_rows(monkeypatch):
    tried = []
    compress = cold._compress
    monkeypatch.setattr(cold, "SAMPLE_BYTES", 1 << 18)
    monkeypatch.setattr(cold, "_compress", lambda *args: tried.append(args[2]) or compress(*args))
    spec = ArraySpec(name="mask", dtype="uint8")
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    half = noise.copy()
    half[: 1 << 18] = 0
    assert cold.choose_codec(spec, half, layered=False) == "raw"
    assert tried == list(range(0, 256, 4))
    half[: 7 << 17] = 0
    assert cold.choose_codec(spec, half, layered=False) == "zstd"


def test_layouts_name_what_a_chunk_holds():
    spec, sizes = _experts(12, 384)
    assert spec.dtype == "uint16"
    assert cold_layout(spec, sizes, "raw", layered=True) == ColdLayout(spec, "raw", 4096, sizes.shard_rows[spec.name])
    packed = cold_layout(spec, sizes, "zstd", layered=True)
    assert (packed.chunk_shape, packed.layer_bytes, packed.chunk_bytes) == ((2048, 1, 8), 16, 32_768)
    assert packed.index_bytes == 16 * packed.n_groups * 12 + 4
