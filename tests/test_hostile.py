"""Hostile and odd input: names, arrays, texts, trees, and processes that fork, race and die."""

from __future__ import annotations

import glob
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import workers
import zarr
from kit import SHAPE, add, counting, routing
from numpy.testing import assert_array_equal

import spool
from spool import ConfigError, FieldSpec, InputError, MoEShape, NotFoundError, PayloadError, SpoolError

spawn = multiprocessing.get_context("spawn")
fork = multiprocessing.get_context("fork")


def session(sp, session_id="s", **more):
    return sp.session(session_id=session_id, experts=SHAPE, **more)


def tree(folder):
    """Return every path under ``folder``, as bytes: what a name may have created."""
    return {
        os.path.join(base, name) for base, folders, files in os.walk(os.fsencode(folder)) for name in folders + files
    }


# ------------------------------------------------------------------------------------------------------ names

NAMES = [
    "../../escape", "..", ".", "/etc/absolute", "a/b/c", "a\\b", "C:\\x", "~", "~root", "-rf", "", " ", "  lead",
    "trail ", "x" * 300, "é" * 300, "x" * 70_000, "a:0", "a@lineage/0", "a:0@timeline/1", "a?b=c&d", "a%2Fb", "%00",
    "a\nb", "a\tb", "a\rb", "nul\0byte", "\0", "emoji-\U0001f600-\U0001f468\u200d\U0001f469", "\u202egnp.exe",
    "caf\u00e9", "cafe\u0301",
    "\u0430dmin", "admin", "\uff21", "A", "a", "\ufeffbom", "\u2028line", "'; DROP TABLE sessions; --", "%s%n", "*",
    "[a]", "true", "null", "1", "\x7f", "\x1b[31mred", "con", "spool.json", "lock",
]  # fmt: skip
LONE = ["lone-\ud800", "\udfff", "\udcff\udc80"]


@pytest.mark.parametrize("where", ["session_id", "source", "group_id", "step_id", "prompt_id", "split"])
def test_names_are_kept_exactly_or_refused_and_make_no_path(open_spool, tmp_path, where):
    sp = open_spool()
    add(session(sp, "warm"), [1, 2], [3])
    outside = {path for path in tree(tmp_path) if b"/spool/" not in path}
    shape_of_inside = {path.count(b"/") for path in tree(tmp_path / "spool")}
    kept = {}
    for number, name in enumerate(NAMES):
        at_session = {where: name} if where not in ("session_id", "step_id") else {}
        try:
            s = session(sp, name if where == "session_id" else f"number {number}", **at_session)
            ref = add(s, [number + 5, 2], [3], **({"step_id": name} if where == "step_id" else {}))
        except InputError:
            continue
        assert getattr(ref, where) == name
        kept[name] = ref
    assert {path for path in tree(tmp_path) if b"/spool/" not in path} == outside
    assert {path.count(b"/") for path in tree(tmp_path / "spool")} <= shape_of_inside
    assert not [path for path in tree(tmp_path / "spool") if b"escape" in path or b"emoji" in path]
    for plain in ("caf\u00e9", "cafe\u0301", "\u0430dmin", "admin", "A", "a", "\uff21", "a:0", "1"):
        assert plain in kept, f"{where} {plain!r} is a plain name and was refused"
    sp.close()
    again = open_spool()
    for number, (name, ref) in enumerate(kept.items()):
        (listed,) = again.steps(ref.session_id)
        assert getattr(listed, where) == name
        assert again.read(ref)["token_ids"].tolist() == again.read(listed)["token_ids"].tolist()
        assert spool.ref_from_json(ref.to_json()) == pickle.loads(pickle.dumps(ref)) == ref
        if number % 8 == 0:
            assert again.view(ref.session_id, "timeline")[0].session_id == ref.session_id
    assert len({row.session_id for row in again.sessions()}) == len(kept) + 1
    assert unicodedata.normalize("NFC", "cafe\u0301") == "caf\u00e9"


@pytest.mark.parametrize("name", LONE)
@pytest.mark.parametrize("where", ["session_id", "source", "group_id", "step_id", "finish_reason"])
def test_names_with_lone_surrogates_are_kept_or_refused_never_half_done(sp, where, name):
    at_session = {where: name} if where in ("source", "group_id") else {}
    s = None
    try:
        s = session(sp, name if where == "session_id" else "s", **at_session)
        ref = add(s, [1, 2], [3], **({where: name} if where in ("step_id", "finish_reason") else {}))
    except SpoolError as error:
        assert isinstance(error, InputError)
        assert s is None or where not in ("step_id", "finish_reason") or s.steps == []
    else:
        assert getattr(ref, where) == name
        assert getattr(sp.steps(ref.session_id)[0], where) == name
    assert add(session(sp, "after"), [1, 2], [3]).n_tokens == 3


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/etc",
        "../x",
        "a.b",
        "nul\0",
        "x" * 65,
        "é",
        "1a",
        "a-b",
        "records",
        "LOCK",
        "\ud800",
        " a",
    ],
)
def test_field_names_that_would_be_paths_are_refused(name):
    with pytest.raises(ConfigError):
        FieldSpec(name=name, dtype="int32", align="token")


def test_fields_that_differ_in_case_only_are_refused(sp):
    specs = [FieldSpec(name=name, dtype="int32", align="token") for name in ("Reward", "reward")]
    with pytest.raises(ConfigError):
        add(sp.session(session_id="s", experts=SHAPE, fields=specs), [1], [2])


@pytest.mark.parametrize("name", ["token_ids", "routed_experts", "logprobs", "loss_mask"])
def test_a_field_may_not_pose_as_a_built_in_one(shared_sp, name):
    with pytest.raises(InputError, match=name):
        add(
            shared_sp.session(fields=[FieldSpec(name=name, dtype="float64", align="step")]),
            [1],
            [2],
            fields={},
        )


@pytest.mark.parametrize("folder", ["with space", "100%", "a#b", "caf\u00e9", "\U0001f600", "a+b", "x" * 200])
def test_a_spool_lives_under_any_folder_name(tmp_path, folder):
    with spool.open(str(tmp_path / folder)) as sp:
        ref = add(session(sp), [1, 2], [3])
        assert sp.read(ref)["token_ids"].tolist() == [1, 2, 3]
    assert (tmp_path / folder / "spool.json").is_file()


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
    sp.annotate("s", reward=float("nan"), odd=float("inf"))
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


# -------------------------------------------------------------------------------------- case 9: finish reasons

REASONS = [
    "stop",
    "abort",
    "tool_calls",
    "length",
    "a brand new reason",
    "content_filter",
    "",
    "\U0001f600",
    "length'; --",
]


def test_case_09_finish_reasons_are_kept_and_can_be_filtered_on(open_spool):
    sp = open_spool()
    for i, reason in enumerate(REASONS):
        s = session(sp, f"s{i}")
        add(s, [1, 2], [3], finish_reason="stop")
        add(s, [1, 2, 3, 4], [5], finish_reason=reason)
        assert [ref.finish_reason for ref in s.steps] == ["stop", reason]
        s.finalize()
    assert [ref.finish_reason for ref in sp.segments(view="lineage")] == REASONS
    for handle in (sp, open_spool()):
        for i, reason in enumerate(REASONS):
            quoted = reason.replace("'", "''")
            found = [ref.session_id for ref in handle.segments(where=f"finish_reason = '{quoted}'", view="lineage")]
            assert found == [f"s{i}"]
        assert len(list(handle.segments(where="finish_reason != 'length'", view="lineage"))) == len(REASONS) - 1


@pytest.mark.parametrize(
    "where",
    [
        "reward >",
        "1; DROP TABLE segments",
        "nosuchcolumn = 1",
        "(",
        "",
        "reward = 'a",
        "1=1) UNION SELECT 1--",
        "load_extension('x')",
        "\0",
    ],
)
def test_case_09_a_filter_is_a_filter_and_nothing_else(sp, where):
    s = session(sp)
    add(s, [1, 2], [3])
    s.finalize()
    try:
        found = list(sp.segments(where=where))
    except SpoolError as error:
        assert isinstance(error, InputError)
    else:
        assert where == "" or len(found) <= 1
    assert len(list(sp.segments())) == 1


# ---------------------------------------------------------------------------- case 11: eight processes at once


def check_eight_processes(uri):
    barrier = spawn.Barrier(8)
    processes = [spawn.Process(target=workers.append_many, args=(uri, worker, 25, barrier)) for worker in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    with spool.open(uri) as sp:
        check_their_steps(sp)


def check_their_steps(sp):
    names = [row.session_id for row in sp.sessions() if row.session_id != "before"]
    refs = [ref for name in names for ref in sp.steps(name)]
    assert (len(names), len(refs)) == (40, 200)
    for ref, sample in zip(refs, sp.read(refs, fields=["token_ids", "routed_experts"]), strict=True):
        worker = int(ref.session_id.split("-")[0])
        tokens = [worker + 1, int(ref.step_id) + 1, *counting(60, 100 * worker)]
        assert sample["token_ids"].tolist() == tokens
        assert_array_equal(sample["routed_experts"], routing(tokens))
    owners = {}
    for ref in refs:
        for extent in ref.extents["token_ids"]:
            assert owners.setdefault(extent.stream, ref.session_id.split("-")[0]) == ref.session_id.split("-")[0]
    assert len(owners) == 8


def test_case_11_eight_processes_append_to_one_spool_at_once(open_spool, spool_uri):
    add(session(open_spool(), "before"), [1, 2], [3])
    check_eight_processes(spool_uri)


def test_case_11_eight_processes_create_the_spool_at_once(spool_uri):
    check_eight_processes(spool_uri)


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


# --------------------------------------------------------------------- case 23: forks with everything open at once


def test_case_23_a_fork_inside_an_open_transaction(open_spool, spool_uri, tmp_path):
    sp = open_spool()
    s = session(sp)
    before = add(s, [1, 2], [3])
    with s.transaction():
        add(s, [1, 2, 3, 4], [5])
        child = fork.Process(target=_read_and_append_in_child, args=(sp, spool_uri, before, str(tmp_path / "seen")))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        add(s, [1, 2, 3, 4, 5, 6], [7])
    assert (tmp_path / "seen").read_text() == "[1, 2, 3]"
    assert [ref.n_tokens for ref in sp.steps("s")] == [3, 5, 7]
    (ref,) = sp.steps("child")
    assert sp.read(ref)["token_ids"].tolist() == [8, 9]
    assert_array_equal(sp.read(s.steps[-1])["routed_experts"], routing([1, 2, 3, 4, 5, 6, 7]))
    sp.close()
    again = open_spool()
    assert [ref.n_tokens for ref in again.steps("s")] == [3, 5, 7]
    assert again.verify(deep=True).findings == ()


def _read_and_append_in_child(sp, uri, ref, out):
    Path(out).write_text(str(sp.read(ref, fields=["token_ids"])["token_ids"].tolist()))
    with spool.open(uri) as own:
        assert own.read(ref)["token_ids"].tolist() == [1, 2, 3]
        add(session(own, "child"), [8], [9])


def test_case_23_the_parents_handle_works_in_a_child_that_appends_by_it(sp):
    s = session(sp)
    add(s, [1, 2], [3])
    child = fork.Process(target=_append_by_inherited_handle, args=(sp,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    add(s, [1, 2, 3], [4])
    assert [ref.n_tokens for ref in sp.steps("s")] == [3, 4]
    (ref,) = sp.steps("by child")
    assert sp.read(ref)["token_ids"].tolist() == [5, 6]
    assert {e.stream for e in ref.extents["token_ids"]}.isdisjoint(e.stream for e in s.steps[0].extents["token_ids"])


def _append_by_inherited_handle(sp):
    add(session(sp, "by child"), [5], [6])
    sp.close()


# ------------------------------------------------------------------------------- case 24: killed writers, cut files


def killed_after_five(uri):
    """Return the references that a writer acknowledged before it was killed."""
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=workers.write_ten, args=(uri, theirs))
    process.start()
    refs = []
    for number in range(5):
        assert ours.poll(60)
        refs.append(spool.ref_from_json(ours.recv()))
        ours.send("die" if number == 4 else "go on")
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    return refs


def test_case_24_what_a_killed_writer_acknowledged_is_there(open_spool, spool_uri):
    refs = killed_after_five(spool_uri)
    sp = open_spool()
    assert [ref.extents for ref in sp.steps("s")] == [ref.extents for ref in refs]
    for number, sample in enumerate(sp.read(refs, verify="always")):
        tokens = [number + 1, *counting(300), 7, 8]
        assert sample["token_ids"].tolist() == tokens
        assert_array_equal(sample["routed_experts"], routing(tokens))
    assert add(session(sp), [99], [98]).index == 5
    assert sp.verify(deep=True).findings == ()


@pytest.mark.parametrize("cut", [1, 7, 300])
def test_case_24_a_cut_log_is_reported_and_never_silently_shorter(open_spool, spool_uri, cut):
    refs = killed_after_five(spool_uri)
    root = spool_uri.removeprefix("file://")
    open_spool().close()
    (log,) = glob.glob(f"{glob.escape(root)}/streams/*/records/0.log")
    os.truncate(log, os.path.getsize(log) - cut)
    assert not passes_verify(spool_uri)
    with spool.open(spool_uri) as sp:
        for ref, sample in zip(refs[:4], sp.read(refs[:4]), strict=True):
            assert sample["token_ids"].tolist()[1:] == [*counting(300), 7, 8]
            assert ref.n_tokens == len(sample["token_ids"])


@pytest.mark.parametrize("field", ["token_ids", "routed_experts"])
def test_case_24_payload_that_is_cut_is_an_integrity_error(open_spool, spool_uri, field):
    refs = killed_after_five(spool_uri)
    root = spool_uri.removeprefix("file://")
    for tail in glob.glob(f"{glob.escape(root)}/streams/*/{field}/**", recursive=True):
        if os.path.isfile(tail) and not tail.endswith("zarr.json"):
            os.truncate(tail, max(os.path.getsize(tail) - 5, 0))
    sp = open_spool()
    with pytest.raises(spool.IntegrityError, match=field):
        sp.read(refs[-1])
    assert sp.read(refs[0])["token_ids"].tolist() == [1, *counting(300), 7, 8]
    assert not passes_verify(spool_uri)


@pytest.mark.parametrize("field", ["token_ids", "routed_experts", "logprobs"])
def test_case_24_a_flipped_bit_is_an_integrity_error(open_spool, spool_uri, field):
    sp = open_spool()
    ref = add(session(sp), counting(50), [1, 2])
    sp.flush()
    sp.close()
    root = spool_uri.removeprefix("file://")
    (shard,) = (
        p for p in glob.glob(f"{glob.escape(root)}/streams/*/{field}/c/**", recursive=True) if os.path.isfile(p)
    )
    with open(shard, "r+b") as file:
        file.seek(1)
        byte = file.read(1)
        file.seek(1)
        file.write(bytes([byte[0] ^ 1]))
    again = open_spool()
    with pytest.raises(spool.IntegrityError):
        again.read(ref)
    assert not passes_verify(spool_uri, deep=True)


def passes_verify(uri, deep=False):
    """Return whether ``sp.verify`` finds nothing wrong."""
    with spool.open(uri) as sp:
        return not sp.verify(deep=deep).findings


# ------------------------------------------------------------------------------------ case 26: texts that are not

TEXTS = ["\ud800", "a\udfffb", "\udc80\ud800", "\U0001f600", "\0", "\u2028", "\x1b[31m", '"\\', ""]


def test_case_26_messages_with_any_text_come_back_equal(open_spool):
    sp = open_spool()
    s = session(sp)
    messages = []
    for text in TEXTS:
        messages += [
            {"role": "user", "content": text},
            {"role": text or "x", text: {"nested": [text, {text: text}]}},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": text})}}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": text, "arguments": {text: text}}}]},
        ]
    tools = [{"name": text, "description": text, text: None} for text in TEXTS]
    ref = add(s, [1, 2], [3], messages=messages, tools=tools)
    child = add(s, [1, 2, 3], [4], messages=[*messages, {"role": "user", "content": "\ud800 again"}])
    s.finalize()
    sp.close()
    for handle in (open_spool(), open_spool()):
        assert handle.messages(ref) == messages
        assert handle.messages(child) == [*messages, {"role": "user", "content": "\ud800 again"}]
        assert handle.tools(ref) == tools
        handle.flush()
    for found in (ref, *handle.segments(), *handle.steps("s")):
        found.to_json().encode("utf-8")


@pytest.mark.parametrize(
    "messages",
    [[object()], [{1, 2}], [b"bytes"], [{"a": float("nan")}], [{"a": 2**70}], [{1: 2}], "text", [{"a": (1, 2)}]],
)
def test_case_26_what_is_no_message_is_refused_or_comes_back_equal(shared_sp, messages):
    s = session(shared_sp, None)
    try:
        ref = add(s, [1, 2], [3], messages=messages)
    except SpoolError as error:
        assert isinstance(error, InputError)
        assert s.steps == []
        return
    back = shared_sp.messages(ref)
    normal = json.loads(json.dumps(messages if not isinstance(messages, str) else list(messages)))
    assert str(back) == str(normal)


def test_case_26_a_message_nested_beyond_reason_is_refused_or_kept(sp):
    s = session(sp)
    deep = "end"
    for _ in range(100_000):
        deep = [deep]
    try:
        add(s, [1, 2], [3], messages=[{"role": "user", "content": deep}])
    except SpoolError as error:
        assert isinstance(error, InputError)
        assert s.steps == []
    while isinstance(deep, list):
        deep = deep.pop()
    add(s, [5, 6], [7])


# --------------------------------------------------------------------------------------- case 27: shapes of trees


def test_case_27_a_chain_of_5000_steps(sp):
    n = 5000
    s = sp.session(session_id="s")
    tokens = np.arange(1, 2 * n + 2, dtype=np.int32)
    for number in range(n):
        ref = s.append(
            prompt_token_ids=tokens[: 2 * number + 1], response_token_ids=tokens[2 * number + 1 : 2 * number + 2]
        )
    assert (ref.index, ref.parent) == (n - 1, n - 2)
    (segment,) = s.view("lineage")
    assert segment.steps == tuple(range(n))
    assert segment.trainable_tokens == n
    assert segment.n_tokens == 2 * n
    sample = sp.read(segment, fields=["token_ids", "loss_mask"])
    assert_array_equal(sample["token_ids"], tokens[: 2 * n])
    assert_array_equal(sample["loss_mask"], [0, 1] * n)
    assert len(pickle.loads(pickle.dumps(segment)).steps) == n
    (segment,) = s.finalize()
    assert sp.view("s", "lineage")[0].steps == segment.steps


def test_case_27_steps_in_reverse_order_are_the_same_data(sp):
    """The same requests, longest first: each begins a chain of its own, and every step reads the same."""
    forward, backward = session(sp, "forward"), session(sp, "backward")
    prompts = [counting(2 * number + 1) for number in range(6)]
    for prompt in prompts:
        add(forward, prompt, [prompt[-1] + 1])
    for prompt in reversed(prompts):
        add(backward, prompt, [prompt[-1] + 1])
    for one, other in zip(sp.read(forward.steps), sp.read(backward.steps)[::-1], strict=True):
        assert set(one) == set(other) >= {"token_ids", "routed_experts", "logprobs", "loss_mask"}
        for field in one:
            assert_array_equal(one[field], other[field])
    assert [ref.parent for ref in backward.steps] == [None] * 6


@pytest.mark.parametrize("parent", ["nobody", 7, -1, "1", "7", True, 1.0, "\ud800", ""])
def test_case_27_a_missing_parent_or_a_cycle_is_an_error_that_names_it(shared_sp, parent):
    s = session(shared_sp, None)
    add(s, [1, 2], [3], step_id="first")
    with pytest.raises((InputError, NotFoundError)) as caught:
        add(s, [1, 2, 3], [4], step_id="1", parent=parent)
    if parent in ("nobody", 7):
        assert str(parent) in str(caught.value)
    assert [ref.step_id for ref in s.steps] == ["first"]


def test_a_spool_opens_in_a_plain_interpreter_without_the_test_environment(spool_uri):
    code = (
        "import sys, spool\n"
        f"sp = spool.open({spool_uri!r})\n"
        "s = sp.session(session_id='s')\n"
        "ref = s.append(prompt_token_ids=[1, 2], response_token_ids=[3])\n"
        "assert sp.read(ref)['token_ids'].tolist() == [1, 2, 3]\n"
        "assert not {'torch', 'ray', 'click', 'textual', 's3fs', 'botocore'} & set(sys.modules)\n"
        "sp.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_that_exits_without_closing_loses_nothing(open_spool, spool_uri):
    code = (
        "import spool\n"
        f"s = spool.open({spool_uri!r}).session(session_id='s')\n"
        "s.append(prompt_token_ids=[1, 2], response_token_ids=[3])\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 30
    assert [ref.n_tokens for ref in open_spool().steps("s")] == [3]


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


def test_a_root_that_cannot_be_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "spool.json").write_text("{}")
    for path in ("file", "file/below", "full"):
        with pytest.raises(SpoolError):
            spool.open(str(tmp_path / path))
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "full" / "spool.json").read_text() == "{}"
    for uri in (
        "http://host/x",
        "file://host/x",
        "file:///x?nosuch=1",
        f"{tmp_path}/y?hot_bytes=many",
        "nul\0",
        "s3://bucket/x",
    ):
        with pytest.raises(ConfigError):
            spool.open(uri)
    shutil.rmtree(tmp_path / "full")
