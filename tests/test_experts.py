"""Routing rows: placed by their count, checked, narrowed, widened, linted."""

from __future__ import annotations

import json
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spool.errors import InputError, PayloadError
from spool.formats.experts import Chunk, lint, pieces, store, stored_layers, widen
from spool.model.fields import FieldSpec, expert_field, numpy_dtype
from spool.model.moe import MoEShape, models

QWEN = MoEShape(num_layers=40, num_experts=256, topk=8)
DENSE = MoEShape(num_layers=6, num_experts=300, topk=2, moe_layers=(2, 3, 4, 5))
EVERY = MoEShape(num_layers=6, num_experts=128, topk=1, moe_layers=(1, 3, 5))
ODD = MoEShape(num_layers=9, num_experts=64, topk=4, moe_layers=(1, 2, 5, 6, 8))
SHAPES = [QWEN, DENSE, EVERY, ODD]


def routing(n, shape, *, seed=0, dtype=np.int32):
    """Return ``[n, num_layers, topk]`` as an engine sends it: distinct experts in a row, dense layers 0."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, shape.num_experts, (n, shape.num_layers, 1))
    rows = (base + np.arange(shape.topk) * (1 + rng.integers(0, 3))) % shape.num_experts
    if shape.moe_layers is not None:
        rows[:, sorted(set(range(shape.num_layers)) - set(shape.moe_layers))] = 0
    return rows.astype(dtype)


def take(payload, spec, *, n_rows, start=0):
    return pieces(payload, spec, n_rows=n_rows, start=start, what="step 3")


def kept(found, spec):
    """Store the pieces; return {position: stored rows}."""
    out = {}
    for piece in found:
        dst = np.full((len(piece.rows), *spec.shape), 99).astype(numpy_dtype(spec.dtype))
        store(dst, piece.rows, spec)
        out[piece.position] = dst
    return out


def stored_of(rows, shape):
    return rows if shape.moe_layers is None else rows[:, list(shape.moe_layers)]


# --- placing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("r", "start", "position", "k"),
    [
        (4, 0, 0, 4),
        (5, 0, 0, 4),
        (2, 2, 2, 2),
        (4, 2, 0, 4),
        (3, 2, 2, 2),
        (5, 2, 0, 4),
        (3, 1, 1, 3),
        (4, 1, 0, 4),
        (0, 4, None, 0),
        (1, 4, None, 0),
        (0, 5, None, 0),
    ],
)
def test_the_row_count_decides_where_rows_stand(r, start, position, k):
    spec, rows = expert_field(DENSE), routing(r, DENSE)
    found = take(rows, spec, n_rows=5, start=start)
    assert [(piece.position, len(piece.rows)) for piece in found] == ([(position, k)] if k else [])
    for piece in found:
        assert np.shares_memory(piece.rows, rows)
        assert np.array_equal(piece.rows, rows[:k])


@pytest.mark.parametrize(
    ("r", "start", "expected"),
    [(3, 0, [4, 5]), (0, 0, [4, 5]), (6, 0, [4, 5]), (1, 1, [3, 4, 5]), (2, -1, []), (2, 9, [4, 5])],
)
def test_another_row_count_is_refused(r, start, expected):
    with pytest.raises(PayloadError, match=rf"routed_experts of step 3: got {r} rows for 5 tokens") as caught:
        take(routing(r, QWEN), expert_field(QWEN), n_rows=5, start=start)
    details = caught.value.details
    assert (details["got"], details["expected"], details["step"], details["field"]) == (
        r,
        expected,
        "step 3",
        "routed_experts",
    )


@pytest.mark.parametrize(("n_rows", "r"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("form", [lambda r: routing(r, QWEN), lambda r: routing(r, QWEN).tolist()])
def test_steps_without_a_forward(n_rows, r, form):
    assert take(form(r), expert_field(QWEN), n_rows=n_rows) == ()


def test_the_dropped_row_is_not_looked_at():
    rows = routing(5, QWEN)
    rows[4] = 999
    (piece,) = take(rows, expert_field(QWEN), n_rows=5)
    assert np.array_equal(kept([piece], expert_field(QWEN))[0], rows[:4])


def test_none_is_not_rows():
    with pytest.raises(PayloadError, match="routed_experts of step 3: None is not a number"):
        take(None, expert_field(QWEN), n_rows=5)


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_chunks_stand_where_they_say_in_the_order_given():
    spec, rows = expert_field(QWEN), routing(10, QWEN)
    chunks = [Chunk(rows[4:10], 4, "b"), Chunk(torch.from_numpy(rows[:5]), 0, "a")]
    found = take(chunks, spec, n_rows=10)
    assert [(p.position, len(p.rows)) for p in found] == [(4, 5), (0, 5)]
    stored = kept(found, spec)
    assert np.array_equal(stored[4], rows[4:9])
    assert np.array_equal(stored[0], rows[:5])
    (alone,) = take(chunks[0], spec, n_rows=10)
    assert alone.position == 4


def test_chunks_may_be_empty_and_hold_gaps():
    spec, rows = expert_field(QWEN), routing(6, QWEN)
    rows[2] = -1
    found = take((Chunk([], 3), Chunk(rows, 1), Chunk(rows[:0], 9)), spec, n_rows=9)
    assert [(p.position, len(p.rows)) for p in found] == [(1, 2), (4, 3)]


@pytest.mark.parametrize(("start", "r"), [(-1, 2), (0, 6), (4, 2), (6, 0), (5, 1)])
def test_chunks_beyond_the_step_are_refused(start, r):
    with pytest.raises(PayloadError, match=r"a chunk of rows .* of 5 tokens"):
        take([Chunk(routing(r, QWEN), start)], expert_field(QWEN), n_rows=5)


def test_chunks_and_arrays_do_not_mix():
    with pytest.raises(PayloadError, match="mixed"):
        take([Chunk(routing(2, QWEN), 0), routing(2, QWEN)], expert_field(QWEN), n_rows=5)


# --- forms ------------------------------------------------------------------------------------------------------------

FORMS = {
    "reversed": lambda a: a[::-1].copy()[::-1],
    "strided": lambda a: np.repeat(a, 2, axis=2)[:, :, ::2],
    "fortran": np.asfortranarray,
    "big-endian": lambda a: a.astype(">i4"),
    "int16": lambda a: a.astype(np.int16),
    "big-endian int16": lambda a: a.astype(">i2"),
    "uint16": lambda a: a.astype(np.uint16),
    "int64": lambda a: a.astype(np.int64),
    "uint64": lambda a: a.astype(np.uint64),
    "torch": torch.from_numpy,
    "torch transposed": lambda a: torch.from_numpy(np.ascontiguousarray(a.transpose(2, 1, 0))).permute(2, 1, 0),
    "lists": lambda a: a.tolist(),
    "list of arrays": list,
}


@pytest.mark.parametrize("shape", SHAPES, ids=range(4))
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_stored_by_value(form, shape):
    spec, rows = expert_field(shape), routing(50, shape)
    (stored,) = kept(take(FORMS[form](rows), spec, n_rows=51), spec).values()
    assert stored.dtype == numpy_dtype(spec.dtype)
    assert np.array_equal(stored, stored_of(rows, shape))


@pytest.mark.parametrize("shape", [DENSE, EVERY, ODD], ids=range(3))
def test_payloads_may_hold_the_moe_layers_only(shape):
    spec, rows = expert_field(shape), routing(20, shape, dtype=np.int16)
    found = take(stored_of(rows, shape).tolist(), spec, n_rows=21)
    assert np.array_equal(kept(found, spec)[0], stored_of(rows, shape))


@pytest.mark.parametrize("inner", [(48, 8), (40, 4), (40,), (40, 8, 1), (320,), (39, 8)], ids=str)
def test_other_shapes_are_refused(inner):
    with pytest.raises(
        PayloadError, match=r"routed_experts of step 3: expected shape \(rows, 40, 8\), got \(4, "
    ) as caught:
        take(np.ones((4, *inner), np.int32), expert_field(QWEN), n_rows=5)
    assert (caught.value.details["expected"], caught.value.details["got"]) == ([[40, 8]], [4, *inner])


def test_shapes_with_dense_layers_name_both_that_fit():
    with pytest.raises(PayloadError, match=r"expected shape \(rows, 6, 2\) or \(rows, 4, 2\), got \(4, 5, 2\)"):
        take(np.ones((4, 5, 2), np.int32), expert_field(DENSE), n_rows=5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, bool, ml_dtypes.bfloat16])
def test_ids_must_be_integers(dtype):
    with pytest.raises(PayloadError, match="routed_experts of step 3: expert ids must be integers"):
        take(np.ones((4, 40, 8), dtype), expert_field(QWEN), n_rows=5)


# --- range ------------------------------------------------------------------------------------------------------------


def test_width_follows_the_declared_number_of_experts():
    shape = MoEShape(num_layers=1, num_experts=512, topk=4)
    spec = expert_field(shape)
    assert spec.dtype == "uint16"
    for ids in ([0, 255, 256, 511], [0, 1, 254, 255]):
        stored = kept(take(np.array(ids).reshape(1, 1, 4), spec, n_rows=2), spec)[0]
        assert (stored.dtype, stored.ravel().tolist()) == (np.dtype("<u2"), ids)
    with pytest.raises(PayloadError, match=r"expert id 512 at token 0, layer 0 is outside \[0, 512\)"):
        take(np.array([0, 1, 2, 512]).reshape(1, 1, 4), spec, n_rows=2)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, ">i4", np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("value", [256, 300, -2, -1, 32767])
def test_ids_out_of_range_are_named(value, dtype):
    if value < 0 and np.dtype(dtype).kind == "u":
        value = np.iinfo(dtype).max
    rows = routing(30, QWEN, dtype=dtype)
    rows[12, 5, 3] = value
    with pytest.raises(PayloadError) as caught:
        take(rows, expert_field(QWEN), n_rows=36, start=5)
    assert str(caught.value).startswith(
        f"routed_experts of step 3: expert id {value} at token 17, layer 5 is outside [0, 256)"
    )
    assert caught.value.details == {
        "field": "routed_experts",
        "step": "step 3",
        "token": 17,
        "layer": 5,
        "value": value,
        "bound": 256,
    }
    json.dumps(caught.value.details)


def test_ids_that_would_wrap_into_range_are_refused():
    for value, dtype in ((2**32 + 7, np.int64), (2**16 + 7, np.int32), (-256, np.int16), (2**31, np.uint32)):
        rows = routing(4, QWEN, dtype=dtype)
        rows[1, 2, 0] = value
        with pytest.raises(PayloadError, match=rf"expert id {value} at token 1, layer 2 "):
            take(rows, expert_field(QWEN), n_rows=5)


def test_ids_of_a_byte_are_checked_where_the_model_has_fewer_experts():
    small = MoEShape(num_layers=4, num_experts=128, topk=4)
    rows = routing(9, small, dtype=np.uint8)
    assert np.array_equal(kept(take(rows, expert_field(small), n_rows=10), expert_field(small))[0], rows)
    rows[8, 3, 3] = 128
    with pytest.raises(PayloadError, match="expert id 128 at token 8, layer 3"):
        take(rows, expert_field(small), n_rows=10)


def test_layers_in_errors_are_absolute():
    rows = stored_of(routing(9, ODD), ODD).copy()
    rows[4, 3, 1] = 64
    with pytest.raises(PayloadError, match="expert id 64 at token 4, layer 6 "):
        take(rows, expert_field(ODD), n_rows=10)


@pytest.mark.parametrize("shape", [DENSE, EVERY, ODD], ids=range(3))
def test_dense_layers_must_be_zero(shape):
    rows = routing(9, shape)
    dense = max(set(range(shape.num_layers)) - set(shape.moe_layers))
    rows[7, dense, 0] = 3
    with pytest.raises(PayloadError, match=rf"3 at token 7, layer {dense}, which the spec does not list") as caught:
        take(rows, expert_field(shape), n_rows=10)
    assert (caught.value.details["layer"], caught.value.details["token"]) == (dense, 7)


# --- gaps -------------------------------------------------------------------------------------------------------------


def runs_of(present, offset=0):
    runs, first = [], None
    for i, here in enumerate([*present, False]):
        if here and first is None:
            first = i
        elif not here and first is not None:
            runs.append((first + offset, i - first))
            first = None
    return runs


@given(
    present=st.lists(st.booleans(), min_size=1, max_size=40),
    signed=st.booleans(),
    shape=st.sampled_from([DENSE, ODD]),
    dense=st.sampled_from([0, -1]),
    only_moe=st.booleans(),
)
def test_whole_rows_of_minus_one_are_gaps(present, signed, shape, dense, only_moe):
    spec, rows = expert_field(shape, signed=signed), routing(len(present), shape)
    gap = np.full((shape.num_layers, shape.topk), dense)
    gap[list(shape.moe_layers)] = -1
    rows[~np.array(present)] = gap
    sent = stored_of(rows, shape) if only_moe else rows
    found = take(sent, spec, n_rows=len(rows) + 3, start=2)
    assert [(p.position, len(p.rows)) for p in found] == runs_of(present, 2)
    for position, stored in kept(found, spec).items():
        assert np.array_equal(stored, stored_of(rows, shape)[position - 2 : position - 2 + len(stored)])


def test_gaps_are_found_over_many_blocks():
    rows = routing(4096, QWEN)
    rows[1000:3000] = -1
    found = take(rows, expert_field(QWEN), n_rows=4097)
    assert [(p.position, len(p.rows)) for p in found] == [(0, 1000), (3000, 1096)]
    rows[:] = -1
    assert take(rows, expert_field(QWEN), n_rows=4097) == ()


@pytest.mark.parametrize("where", [(3, 5, 2), (3, 0, 0), (3, 0)])
def test_minus_one_inside_a_row_needs_a_mark(where):
    rows = routing(9, QWEN)
    rows[where] = -1
    rows[6] = -1
    with pytest.raises(PayloadError, match=r"expert id -1 at token 3, layer \d is outside .*missing=-1"):
        take(rows, expert_field(QWEN), n_rows=10)
    spec = expert_field(QWEN, signed=True)
    stored = kept(take(rows, spec, n_rows=10), spec)
    assert sorted(stored) == [0, 7]
    assert np.array_equal(stored[0], rows[:6])
    assert stored[0].dtype == np.dtype("<i2")


def test_other_negatives_are_refused_in_signed_fields_too():
    rows = routing(9, QWEN)
    rows[2, 1, 1], rows[3, 4, 5] = -1, -2
    with pytest.raises(PayloadError, match="expert id -2 at token 3, layer 4 "):
        take(rows, expert_field(QWEN, signed=True), n_rows=10)


# --- layers of nothing but zeros --------------------------------------------------------------------------------------


def test_moe_layers_that_are_zero_throughout_are_refused():
    rows = routing(100, QWEN)
    rows[:, 20:] = 0
    rows[:, 7] = 0
    with pytest.raises(PayloadError, match=r"layers 7, 20-39 are 0 in all of 100 rows.*pipeline stage") as caught:
        take(rows, expert_field(QWEN), n_rows=101)
    assert caught.value.details["layers"] == [7, *range(20, 40)]


@pytest.mark.parametrize("only_moe", [False, True])
def test_zero_layers_are_named_by_their_absolute_number(only_moe):
    rows = routing(100, ODD)
    rows[:, 5] = 0
    rows[40:60] = -1
    with pytest.raises(PayloadError, match=r"layers 5 are 0 in all of 80 rows"):
        take(stored_of(rows, ODD) if only_moe else rows, expert_field(ODD), n_rows=101)


def test_two_rows_are_enough_to_tell():
    with pytest.raises(PayloadError, match="layers 0-39 are 0 in all of 2 rows"):
        take(np.zeros((2, 40, 8), np.int32), expert_field(QWEN), n_rows=3)


def test_zero_rows_that_are_not_all_are_let_through():
    rows = routing(100, QWEN)
    rows[:98] = 0
    rows[98, 0] = 0
    rows[99] = 0
    rows[50, 0, 3] = 1
    assert len(take(rows, expert_field(QWEN), n_rows=101)) == 1
    rows[98, 1] = 0
    rows[3, 1, 2] = 4
    rows[20:40] = -1
    assert len(take(rows, expert_field(QWEN), n_rows=101)) == 2
    one = np.zeros((1, 40, 8), np.int32)
    assert len(take(one, expert_field(QWEN), n_rows=2)) == 1


def test_top_1_may_choose_expert_0_always():
    assert len(take(np.zeros((50, 6, 1), np.int32), expert_field(EVERY), n_rows=51)) == 1


# --- other fields of the forward --------------------------------------------------------------------------------------


def test_other_forward_fields_follow_the_same_rules():
    chosen = FieldSpec(name="indexer", dtype="int32", align="forward", shape=(3,), bound=1000, missing=-1)
    rows = np.arange(15).reshape(5, 3)
    rows[1, 2], rows[3] = -1, -1
    stored = kept(take(rows, chosen, n_rows=6), chosen)
    assert {position: part.tolist() for position, part in stored.items()} == {
        0: [[0, 1, 2], [3, 4, -1], [6, 7, 8]],
        4: [[12, 13, 14]],
    }
    values = FieldSpec(name="margin", dtype="int16", align="forward")
    (piece,) = take(np.array([-1, 5, -1]), values, n_rows=4)
    assert piece.rows.tolist() == [-1, 5, -1]
    flags = FieldSpec(name="flag", dtype="uint8", align="forward")
    assert [(p.position, p.rows.tolist()) for p in take(np.array([1, -1, 2]), flags, n_rows=4)] == [(0, [1]), (2, [2])]
    entropy = FieldSpec(name="entropy", dtype="float32", align="forward")
    (piece,) = take([0.1, -1.0, float("nan")], entropy, n_rows=4)
    assert kept([piece], entropy)[0][:2].tolist() == [np.float32(0.1), -1]


def test_other_layered_fields_keep_zeros_and_layers():
    spec = FieldSpec(
        name="load", dtype="float16", align="forward", shape=(2, 3), num_layers=4, layers=(1, 3), train_dtype="float32"
    )
    rows = np.zeros((5, 4, 3), np.float32)
    rows[:, 3] = 0.5
    stored = kept(take(rows, spec, n_rows=6), spec)[0]
    assert stored[:, 1].tolist() == [[0.5] * 3] * 5
    out = np.empty((5, 4, 3), np.float32)
    widen(out, stored, spec, None)
    assert np.array_equal(out, rows)
    rows[2, 0, 0] = 0.25
    with pytest.raises(PayloadError, match=r"load of step 3: 0\.25 at token 2, layer 0"):
        take(rows, spec, n_rows=6)


# --- widen ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=range(4))
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int16, ">i4"])
def test_widen_gives_absolute_layers_back(shape, dtype):
    spec, rows = expert_field(shape), routing(33, shape)
    stored = kept(take(rows, spec, n_rows=34), spec)[0]
    n = shape.num_layers
    for start, stop in ((0, n), (0, 1), (n - 1, n), (1, n - 1), (2, 2), (3, 5)):
        for given_ in (stored, stored[:, stored_layers(spec, slice(start, stop))]):
            out = np.full((33, stop - start, shape.topk), 77).astype(dtype)
            widen(out, given_, spec, slice(start, stop))
            assert np.array_equal(out, rows[:, start:stop])
    out = np.full(rows.shape, 77).astype(dtype)
    widen(out, stored, spec)
    assert np.array_equal(out, rows)


def test_widen_into_strided_memory():
    spec, rows = expert_field(DENSE), routing(8, DENSE)
    stored = kept(take(rows, spec, n_rows=9), spec)[0]
    wide = np.full((8, 12, 4), 7, np.int32)
    widen(wide[:, ::2, 1:3], stored, spec, None)
    assert np.array_equal(wide[:, ::2, 1:3], rows)
    assert (wide[:, 1::2] == 7).all()


def test_widen_refuses_what_does_not_hold_the_values():
    spec, stored = expert_field(QWEN), np.ones((2, 40, 8), np.uint8)
    widen(np.empty((2, 40, 8), np.uint8), stored, spec)
    with pytest.raises(InputError, match="int8 does not hold"):
        widen(np.empty((2, 40, 8), np.int8), stored, spec)
    with pytest.raises(InputError, match="uint8 does not hold"):
        widen(np.empty((2, 40, 8), np.uint8), stored.astype(np.int16), expert_field(QWEN, signed=True))
    with pytest.raises(InputError, match="uint8 does not hold"):
        widen(np.empty((2, 6, 2), np.uint8), np.ones((2, 4, 2), np.uint16), expert_field(DENSE))
    with pytest.raises(InputError, match="out has 39 layers"):
        widen(np.empty((2, 39, 8), np.int32), stored, spec)
    with pytest.raises(InputError, match="stored layers are not those"):
        widen(np.empty((2, 5, 8), np.int32), stored[:, :1], spec, slice(0, 5))
    for layers in (slice(0, 41), slice(5, 3), slice(-2, 3), slice(0, 8, 2)):
        with pytest.raises(InputError, match="no range of its layers"):
            widen(np.empty((2, 3, 8), np.int32), stored, spec, layers)
    with pytest.raises(InputError, match="no layers to choose from"):
        stored_layers(FieldSpec(name="x", dtype="int32", align="forward"), slice(0, 1))


@given(
    shape=st.builds(
        lambda n, moe, topk: MoEShape(n, 300, topk, tuple(sorted({layer % n for layer in moe})) or None),
        st.integers(1, 9),
        st.sets(st.integers(0, 8)),
        st.integers(1, 3),
    ),
    n=st.integers(1, 5),
    cut=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_any_set_of_layers_round_trips(shape, n, cut):
    spec, rows = expert_field(shape), routing(n, shape) + 0
    moe = range(shape.num_layers) if shape.moe_layers is None else shape.moe_layers
    rows[:, list(moe)] = np.maximum(rows[:, list(moe)], 1)
    stored = kept(take(rows, spec, n_rows=n + 1), spec)[0]
    start, stop = sorted(min(at, shape.num_layers) for at in cut)
    out = np.full((n, stop - start, shape.topk), 77, np.int64)
    widen(out, stored, spec, slice(start, stop))
    assert np.array_equal(out, rows[:, start:stop])


# --- lint -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=range(4))
def test_good_routing_has_no_findings(shape):
    rows = routing(500, shape)
    assert lint(stored_of(rows, shape), expert_field(shape)) == []
    assert lint(rows, expert_field(shape)) == []
    assert lint(rows[:0], expert_field(shape)) == []


def test_lint_finds_each_fault_and_where():
    spec, rows = expert_field(ODD), stored_of(routing(60_000, ODD), ODD).astype(np.uint8)
    rows[:, 0] = 0
    rows[:, 3] = [9, 8, 7, 6]
    rows[59_000, 4] = [5, 1, 2, 5]
    rows[1700, 2, 3] = rows[1700, 2, 0]
    rows[1701, 2, 3] = rows[1701, 2, 0]
    zero, repeated, constant = lint(rows, spec, position=10)
    assert (zero.kind, zero.layers, zero.count) == ("zero_layers", (1,), 60_000)
    assert (repeated.kind, repeated.layers, repeated.count) == ("repeated_expert", (5, 8), 3)
    assert (repeated.token, repeated.layer) == (1710, 5)
    assert f"expert {rows[1700, 2, 0]} at token 1710, layer 5" in repeated.message
    assert (constant.kind, constant.layers, constant.count, constant.token) == ("constant_rows", (6,), 60_000, 10)


def test_lint_leaves_marks_and_few_rows_alone():
    spec = expert_field(ODD, signed=True)
    rows = stored_of(routing(50, ODD), ODD).astype(np.int8)
    rows[3, 1, :2] = -1
    assert lint(rows, spec) == []
    assert lint(np.repeat(rows[:1], 7, axis=0), spec) == []
    assert [finding.kind for finding in lint(np.repeat(rows[:1], 8, axis=0), spec)] == ["constant_rows"]
    assert [finding.kind for finding in lint(np.zeros((9, 3, 1), np.uint8), expert_field(EVERY))] == ["constant_rows"]


# --- cost -------------------------------------------------------------------------------------------------------------


def best(function, n=15):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "glm-5"])
def test_checks_cost_about_what_narrowing_costs(name):
    shape = models[name]
    spec, rows = expert_field(shape), routing(4096, shape)
    dst = np.empty((4096, *spec.shape), spec.dtype)
    source = rows if shape.moe_layers is None else rows[:, shape.moe_layers[0] : shape.moe_layers[-1] + 1]

    def ingest():
        (piece,) = take(rows, spec, n_rows=4097)
        store(dst, piece.rows, spec)

    checked, bare, check = (
        best(ingest),
        best(lambda: np.copyto(dst, source, casting="unsafe")),
        best(lambda: take(rows, spec, n_rows=4097)),
    )
    print(f"{name}: pieces {check * 1e3:.3f} ms, pieces+store {checked * 1e3:.3f} ms, copyto {bare * 1e3:.3f} ms")
    assert checked <= 6 * bare
    assert np.array_equal(dst, stored_of(rows, shape))


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        (QWEN, lambda a: a),
        (ODD, lambda a: a),
        (QWEN, lambda a: a.astype(">i4")),
        (QWEN, np.asfortranarray),
        (EVERY, lambda a: a),
    ],
)
@pytest.mark.parametrize("gaps", [False, True])
def test_no_temporary_of_the_payloads_size(shape, form, gaps):
    spec = expert_field(shape)
    n = (24 << 20) // (4 * shape.num_layers * shape.topk)
    rows = routing(n, shape)
    if gaps:
        rows[n // 3 : n // 2] = -1
        rows[5] = -1
    rows = form(rows)
    dst = np.empty((n, *spec.shape), spec.dtype)
    out = np.empty(rows.shape, np.int32)
    tracemalloc.start()
    for piece in take(rows, spec, n_rows=n + 1):
        store(dst[piece.position : piece.position + len(piece.rows)], piece.rows, spec)
    widen(out, dst, spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
