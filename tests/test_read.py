"""Reading by reference, against arrays kept in memory; on a store of a few lines that counts, and on the hot tier."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.errors import GapError, InputError, IntegrityError, NotFoundError
from spool.formats.frames import encode_event
from spool.formats.shard import group_metadata, shard_key
from spool.model.events import Checkpointed
from spool.model.fields import LOGPROBS, LOSS_MASK, TOKEN_IDS, FieldSpec, Layout, Schema, expert_field, numpy_dtype
from spool.model.moe import MoEShape
from spool.model.refs import Extent, Inline, SegmentRef, Span, StepRef, Unit
from spool.read.fetch import Workers
from spool.read.hot import HotTier
from spool.read.locate import files
from spool.read.reader import Reader
from spool.read.sample import Ragged
from spool.stores.hot import HotStore
from spool.write.stream import Rows, create_stream

EXPERTS = expert_field(MoEShape(num_layers=5, num_experts=300, topk=2, moe_layers=(1, 2, 4)))
PLAIN = expert_field(MoEShape(num_layers=3, num_experts=200, topk=4))
TOP_P = FieldSpec(name="top_p", dtype="int32", align="response", ragged=True)
RNG = np.random.default_rng(3)


class Memory:
    """A tier in memory that counts calls and bytes."""

    def __init__(self):
        self.objects, self.calls, self.n_bytes, self.closed = {}, [], 0, False

    def _bytes(self, key, offset, length):
        self.calls.append((key, offset, length))
        self.n_bytes += length
        data = memoryview(self.objects[key])[offset : offset + length]
        if len(data) < length:
            raise IntegrityError(f"{key} is short")
        return data

    def read(self, key):
        return bytes(self.objects[key])

    def read_into(self, key, offset, buffers):
        data, at = self._bytes(key, offset, sum(map(len, buffers))), 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    @contextlib.contextmanager
    def borrow(self, key, offset, length):
        yield self._bytes(key, offset, length).toreadonly()

    def path(self, key):
        return f"/memory/{key}"

    def close(self):
        self.closed = True


class Stream:
    """A stream written by hand: rows are appended, extents come back."""

    def __init__(self, objects, name, *specs, shard_rows=64):
        schema = Schema.of(*specs)
        self.name, self.objects, self.shard_rows = name, objects, shard_rows
        self.specs = {array.name: array for array in schema.arrays}
        self.rows = dict.fromkeys(self.specs, 0)
        sizes = dict.fromkeys(self.specs, shard_rows)
        objects[f"streams/{name}/zarr.json"] = group_metadata(schema, Layout(sizes, sizes), stream=name, created=1.0)

    def append(self, array, stored, position=0):
        """Store rows, whole in one pack, and return their extent."""
        spec = self.specs[array]
        stored = np.ascontiguousarray(stored, numpy_dtype(spec.dtype)).reshape(-1, *spec.shape)
        row = self.rows[array]
        if row % self.shard_rows + len(stored) > self.shard_rows:
            row = -(-row // self.shard_rows) * self.shard_rows
        self.rows[array] = row + len(stored)
        data = stored.view(np.uint8).tobytes() if stored.size else b""
        pack, first = divmod(row, self.shard_rows)
        key = f"streams/{self.name}/{shard_key(array, 1 + len(spec.shape), pack)}"
        held = self.objects.setdefault(key, bytearray())
        held += bytes(first * spec.row_bytes - len(held)) + data
        return Extent(self.name, row, len(stored), position, crc32c(data))

    def append_ragged(self, field, lists, position=0):
        ends = self.append(f"{field}.offsets", np.cumsum([len(part) for part in lists]), position)
        values = self.append(f"{field}.values", np.array([value for part in lists for value in part]))
        return ends, values


def step_ref(n_tokens=0, n_rows=None, **facts):
    n_rows = n_tokens if n_rows is None else n_rows
    return StepRef(spool_id="x", session_id="s", step_id="0", index=0, n_tokens=n_tokens, n_rows=n_rows, **facts)


def segment_ref(n_tokens, **facts):
    return SegmentRef(spool_id="x", session_id="s", view="lineage", n_tokens=n_tokens, n_rows=n_tokens, **facts)


def absolute(stored):
    """Stored rows of `EXPERTS` as a trainer gets them."""
    wide = np.zeros((len(stored), 5, 2), np.int32)
    wide[:, [1, 2, 4]] = stored
    return wide


class World:
    """One trajectory of two steps (tokens 0-20 and 20-30; generated: 12-20 and 25-30) between other rows."""

    def __init__(self):
        self.store = Memory()
        self.stream = Stream(self.store.objects, "one", EXPERTS, TOKEN_IDS, LOGPROBS, LOSS_MASK, TOP_P)
        self.tokens = RNG.integers(0, 99_999, 30, np.int32)
        self.experts = RNG.integers(0, 300, (29, 3, 2)).astype(np.uint16)
        self.logprobs = -RNG.random(13, np.float32)
        self.top_p = [RNG.integers(0, 99, RNG.integers(0, 4)).tolist() for _ in range(13)]
        extents = {}
        parts = [
            ("token_ids", self.tokens, 0, 20), ("routed_experts", self.experts, 0, 19),
            ("logprobs", self.logprobs[:8], 12, 20), ("loss_mask", [1, 1, 0, 1, 1, 1, 1, 1], 12, 20),
            ("token_ids", self.tokens, 20, 30), ("routed_experts", self.experts, 19, 29),
            ("logprobs", self.logprobs[8:], 25, 30),
        ]  # fmt: skip
        for array, rows, start, stop in parts:
            self.stream.append(array, RNG.integers(0, 9, (3, *self.stream.specs[array].shape)))  # someone else's
            rows = rows[start:stop] if len(rows) > stop - start else rows
            extents.setdefault(array, []).append(self.stream.append(array, rows, start))
        for lists, start in ((self.top_p[:8], 12), (self.top_p[8:], 25)):
            for array, extent in zip(
                ("offsets", "values"), self.stream.append_ragged("top_p", lists, start), strict=True
            ):
                extents.setdefault(f"top_p.{array}", []).append(extent)
        self.ref = segment_ref(
            30, response_start=12, steps=(0, 1), spans=(Span(0, 12, 20), Span(1, 25, 30)),
            extents={name: tuple(found) for name, found in extents.items()},
        )  # fmt: skip
        self.reader = Reader([HotTier(self.store)], threads=2)
        observed = np.zeros(5, np.float32)
        self.expected = {
            "token_ids": self.tokens,
            "routed_experts": absolute(self.experts),
            "logprobs": np.concatenate([self.logprobs[:8], observed, self.logprobs[8:]]),
            "loss_mask": np.array([0] * 12 + [1, 1, 0, 1, 1, 1, 1, 1] + [0] * 5 + [1] * 5, np.uint8),
        }
        self.expected_top_p = [*self.top_p[:8], *[[]] * 5, *self.top_p[8:]]

    def read(self, **options):
        return self.reader.read([self.ref], **options)[0]

    def without(self, field, *numbers):
        """The reference without some extents of a field."""
        kept = tuple(e for number, e in enumerate(self.ref.extents[field]) if number not in numbers)
        return segment_ref(
            30, response_start=12, steps=(0, 1), spans=self.ref.spans, extents={**self.ref.extents, field: kept}
        )


@pytest.fixture
def world():
    return World()


def lists(ragged):
    assert isinstance(ragged, Ragged)
    assert ragged.offsets.dtype == np.int64
    assert len(ragged.values) == ragged.offsets[-1]
    return [part.tolist() for part in np.split(ragged.values, ragged.offsets[1:-1])] if len(ragged.offsets) > 1 else []


def same(array, expected):
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    base = array if array.base is None else array.base
    assert base.flags.owndata or type(base) is not np.ndarray  # its own, or lent to it alone


# -- what a sample holds ---------------------------------------------------------------------------------------------


def test_a_sample_holds_everything(world):
    sample = world.read()
    assert set(sample) == {*world.expected, "top_p"}
    for field, expected in world.expected.items():
        same(sample[field], expected)
    assert lists(sample["top_p"]) == world.expected_top_p
    assert sample["top_p"].values.dtype == np.int32
    assert sample.ref is world.ref
    assert "top_p: ragged int32" in repr(sample)
    copy = pickle.loads(pickle.dumps(sample))
    assert copy.ref == sample.ref
    np.testing.assert_array_equal(copy["routed_experts"], sample["routed_experts"])


@given(st.lists(st.tuples(st.integers(-31, 31) | st.none(), st.integers(-31, 31) | st.none()), max_size=4), st.data())
@settings(max_examples=60)
def test_slices_are_those_of_the_whole(bounds, data):
    world = World()
    slices = [slice(*pair) for pair in bounds]
    verify = data.draw(st.sampled_from(["whole", "always", "never"]))
    sample = world.read(tokens=[slices], verify=verify)
    ranges = [(range(30)[part].start, range(30)[part].stop) for part in slices]
    pieces = [(start, max(start, stop)) for start, stop in ranges]
    for field, first, count in (
        ("token_ids", 0, 30),
        ("loss_mask", 0, 30),
        ("logprobs", 12, 18),
        ("routed_experts", 0, 29),
    ):
        rows = [p - first for start, stop in pieces for p in range(start, stop) if 0 <= p - first < count]
        same(sample[field], world.expected[field][rows])
    rows = [p - 12 for start, stop in pieces for p in range(start, stop) if p >= 12]
    assert lists(sample["top_p"]) == [world.expected_top_p[row] for row in rows]


def test_layers_are_absolute(world):
    for layers in (slice(0, 3), slice(2, None), slice(3, 4), slice(-1, None), slice(4, 2), slice(None)):
        sample = world.read(fields=["routed_experts", "token_ids"], layers=layers, tokens=[slice(7, 22)])
        same(sample["routed_experts"], np.ascontiguousarray(world.expected["routed_experts"][7:22, layers]))
        same(sample["token_ids"], world.tokens[7:22])
    narrow = world.read(fields=["routed_experts"], dtype="stored")["routed_experts"]
    same(narrow, world.expected["routed_experts"].astype(np.uint16))


def test_stored_bytes_that_are_wanted_bytes_go_straight_to_their_place(world):
    borrow = world.store.borrow
    world.store.borrow = None
    world.read(fields=["token_ids", "logprobs", "loss_mask", "top_p"], dtype="stored")
    world.store.borrow = borrow
    assert len(world.store.calls) == 5  # one range an array: parts that nearly touch are read in one go


def test_loss_mask_of_spans_alone(world):
    ref = step_ref(9, response_start=4, spans=(Span(0, 4, 6), Span(1, 7, 9, trained=False)))
    (sample,) = world.reader.read([ref])
    assert dict(sample).keys() == {"loss_mask"}
    same(sample["loss_mask"], np.array([0, 0, 0, 0, 1, 1, 0, 0, 0], np.uint8))
    (sliced,) = world.reader.read([ref], tokens=[[slice(5, 8), slice(0, 5)]])
    same(sliced["loss_mask"], np.array([1, 0, 0, 0, 0, 0, 0, 1], np.uint8))
    assert world.store.calls == []


def test_bfloat16_and_bool_come_back_as_they_are():
    store = Memory()
    fields = (
        FieldSpec(name="weight", dtype="bfloat16", align="token", shape=(2,)),
        FieldSpec(name="flag", dtype="bool", align="step"),
        FieldSpec(name="wide", dtype="bfloat16", align="token", train_dtype="float32"),
    )
    stream = Stream(store.objects, "one", *fields)
    weight = RNG.random((4, 2)).astype(ml_dtypes.bfloat16)
    extents = {
        "weight": (stream.append("weight", weight),),
        "flag": (stream.append("flag", [True]),),
        "wide": (stream.append("wide", weight[:, 0]),),
    }
    (sample,) = Reader([HotTier(store)]).read([step_ref(4, extents=extents)])
    same(sample["weight"], weight)
    same(sample["flag"], np.array([True]))
    same(sample["wide"], weight[:, 0].astype(np.float32))


def test_multimodal_tokens_bring_their_rows():
    store = Memory()
    stream = Stream(store.objects, "one", PLAIN)
    rows = RNG.integers(0, 200, (8, 3, 4)).astype(np.uint8)
    ref = step_ref(
        6, 9, units=(Unit("image", 2, 4),), extents={"routed_experts": (stream.append("routed_experts", rows),)}
    )
    reader = Reader([HotTier(store)])
    for tokens, expected in ((None, rows), (slice(2, 3), rows[2:6]), (slice(3, 6), rows[6:8]), (slice(0, 2), rows[:2])):
        (sample,) = reader.read([ref], fields=["routed_experts"], tokens=[tokens])
        same(sample["routed_experts"], expected.astype(np.int32))


def test_step_fields_are_given_whole():
    store = Memory()
    stream = Stream(store.objects, "one", FieldSpec(name="value", dtype="float64", align="step", shape=(2,)))
    value = RNG.random((3, 2))
    extents = tuple(stream.append("value", value[i], i) for i in range(3))
    ref = segment_ref(9, steps=(0, 4, 5), extents={"value": extents})
    (sample,) = Reader([HotTier(store)]).read([ref], fields=["value"], tokens=[slice(2, 3)])
    same(sample["value"], value)
    gapped = segment_ref(9, steps=(0, 4, 5), extents={"value": extents[::2]})
    with pytest.raises(GapError, match=r"steps \[1, 2\)"):
        Reader([HotTier(store)]).read([gapped])


# -- what was never sent ---------------------------------------------------------------------------------------------


def test_a_gap_is_an_error_that_says_where(world):
    ref = world.without("routed_experts", 1)
    with pytest.raises(GapError, match=r"s@lineage/0.*routed_experts.*\[19, 29\).*missing=") as caught:
        world.reader.read([ref])
    assert caught.value.details == {"field": "routed_experts", "ref": "s@lineage/0", "rows": [[19, 29]], "n_gaps": 1}
    assert world.store.calls == []
    (part,) = world.reader.read([ref], tokens=[slice(0, 19)])
    same(part["routed_experts"], world.expected["routed_experts"][:19])


def test_missing_rows_are_filled_with_what_fits(world):
    ref = world.without("routed_experts", 0)
    (sample,) = world.reader.read([ref], fields=["routed_experts"], missing=-1)
    same(
        sample["routed_experts"],
        np.concatenate([np.full((19, 5, 2), -1, np.int32), world.expected["routed_experts"][19:]]),
    )
    with pytest.raises(InputError, match="uint16"):
        world.reader.read([ref], fields=["routed_experts"], missing=-1, dtype="stored")
    for wrong in ("zero", 1.5, None, np.zeros(3), np.array([1, 2]), [1]):
        with pytest.raises(InputError, match="missing"):
            world.reader.read([ref], fields=["token_ids"], missing=wrong)


def test_logprobs_have_gaps_in_generated_tokens_only(world):
    ref = world.without("logprobs", 1)
    with pytest.raises(GapError, match=r"generated tokens \[25, 30\)"):
        world.reader.read([ref], fields=["logprobs"])
    (sample,) = world.reader.read([ref], fields=["logprobs"], missing=7)
    same(sample["logprobs"], np.concatenate([world.logprobs[:8], np.zeros(5, np.float32), np.full(5, 7, np.float32)]))
    (sample,) = world.reader.read([ref], fields=["logprobs"], tokens=[slice(0, 25)])
    same(sample["logprobs"], world.expected["logprobs"][:13])


def test_ragged_gaps(world):
    keep = {name: world.ref.extents[name][:1] for name in ("top_p.offsets", "top_p.values")}
    ref = segment_ref(30, response_start=12, spans=world.ref.spans, extents=keep)
    with pytest.raises(GapError, match="top_p"):
        world.reader.read([ref])
    (sample,) = world.reader.read([ref], missing=0)
    assert lists(sample["top_p"]) == [*world.top_p[:8], *[[]] * 10]


def test_a_field_that_no_one_sent(world):
    ref = world.without("routed_experts", 0, 1)
    with pytest.raises(NotFoundError, match=r"no rows of routed_experts; it has .*token_ids") as caught:
        world.reader.read([ref], fields=["routed_experts"])
    assert "logprobs" in caught.value.details["known"]
    with pytest.raises(NotFoundError, match="no rows of nonsense"):
        world.read(fields=["nonsense"])
    (filled,) = world.reader.read([ref], fields=["routed_experts"], missing=0)
    same(filled["routed_experts"], np.zeros((29, 5, 2), np.int32))


def test_references_of_no_and_of_one_token(world):
    nothing, one = step_ref(0), step_ref(1, extents={"token_ids": (world.stream.append("token_ids", [7]),)})
    (sample,) = world.reader.read([nothing])
    assert {name: array.shape for name, array in sample.items()} == {"token_ids": (0,), "loss_mask": (0,)}
    assert dict(world.reader.read([nothing], fields=["routed_experts"])[0]) == {}
    (sample,) = world.reader.read([one], fields=["routed_experts", "logprobs", "token_ids"])
    assert {name: array.shape for name, array in sample.items()} == {
        "routed_experts": (0, 5, 2), "logprobs": (1,), "token_ids": (1,),
    }  # fmt: skip
    empty, full = world.reader.read([nothing, world.ref], fields=["routed_experts"])
    assert (empty["routed_experts"].shape, full["routed_experts"].shape) == ((0, 5, 2), (29, 5, 2))
    assert world.reader.read([]) == []


# -- many references -------------------------------------------------------------------------------------------------


def test_shared_rows_are_read_once_and_belong_to_each(world):
    first, second = world.reader.read([world.ref, world.ref], fields=["routed_experts", "token_ids"])
    assert len(world.store.calls) == 2
    assert world.store.n_bytes == (29 + 3) * EXPERTS.arrays[0].row_bytes + (30 + 3) * 4
    first["routed_experts"][:] = 0
    first["token_ids"][:] = 0
    same(second["routed_experts"], world.expected["routed_experts"])
    same(second["token_ids"], world.tokens)


def test_tokens_for_each_reference(world):
    samples = world.reader.read(
        [world.ref] * 3, fields=["token_ids"], tokens=[None, slice(2, 5), [slice(8, 9), slice(0, 2)]]
    )
    for sample, expected in zip(samples, (world.tokens, world.tokens[2:5], world.tokens[[8, 0, 1]]), strict=True):
        same(sample["token_ids"], expected)
    for wrong in (slice(0, 2), [None], [None] * 4):
        with pytest.raises(InputError, match="one entry for each of the 3"):
            world.reader.read([world.ref] * 3, tokens=wrong)


def count_calls(monkeypatch):
    calls, read_into = [], HotStore.read_into

    def counted(self, key, offset, buffers):
        if "/c/" in key:
            calls.append(sum(map(len, buffers)))
        return read_into(self, key, offset, buffers)

    monkeypatch.setattr(HotStore, "read_into", counted)
    return calls


def test_ranges_far_apart_are_read_apart(world):
    stream = Stream(world.store.objects, "far", FieldSpec(name="x", dtype="uint8", align="token"), shard_rows=1 << 20)
    rows = RNG.integers(0, 99, 1 << 20).astype(np.uint8)
    ref = step_ref(1 << 20, extents={"x": (stream.append("x", rows),)})
    slices = [slice(first, first + 10) for first in range(0, 1 << 20, 10_000)]
    (sample,) = world.reader.read([ref], fields=["x"], tokens=[slices[::-1]])
    same(sample["x"], np.concatenate([rows[part] for part in slices[::-1]]))
    assert len(world.store.calls) == len(slices)
    assert world.store.n_bytes == 10 * len(slices)


@pytest.mark.parametrize("n_ranges", [1, 1024, 1025, 5000])
def test_any_number_of_ranges_is_the_rows_one_by_one(n_ranges, tmp_path, monkeypatch):
    objects = {}
    stream = Stream(objects, "one", TOKEN_IDS, shard_rows=1 << 16)
    rows = RNG.integers(0, 1 << 30, 3 * n_ranges, np.int32)
    extent = stream.append("token_ids", rows)
    write(tmp_path, objects)
    reader = Reader([HotTier(HotStore(str(tmp_path)))])
    ref = step_ref(len(rows), extents={"token_ids": (extent,)})
    calls = count_calls(monkeypatch)
    order = RNG.permutation(n_ranges)
    slices = [slice(int(3 * i), int(3 * i + 2)) for i in order]
    (sample,) = reader.read([ref], fields=["token_ids"], tokens=[slices])
    same(sample["token_ids"], np.concatenate([rows[part] for part in slices]))
    assert len(calls) == 1  # 4 bytes between two ranges are rather read than skipped
    assert calls[0] < 12 * n_ranges
    with_empty = [part for slot in slices[:9] for part in (slot, slice(4, 4))]
    (sample,) = reader.read([ref], fields=["token_ids"], tokens=[with_empty])
    same(sample["token_ids"], np.concatenate([rows[part] for part in slices[:9]]))


def test_no_call_for_nothing(world):
    world.read(fields=["routed_experts", "token_ids", "logprobs", "top_p"], tokens=[[slice(3, 3), slice(30, 40)]])
    assert world.store.calls == []


def test_a_small_slice_costs_few_calls_of_python(world):
    options = {"fields": ["routed_experts"], "tokens": [slice(3, 9)]}
    world.read(**options)
    calls = []
    sys.setprofile(lambda _, event, __: calls.append(event))
    try:
        world.read(**options)
    finally:
        sys.setprofile(None)
    assert calls.count("call") + calls.count("c_call") < 220


# -- the caller's arrays ---------------------------------------------------------------------------------------------


def test_out_is_filled_in_place(world):
    batch = np.full((40, 5, 2), 9, np.int64)
    out = {
        "routed_experts": batch[5:34],
        "token_ids": np.empty(60, np.int32)[::2],
        "loss_mask": np.empty(30, np.float32),
        "logprobs": np.empty(18, np.float64),
    }
    (sample,) = world.reader.read([world.ref], fields=list(out), out=[out])
    for field, array in out.items():
        assert sample[field] is array
        np.testing.assert_array_equal(array, world.expected[field])
    assert (batch[:5] == 9).all()
    assert (batch[34:] == 9).all()


def test_unfit_out_is_refused_before_anything_is_read(world):
    frozen = np.empty(30, np.int32)
    frozen.flags.writeable = False
    for out in (
        {"token_ids": np.empty(29, np.int32)}, {"token_ids": np.empty((30, 1), np.int32)}, {"token_ids": frozen},
        {"token_ids": np.empty(30, np.int16)}, {"token_ids": np.empty(30, np.float32)}, {"token_ids": [0] * 30},
        {"routed_experts": np.empty((29, 5, 2), np.uint8)}, {"top_p": np.empty(9, np.int32)}, {"nonsense": frozen},
        {"loss_mask": np.empty(29, np.uint8)},
    ):  # fmt: skip
        with pytest.raises(InputError, match="out="):
            world.reader.read([world.ref], out=[out])
    with pytest.raises(InputError, match="out="):
        world.reader.read([world.ref], out={"token_ids": np.empty(30, np.int32)})
    assert world.store.calls == []


def test_wrong_arguments(world):
    for options in (
        {"fields": "token_ids"}, {"dtype": "int64"}, {"verify": "sometimes"}, {"layers": slice(0, 4, 2)},
        {"layers": 3, "fields": ["token_ids"]}, {"tokens": [slice(0, 4, 2)]},
    ):  # fmt: skip
        with pytest.raises(InputError):
            world.read(**options)


# -- inline payload --------------------------------------------------------------------------------------------------


def carried(sample, *names):
    return {name: Inline(sample[name].dtype.name, sample[name].shape, sample[name].tobytes()) for name in names}


def test_inline_payload_needs_no_store(world):
    names = ("token_ids", "loss_mask", "logprobs", "routed_experts")
    ref = segment_ref(30, response_start=12, spans=world.ref.spans, inline=carried(world.read(), *names))
    alone = Reader([HotTier(Memory())])
    (sample,) = alone.read([ref])
    assert set(sample) == set(names)
    for field in names:
        same(sample[field], world.expected[field])
    (part,) = alone.read([ref], tokens=[[slice(26, None), slice(0, 14)]])
    same(part["token_ids"], world.tokens[[*range(26, 30), *range(14)]])
    same(part["logprobs"], world.expected["logprobs"][[14, 15, 16, 17, 0, 1]])
    same(part["routed_experts"], world.expected["routed_experts"][[*range(26, 29), *range(14)]])


def test_inline_payload_follows_the_options(world):
    extents = {"routed_experts": world.ref.extents["routed_experts"]}
    ref = segment_ref(30, extents=extents, inline=carried(world.read(), "routed_experts"))
    (sample,) = world.reader.read([ref], fields=["routed_experts"], layers=slice(1, 3), dtype="stored")
    same(sample["routed_experts"], world.expected["routed_experts"][:, 1:3].astype(np.uint16))
    out = np.empty((29, 5, 2), np.int64)
    world.reader.read([ref], fields=["routed_experts"], out=[{"routed_experts": out}])
    np.testing.assert_array_equal(out, world.expected["routed_experts"])


def test_inline_payload_that_no_stream_describes(world):
    whole = world.read()
    inline = {**carried(whole, "routed_experts"), "mine": Inline("float64", (2,), np.array([1.5, 2.5]).tobytes())}
    ref = segment_ref(30, inline=inline)
    alone = Reader([HotTier(Memory())])
    (sample,) = alone.read([ref], layers=slice(1, 3))
    same(sample["routed_experts"], whole["routed_experts"][:, 1:3].copy())
    same(sample["mine"], np.array([1.5, 2.5]))
    out = np.empty((9, 5, 2), np.int64)
    alone.read([ref], fields=["routed_experts"], tokens=[slice(3, 12)], out=[{"routed_experts": out}])
    np.testing.assert_array_equal(out, whole["routed_experts"][3:12])
    with pytest.raises(InputError, match="no stream says"):
        alone.read([ref], tokens=[slice(0, 1)])


def test_damaged_inline_payload(world):
    short = segment_ref(30, inline={"token_ids": Inline("int32", (29,), bytes(116))})
    torn = segment_ref(30, inline={"token_ids": Inline("int32", (30,), bytes(119))})
    for ref in (short, torn):
        with pytest.raises(IntegrityError, match="carries"):
            world.reader.read([ref])


# -- ragged fields ---------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=9), st.data())
@settings(max_examples=60)
def test_cut_ragged_extents_find_their_values(rows, data):
    store = Memory()
    stream = Stream(store.objects, "one", FieldSpec(name="r", dtype="uint8", align="token", ragged=True))
    stream.append_ragged("r", [[1, 2, 3]])
    ends, values = stream.append_ragged("r", rows)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    hole = data.draw(st.integers(start, stop))
    parts = [ends.cut(a, b) for a, b in ((start, hole), (hole, stop)) if a < b]
    extents = {"r.offsets": tuple(part.at(part.position - start) for part in parts), "r.values": (values,) * len(parts)}
    verify = data.draw(st.sampled_from(["whole", "always"]))
    (sample,) = Reader([HotTier(store)]).read([step_ref(stop - start, extents=extents)], fields=["r"], verify=verify)
    assert lists(sample["r"]) == rows[start:stop]
    assert sample["r"].values.dtype == np.uint8


def test_ragged_end_offsets_that_lie_are_refused(world):
    ends = world.ref.extents["top_p.offsets"][0]
    key = "streams/one/top_p.offsets/c/0"
    held = np.frombuffer(world.store.objects[key], "<u8")
    for row, wrong in ((ends.row, 10**6), (ends.row + 7, 10**6), (ends.row + 7, 0), (ends.row, 2**64 - 1)):
        before = int(held[row])
        held[row] = wrong
        with pytest.raises(IntegrityError, match=r"top_p"):
            world.read(verify="never")
        held[row] = before
    alone = {"top_p.offsets": world.ref.extents["top_p.offsets"]}
    with pytest.raises(IntegrityError, match="values"):
        world.reader.read([segment_ref(30, response_start=12, extents=alone)])


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_field_stored_in_two_ways_is_read_with_the_wider():
    store = Memory()
    narrow = Stream(store.objects, "narrow", PLAIN)
    wide = Stream(store.objects, "wide", expert_field(MoEShape(3, 500, 4, moe_layers=(0, 2))))
    rows = RNG.integers(0, 200, (4, 3, 4)).astype(np.uint16)
    more = RNG.integers(200, 500, (3, 3, 4)).astype(np.uint16)
    more[:, 1] = 0
    extents = (narrow.append("routed_experts", rows), wide.append("routed_experts", more[:, [0, 2]], 4))
    ref = step_ref(8, extents={"routed_experts": extents})
    (sample,) = Reader([HotTier(store)]).read([ref], fields=["routed_experts"], dtype="stored")
    same(sample["routed_experts"], np.concatenate([rows, more]))


def test_streams_that_no_array_can_hold_together():
    store = Memory()
    one = Stream(store.objects, "one", FieldSpec(name="x", dtype="int64", align="token"))
    two = Stream(store.objects, "two", FieldSpec(name="x", dtype="uint64", align="token"))
    three = Stream(store.objects, "three", FieldSpec(name="x", dtype="int64", align="token", shape=(2,)))
    first = one.append("x", [1, 2])
    for other in (two.append("x", [3], 2), three.append("x", [[3, 4]], 2)):
        with pytest.raises(InputError, match="field x"):
            Reader([HotTier(store)]).read([step_ref(3, extents={"x": (first, other)})])


def test_damaged_references_are_named(world):
    beyond = Extent("one", 60, 10, 0, 0)
    with pytest.raises(IntegrityError, match="would cross"):
        world.reader.read([step_ref(10, extents={"token_ids": (beyond,)})])
    with pytest.raises(IntegrityError, match="schema has only"):
        world.reader.read([step_ref(10, extents={"nonsense": (Extent("one", 0, 10, 0, 0),)})])


# -- checksums -------------------------------------------------------------------------------------------------------


def spoil(world, field="routed_experts", number=0):
    key = f"streams/one/{shard_key(field, 1 + len(world.stream.specs[field].shape), 0)}"
    extent = world.ref.extents[field][number]
    world.store.objects[key][(extent.row + 1) * world.stream.specs[field].row_bytes] ^= 1
    return key, extent


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("routed_experts", 0),
        ("routed_experts", 1),
        ("token_ids", 1),
        ("loss_mask", 0),
        ("logprobs", 1),
        ("top_p.offsets", 1),
    ],
)
def test_altered_bytes_are_found_and_named(world, field, number):
    key, extent = spoil(world, field, number)
    name = field.partition(".")[0]
    with pytest.raises(IntegrityError, match=f"of {name} in stream one") as caught:
        world.read()
    details = caught.value.details
    assert details["rows"] == [extent.row, extent.row + extent.n]
    assert details["file"] == f"/memory/{key}"
    assert details["expected"] == extent.crc != details["got"]


def test_partial_reads_are_checked_on_demand(world):
    spoil(world)
    tail = {"fields": ["routed_experts"], "tokens": [slice(4, 9)]}
    same(world.read(**tail)["routed_experts"], world.expected["routed_experts"][4:9])
    with pytest.raises(IntegrityError):
        world.read(**tail, verify="always")
    assert world.store.calls[-1][2] == 19 * EXPERTS.arrays[0].row_bytes
    ref = segment_ref(10, extents={"routed_experts": (world.ref.extents["routed_experts"][0].cut(4, 13).at(0),)})
    world.reader.read([ref])
    with pytest.raises(IntegrityError):
        world.reader.read([ref], verify="always")
    altered = world.read(fields=["routed_experts"], verify="never")["routed_experts"]
    assert (altered != world.expected["routed_experts"]).sum() == 1


def test_an_extent_read_in_many_parts_is_checked_as_one():
    store = Memory()
    spec = FieldSpec(name="big", dtype="uint16", align="token", shape=(1024,), train_dtype="int32")
    stream = Stream(store.objects, "one", spec, shard_rows=1 << 14)
    rows = RNG.integers(0, 1 << 16, (12_000, 1024), np.uint16)
    ref = step_ref(12_000, extents={"big": (stream.append("big", rows),)})
    for threads in (1, 3):
        for dtype in ("train", "stored"):
            store.calls.clear()
            (sample,) = Reader([HotTier(store)], threads=threads).read([ref], fields=["big"], dtype=dtype)
            assert len(store.calls) == 3
            assert max(call[2] for call in store.calls) == 8 << 20
            assert np.array_equal(sample["big"], rows)
    store.objects["streams/one/big/c/0/0"][-1] ^= 4
    for threads in (1, 3):
        with pytest.raises(IntegrityError, match=r"rows \[0, 12000\) of big"):
            Reader([HotTier(store)], threads=threads).read([ref], fields=["big"])


# -- threads and forks -----------------------------------------------------------------------------------------------


def test_workers_share_items_and_stop_at_the_first_error():
    workers, seen = Workers(4), []

    def work(item):
        time.sleep(0.001)
        if item == 20:
            raise KeyError(item)
        seen.append((item, threading.get_ident()))

    workers.each(work, range(20))
    assert sorted(item for item, _ in seen) == list(range(20))
    assert len({thread for _, thread in seen}) > 1
    seen.clear()
    with pytest.raises(KeyError):
        workers.each(work, range(20, 400))
    assert len(seen) < 300
    seen.clear()
    workers.close()
    workers.each(work, range(5))
    workers.close()


def test_only_a_large_read_of_several_ranges_is_shared_with_threads(monkeypatch):
    store, seen = Memory(), set()
    spec = FieldSpec(name="big", dtype="uint8", align="token", shape=(1024,))
    stream = Stream(store.objects, "one", spec, shard_rows=1 << 14)
    rows = RNG.integers(0, 256, (12_000, 1024), np.uint8)
    ref = step_ref(12_000, extents={"big": (stream.append("big", rows),)})
    read_into = store.read_into

    def look(key, offset, buffers):
        seen.add(threading.get_ident())
        time.sleep(0.01)
        read_into(key, offset, buffers)

    monkeypatch.setattr(store, "read_into", look)
    reader = Reader([HotTier(store)], threads=4)
    slices = [slice(start, start + 300) for start in range(0, 12_000, 1000)]
    (sample,) = reader.read([ref], tokens=[slices], fields=["big"])
    assert np.array_equal(sample["big"], np.concatenate([rows[part] for part in slices]))
    assert seen == {threading.get_ident()}
    reader.read([ref], fields=["big"])
    assert len(seen) > 1
    reader.close()


def in_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"


def test_a_forked_child_has_threads_of_its_own():
    workers = Workers(4)
    workers.each(lambda _: time.sleep(0.001), range(20))

    def child():
        seen = set()
        workers.each(lambda _: (time.sleep(0.001), seen.add(threading.get_ident())), range(40))
        assert len(seen) > 1

    assert in_child(child) == 0
    workers.close()


# -- the hot tier ----------------------------------------------------------------------------------------------------


def write(root, objects, tails=()):
    """Write objects as files; those in ``tails`` as whole blocks and a tail."""
    for key, data in objects.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        head = len(data) // 4096 * 4096 if key in tails else len(data)
        if head or key not in tails:
            path.write_bytes(data[:head])
        if key in tails:
            array, pack = key.split("/c/")
            (root / array / f"tail-{pack.partition('/')[0]}-{head}").write_bytes(data[head:])


def big_world(root, *, tails):
    objects = {}
    stream = Stream(objects, "one", PLAIN, TOKEN_IDS, TOP_P, shard_rows=1 << 20)
    stream.append("routed_experts", np.zeros((11, 3, 4)))
    rows = RNG.integers(0, 200, (900_000, 3, 4)).astype(np.uint8)
    ids = RNG.integers(0, 1 << 20, 900_001, np.int32)
    kept = [[7, 8], [], [9]]
    ends, values = stream.append_ragged("top_p", kept, 900_001 - 3)
    extents = {
        "routed_experts": (stream.append("routed_experts", rows),),
        "token_ids": (stream.append("token_ids", ids),),
        "top_p.offsets": (ends,),
        "top_p.values": (values,),
    }
    shards = [key for key in objects if "/c/" in key]
    write(root, objects, shards if tails else ())
    n_tokens = 900_001
    return (
        step_ref(n_tokens, response_start=n_tokens - 3, spans=(Span(0, n_tokens - 3, n_tokens),), extents=extents),
        rows,
        ids,
    )


@pytest.mark.parametrize("tails", [True, False], ids=["unsealed", "sealed"])
def test_the_hot_tier(tmp_path, tails):
    ref, rows, ids = big_world(tmp_path, tails=tails)
    reader = Reader([HotTier(HotStore(str(tmp_path)))], threads=3)
    (whole,) = reader.read([ref])
    assert np.array_equal(whole["routed_experts"], rows)
    assert np.array_equal(whole["token_ids"], ids)
    assert lists(whole["top_p"]) == [[7, 8], [], [9]]
    (narrow,) = reader.read([ref], fields=["routed_experts", "token_ids"], dtype="stored")
    same(narrow["routed_experts"], rows)
    for tokens in (slice(13, 23), slice(500_000, 500_300), slice(-40, None), slice(1, 800_000)):
        (part,) = reader.read([ref], fields=["routed_experts", "token_ids"], tokens=[tokens])
        same(part["routed_experts"], rows[tokens if tokens.stop else slice(-39, None)].astype(np.int32))
        same(part["token_ids"], ids[tokens])

    def child():
        (again,) = reader.read([ref])
        assert np.array_equal(again["routed_experts"], rows)

    assert in_child(child) == 0
    reader.close()


@pytest.mark.parametrize("tails", [True, False], ids=["unsealed", "sealed"])
def test_located_bytes_are_the_rows(tmp_path, tails):
    ref, rows, ids = big_world(tmp_path, tails=tails)
    reader = Reader([HotTier(HotStore(str(tmp_path)))])

    def dd(part):
        with open(part.file, "rb") as file:
            file.seek(part.offset)
            data = file.read(part.length)
        assert len(data) == part.length
        return data

    for tokens in (None, slice(77, 99), slice(-3, None), slice(899_000, None)):
        picked = slice(None) if tokens is None else tokens
        found = reader.locate(ref, fields=["routed_experts"], tokens=tokens)
        expected = rows[: len(ids) - 1][picked if tokens is None or tokens.start >= 0 else slice(-2, None)]
        assert b"".join(map(dd, found)) == expected.tobytes()
        assert (found[0].field, found[0].stream) == ("routed_experts", "one")
        first = range(900_001)[picked].start
        assert (found[0].rows[0], found[-1].rows[1]) == (first + 11, first + 11 + len(expected))
    assert len(reader.locate(ref, fields=["routed_experts"])) == (2 if tails else 1)
    everything = reader.locate(ref)
    assert {part.field for part in everything} == {"routed_experts", "token_ids", "top_p"}
    kept = [part for part in everything if part.field == "top_p"]
    assert [dd(part) for part in kept] == [np.array([2, 2, 3], "<u8").tobytes(), np.array([7, 8, 9], "<i4").tobytes()]
    with pytest.raises(NotFoundError):
        reader.locate(ref, fields=["nonsense"])
    assert reader.locate(ref, fields=["routed_experts"], tokens=slice(5, 5)) == []


def test_bytes_that_are_not_there(tmp_path):
    ref, _, _ = big_world(tmp_path, tails=True)
    for path in (tmp_path / "streams/one/token_ids").glob("tail-*"):
        path.unlink()
    reader = Reader([HotTier(HotStore(str(tmp_path)))])
    for call in (lambda: reader.read([ref], fields=["token_ids"]), lambda: reader.locate(ref, fields=["token_ids"])):
        with pytest.raises(IntegrityError, match="token_ids"):
            call()


def test_a_tail_is_taken_for_what_it_holds(tmp_path):
    folder = tmp_path / "streams/one/x"
    (folder / "c").mkdir(parents=True)
    (folder / "c/2").write_bytes(bytes(4096))
    (folder / "tail-1-0").write_bytes(bytes(20_000))
    (folder / "tail-2-8192").write_bytes(bytes(20_000))
    (folder / "tail-2-0").write_bytes(bytes(4096))
    store = HotStore(str(tmp_path))
    with pytest.raises(IntegrityError, match="do not hold"):
        files(store, "streams/one/x/c/2", 4000, 196)
    (folder / "tail-2-4096").write_bytes(bytes(200))
    shard, tail = files(store, "streams/one/x/c/2", 4000, 196)
    assert shard == (str(folder / "c/2"), 4000, 96)
    assert tail == (str(folder / "tail-2-4096"), 0, 100)
    assert files(store, "streams/one/x/c/2", 4150, 60) == [(str(folder / "tail-2-4096"), 54, 60)]


class Free:
    """A hot tier without a limit."""

    def reserve(self, stream, n_bytes):
        return True

    def settle(self, stream, n_bytes):
        pass


def rows_from(array):
    def fill(dst, first):
        dst[...] = array[first : first + len(dst)]

    return Rows(len(array), fill)


def test_references_are_good_while_their_stream_is_written_and_after(tmp_path):
    writer = create_stream(str(tmp_path), Schema.of(PLAIN, TOKEN_IDS), space=Free())
    event = encode_event(Checkpointed("any", 1.0))
    reader = Reader([HotTier(HotStore(str(tmp_path)))], threads=3)
    refs, expected, done = [], [], threading.Event()

    def append_all():
        rng = np.random.default_rng(5)
        try:
            for number in range(120):
                n = int(rng.integers(2, 9000))
                ids = rng.integers(0, 1 << 20, n, np.int32)
                rows = rng.integers(0, 200, (n - 1, 3, 4)).astype(np.uint8)
                runs = writer.append({"routed_experts": rows_from(rows), "token_ids": rows_from(ids)}, lambda _: event)
                extents = {
                    name: tuple(Extent(writer.name, run.row, run.n, 0, run.crc) for run in found)
                    for name, found in runs.items()
                }
                expected.append((ids, rows))
                refs.append(step_ref(n, extents=extents))
                if number == 70:
                    writer.flush()
        finally:
            done.set()

    def check(picked):
        for number, sample in zip(picked, reader.read([refs[i] for i in picked], verify="always"), strict=True):
            np.testing.assert_array_equal(sample["token_ids"], expected[number][0])
            np.testing.assert_array_equal(sample["routed_experts"], expected[number][1])

    thread = threading.Thread(target=append_all)
    thread.start()
    rng, n_reads = np.random.default_rng(6), 0
    while not done.is_set():
        if refs:
            check([*rng.integers(0, len(refs), 8).tolist(), len(refs) - 1])
            n_reads += 1
    thread.join()
    assert len(refs) == 120
    assert n_reads
    check(range(120))
    writer.close()
    check(range(120))
    assert not [part for part in reader.locate(refs[-1]) if "tail-" in part.file]
    reader.close()
