"""Arrays and specs that broke others: counts, widths, lengths, layouts, empty shapes."""

from __future__ import annotations

import json
import multiprocessing

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from kit import add, counting, routing, session
from numpy.testing import assert_array_equal

import spool
from spool import ConfigError, FieldSpec, InputError, MoEShape, PayloadError

spawn = multiprocessing.get_context("spawn")
fork = multiprocessing.get_context("fork")


# ---------------------------------------------------------------------------------------- case 2: counts of rows


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int16, np.int64])
def test_case_02_row_counts_of_five_tokens(shared_sp, dtype):
    tokens, extra = [1, 2, 3, 4, 5], np.zeros((1, 3, 2), np.int32)
    extra[0, 1:] = 9
    rows = np.concatenate([routing(tokens), extra]).astype(dtype)
    s = session(shared_sp, None)
    for count in (4, 5):
        ref = s.append(prompt_token_ids=[*tokens[:3]], response_token_ids=tokens[3:], routed_experts=rows[:count])
        got = shared_sp.read(ref, fields=["routed_experts"])["routed_experts"]
        assert_array_equal(got, routing(tokens))
    for count in (3, 2, 1, 0):
        with pytest.raises(PayloadError) as caught:
            s.append(
                prompt_token_ids=tokens[:3], response_token_ids=tokens[3:], routed_experts=rows[:count], step_id="short"
            )
        text = str(caught.value)
        assert "short" in text
        assert "4" in text
        assert 4 in np.atleast_1d(caught.value.details["expected"])
        assert caught.value.details["got"] == count
    none = s.append(prompt_token_ids=[7, *tokens[:3]], response_token_ids=tokens[3:])
    assert none.extents.get("routed_experts", ()) == ()
    assert len(s.steps) == 3


def test_case_02_a_missing_last_row_is_missing_not_expert_zero(sp):
    s = session(sp)
    add(s, [1, 2], [3])
    child = add(s, [1, 2, 3, 4], [5], routed_experts=routing([1, 2, 3, 4, 5])[3:], routed_experts_start=3)
    filled = sp.read(child, missing=-1)["routed_experts"]
    assert (filled[2] == -1).all()
    with pytest.raises(spool.GapError):
        sp.read(child, fields=["routed_experts"])


# ------------------------------------------------------------------------------------------ case 3: width of ids


@pytest.mark.parametrize(
    ("n_experts", "dtype"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (512, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_case_03_width_follows_the_declared_expert_count(shared_sp, n_experts, dtype):
    shape = MoEShape(num_layers=2, num_experts=n_experts, topk=1)
    s = shared_sp.session(experts=shape)
    ids = [i for i in (0, 1, 255, 256, 511, 65535, 65536) if i < n_experts]
    rows = np.array(ids, np.int32)[:, None, None].repeat(2, axis=1)
    refs = [
        s.append(prompt_token_ids=counting(len(ids)), response_token_ids=[7], routed_experts=rows),
        s.append(prompt_token_ids=counting(4, 50), response_token_ids=[7], routed_experts=rows[:1].repeat(4, axis=0)),
    ]
    for ref, expected in zip(refs, (rows, rows[:1].repeat(4, axis=0)), strict=True):
        stored = shared_sp.read(ref, fields=["routed_experts"], dtype="stored")["routed_experts"]
        assert stored.dtype == np.dtype(dtype)
        assert_array_equal(shared_sp.read(ref)["routed_experts"], expected)
        assert shared_sp.read(ref)["routed_experts"].dtype == np.int32
    for value in (n_experts, n_experts + 256, -2):
        wrong = rows.copy()
        wrong[-1, 1, 0] = value
        with pytest.raises(PayloadError, match=str(value)):
            s.append(prompt_token_ids=counting(len(ids), 90), response_token_ids=[7], routed_experts=wrong)


# ----------------------------------------------------------------------------------- case 5: lengths do not fit


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_mask", [1] * 5),
        ("logprobs", [-0.5] * 5),
        ("weight_version", [("1", 0, 5)]),
        ("entropy", [0.5] * 5),
        ("loss_mask", [1] * 2),
        ("logprobs", []),
        ("loss_mask", [1, 1, "x"]),
        ("logprobs", "abc"),
    ],
)
def test_case_05_a_step_whose_lengths_do_not_fit_is_refused_and_the_next_is_taken(shared_sp, field, value):
    spec = FieldSpec(name="entropy", dtype="float32", align="response")
    s = session(shared_sp, None, fields=[spec])
    first = add(s, [1, 2], [3, 4, 5], fields={"entropy": [0.5] * 3})
    bad = {"fields": {field: value}} if field == "entropy" else {field: value}
    with pytest.raises(InputError, match="version" if field == "weight_version" else field) as caught:
        add(s, [9, 8], [7, 6, 5], **bad)
    if isinstance(value, list) and len(value) != 3 and field != "weight_version":
        assert str(len(value)) in str(caught.value)
        assert "3" in str(caught.value)
    assert shared_sp.read(s.steps[0])["token_ids"].tolist() == [1, 2, 3, 4, 5]
    second = add(s, [1, 2, 3, 4, 5, 6], [7], fields={"entropy": [0.25]})
    assert (second.parent, second.index) == (0, 1)
    assert shared_sp.read(second)["token_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert shared_sp.read(first)["entropy"].tolist() == [0.5] * 3


# ------------------------------------------------------------------------------------------ case 6: odd logprobs


@pytest.mark.parametrize("make", [list, np.array, lambda v: np.array(v, np.float32), lambda v: torch.tensor(v)])
def test_case_06_non_finite_logprobs_are_kept_counted_and_valid_json(sp, make):
    s = session(sp)
    values = [-0.1, float("nan"), float("-inf"), -0.0]
    add(s, [1], [2, 3, 4, 5], logprobs=make(values))
    sp.annotate("s", reward=0.0, none=float("nan"), odd=float("inf"))
    (segment,) = s.finalize(inline=("logprobs", "token_ids"))
    got = sp.read(segment)["logprobs"]
    assert_array_equal(np.isnan(got), [False, True, False, False])
    assert (got[2], got[0]) == (-np.inf, np.float32(-0.1))
    assert np.signbit(got[3])
    assert segment.n_nonfinite == 2

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    for ref in (segment, s.steps[0], *sp.segments()):
        json.loads(ref.to_json(), parse_constant=refuse)
        assert spool.ref_from_json(ref.to_json()).n_nonfinite == 2
    assert list(sp.segments(where="n_nonfinite = 0")) == []


@pytest.mark.parametrize("hole", [None, "x", [], {}])
def test_case_06_a_hole_in_logprobs_is_refused_by_field_and_index(shared_sp, hole):
    s = session(shared_sp, None)
    with pytest.raises(PayloadError, match="logprobs") as caught:
        add(s, [1], [2, 3, 4], logprobs=[-0.1, hole, -0.2])
    if hole is None:
        assert "1" in str(caught.value).replace("response", "")
    assert s.steps == []


# ---------------------------------------------------------------------------------- case 7: arrays of every kind

ARRAYS = {
    "column of a torch matrix": lambda: torch.arange(64).view(8, 8)[:, 3],
    "torch row of a row": lambda: torch.arange(64).view(8, 8)[:1, 3],
    "torch transposed": lambda: torch.arange(64).view(8, 8).t(),
    "torch bfloat16": lambda: torch.linspace(-3, 3, 24).view(8, 3).bfloat16(),
    "torch bfloat16 strided": lambda: torch.linspace(-3, 3, 24).view(3, 8).bfloat16().t(),
    "torch float16": lambda: torch.linspace(-3, 3, 8).half(),
    "torch bool": lambda: torch.arange(8) % 3 == 0,
    "torch with grad": lambda: torch.ones(8, requires_grad=True),
    "torch expanded": lambda: torch.tensor([5]).expand(8),
    "reversed": lambda: np.arange(8)[::-1],
    "every other column": lambda: np.arange(48).reshape(8, 6)[:, ::2],
    "Fortran order": lambda: np.asfortranarray(np.arange(24).reshape(8, 3)),
    "big-endian int": lambda: np.arange(8, dtype=">i4"),
    "big-endian float": lambda: np.linspace(0, 1, 8).astype(">f8"),
    "unaligned": lambda: np.frombuffer(b"\0" + np.arange(8, dtype=np.int64).tobytes(), np.uint8)[1:].view(np.int64),
    "read-only": lambda: np.frombuffer(np.arange(8.0).tobytes()),
    "broadcast": lambda: np.broadcast_to(np.float32(2.5), (8, 4)),
    "ml_dtypes bfloat16": lambda: np.linspace(-3, 3, 8).astype(ml_dtypes.bfloat16),
    "list": lambda: [[1, 2], [3, 4], [5, 6]],
    "tuple of arrays": lambda: (np.arange(3), np.arange(3) + 5),
    "memoryview": lambda: memoryview(np.arange(8, dtype=np.int16)),
    "array of bool": lambda: np.arange(8) % 2 == 0,
    "uint64 at the top": lambda: np.array([2**64 - 1, 0, 2**63], np.uint64),
    "int64 at the bottom": lambda: np.array([-(2**63), 2**63 - 1]),
}


def plain(value):
    """Return ``value`` as a contiguous numpy array of its own dtype, by a way of our own."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return value.detach().float().numpy().astype(ml_dtypes.bfloat16)
        return np.array(value.detach().tolist(), dtype=value.detach().numpy().dtype)
    array = np.asarray(value)
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


@pytest.mark.parametrize("kind", ARRAYS)
def test_case_07_arrays_of_every_kind_keep_value_and_dtype(shared_sp, kind):
    value = ARRAYS[kind]()
    expected = plain(value)
    name = "bfloat16" if expected.dtype == ml_dtypes.bfloat16 else expected.dtype.name
    spec = FieldSpec(name="odd", dtype=name, align="token", shape=expected.shape[1:])
    n = len(expected)
    s = shared_sp.session(fields=[spec])
    ref = s.append(prompt_token_ids=counting(n - 1) if n > 1 else [], response_token_ids=[5], fields={"odd": value})
    got = shared_sp.read(ref, fields=["odd"])["odd"]
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()
    assert got.flags.writeable
    assert got.flags.c_contiguous


@pytest.mark.parametrize(
    "make",
    [
        lambda t: torch.tensor(t),
        lambda t: torch.tensor(t, dtype=torch.int32),
        lambda t: np.array(t)[::-1].copy()[::-1],
        lambda t: np.array(t, ">i8"),
        lambda t: np.array(t, np.uint16),
        tuple,
        lambda t: np.repeat(np.array(t), 2)[::2],
        lambda t: [np.int64(x) for x in t],
    ],
)
def test_case_07_token_ids_of_every_kind(shared_sp, make):
    tokens = counting(2000, 3)
    ref = session(shared_sp, None).append(prompt_token_ids=make(tokens[:1500]), response_token_ids=make(tokens[1500:]))
    got = shared_sp.read(ref, fields=["token_ids"])["token_ids"]
    assert got.dtype == np.int32
    assert got.tolist() == tokens


@pytest.mark.parametrize(
    "tokens",
    [
        3,
        np.array(3),
        [1.0],
        [True],
        [None],
        ["1"],
        b"ab",
        "ab",
        [[1, 2]],
        [-1],
        [2**31],
        np.array([1.5]),
        {1: 2},
        object(),
        [1, [2]],
    ],
)
def test_case_07_what_is_no_list_of_token_ids_is_refused(shared_sp, tokens):
    s = session(shared_sp, None)
    with pytest.raises(InputError, match="token_ids"):
        s.append(prompt_token_ids=tokens, response_token_ids=[1])
    assert s.steps == []


@pytest.mark.parametrize(
    "make",
    [
        lambda r: torch.tensor(r.tolist(), dtype=torch.int32),
        lambda r: torch.tensor(r.tolist(), dtype=torch.uint8),
        lambda r: torch.tensor(r.transpose(2, 0, 1).tolist()).permute(1, 2, 0),
        lambda r: np.asfortranarray(r),
        lambda r: r.astype(">i4"),
        lambda r: r.astype(">u2"),
        lambda r: r.tolist(),
        lambda r: np.repeat(r, 2, axis=0)[::2],
        lambda r: r[::-1].copy()[::-1],
        lambda r: r[:, 1:],
    ],
)
def test_case_07_routing_of_every_kind(shared_sp, make):
    tokens = counting(600)
    ref = add(session(shared_sp, None), tokens[:300], tokens[300:], routed_experts=make(routing(tokens)))
    assert_array_equal(shared_sp.read(ref)["routed_experts"], routing(tokens))


NOT_ROUTING = [
    np.zeros((2, 3)), np.ones((2, 3, 3), np.int32), np.ones((2, 4, 2), np.int32), np.ones((2, 3, 2), np.float32),
    np.int32(3), [[[1, 2]]], [[1], [2, 3]], "abc", [None, None], np.array([None] * 12).reshape(2, 3, 2),
    np.ones((2, 3, 2), bool),
]  # fmt: skip


@pytest.mark.parametrize("rows", NOT_ROUTING)
def test_case_07_what_is_no_routing_is_refused(shared_sp, rows):
    s = session(shared_sp, None)
    with pytest.raises(PayloadError, match="routed_experts"):
        add(s, [1, 2], [3], routed_experts=rows)
    assert s.steps == []
    assert add(s, [1, 2], [3]).index == 0


def test_case_07_the_callers_array_is_not_kept(shared_sp):
    s = session(shared_sp, None)
    tokens = counting(64)
    rows, ids = routing(tokens), np.array(tokens, np.int32)
    ref = s.append(prompt_token_ids=ids[:32], response_token_ids=ids[32:], routed_experts=rows)
    expected = rows.copy()
    rows[:], ids[:] = 0, 0
    first = shared_sp.read(ref)
    assert_array_equal(first["routed_experts"], expected)
    assert first["token_ids"].tolist() == tokens
    first["routed_experts"][:] = -3
    first["loss_mask"][:] = 0
    again = shared_sp.read(ref)
    assert_array_equal(again["routed_experts"], expected)
    assert again["loss_mask"].tolist() == [0] * 32 + [1] * 32


# ------------------------------------------------------------------------ case 12: marks that do not fit a dtype


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "bool", "float32", "bfloat16"])
def test_case_12_a_missing_mark_needs_a_signed_dtype(dtype):
    with pytest.raises(ConfigError, match="signed") as caught:
        FieldSpec(name="indexer", dtype=dtype, align="forward", missing=-1)
    assert "indexer" in str(caught.value)


BAD_SPECS = [
    {"missing": 0}, {"missing": 255}, {"bound": 129}, {"bound": 0}, {"dtype": "complex64"}, {"dtype": "O"},
    {"dtype": "U5"}, {"dtype": "M8[s]"}, {"dtype": "nonsense"}, {"dtype": ""},
]  # fmt: skip


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_case_12_specs_that_cannot_hold_what_they_say(spec):
    with pytest.raises(ConfigError):
        FieldSpec(**{"name": "f", "dtype": "int8", "align": "token", **spec})


# ------------------------------------------------------------------------------------- case 13: shapes with zeros


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3), (-1,)])
def test_case_13_an_inner_shape_without_elements_is_refused(shape):
    with pytest.raises(ConfigError, match="at least 1"):
        FieldSpec(name="f", dtype="int32", align="token", shape=shape)


def test_case_13_no_rows_then_five(open_spool, tmp_path):
    spec = FieldSpec(name="f", dtype="int16", align="token", shape=(48, 8))
    sp = open_spool()
    s = session(sp, fields=[spec])
    data = np.arange(5 * 48 * 8, dtype=np.int16).reshape(5, 48, 8)
    empty = s.append(
        fields={"f": data[:0]}, logprobs=np.zeros(0), routed_experts=np.zeros((0, 3, 2), int), loss_mask=[]
    )
    assert len(sp.read(empty).get("f", ())) == 0
    sp.flush()
    ref = add(s, [1, 2, 3], [4, 5], fields={"f": data})
    sp.flush()
    sp.flush()
    assert_array_equal(sp.read(ref)["f"], data)
    assert len(sp.read(empty).get("f", ())) == 0
    (folder,) = (tmp_path / "spool" / "streams").iterdir()
    group = zarr.open_group(folder, mode="r")
    for name, array in group.arrays():
        assert min((*array.chunks, *(array.shards or (1,)))) >= 1, name
    starts = group["f"].attrs["spool:rows"]
    stored = np.concatenate([group["f"][start : start + n] for start, n in starts])
    assert_array_equal(stored, data)


def test_case_13_a_step_larger_than_a_shard_and_a_partial_last_one(open_spool, tmp_path):
    wide = FieldSpec(name="wide", dtype="uint8", align="token", shape=(1 << 17,))
    sp = open_spool()
    s = sp.session(session_id="s", fields=[wide])
    n = 577
    data = (np.arange(n) * 31).astype(np.uint8)[:, None] + np.arange(1 << 17).astype(np.uint8)
    ref = s.append(prompt_token_ids=counting(n - 1), response_token_ids=[1], fields={"wide": data})
    assert len(ref.extents["wide"]) >= 2
    assert all(extent.n >= 1 for extent in ref.extents["wide"])
    assert_array_equal(sp.read(ref, fields=["wide"])["wide"], data)
    sp.flush()
    assert_array_equal(sp.read(ref, fields=["wide"], tokens=slice(500, 577))["wide"], data[500:])
    (folder,) = (tmp_path / "spool" / "streams").iterdir()
    array = zarr.open_group(folder, mode="r")["wide"]
    stored = np.concatenate([array[start : start + count] for start, count in array.attrs["spool:rows"]])
    assert_array_equal(stored, data)


def test_real_routing_comes_back(open_spool, shared_data):
    for folder, shape in (("A_12L_256E", (12, 256, 8)), ("B_8L_384E", (8, 384, 8))):
        sp = open_spool()
        recorded = np.load(shared_data / "routing" / folder / "taubench_airline_a.npz")
        tokens, experts, probs = recorded["token_ids"], recorded["routed_experts"], recorded["logprobs"]
        mask = recorded["assistant_mask"]
        edges = np.flatnonzero(np.diff(mask.astype(int))) + 1
        turns = [(a, b) for a, b in zip(edges, [*edges[1:], len(mask)], strict=True) if mask[a]]
        s = sp.session(session_id=folder, experts=MoEShape(*shape))
        for a, b in turns:
            s.append(
                prompt_token_ids=tokens[:a],
                response_token_ids=tokens[a:b],
                logprobs=probs[a:b],
                routed_experts=experts[: b - 1],
            )
        (segment,) = s.finalize()
        end = turns[-1][1]
        sample = sp.read(segment)
        assert_array_equal(sample["token_ids"], tokens[:end])
        assert_array_equal(sample["routed_experts"], experts[: end - 1])
        assert_array_equal(sample["loss_mask"], mask[:end])
        first = turns[0][0]
        assert_array_equal(sample["logprobs"], np.where(mask[first:end], probs[first:end], 0))
