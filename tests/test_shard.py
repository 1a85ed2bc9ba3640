import warnings

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tensorstore
import zarr
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import ConfigError, IntegrityError
from spool.formats import shard
from spool.model.fields import LOGPROBS, TOKEN_IDS, ArraySpec, FieldSpec, Schema, expert_field, layout, numpy_dtype
from spool.model.moe import MoEShape

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
          "float64", "bfloat16"]  # fmt: skip


def values(dtype, shape, seed=0):
    """Random bits of a dtype, NaNs among them."""
    kind = numpy_dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)


def store(root, spec, packs, *, chunk_rows, shard_rows):
    """Write ``packs`` (pack number -> its rows) as a stream does; return the whole array, fill value where skipped."""
    ndim, valid = 1 + len(spec.shape), []
    n_rows = max((pack * shard_rows + len(rows) for pack, rows in packs.items()), default=0)
    whole = np.zeros((n_rows, *spec.shape), numpy_dtype(spec.dtype))
    for pack, rows in sorted(packs.items()):
        start = pack * shard_rows
        valid.append([start, len(rows)])
        whole[start : start + len(rows)] = rows
        data, chunk_bytes = rows.tobytes(), chunk_rows * spec.row_bytes
        path = root / shard.shard_key(spec.name, ndim, pack)
        path.parent.mkdir(parents=True, exist_ok=True)
        padded = data.ljust(shard.padded_bytes(len(data), chunk_bytes=chunk_bytes), b"\0")
        index = shard.shard_index(len(data), chunk_bytes=chunk_bytes, n_chunks=shard_rows // chunk_rows)
        path.write_bytes(padded + index)
        assert path.read_bytes()[: len(data)] == data
    (root / spec.name).mkdir(exist_ok=True, parents=True)
    document = shard.array_metadata(spec, chunk_rows=chunk_rows, shard_rows=shard_rows, n_rows=n_rows, valid_rows=valid)
    (root / spec.name / "zarr.json").write_bytes(document)
    assert shard.parse_rows(document) == (n_rows, [tuple(pair) for pair in valid])
    return whole


def bits(array):
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def check(root, spec, whole):
    """Both readers see ``whole``, in full and in slices that cross chunks and shards."""
    expected = bits(whole)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_readers_read_every_dtype(tmp_path, dtype):
    spec = ArraySpec(name="x", dtype=dtype, shape=(3,))
    packs = {0: values(dtype, (16, 3)), 1: values(dtype, (13, 3), 1)}
    check(tmp_path, spec, store(tmp_path, spec, packs, chunk_rows=4, shard_rows=16))
    attributes = dict(zarr.open_array(str(tmp_path / "x"), mode="r").attrs)
    assert attributes["spool:rows"] == [[0, 16], [16, 13]]
    assert attributes.get("spool:dtype") == ("bfloat16" if dtype == "bfloat16" else None)


@pytest.mark.parametrize(
    ("dtype", "shape", "chunk_rows", "shard_rows", "sizes"),
    [
        ("uint8", (40, 8), 1024, 4096, {0: 4000, 1: 1025}),
        ("uint8", (40, 8), 1024, 4096, {0: 1, 2: 4096}),
        ("uint16", (75, 8), 512, 1024, {0: 1024, 1: 1}),
        ("int32", (), 4096, 8192, {0: 5000, 1: 8192, 2: 17}),
        ("float32", (), 4, 16, {1: 3}),
        ("bool", (), 1, 1, {0: 1, 1: 1, 5: 1}),
        ("int16", (2, 3, 4), 1, 8, {0: 3, 1: 8}),
        ("bfloat16", (7,), 8, 8, {0: 8, 3: 5}),
        ("uint8", (1_200_000,), 1, 2, {0: 2, 1: 1}),
        ("int32", (), 16, 16, {}),
        ("uint8", (48, 8), 16, 16, {}),
        ("int64", (), 16, 16, {0: 0}),
    ],
)
def test_both_readers_read_partial_and_missing_shards(tmp_path, dtype, shape, chunk_rows, shard_rows, sizes):
    spec = ArraySpec(name="x", dtype=dtype, shape=shape)
    packs = {pack: values(dtype, (n, *shape), pack) for pack, n in sizes.items()}
    check(tmp_path, spec, store(tmp_path, spec, packs, chunk_rows=chunk_rows, shard_rows=shard_rows))


def test_1153_rows_in_shards_of_16(tmp_path):
    spec = ArraySpec(name="x", dtype="uint16", shape=(2,))
    rows = values("uint16", (1153, 2))
    packs = {pack: rows[pack * 16 : pack * 16 + 16] for pack in range(73)}
    whole = store(tmp_path, spec, packs, chunk_rows=8, shard_rows=16)
    assert np.array_equal(whole, rows)
    check(tmp_path, spec, whole)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 4), max_size=3),
    chunk=st.integers(0, 4),
    more=st.integers(0, 3),
    fills=st.lists(st.integers(0, 128), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_any_layout_is_read_back(tmp_path_factory, dtype, shape, chunk, more, fills):
    root, spec = tmp_path_factory.mktemp("any"), ArraySpec(name="x", dtype=dtype, shape=tuple(shape))
    chunk_rows, shard_rows = 1 << chunk, 1 << (chunk + more)
    packs = {i: values(dtype, (min(n, shard_rows), *shape), i) for i, n in enumerate(fills) if n}
    check(root, spec, store(root, spec, packs, chunk_rows=chunk_rows, shard_rows=shard_rows))


def test_a_damaged_index_is_seen_by_the_readers(tmp_path):
    spec = ArraySpec(name="x", dtype="uint8")
    store(tmp_path, spec, {0: values("uint8", (16,))}, chunk_rows=4, shard_rows=16)
    path = tmp_path / "x/c/0"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"(?i)crc|checksum"):
        zarr.open_array(str(tmp_path / "x"), mode="r")[:]


def test_the_index_is_offsets_sizes_and_a_checksum():
    index = shard.shard_index(2500, chunk_bytes=1000, n_chunks=4)
    assert len(index) == 4 * 16 + 4
    none = 2**64 - 1
    assert np.frombuffer(index[:-4], "<u8").tolist() == [0, 1000, 1000, 1000, 2000, 1000, none, none]
    assert int.from_bytes(index[-4:], "little") == crc32c(index[:-4])
    assert np.frombuffer(shard.shard_index(0, chunk_bytes=7, n_chunks=1)[:-4], "<u8").tolist() == [none, none]
    assert shard.padded_bytes(2500, chunk_bytes=1000) == 3000
    assert shard.padded_bytes(0, chunk_bytes=1000) == 0
    with pytest.raises(AssertionError):
        shard.shard_index(4001, chunk_bytes=1000, n_chunks=4)


def test_keys():
    assert shard.shard_key("routed_experts", 3, 12) == "routed_experts/c/12/0/0"
    assert shard.shard_key("token_ids", 1, 0) == "token_ids/c/0"


SCHEMA = Schema.of(
    TOKEN_IDS,
    LOGPROBS,
    expert_field(MoEShape(47, 512, 4, tuple(range(1, 47)))),
    FieldSpec(name="top_p", dtype="int32", align="response", ragged=True, positions=False, bound=150_000),
    FieldSpec(name="probe", dtype="bfloat16", align="token", shape=(5,), train_dtype="float32"),
    FieldSpec(name="gaps", dtype="int16", align="forward", shape=(46, 4), num_layers=46, missing=-1),
)


def test_a_stream_opens_as_a_group_without_spool(tmp_path):
    plan = layout(SCHEMA, max_shard_bytes=1 << 16)
    document = shard.group_metadata(SCHEMA, plan, stream="s1", created=1.5, host="node7")
    (tmp_path / "zarr.json").write_bytes(document)
    wholes = {}
    for spec in SCHEMA.arrays:
        rows = plan.shard_rows[spec.name]
        packs = {0: values(spec.dtype, (min(rows, 300), *spec.shape)), 1: values(spec.dtype, (5, *spec.shape), 1)}
        wholes[spec.name] = store(
            tmp_path, spec, packs, chunk_rows=plan.chunk_rows[spec.name], shard_rows=plan.shard_rows[spec.name]
        )
    (tmp_path / "lock").touch()
    (tmp_path / "records").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(str(tmp_path), mode="r")
        for name, whole in wholes.items():
            assert group[name][:].tobytes() == bits(whole).tobytes()
    assert group.attrs["spool:stream"] == "s1"
    assert set(wholes) == {"token_ids", "logprobs", "routed_experts", "top_p.values", "top_p.offsets", "probe", "gaps"}


def test_schema_and_layout_come_back_from_the_document():
    plan = layout(SCHEMA)
    document = shard.group_metadata(SCHEMA, plan, stream="s1", created=1.5, host="node7")
    assert shard.parse_group(document) == (SCHEMA, plan)
    facts = shard.parse_attributes(document)
    assert (facts["format"], facts["stream"], facts["created"], facts["host"]) == (1, "s1", 1.5, "node7")
    empty = Schema()
    assert shard.parse_group(shard.group_metadata(empty, layout(empty), stream="s", created=0.0))[0] == empty


def test_a_torn_or_foreign_document_is_an_integrity_error():
    group = shard.group_metadata(SCHEMA, layout(SCHEMA), stream="s1", created=1.5)
    array = shard.array_metadata(TOKEN_IDS.arrays[0], chunk_rows=1, shard_rows=1, n_rows=0, valid_rows=[])
    newer = msgspec.json.decode(group)
    newer["attributes"]["spool:format"] = 2
    alien = msgspec.json.decode(group)
    alien["attributes"]["spool:schema"][0]["dtype"] = "str"
    for bad in (b"", group[: len(group) // 2], b"[]", b"{}", b"\xff", array, msgspec.json.encode(newer),
                msgspec.json.encode(alien), group.replace(b"spool:layout", b"spool:l")):  # fmt: skip
        with pytest.raises(IntegrityError, match=r"zarr.json"):
            shard.parse_group(bad)
    for bad in (b"", array[:-5], group, array.replace(b"spool:rows", b"rows"), array.replace(b'"shape"', b'"s"')):
        with pytest.raises(IntegrityError, match=r"zarr.json"):
            shard.parse_rows(bad)


@pytest.mark.parametrize(("dtype", "name"), [("f4", "float32"), (">i2", "int16"), ("half", "float16"), ("?", "bool")])
def test_other_spellings_of_a_dtype_are_stored_little_endian_under_the_standard_name(dtype, name):
    spec = ArraySpec(name="x", dtype=dtype)
    document = msgspec.json.decode(shard.array_metadata(spec, chunk_rows=1, shard_rows=1, n_rows=0, valid_rows=[]))
    assert document["data_type"] == name
    assert "spool:dtype" not in document["attributes"]


def test_a_dtype_that_zarr_lacks_is_refused():
    with pytest.raises(ConfigError, match="no dtype for longdouble"):
        shard.array_metadata(
            ArraySpec(name="x", dtype="longdouble"), chunk_rows=1, shard_rows=1, n_rows=0, valid_rows=[]
        )
