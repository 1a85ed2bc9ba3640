"""What callers hand over as arrays: values and dtypes kept, nothing wrapped, and errors that name the place."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spool.errors import PayloadError
from spool.formats.arrays import (
    PIECE,
    Ragged,
    as_array,
    as_floats,
    as_token_ids,
    bits_view,
    check_values,
    copy_rows,
    count_nonfinite,
    ragged,
    value_view,
)
from spool.model.fields import FieldSpec, numpy_dtype

BF16 = np.dtype(ml_dtypes.bfloat16)


def spec(dtype, **more):
    return FieldSpec(**{"name": "f", "dtype": dtype, "align": "token", **more})


def kept(value, field):
    """Check and store ``value`` as the writer does."""
    rows = as_array(value, what="f of step 3")
    check_values(rows, field, what="step 3", position=0)
    dst = np.full((len(rows), *field.shape), 77).astype(numpy_dtype(field.dtype))
    copy_rows(dst, rows)
    return dst


# --- as_array ---------------------------------------------------------------------------------------------------------

GRID = torch.arange(64).view(8, 8)
BASE = np.arange(24, dtype=np.int32).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [GRID[:, 3], GRID[:1, 3], GRID.t(), GRID[::2, 1::3], GRID[3, 3], GRID[:0], GRID.int(), GRID.bool()],
    ids=str,
)
def test_torch_tensors_come_through_by_value_and_dtype(tensor):
    array = as_array(tensor, what="x")
    assert array.shape == tuple(tensor.shape)
    assert array.dtype.name == str(tensor.dtype).removeprefix("torch.")
    assert array.tolist() == tensor.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.uint8, torch.uint16, torch.int16])
def test_torch_dtypes(dtype):
    tensor = torch.tensor([0, 1, 2, 200]).to(dtype)
    array = as_array(tensor, what="x")
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.tolist() == [0, 1, 2, 200]


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[:, 1], lambda t: t.t(), lambda t: t[1, 1]], ids=range(4))
def test_torch_bfloat16_stays_bfloat16(view):
    tensor = view(torch.tensor([[1.5, -2.25], [float("nan"), 3e38]], dtype=torch.bfloat16))
    array = as_array(tensor, what="x")
    assert array.dtype == BF16
    assert array.view(np.int16).tolist() == tensor.view(torch.int16).tolist()


def test_tensors_share_memory_and_may_need_grad():
    tensor = torch.ones(4, requires_grad=True)
    array = as_array(tensor, what="x")
    array[0] = 5
    assert tensor[0].item() == 5
    half = torch.ones(4, dtype=torch.bfloat16)
    assert np.shares_memory(as_array(half, what="x"), half.view(torch.int16).numpy())


def test_a_list_of_tensors_is_stacked():
    array = as_array([torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)], what="x")
    assert array.dtype == BF16
    assert array.tolist() == [[1, 1], [0, 0]]


def test_torch_is_not_imported():
    code = (
        "import sys; from spool.formats import arrays, experts; arrays.as_array([1], what='x'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "array",
    [
        BASE[::-1],
        BASE[:, ::2],
        np.asfortranarray(BASE),
        BASE.astype(">i4"),
        np.array(7, np.int16),
        BASE[:0],
        BASE.astype(bool),
        BASE.astype(BF16),
        BASE.astype(">f8")[:, ::-3],
        np.zeros((4, 0)),
        np.zeros((0, 48, 8), np.uint8),
    ],
)
def test_numpy_arrays_are_not_touched(array):
    same = as_array(array, what="x")
    assert same is array
    if array.ndim:
        stored = np.empty(array.shape, array.dtype.newbyteorder("=") if array.dtype != BF16 else BF16)
        copy_rows(stored, same)
        assert stored.tobytes() == np.ascontiguousarray(array).astype(stored.dtype).tobytes()


def test_other_array_likes():
    class Like:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3, dtype=np.uint8)

    assert as_array(Like(), what="x").tolist() == [0, 1, 2]
    assert as_array(memoryview(b"\x01\x02"), what="x").tolist() == [1, 2]
    assert as_array(range(4), what="x").tolist() == [0, 1, 2, 3]
    assert as_array(5, what="x").shape == ()
    assert as_array([], what="x").shape == (0,)


@pytest.mark.parametrize(
    ("value", "index"),
    [
        ([1, None, 2], 1),
        ([0.1, None], 1),
        ([[1, 2], [3, None]], [1, 1]),
        (np.array([1, None], object), 1),
        ([1.0] * (PIECE + 5) + [None], PIECE + 5),
        ([[0] * 8] * 9000 + [[0] * 7 + [None]], [9000, 7]),
    ],
)
def test_none_is_refused_with_its_index(value, index):
    with pytest.raises(PayloadError, match=r"logprobs of step 3: None at index .* is not a number") as caught:
        as_array(value, what="logprobs of step 3")
    assert caught.value.details["index"] == index


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        b"bytes",
        {"a": 1},
        [1, "a"],
        [[1, 2], [3]],
        [2**70],
        np.array(["a"]),
        [1j],
        object(),
        np.ma.masked_array([1, 2], [False, True]),
        np.array(["2020-01-01"], "M8[s]"),
        np.zeros(2, "i4,i4"),
        torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True),
        torch.empty(3, device="meta"),
        [[0] * 8] * 5000 + [[0] * 7],
    ],
    ids=lambda value: "object" if type(value) is object else str(value),
)
def test_what_is_no_numeric_array_is_refused(value):
    with pytest.raises(PayloadError, match="x of step 1"):
        as_array(value, what="x of step 1")


def test_null_entries_are_refused():
    assert as_array(pa.array([1, 2]), what="x").tolist() == [1, 2]
    with pytest.raises(PayloadError, match="null"):
        as_array(pa.array([1, None]), what="x")


@pytest.mark.parametrize("n", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_long_lists_equal_short_ones(n):
    values = np.random.default_rng(n).integers(0, 2**40, n)
    assert np.array_equal(as_array(values.tolist(), what="x"), values)
    mixed = [*values.tolist()[:-1], 0.5]
    assert np.array_equal(as_array(mixed, what="x"), np.asarray(mixed))
    nested = values[: n // 8 * 8].reshape(-1, 4, 2)
    assert np.array_equal(as_array(nested.tolist(), what="x"), nested)


@pytest.mark.parametrize("n", [2, PIECE + 2])
def test_integers_of_64_bits_are_never_rounded_to_floats(n):
    values = [1, *[3] * (n - 2), 2**63 + 1]
    array = as_array(values, what="x")
    assert array.dtype == np.uint64
    assert array[[0, -1]].tolist() == [1, 2**63 + 1]
    with pytest.raises(PayloadError):
        as_array([-1, *values], what="x")


# --- token ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 151_643],
        (1, 2, 151_643),
        np.array([1, 2, 151_643]),
        np.array([1, 2, 151_643], ">i4"),
        torch.tensor([1, 2, 151_643]),
        np.array([1, 2, 151_643], np.uint32),
        [np.int64(1), 2, 151_643],
        np.array([151_643, 2, 1], np.int32)[::-1],
    ],
)
def test_token_ids(value):
    ids = as_token_ids(value, what="prompt_token_ids of step 0")
    assert (ids.dtype, ids.flags.c_contiguous) == (np.dtype("<i4"), True)
    assert ids.tolist() == [1, 2, 151_643]


def test_token_ids_of_no_tokens_and_without_a_copy():
    assert as_token_ids([], what="x").shape == as_token_ids(torch.empty(0), what="x").shape == (0,)
    ids = np.arange(5, dtype=np.int32)
    assert np.shares_memory(as_token_ids(ids, what="x"), ids)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("bad", [-1, 2**31, 2**40, -(2**31)])
def test_token_ids_never_wrap(bad, long):
    before = list(range(PIECE * 2)) if long else [4, 5]
    values = [*before, bad, 6]
    inputs = [values, np.array(values), torch.tensor(values)]
    for value in inputs if not long else inputs[:1]:
        with pytest.raises(PayloadError, match=rf"token id {bad} at index {len(before)} is outside") as caught:
            as_token_ids(value, what="x")
        assert caught.value.details["value"] == bad


@pytest.mark.parametrize(
    "bad",
    [
        [1.0, 2.0],
        [1, 2.5],
        [True, False],
        np.ones(2, bool),
        torch.ones(2),
        [[1, 2]],
        5,
        ["1"],
        [1, None],
        None,
        np.array([2**64 - 1], np.uint64),
        [2**63, 1],
        [2**70],
    ],
    ids=str,
)
def test_what_are_no_token_ids_is_refused(bad):
    with pytest.raises(PayloadError, match="response_token_ids of step 2"):
        as_token_ids(bad, what="response_token_ids of step 2")


def test_a_long_list_of_token_ids_is_fast_and_lets_other_threads_run():
    values = np.random.default_rng(0).integers(0, 151_000, 1 << 18).tolist()

    def best(function):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(lambda: as_token_ids(values, what="x")) < 1.5 * best(lambda: np.asarray(values))

    long, stop, ticks, interval = values * 16, threading.Event(), [], sys.getswitchinterval()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    sys.setswitchinterval(0.0005)
    try:
        thread.start()
        start = time.perf_counter()
        assert len(as_token_ids(long, what="x")) == len(long)
        end = time.perf_counter()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert sum(start < at < end for at in ticks) >= 8


# --- floats -----------------------------------------------------------------------------------------------------------


def test_floats_are_kept_bit_for_bit_and_counted():
    bits = np.array([0x7FC12345, 0xFFC00001, 0x7F812345, 0xFF800000, 0x80000000, 0x00000001, 0xBDCCCCCD], np.uint32)
    values = bits.view(np.float32)
    for given_ in (
        values,
        values.astype(">f4"),
        np.repeat(values, 2)[::2],
        values[::-1][::-1],
        torch.from_numpy(values),
    ):
        floats = as_floats(given_, what="x")
        assert (floats.dtype, floats.flags.c_contiguous) == (np.dtype("<f4"), True)
        assert floats.view(np.uint32).tolist() == bits.tolist()
    assert count_nonfinite(values) == 4


def test_the_case_of_the_four_logprobs():
    floats = as_floats([-0.1, float("nan"), float("-inf"), -0.0], what="x")
    assert floats[0] == np.float32(-0.1)
    assert np.isnan(floats[1])
    assert np.isneginf(floats[2])
    assert np.signbit(floats[3]) and floats[3] == 0
    assert count_nonfinite(floats) == 2
    with pytest.raises(PayloadError, match="logprobs of step 1: None at index 1") as caught:
        as_floats([-0.1, None], what="logprobs of step 1")
    assert caught.value.details["index"] == 1


def test_narrower_floats_and_exact_integers_are_taken():
    assert as_floats(np.array([1.5], BF16), what="x").tolist() == [1.5]
    assert as_floats(np.array([1.5], np.float16), what="x").tolist() == [1.5]
    assert as_floats([0, -3], what="x").tolist() == [0, -3]
    assert as_floats([], what="x").dtype == np.float32
    assert as_floats(np.array([0.1]), what="x")[0] == np.float32(0.1)


@pytest.mark.parametrize("bad", [[1e300], [True], [[0.1]], 0.1, [2**24 + 1], ["a"]], ids=str)
def test_what_are_no_floats_is_refused(bad):
    with pytest.raises(PayloadError, match="logprobs of step 1"):
        as_floats(bad, what="logprobs of step 1")


def test_an_overflowing_logprob_is_named():
    with pytest.raises(PayloadError, match=r"1e\+300 at index 1 .*float32") as caught:
        as_floats([0.0, 1e300], what="x")
    assert caught.value.details == {"what": "x", "index": 1, "value": 1e300}


# --- values of a field ------------------------------------------------------------------------------------------------

EXACT = [
    ("uint8", [0, 255]),
    ("int8", [-128, 127]),
    ("uint16", [65535]),
    ("int32", [-(2**31), 2**31 - 1]),
    ("uint8", [True, False]),
    ("int64", [-(2**63), 2**63 - 1]),
    ("uint64", [2**64 - 1, 0]),
    ("bool", [0, 1]),
    ("bool", [True, False]),
    ("bool", [1.0, 0.0]),
    ("uint8", [1.0, 255.0]),
    ("float32", [2**24, -(2**24)]),
    ("float64", [2**53]),
    ("float32", [0.1, 1e-50, float("inf")]),
    ("float16", [0.1]),
    ("bfloat16", [0.1, float("nan")]),
    ("bfloat16", [256, -256]),
    ("float16", [2048]),
    ("float64", np.array([0.1], np.float32)),
    ("bfloat16", np.array([1.5], np.float32)),
    ("float32", np.array([1.1], BF16)),
    ("int32", np.array([3.0], BF16)),
    ("float16", np.array([np.inf, -0.0, 0.5], np.float32)),
    ("bfloat16", np.array([np.nan, -np.inf], np.float32)),
    ("float32", np.array([1.1], ">f4")),
]


@pytest.mark.parametrize(("dtype", "values"), EXACT)
def test_what_a_field_holds(dtype, values):
    stored = kept(values, spec(dtype))
    expected = np.array(values, dtype=numpy_dtype(dtype))
    assert stored.dtype == numpy_dtype(dtype)
    assert stored.tobytes() == expected.tobytes()


UNFIT = [
    ("uint8", [256]),
    ("uint8", [-1]),
    ("int8", [128]),
    ("int8", [-129]),
    ("int16", [2**15]),
    ("uint16", [2**16]),
    ("uint16", np.array([-1], np.int16)),
    ("int8", np.array([255], np.uint8)),
    ("int32", [2**31]),
    ("int64", [2**63]),
    ("uint64", [-1]),
    ("uint32", np.array([-1], ">i4")),
    ("bool", [2]),
    ("bool", [-1]),
    ("bool", [0.5]),
    ("uint8", [1.5]),
    ("uint8", [float("nan")]),
    ("int32", [float("inf")]),
    ("int64", [2.0**63]),
    ("float32", [2**24 + 1]),
    ("bfloat16", [257]),
    ("float32", [1e39]),
    ("float16", [70000.0]),
    ("bfloat16", np.array([0.1], np.float32)),
    ("float16", np.array([1e6], np.float32)),
    ("float16", np.array([1 + 2**-8], BF16) * 0 + np.array([3e38], BF16)),
]


@pytest.mark.parametrize(("dtype", "values"), UNFIT)
def test_what_a_field_does_not_hold(dtype, values):
    good = np.zeros(3, np.asarray(values).dtype)
    rows = np.concatenate([good, np.asarray(values)])
    with pytest.raises(PayloadError, match=r"f of step 3: value .* at token 13 ") as caught:
        check_values(rows, spec(dtype), what="step 3", position=10)
    details = caught.value.details
    assert (details["field"], details["step"], details["token"]) == ("f", "step 3", 13)
    assert {"value", "bound"} <= details.keys()
    json.dumps(details, allow_nan=False)


def test_a_value_inside_a_row_is_named():
    rows = np.zeros((300_000, 2), np.int64)
    rows[200_000, 1] = 99
    with pytest.raises(PayloadError, match=r"value 99 at token 200007, entry 1 is outside \[0, 9\)"):
        check_values(rows, spec("int16", shape=(2,), bound=9), what="step 3", position=7)
    with pytest.raises(PayloadError, match=r"value 99 at row 200000"):
        check_values(rows, spec("int16", shape=(2,), bound=9, align="step"), what="step 3")


def test_marks_of_missing_entries():
    minus_one, minus_hundred = spec("int8", bound=100, missing=-1), spec("int8", bound=100, missing=-100)
    assert kept([-1, 0, 99], minus_one).tolist() == [-1, 0, 99]
    assert kept([-100, 0, 99], minus_hundred).tolist() == [-100, 0, 99]
    for field, bad in ((minus_one, -2), (minus_one, 100), (minus_hundred, -1), (minus_hundred, -101)):
        with pytest.raises(PayloadError, match=rf"value {bad} at token 1 "):
            kept([0, bad], field)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 1), ()])
def test_another_inner_shape_is_refused(shape):
    with pytest.raises(PayloadError, match=r"expected shape \(rows, 2\), got") as caught:
        check_values(np.zeros(shape), spec("float32", shape=(2,)), what="step 3", position=0)
    assert (caught.value.details["expected"], caught.value.details["got"]) == ([[2]], list(shape))


@pytest.mark.parametrize("value", [[], np.zeros((0,)), np.zeros((0, 48, 8)), torch.zeros(0, 48, 8)])
def test_no_rows_are_legal(value):
    assert kept(value, spec("uint8", shape=(48, 8))).shape == (0, 48, 8)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::2],
        np.asfortranarray,
        lambda a: a.astype(">i4"),
        lambda a: a.T,
        torch.from_numpy,
        lambda a: torch.from_numpy(a)[:, 3:4],
        lambda a: torch.from_numpy(a).t(),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "bfloat16"])
def test_any_layout_is_stored_by_value(change, dtype):
    value = change(np.arange(64, dtype=np.int32).reshape(8, 8))
    stored = kept(value, spec(dtype, shape=tuple(value.shape[1:])))
    assert stored.tolist() == value.tolist()


def test_bits_on_disk():
    half, flags = np.array([1.5, -2], BF16), np.array([True, False])
    assert bits_view(half, "bfloat16").tolist() == [0x3FC0, 0xC000]
    assert bits_view(flags, "bool").tolist() == [1, 0]
    for array, name in ((half, "bfloat16"), (flags, "bool"), (np.arange(3), "int64")):
        back = value_view(bits_view(array, name), name)
        assert back.dtype == array.dtype and back.tolist() == array.tolist()
        assert np.shares_memory(back, array)


@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300), min_size=1, max_size=20),
    dtype=st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]),
    bound=st.none() | st.integers(1, 127),
)
def test_integers_are_stored_exactly_or_refused(values, dtype, bound):
    field = spec(dtype, bound=bound)
    low, high = (0, bound) if bound else (np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
    bad = [i for i, value in enumerate(values) if not int(low) <= value < int(high)]
    if not bad:
        assert kept(values, field).tolist() == values
        return
    with pytest.raises(PayloadError) as caught:
        kept(values, field)
    assert (caught.value.details["token"], caught.value.details["value"]) == (bad[0], values[bad[0]])


# --- ragged -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2], [], [3]],
        ([1, 2], (), [3]),
        [np.array([1, 2]), np.array([]), np.array([3], np.uint8)],
        [torch.tensor([1, 2]), [], torch.tensor([3])],
        Ragged(np.array([1, 2, 3]), np.array([0, 2, 2, 3])),
        Ragged([1, 2, 3], [0, 2, 2, 3]),
        Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3], dtype=torch.int32)),
        np.array([np.array([1, 2]), np.array([]), np.array([3])], dtype=object),
    ],
)
def test_ragged_rows(rows):
    values, ends = ragged(rows, spec("uint16", ragged=True), what="step 3")
    assert values.tolist() == [1, 2, 3]
    assert (ends.dtype, ends.tolist()) == (np.uint64, [2, 2, 3])


@pytest.mark.parametrize(
    ("rows", "n"),
    [([], 0), ([[], []], 2), (np.zeros((4, 0)), 4), (Ragged([], [0]), 0), (Ragged([], [0, 0]), 1), (np.zeros(0), 0)],
)
def test_ragged_rows_without_values(rows, n):
    for shape in ((), (2,)):
        values, ends = ragged(rows, spec("int32", ragged=True, shape=shape), what="step 3")
        assert values.shape == (0, *shape)
        assert ends.tolist() == [0] * n


def test_ragged_values_with_an_inner_shape():
    field = spec("float32", ragged=True, shape=(2,))
    for rows in ([[[1, 2], [3, 4]], [[5, 6]]], [np.array([[1, 2], [3, 4]]), np.array([[5, 6]])]):
        values, ends = ragged(rows, field, what="step 3")
        assert values.tolist() == [[1, 2], [3, 4], [5, 6]]
        assert ends.tolist() == [2, 3]
    values, ends = ragged(np.arange(12).reshape(2, 3, 2), field, what="step 3")
    assert (values.shape, ends.tolist()) == ((6, 2), [3, 6])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], None], "row 1 is None"),
        ([1, 2], "row 0 is 1"),
        ([[1], np.array(2)], "row 1"),
        (5, "needs rows"),
        (np.zeros(3), "needs rows"),
        ([[1, None]], "None at index 1"),
        (Ragged([1, 2], [0, 3]), "rise from 0"),
        (Ragged([1, 2], [1, 2]), "rise from 0"),
        (Ragged([1, 2], [0, 1]), "rise from 0"),
        (Ragged([1, 2], [0, 2, 1, 2]), "falling"),
        (Ragged([1, 2], []), "integer offsets"),
        (Ragged([1, 2], [0.0, 2.0]), "integer offsets"),
        (Ragged(3, [0]), "needs values"),
        ([[[1, 2]], [[1, 2]]], "expected shape"),
        ([np.zeros((1, 2)), np.zeros(1)], "rows do not join"),
        (None, "is None|None is"),
        ([[1], [2, 999, 3]], "value 999 at token 11"),
        (Ragged([1, 2, 3, -1], [0, 1, 1, 4]), "value -1 at token 12"),
    ],
    ids=str,
)
def test_ragged_rows_that_are_refused(rows, message):
    with pytest.raises(PayloadError, match=message):
        ragged(rows, spec("uint16", ragged=True, bound=256), what="step 3", position=10)


@given(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=12))
def test_ragged_rows_come_back(rows):
    values, ends = ragged(rows, spec("uint16", ragged=True), what="step 3")
    starts = [0, *ends.tolist()]
    assert [values[a:b].tolist() for a, b in zip(starts, ends.tolist(), strict=False)] == rows
    again = ragged(Ragged(values, np.array(starts)), spec("uint16", ragged=True), what="step 3")
    assert again[0].tolist() == values.tolist() and again[1].tolist() == ends.tolist()
