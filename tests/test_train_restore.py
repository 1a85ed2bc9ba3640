"""From references to what a trainer takes: against plain loops over plain reads, and each rule alone."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import SHAPE, add, counting, probabilities, routing, session
from numpy.testing import assert_array_equal
from tiers import record
from training import N_EXPERTS, N_LAYERS, TOPK, plain_rows, with_gap, with_unit

import spool
from spool.formats.arrays import Ragged
from spool.train import LazyRouting, RankSlice, restore, select, staleness, token_versions, version_order
from spool.train.restoring import tensors
from spool.train.restoring.fields import agreed
from spool.train.restoring.versions import named

ABSENT = 77_777
LISTS = {"slime": ("tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts")}
LISTS["miles"] = LISTS["slime"]
LISTS["verl"] = ("input_ids", "response_mask", "rollout_log_probs", "routed_experts")
LISTS["nested"] = ("token_ids", "loss_mask", "logprobs", "routed_experts")


def as_numpy(value):
    return value.numpy() if isinstance(value, torch.Tensor) else value


def parts(value):
    """Return the arrays of a list or a nested tensor, one a sequence."""
    if isinstance(value, torch.Tensor):
        assert value.is_nested
        value = value.unbind()
    return [as_numpy(part) for part in value]


def plain(sp, ref, missing="error", mask_versions="all", version=None, lacking="consecutive", told=None):
    """Return tokens, mask, logprobs, routing and versions of one reference, rule by rule, in plain loops."""
    names = ["token_ids", "loss_mask", "logprobs", "routed_experts"]
    known = names if "routed_experts" in ref.extents else names[:3]
    read = dict(sp.read(ref, fields=known, missing="error" if missing == "error" else ABSENT))
    absent = np.full((max(ref.n_rows - 1, 0), N_LAYERS, TOPK), ABSENT)
    read = {"token_ids": np.zeros(0, int), "logprobs": np.zeros(0), "routed_experts": absent, **read}
    mask, versions = read["loss_mask"].tolist(), [-1] * ref.n_tokens
    for span in ref.versions:
        for token in range(span.start, span.stop):
            versions[token] = told.index(span.version) if told else int(span.version)
    newest = max((each for each in versions), default=-1)
    for token, each in enumerate(versions):
        if newest >= 0 and mask_versions == "last" and each != newest:
            mask[token] = 0
        if each >= 0 and isinstance(mask_versions, int) and version - each > mask_versions:
            mask[token] = 0
    experts = read["routed_experts"].tolist()
    for row, ids in enumerate(experts):
        if ids[0][0] == ABSENT:
            experts[row] = plain_rows(row) if lacking == "consecutive" else [[-1] * TOPK] * N_LAYERS
            if missing == "mask":
                mask[row + 1] = 0
    probs = read["logprobs"].tolist()
    for i, each in enumerate(probs):
        if each == ABSENT:
            probs[i], mask[ref.response_start + i] = 0.0, 0
    rows = np.array(experts, np.int64).reshape(-1, N_LAYERS, TOPK)
    return read["token_ids"], np.array(mask, np.int64), np.array(probs, np.float32), rows, np.array(versions, np.int64)


# -- any batch, against plain loops ------------------------------------------------------------------------------------

turns = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(0, 4), st.sampled_from(["3", "7", "11", None]), st.booleans(), st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def record_turns(sp, drawn, first):
    """Record a session: each turn adds prompt and response tokens; some send no routing, no logprobs, or clear some."""
    s, tokens = session(sp, None), []
    for n_prompt, n_response, version, routed, scored, cleared in drawn:
        tokens = tokens + counting(n_prompt, first + len(tokens))
        response = counting(n_response, first + 500 + len(tokens))
        more = {"weight_version": version} if version and response else {}
        if not routed:
            more["routed_experts"] = None
        if not scored:
            more["logprobs"] = None
        if cleared and response:
            more["loss_mask"] = [0] + [1] * (n_response - 1)
        add(s, tokens, response, **more)
        tokens = tokens + response
    return s.finalize() and s.view(gaps="keep", trailing="keep")


@settings(max_examples=75)
@given(
    sessions=st.lists(turns, min_size=1, max_size=3),
    layout=st.sampled_from(["slime", "miles", "verl", "nested", "packed"]),
    target=st.sampled_from([{}, {"framework": "torch"}, {"framework": "torch", "device": "cpu"}]),
    mask_versions=st.sampled_from(["all", "last", 0, 1, 4]),
    cuts=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    told=st.none() | st.permutations(["3", "7", "11"]),
)
def test_any_batch_is_what_plain_loops_make_of_it(shared_sp, sessions, layout, target, mask_versions, cuts, told):
    sp, current = shared_sp, 2 if told else 11
    refs = [ref for i, drawn in enumerate(sessions) for ref in record_turns(sp, drawn, 10_000 * i)]
    refs = [ref.head(max(ref.n_tokens - cut, 0)) for ref, cut in zip(refs, cuts, strict=False)]
    lacking = "minus one" if layout == "miles" else "consecutive"
    expected = [plain(sp, ref, "mask", mask_versions, current, lacking, told) for ref in refs]
    fields = ["token_ids", "loss_mask", "logprobs", "routed_experts", "weight_versions", "staleness"]
    options = {"missing": "mask", "mask_versions": mask_versions, "version": told or 11, "fields": fields}
    batch = restore(sp, refs, layout, experts=SHAPE, **target, **options)
    if layout == "packed":
        check_packed(batch, refs, expected)
        return
    names = LISTS[layout]
    for i, (ref, (tokens, mask, probs, rows, versions)) in enumerate(zip(refs, expected, strict=True)):
        start = 0 if layout == "nested" else ref.response_start
        got = [parts(batch[name])[i] for name in names]
        for value, wanted in zip(got, (tokens, mask[start:], probs, rows), strict=True):
            assert_array_equal(value, wanted)
            assert value.shape == wanted.shape
        assert_array_equal(parts(batch["weight_versions"])[i], versions[start:])
        assert_array_equal(parts(batch["staleness"])[i], np.where(versions < 0, 0, current - versions)[start:])
        assert got[0].dtype == np.int64
        assert got[3].dtype == (np.uint8 if layout == "verl" else np.int32)
    assert batch["response_lengths"] == [ref.response_length for ref in refs]
    assert batch["total_lengths"] == [ref.n_tokens for ref in refs]


def check_packed(batch, refs, expected):
    tokens, masks, probs, rows, versions = zip(*expected, strict=True)
    ends = np.cumsum([0] + [ref.n_tokens for ref in refs])
    assert_array_equal(as_numpy(batch["cu_seqlens"]), ends)
    assert_array_equal(as_numpy(batch["cu_rows"]), ends)
    assert as_numpy(batch["cu_seqlens"]).dtype == np.int32
    assert_array_equal(as_numpy(batch["token_ids"]), np.concatenate(tokens))
    assert_array_equal(as_numpy(batch["position_ids"]), np.concatenate([np.arange(ref.n_tokens) for ref in refs]))
    assert_array_equal(as_numpy(batch["loss_mask"]), np.concatenate(masks))
    assert_array_equal(as_numpy(batch["weight_versions"]), np.concatenate(versions))
    whole = [np.concatenate([np.zeros(r.response_start, "f4"), each]) for r, each in zip(refs, probs, strict=True)]
    assert_array_equal(as_numpy(batch["logprobs"]), np.concatenate(whole))
    filled = [
        np.concatenate([each, np.array([plain_rows(ref.n_rows - 1)] * (ref.n_rows > 0)).reshape(-1, N_LAYERS, TOPK)])
        for ref, each in zip(refs, rows, strict=True)
    ]
    assert_array_equal(as_numpy(batch["routed_experts"]), np.concatenate(filled))
    assert batch["max_seqlen"] == max(ref.n_tokens for ref in refs)


@settings(max_examples=60)
@given(
    drawn=st.lists(turns, min_size=1, max_size=3),
    cp_size=st.integers(1, 4),
    split=st.sampled_from(["zigzag", "contiguous", "uneven"]),
)
def test_ranks_have_everything_once(shared_sp, drawn, cp_size, split):
    refs = [ref for i, each in enumerate(drawn) for ref in record_turns(shared_sp, each, 10_000 * i)]
    whole = restore(shared_sp, refs, missing="mask", experts=SHAPE)

    def uneven(n, rank, size):
        return [slice(n * rank * rank // size**2, n * (rank + 1) ** 2 // size**2)]

    ranks = [
        RankSlice(cp_rank=r, cp_size=cp_size, split=uneven if split == "uneven" else split) for r in range(cp_size)
    ]
    shares = [restore(shared_sp, refs, missing="mask", rank_slice=rank, experts=SHAPE) for rank in ranks]
    for name in ("tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts", "weight_versions"):
        for i, ref in enumerate(refs):
            first = ref.response_start if name in ("loss_masks", "rollout_log_probs", "weight_versions") else 0
            last = ref.n_tokens - (name == "rollout_routed_experts")
            if name not in whole:
                continue
            joined = np.full_like(whole[name][i], -9)
            for rank, share in zip(ranks, shares, strict=True):
                at = [p for a, b in rank.ranges(ref.n_tokens) for p in range(a, b) if first <= p < last]
                assert (joined[np.array(at, int) - first] == -9).all()
                joined[np.array(at, int) - first] = share[name][i]
            assert_array_equal(joined, whole[name][i])


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_packed_part_has_the_rows_of_its_tokens(sp, cp_size, framework):
    refs = [with_gap(sp), with_unit(sp)[0], with_fields(sp, "a", 6), with_gap(sp).head(1)]
    fields = ["token_ids", "loss_mask", "logprobs", "routed_experts", "weight_versions"]
    whole = restore(sp, refs, "packed", fields=fields, missing="arange")
    for rank in range(cp_size):
        mine = RankSlice(cp_rank=rank, cp_size=cp_size)
        part = restore(sp, refs, "packed", fields=fields, missing="arange", rank_slice=mine, framework=framework)
        part = {name: as_numpy(value) for name, value in part.items()}
        own = [[p for a, b in mine.ranges(ref.n_tokens) for p in range(a, b)] for ref in refs]
        at = [start + p for start, each in zip(whole["cu_seqlens"], own, strict=False) for p in each]
        assert part["position_ids"].tolist() == [p for each in own for p in each]
        assert part["cu_seqlens"].tolist() == np.cumsum([0, *map(len, own)]).tolist()
        for name in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
            assert_array_equal(part[name], whole[name][at])
        first = [[token + (3 if i == 1 and token > 2 else 0) for token in range(9)] for i in range(4)]
        rows = [
            start + row
            for i, (start, each) in enumerate(zip(whole["cu_rows"], own, strict=False))
            for p in each
            for row in range(first[i][p], first[i][p + 1])
        ]
        assert_array_equal(part["routed_experts"], whole["routed_experts"][rows])


# -- what is fresh, and bit for bit ------------------------------------------------------------------------------------


def arrays_of(batch):
    for value in batch.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Ragged):
                yield from part
            elif isinstance(part, np.ndarray | torch.Tensor):
                yield part


@pytest.mark.parametrize("layout", ["slime", "miles", "verl", "nested", "packed"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_are_writable_contiguous_and_nobody_elses(sp, layout, framework):
    s = session(sp)
    add(s, counting(5), counting(4, 20), weight_version="3")
    (ref,) = s.finalize()
    seen = []
    for value in arrays_of(restore(sp, [ref, ref], layout, framework=framework, version=3)):
        if isinstance(value, torch.Tensor):
            value = (value.values() if value.is_nested else value).numpy()
        assert value.flags.writeable
        assert value.flags.c_contiguous
        assert not any(np.shares_memory(value, other) for other in seen)
        seen.append(value)
        value[...] = 0
    assert restore(sp, ref)["tokens"][0].tolist() == counting(5) + counting(4, 20)


@pytest.mark.parametrize(("n_experts", "stored"), [(256, "uint8"), (512, "uint16"), (70_000, "uint32")])
@pytest.mark.parametrize("layout", ["slime", "verl", "nested", "packed"])
def test_routing_of_any_width_comes_back(sp, n_experts, stored, layout):
    shape = spool.MoEShape(num_layers=2, num_experts=n_experts, topk=2)
    sent = np.array([[[0, n_experts - 1], [255, n_experts - 2]], [[1, 2], [254, 0]]], np.int32)
    s = sp.session("wide", experts=shape)
    s.append(prompt_token_ids=[1, 2], response_token_ids=[3], routed_experts=sent)
    (ref,) = s.finalize()
    assert sp.read(ref, dtype="stored")["routed_experts"].dtype == stored
    for target in ({}, {"framework": "torch"}, {"framework": "torch", "device": "cpu"}):
        batch = restore(sp, [ref], layout, **target)
        name = LISTS.get(layout, LISTS["nested"])[3]
        got = as_numpy(batch[name])[:2] if layout == "packed" else parts(batch[name])[0]
        assert_array_equal(got, sent)
        wanted = {"uint8": np.uint8, "uint16": np.int16, "uint32": np.int32}[stored] if layout == "verl" else np.int32
        assert got.dtype == wanted


@pytest.mark.parametrize("target", [{}, {"framework": "torch"}, {"framework": "torch", "device": "cpu"}])
@pytest.mark.parametrize("layout", ["slime", "miles", "verl", "nested", "packed"])
@pytest.mark.parametrize("order", [1, -1])
def test_references_of_different_width_do_not_wrap(sp, layout, target, order):
    refs, sent = [], []
    for n_experts in (200, 256, 512)[::order]:
        s = sp.session(f"{n_experts}", experts=spool.MoEShape(num_layers=2, num_experts=n_experts, topk=2))
        sent.append(np.array([[[0, n_experts - 1], [3, n_experts - 2]]], np.int32))
        s.append(prompt_token_ids=[1], response_token_ids=[2], routed_experts=sent[-1])
        refs += s.finalize()
    batch = restore(sp, refs, layout, **target)
    if layout == "packed":
        assert_array_equal(as_numpy(batch["routed_experts"])[::2], np.concatenate(sent))
    else:
        assert_array_equal(np.concatenate(parts(batch[LISTS[layout][3]])), np.concatenate(sent))
    lazy = restore(sp, refs, layout, lazy=True, **target)
    rows = lazy[LISTS.get(layout, LISTS["nested"])[3]].read(1)
    assert_array_equal(as_numpy(rows)[::2], np.concatenate(sent)[:, 1])


def signed_and_not(sp, n_signed, n_unsigned):
    """Return references to routing with a -1 inside a row, and to one of another spec; with what was sent."""
    refs, sent = [], []
    for number, (n_experts, signed) in enumerate([(n_signed, True), (n_unsigned, False)]):
        shape = spool.MoEShape(num_layers=2, num_experts=n_experts, topk=2)
        s = sp.session(f"{number}", fields=[spool.expert_field(shape, signed=signed)])
        sent.append(np.array([[[0, n_experts - 1], [-1 if signed else 5, n_experts - 2]]], np.int32))
        s.append(prompt_token_ids=[1], response_token_ids=[2], routed_experts=sent[-1])
        refs += s.finalize()
    return refs, sent


@pytest.mark.parametrize("target", [{}, {"framework": "torch"}, {"framework": "torch", "device": "cpu"}])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("n_experts", [(100, 100), (100, 200), (200, 100), (100, 512), (512, 200), (20_000, 60_000)])
def test_entries_of_minus_one_stay_beside_references_without_them(sp, n_experts, order, target):
    refs, sent = signed_and_not(sp, *n_experts)
    refs, sent = refs[::order], sent[::order]
    for layout in ("miles", "verl", "nested"):
        got = parts(restore(sp, refs, layout, **target)[LISTS[layout][3]])
        assert_array_equal(np.concatenate(got), np.concatenate(sent))
    packed = restore(sp, refs, "packed", **target)["routed_experts"]
    assert_array_equal(as_numpy(packed)[::2], np.concatenate(sent))
    with pytest.raises(spool.InputError, match="entries of -1 inside rows, which slime does not take"):
        restore(sp, refs, **target)


@pytest.mark.parametrize("order", [1, -1])
def test_the_row_of_a_last_token_is_the_same_beside_wider_routing(sp, order):
    n = 40
    for number, (n_experts, signed) in enumerate([(100, True), (512, False)]):
        spec = spool.expert_field(spool.MoEShape(num_layers=4, num_experts=n_experts, topk=2), signed=signed)
        s = sp.session(str(number), fields=[spec])
        s.append(
            prompt_token_ids=[1] * (n - 1), response_token_ids=[2], routed_experts=np.full((n - 1, 4, 2), [3, 4], "i4")
        )
        s.finalize()
    packed = restore(sp, list(sp.segments())[::order], "packed")["routed_experts"]
    expected = (np.arange(8) + (n - 1) * 8) % 512
    for last in (n - 1, 2 * n - 1):
        assert_array_equal(packed[last].reshape(-1), expected)


def test_what_a_field_is_holds_what_each_reference_has(sp):
    def field(**more):
        return spool.FieldSpec(**{"name": "mine", "dtype": "int8", "align": "token", "train_dtype": "int32"} | more)

    s = session(sp)
    add(s, [1], [2])
    (ref,) = s.finalize()
    layered = {"shape": (2, 3), "num_layers": 4, "layers": (1, 2)}
    for one, other, wanted in [
        (field(), field(dtype="uint8"), field(dtype="int16")),
        (field(bound=9), field(bound=99, missing=-1), field(bound=99, missing=-1)),
        (field(bound=9), field(), field()),
        (field(dtype="uint32", bound=9), field(missing=-1, bound=5), field(dtype="int64", missing=-1, bound=9)),
        (field(dtype="int16", train_dtype="float32"), field(dtype="bfloat16", train_dtype="float32"),
         field(dtype="float32", train_dtype="float32")),
        (field(**layered), field(**layered | {"layers": (2, 3)}),
         field(**layered | {"shape": (3, 3), "layers": (1, 2, 3)})),
        (field(**layered), field(shape=(4, 3), num_layers=4), field(shape=(4, 3), num_layers=4)),
    ]:  # fmt: skip
        for pair in ([one, other], [other, one], [one, other, one, other]):
            assert agreed([(ref, spec) for spec in pair], packed=True) == wanted
    wide = {"train_dtype": "float64"}
    for one, other, says in [
        (field(missing=-1), field(missing=-2), "missing -1 in .* and missing -2 in"),
        (field(shape=(4, 3)), field(shape=(4, 3), num_layers=4), "layers False in .* and layers True in"),
        (
            field(dtype="int64", **wide),
            field(dtype="uint64", **wide),
            "stored dtype int64 in .* dtype uint64 in",
        ),
        (field(), field(train_dtype="float32"), "mine has dtype int32 in [^,]+ and dtype float32 in [^,]+: put them"),
    ]:
        with pytest.raises(spool.InputError, match=says):
            agreed([(ref, one), (ref, one), (ref, other)], packed=True)
        with pytest.raises(spool.InputError, match="in batches of their own"):
            agreed([(ref, other), (ref, one)], packed=False)


def test_references_of_different_models_are_refused(sp):
    refs = []
    for n_layers in (2, 3):
        s = sp.session(f"{n_layers}", experts=spool.MoEShape(num_layers=n_layers, num_experts=8, topk=1))
        s.append(prompt_token_ids=[1], response_token_ids=[2], routed_experts=np.full((1, n_layers, 1), 3))
        refs += s.finalize()
    for options in ({}, {"layout": "packed"}, {"lazy": True}):
        with pytest.raises(spool.InputError, match=r"has rows of \(2, 1\) in 2@lineage/0 and rows of \(3, 1\) in 3@"):
            restore(sp, refs, **options)


def test_a_field_that_is_positions_in_some_references_only_is_refused_where_it_would_be_packed(sp):
    refs = []
    for rebased in (False, True):
        links = spool.FieldSpec(name="links", dtype="int32", align="token", positions=rebased)
        s = sp.session(None, fields=[links])
        s.append(prompt_token_ids=[1, 2], response_token_ids=[3], fields={"links": np.arange(3, dtype=np.int32)})
        refs += s.finalize()
    for chosen in (refs, refs[::-1]):
        said = f"links has positions {chosen is not refs} in {chosen[0].id} and positions {chosen is refs} in "
        with pytest.raises(spool.InputError, match=said):
            restore(sp, chosen, "packed")
        assert [part.tolist() for part in restore(sp, chosen, "nested")["links"]] == [[0, 1, 2]] * 2
    assert restore(sp, refs[:1] * 2, "packed")["links"].tolist() == [0, 1, 2, 0, 1, 2]
    assert restore(sp, refs[1:] * 2, "packed")["links"].tolist() == [0, 1, 2, 3, 4, 5]


def test_narrow_bytes_are_what_travels_to_a_device(sp, monkeypatch):
    s = session(sp)
    add(s, counting(5), counting(4, 20))
    refs, moved, convert = s.finalize(), [], tensors.tensor
    monkeypatch.setattr(
        tensors, "tensor", lambda array, *to: moved.append((array.dtype, array.ndim)) or convert(array, *to)
    )
    for layout in ("slime", "nested", "packed"):
        del moved[:]
        batch = restore(sp, refs, layout, framework="torch", device="meta", fields=["routed_experts"])
        rows = batch[LISTS.get(layout, LISTS["nested"])[3]]
        rows = rows[0] if isinstance(rows, list) else rows
        assert (rows.device.type, rows.dtype) == ("meta", torch.int32)
        assert [dtype for dtype, n_dims in moved if n_dims > 1] == [np.uint8]
    lazy = restore(sp, refs, framework="torch", device="meta", lazy=True)["rollout_routed_experts"]
    del moved[:]
    assert lazy.read(1).device.type == "meta"
    assert moved == [(np.uint8, 2)]


def test_logprobs_keep_their_bits(sp):
    s, probs = session(sp), np.array([-0.1, np.nan, -np.inf, -0.0], np.float32)
    add(s, [1, 2], [3, 4, 5, 6], logprobs=probs, loss_mask=[1, 0, 1, 1])
    (ref,) = s.finalize()
    for framework in ("numpy", "torch"):
        (got,) = restore(sp, ref, framework=framework)["rollout_log_probs"]
        assert as_numpy(got).tobytes() == probs.tobytes()
    assert restore(sp, ref)["loss_masks"][0].tolist() == [1, 0, 1, 1]


def test_observations_have_no_logprob_no_mask_and_no_version(sp):
    s = session(sp)
    add(s, [1, 2], [3, 4], weight_version="5", logprobs=[-1, -2])
    add(s, [1, 2, 3, 4, 8, 9], [5], weight_version="6", logprobs=[-3])
    (ref,) = s.finalize()
    batch = restore(sp, ref, version="6")
    assert batch["rollout_log_probs"][0].tolist() == [-1, -2, 0, 0, -3]
    assert batch["loss_masks"][0].tolist() == [1, 1, 0, 0, 1]
    assert batch["weight_versions"][0].tolist() == [5, 5, -1, -1, 6]
    assert batch["staleness"][0].tolist() == [1, 1, 0, 0, 0]
    assert batch["loss_masks"][0].dtype == np.int32


@pytest.mark.parametrize("n_prompt", [0, 1])
def test_empty_and_tiny_sequences(sp, n_prompt):
    s = session(sp)
    add(s, counting(n_prompt), counting(1 - n_prompt, 50))
    refs = s.finalize() or s.view("timeline")
    empty = [ref.head(0) for ref in refs]
    for layout in ("slime", "miles", "verl", "nested", "packed"):
        for framework in ("numpy", "torch"):
            batch = restore(sp, [*refs, *empty], layout, framework=framework, experts=SHAPE)
            if layout == "packed":
                assert as_numpy(batch["cu_seqlens"]).tolist() == [0, 1, 1]
                assert batch["routed_experts"].shape == (1, N_LAYERS, TOPK)
            else:
                rows = parts(batch[LISTS[layout][3]])
                assert [each.shape for each in rows] == [(0, N_LAYERS, TOPK)] * 2
                assert [len(each) for each in parts(batch[LISTS[layout][0]])] == [1, 0]


def test_an_empty_batch(sp):
    assert restore(sp, [])["tokens"] == []
    assert restore(sp, [], "packed")["cu_seqlens"].tolist() == [0]
    assert restore(sp, [], "packed", framework="torch")["token_ids"].shape == (0,)
    assert restore(sp, [], "verl", framework="torch")["kept"] == []


# -- further fields ----------------------------------------------------------------------------------------------------

SPECS = (
    spool.FieldSpec(name="value", dtype="bfloat16", align="token", train_dtype="float32"),
    spool.FieldSpec(name="half", dtype="bfloat16", align="response"),
    spool.FieldSpec(name="kept_ids", dtype="int32", align="response", ragged=True),
    spool.FieldSpec(name="links", dtype="int8", align="token", positions=True),
    spool.FieldSpec(name="kl", dtype="float32", align="step"),
    spool.FieldSpec(
        name="indexer_topk", dtype="uint16", align="forward", shape=(1, 3), bound=1000, num_layers=2, layers=(1,),
        train_dtype="int32",
    ),
)  # fmt: skip


def with_fields(sp, session_id, n):
    s = sp.session(session_id, experts=SHAPE, fields=SPECS)
    tokens = counting(n)
    fields = {
        "value": np.arange(n) / 2, "half": np.arange(3) - 1.5, "kept_ids": [[7], [], [8, 9]],
        "links": [-1, *range(n - 1)], "kl": 0.25 * n, "indexer_topk": np.arange((n - 1) * 3).reshape(-1, 1, 3),
    }  # fmt: skip
    add(s, tokens[:-3], tokens[-3:], fields=fields)
    return s.finalize()[0]


def test_fields_of_ones_own(sp):
    refs = [with_fields(sp, "a", 6), with_fields(sp, "b", 8)]
    batch = restore(sp, refs, "miles", framework="torch")
    assert batch["value"][0].dtype == torch.float32
    assert batch["half"][1].dtype == torch.bfloat16
    assert batch["half"][1].tolist() == [-1.5, -0.5, 0.5]
    assert batch["kept_ids"][0].values.tolist() == [7, 8, 9]
    assert batch["kept_ids"][0].offsets.tolist() == [0, 1, 1, 3]
    assert [each.tolist() for each in batch["kl"]] == [[1.5], [2.0]]
    assert batch["rollout_indexer_topk"][1].shape == (7, 2, 3)
    assert batch["rollout_indexer_topk"][1].dtype == torch.int32
    assert batch["rollout_indexer_topk"][1][:, 1].flatten().tolist() == list(range(21))
    assert restore(sp, refs, "slime")["half"][0].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_fields_of_ones_own_packed(sp, framework):
    refs = [with_fields(sp, "a", 6), with_fields(sp, "b", 8)]
    batch = restore(sp, refs, "packed", framework=framework)
    assert batch["links"].tolist() == [-1, 0, 1, 2, 3, 4, -1, 6, 7, 8, 9, 10, 11, 12]
    assert batch["half"].tolist() == [0, 0, 0, -1.5, -0.5, 0.5, 0, 0, 0, 0, 0, -1.5, -0.5, 0.5]
    assert batch["kept_ids"].values.tolist() == [7, 8, 9, 7, 8, 9]
    assert batch["kept_ids"].offsets.tolist() == [0, 1, 1, 3, 4, 4, 6]
    assert batch["kl"].tolist() == [1.5, 2.0]
    assert batch["cu_steps"].tolist() == [0, 1, 2]
    assert batch["indexer_topk"].shape == (14, 2, 3)
    with pytest.raises(spool.InputError, match="links holds token positions"):
        restore(sp, refs, "packed", rank_slice=RankSlice(cp_size=2))


def test_positions_do_not_wrap_when_they_are_rebased(sp):
    specs = [
        spool.FieldSpec(name="up", dtype="uint8", align="token", positions=True),
        spool.FieldSpec(name="many", dtype="uint8", align="token", positions=True, ragged=True),
    ]
    refs = []
    for name in ("a", "b"):
        s = sp.session(name, fields=specs)
        s.append(
            prompt_token_ids=range(199), response_token_ids=[7],
            fields={"up": range(200), "many": [[i, 199] for i in range(200)]},
        )  # fmt: skip
        refs += s.finalize()
    for framework in ("numpy", "torch"):
        batch = restore(sp, refs, "packed", framework=framework)
        assert batch["up"].tolist() == list(range(400))
        assert batch["many"].values.tolist() == [x for i in range(400) for x in (i, 399 if i > 199 else 199)]


@pytest.mark.parametrize("layout", ["slime", "nested", "packed"])
def test_a_late_array_of_an_empty_response_alone_and_among_others(sp, layout):
    refs = []
    for n in (0, 2):
        s = session(sp, None)
        add(s, counting(3), counting(n, 50))
        refs += s.finalize()
        sp.attach(refs[-1], align="response", advantages=np.arange(1, n + 1, dtype=np.float32))
    fresh = {ref.session_id: ref for ref in sp.segments()}
    for none, two in (refs, [fresh[ref.session_id] for ref in refs]):
        for chosen, wanted in (([none], [[]]), ([two, none], [[1, 2], []]), ([none, none, two], [[], [], [1, 2]])):
            got = restore(sp, chosen, layout, fields=["advantages"])["advantages"]
            if layout == "packed":
                wanted = [x for own in wanted for x in (0, 0, 0, *own)]
                assert got.dtype == np.float32 and got.tolist() == wanted
            else:
                assert [part.tolist() for part in got] == wanted


@pytest.mark.parametrize("layout", ["slime", "nested", "packed"])
def test_late_arrays_by_name_also_of_a_head(sp, layout):
    s = session(sp)
    add(s, counting(5), counting(4, 50))
    (ref,) = s.finalize()
    sp.attach(ref, teacher_logprobs=np.array([1, 2, 3, 4], np.float32))
    for part, wanted in ((ref, [1, 2, 3, 4]), (ref.head(7), [1, 2]), (ref.head(7).head(6), [1]), (ref.head(3), [])):
        batch = restore(sp, [part], layout, fields=["teacher_logprobs"])
        got = batch["teacher_logprobs"] if layout == "packed" else batch["teacher_logprobs"][0]
        assert got.tolist() == ([0.0] * part.response_start if layout == "packed" else []) + wanted
        assert set(batch) - {"teacher_logprobs"} <= {
            "kept", "total_lengths", "response_lengths", "truncated", "cu_seqlens", "cu_rows", "max_seqlen",
            "position_ids", "response_starts",
        }  # fmt: skip


def test_what_references_say_of_their_samples(sp):
    s = session(sp, "a", sample_index=4)
    add(s, [1], [2], finish_reason="length")
    (first,) = s.finalize(outcome="completed")
    s = session(sp, "b", sample_index=5)
    add(s, [1], [2], finish_reason="stop")
    (second,) = s.finalize(outcome="truncated")
    batch = restore(sp, [first, second])
    assert (batch["truncated"], batch["sample_indices"]) == ([1, 1], [4, 5])
    assert "rewards" not in batch
    sp.annotate("a", reward=1.0)
    sp.annotate("b", reward=0.5)
    known = list(sp.segments())
    assert restore(sp, known)["rewards"] == restore(sp, known)["raw_reward"] == [1.0, 0.5]


# -- a segment cut by the control plane --------------------------------------------------------------------------------


def test_a_head_is_every_field_cut_together(sp):
    ref = with_fields(sp, "a", 8)
    whole = sp.read(ref)
    for n in range(9):
        part = ref.head(n)
        got = sp.read(part)
        assert (part.n_tokens, part.n_rows, part.response_start) == (n, n, min(n, 5))
        assert part.cut_tokens == 8 - n
        assert part.trainable_tokens == max(n - 5, 0) == got["loss_mask"].sum() if n else True
        for name in ("token_ids", "loss_mask", "value", "links"):
            assert_array_equal(got.get(name, whole[name][:0]), whole[name][:n])
        for name in ("logprobs", "half"):
            assert_array_equal(got.get(name, whole[name][:0]), whole[name][: max(n - 5, 0)])
        for name in ("routed_experts", "indexer_topk"):
            assert_array_equal(got.get(name, whole[name][:0]), whole[name][: max(n - 1, 0)])
        if n > 5:
            assert got["kept_ids"].offsets.tolist() == whole["kept_ids"].offsets[: n - 4].tolist()
        assert spool.ref_from_json(part.to_json()) == part
        assert part.head(n) is part
        exact = ref.head(n, fields=SPECS)
        assert all(each.n_tokens == n for each in (part, exact))
        assert_array_equal(sp.read(exact).get("value", whole["value"][:0]), whole["value"][:n])
        assert sum(extent.n for extent in exact.extents.get("value", ())) == n
    assert ref.head(8) is ref
    assert (ref.head(4).key, ref.head(4).head(2).key) == (ref.key, ref.key)
    for n in (-1, 9):
        with pytest.raises(spool.InputError, match=f"{n} tokens of a reference that has 8"):
            ref.head(n)
    for odd in (1.5, True, "x", None, float("nan"), 2**70):
        with pytest.raises(spool.InputError, match="n_tokens must be an integer"):
            ref.head(odd)


def test_a_head_keeps_what_is_trained_and_what_is_cleared(sp):
    s = session(sp)
    add(s, counting(3), [50, 51], weight_version="1")
    add(s, [*counting(3), 50, 51, 60], [52, 53, 54], loss_mask=[0, 0, 1], weight_version="2")
    add(s, [*counting(3), 50, 51, 61], [55, 56], weight_version="3")
    first, second = s.finalize()
    assert [(span.start, span.stop, span.trained) for span in second.head(5).spans] == [(3, 5, False)]
    assert second.head(5).trainable_tokens == restore(sp, second.head(5))["loss_masks"][0].sum() == 0
    part = first.head(7)
    assert restore(sp, part)["loss_masks"][0].tolist() == [1, 1, 0, 0]
    assert (part.spans[-1].n_cleared, part.trainable_tokens) == (0, 3)  # at most
    assert [(v.version, v.start, v.stop) for v in part.versions] == [("1", 3, 5), ("2", 6, 7)]
    assert part.version_span == ("1", "2")


@pytest.mark.parametrize("layout", ["nested", "packed"])
def test_a_head_of_nothing_with_inline_layers_beside_a_segment_without_rows_of_them(sp, layout):
    layered = spool.FieldSpec(name="layered", dtype="uint16", align="forward", shape=(3, 2), num_layers=3)
    refs = []
    for n in (4, 1):
        s = sp.session(None, fields=[layered])
        rows = np.ones((n - 1, 3, 2), np.uint16)
        s.append(prompt_token_ids=counting(n), response_token_ids=[], fields={"layered": rows})
        refs += s.finalize(inline=["layered"])
    chosen = [refs[0].head(0, [layered]), refs[1]]
    for rank in (RankSlice(layers=slice(1, 3)), RankSlice(cp_size=2, split="contiguous")):
        got = restore(sp, chosen, layout, fields=["layered"], rank_slice=rank)["layered"]
        n_layers = 3 if rank.layers is None else 2
        shapes = [part.shape for part in got] if layout == "nested" else [got.shape]
        assert shapes == ([(0, n_layers, 2)] * 2 if layout == "nested" else [(1, n_layers, 2)])


def test_a_head_of_inline_payload(sp):
    s = sp.session("s", experts=SHAPE, fields=SPECS[:1])
    add(s, counting(4), counting(3, 50), fields={"value": np.arange(7)})
    (ref,) = s.finalize(inline=["token_ids", "loss_mask", "logprobs", "routed_experts", "value"])
    part = ref.head(5)
    assert "value" not in part.inline
    assert_array_equal(restore(sp, part, "nested")["value"][0], np.arange(5))
    assert part.inline["loss_mask"].shape == (5,)
    for name in ("tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts"):
        assert_array_equal(restore(sp, part)[name][0], restore(sp, sp.view("s")[0].head(5))[name][0])


def test_a_released_head_releases_its_segment(sp):
    s = session(sp)
    add(s, counting(4), counting(3, 50))
    (ref,) = s.finalize()
    sp.release(ref.head(5))
    assert list(sp.segments(where="released = 0")) == []


# -- multimodal units --------------------------------------------------------------------------------------------------


def test_units_count_as_the_rows_they_expand_to(sp):
    ref, experts = with_unit(sp)
    assert_array_equal(restore(sp, ref)["rollout_routed_experts"][0], experts)
    packed = restore(sp, [ref, ref], "packed")
    assert packed["cu_seqlens"].tolist() == [0, 8, 16]
    assert packed["cu_rows"].tolist() == [0, 11, 22]
    assert_array_equal(packed["routed_experts"][11:21], experts)
    ranks = [RankSlice(cp_rank=rank, cp_size=2, split="contiguous") for rank in (0, 1)]
    first, second = (restore(sp, ref, rank_slice=rank)["rollout_routed_experts"][0] for rank in ranks)
    assert_array_equal(np.concatenate([first, second]), experts)
    assert len(first) == 4 + 3
    assert_array_equal(restore(sp, ref.head(3))["rollout_routed_experts"][0], experts[:5])


def test_a_gap_in_a_units_rows_takes_the_next_token_out(sp):
    s = session(sp)
    s.append(
        prompt_token_ids=[1, 2], response_token_ids=[3], routed_experts=routing([1, 2, 3]), logprobs=[-1],
    )  # fmt: skip
    s.append(
        prompt_token_ids=[1, 2, 3, 99], response_token_ids=[7, 8], logprobs=[-1, -2], units=[("image", 3, 5)],
    )  # fmt: skip
    (ref,) = s.view(gaps="keep")
    assert ref.n_rows == 10
    assert restore(sp, ref, missing="mask")["loss_masks"][0].tolist() == [1, 0, 0, 0]
    assert restore(sp, ref, missing="arange")["loss_masks"][0].tolist() == [1, 0, 1, 1]


def test_coverage_says_what_was_never_sent(sp):
    ref, other = with_gap(sp), with_fields(sp, "a", 6)
    first, second = sp.coverage([ref, other])
    assert first["routed_experts"].gaps == ((4, 7),)
    assert first["routed_experts"].spec.bound == N_EXPERTS
    assert (first["token_ids"].gaps, first["logprobs"].gaps) == ((), ())
    assert set(first) == {"token_ids", "logprobs", "routed_experts"}
    assert second["kept_ids"].spec.ragged
    assert sp.coverage([ref, other], ["value"])[0]["value"].gaps == ((0, 8),)
    sp.attach(other, judged=np.zeros(6, np.float32))
    assert sp.coverage([other], ["judged"])[0]["judged"].spec.align == "token"
    with pytest.raises(spool.NotFoundError, match="nothing"):
        sp.coverage([ref], ["nothing"])


# -- gaps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slime", "miles", "verl", "nested", "packed"])
@pytest.mark.parametrize("target", [{}, {"framework": "torch"}, {"framework": "torch", "device": "cpu"}])
def test_what_stands_for_missing_routing(sp, layout, target):
    ref = with_gap(sp)
    with pytest.raises(spool.GapError, match=r"routed_experts was never sent for positions \[4, 7\)"):
        restore(sp, [ref], layout, **target)
    wanted = np.array([plain_rows(row) for row in range(4, 7)])
    for missing in ("arange", "mask"):
        batch = restore(sp, [ref], layout, missing=missing, **target)
        name = LISTS.get(layout, LISTS["nested"])[3]
        rows = as_numpy(batch[name]) if layout == "packed" else parts(batch[name])[0]
        minus = layout == "miles" and missing == "mask"
        assert_array_equal(rows[4:7], np.full_like(wanted, -1) if minus else wanted)
        assert_array_equal(rows[:4], routing([*counting(3), 50, 51]))
        masks = batch["loss_mask"] if layout == "packed" else parts(batch[LISTS[layout][1]])[0]
        assert as_numpy(masks)[-5:].tolist() == ([1, 1, 0, 1, 1] if missing == "arange" else [1, 1, 0, 0, 0])


def test_an_unsigned_field_has_consecutive_ids_where_minus_one_does_not_fit(sp):
    spec = spool.FieldSpec(name="chosen", dtype="uint8", align="forward", shape=(1, 2), bound=9, num_layers=1)
    s = sp.session("s", fields=[spec])
    s.append(prompt_token_ids=[1], response_token_ids=[2], fields={"chosen": np.array([[[3, 4]]])})
    s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4])
    batch = restore(sp, s.view(gaps="keep"), "miles", fields=["chosen"], missing="mask")
    assert batch["chosen"][0].tolist() == [[[3, 4]], [[2, 3]], [[4, 5]]]


def test_consecutive_experts_do_not_depend_on_the_rank(sp):
    ref = with_gap(sp)
    whole = restore(sp, ref, missing="arange")["rollout_routed_experts"][0]
    late = restore(sp, ref, missing="arange", rank_slice=RankSlice(cp_rank=1, cp_size=2, split="contiguous"))
    assert_array_equal(late["rollout_routed_experts"][0], whole[4:])
    stage = restore(sp, ref, missing="arange", rank_slice=RankSlice(layers=slice(1, 3)))
    assert_array_equal(stage["rollout_routed_experts"][0], whole[:, 1:])


def test_nothing_stands_for_missing_logprobs_but_a_mask(sp):
    ref = with_gap(sp, logprobs=None)
    with pytest.raises(spool.GapError, match=r"logprobs was never sent .*pass missing='mask'"):
        restore(sp, ref, missing="arange")
    batch = restore(sp, ref, missing="mask")
    assert batch["rollout_log_probs"][0][-2:].tolist() == [0, 0]
    assert batch["loss_masks"][0].tolist() == [1, 1, 0, 0, 0]


def test_nothing_stands_for_missing_tokens(open_spool):
    sp = open_spool(options="fields=logprobs,routed_experts")
    s = session(sp)
    add(s, counting(3), [50])
    (ref,) = s.finalize()
    for missing in ("arange", "mask"):
        with pytest.raises(spool.GapError, match=r"token_ids was never sent .*leave the field out"):
            restore(sp, ref, missing=missing)
    assert "tokens" not in restore(sp, ref, fields=["logprobs", "routed_experts"])


def test_one_reference_without_routing_beside_one_that_has_it(sp):
    s = session(sp, "a")
    add(s, counting(3), [50])
    (with_rows,) = s.finalize()
    s = session(sp, "b")
    add(s, counting(3, 200), [70], routed_experts=None)
    (without,) = s.finalize()
    with pytest.raises(spool.GapError, match=r"b@lineage/0: routed_experts was never sent for positions \[0, 3\)"):
        restore(sp, [with_rows, without])
    batch = restore(sp, [with_rows, without], missing="mask")
    assert_array_equal(batch["rollout_routed_experts"][1], [plain_rows(row) for row in range(3)])
    assert [each.tolist() for each in batch["loss_masks"]] == [[1], [0]]
    alone = restore(sp, without, missing="mask")
    assert "rollout_routed_experts" not in alone and alone["loss_masks"][0].tolist() == [1]
    for named_so in ({"experts": SHAPE}, {"fields": ["routed_experts", "loss_mask"]}):
        assert restore(sp, without, missing="mask", **named_so)["loss_masks"][0].tolist() == [0]
    eager, lazy = (
        restore(sp, [with_rows, without], "miles", missing="mask", lazy=lazy)["rollout_routed_experts"]
        for lazy in (False, True)
    )
    assert (eager[1] == -1).all()
    n, rows = len(eager[0]), np.asarray(lazy.read(0))
    assert_array_equal(rows[n + 1 : n + 4], [plain_rows(row)[0] for row in range(3)])


# -- samples that failed, and what is left out ------------------------------------------------------------------------


def test_an_entry_that_is_missing_inside_a_row(sp):
    shape = spool.MoEShape(num_layers=2, num_experts=512, topk=2)
    rows = np.array([[[5, -1], [3, 4]], [[1, 2], [7, 8]]], np.int32)
    s = sp.session("s", fields=[spool.expert_field(shape, signed=True)])
    s.append(prompt_token_ids=[1, 2], response_token_ids=[3], routed_experts=rows)
    (ref,) = s.finalize()
    for layout in ("miles", "verl", "nested"):
        for framework in ("numpy", "torch"):
            got = parts(restore(sp, ref, layout, framework=framework)[LISTS[layout][3]])[0]
            assert_array_equal(got, rows)
    with pytest.raises(spool.InputError, match="entries of -1 inside rows, which slime does not take"):
        restore(sp, ref)


def test_a_step_is_restored_like_a_segment(sp):
    s = session(sp)
    step = add(s, counting(5), counting(4, 20), weight_version="3")
    for layout in ("slime", "packed"):
        one, other = restore(sp, step, layout, version=3), restore(sp, s.finalize(), layout, version=3)
        assert one.keys() == other.keys()
        for name in ("weight_versions", "staleness"):
            assert_array_equal(one[name], other[name])
    assert_array_equal(one["routed_experts"], other["routed_experts"])


@pytest.mark.parametrize("layout", ["slime", "verl", "nested", "packed"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_none_stands_for_a_sample_that_failed(sp, layout, framework):
    s = session(sp)
    add(s, counting(5), counting(4, 20), weight_version="3")
    (ref,) = s.finalize()
    batch = restore(sp, [None, ref], layout, lengths=[(6, 2), None], framework=framework, version=4)
    assert batch["kept"] == [0, 1]
    if layout == "packed":
        assert as_numpy(batch["cu_seqlens"]).tolist() == [0, 6, 15]
        assert not as_numpy(batch["loss_mask"])[:6].any()
        assert not as_numpy(batch["routed_experts"])[:5].any()
        return
    tokens, masks, probs, rows = (parts(batch[name])[0] for name in LISTS[layout])
    assert [len(each) for each in (tokens, probs, rows)] == [6, 2, 5]
    assert len(masks) == (6 if layout == "nested" else 2)
    assert not any(each.any() for each in (tokens, masks, probs, rows))
    assert (parts(batch["weight_versions"])[0] == -1).all()
    assert (batch["total_lengths"], batch["response_lengths"]) == ([6, 9], [2, 4])
    assert_array_equal(parts(batch[LISTS[layout][3]])[1], routing(counting(5) + counting(4, 20)))


def test_a_batch_of_failed_samples_only(sp):
    batch = restore(sp, [None, None], lengths=[(3, 1), (0, 0)], experts="qwen3.6-35b-a3b")
    assert [each.shape for each in batch["rollout_routed_experts"]] == [(2, 40, 8), (0, 40, 8)]
    assert "rollout_routed_experts" not in restore(sp, [None], lengths=[(3, 1)])
    with pytest.raises(spool.InputError, match=r"no reference of the batch says what routed_experts is.*experts="):
        restore(sp, [None], lengths=[(3, 1)], fields=["routed_experts"])


def test_segments_are_left_out(sp):
    refs = []
    for name, outcome in (("a", "completed"), ("b", "aborted"), ("c", "truncated")):
        s = session(sp, name)
        add(s, [1, 2], [3], logprobs=[np.nan] if name == "c" else [-1], loss_mask=[int(name != "a")])
        refs += s.finalize(outcome=outcome)
    for giant in ((2**40, 1), (10**30, 1)):
        with pytest.raises(spool.InputError, match=f"lengths must be .* both below {2**31}"):
            restore(sp, [None], lengths=[giant], fields=["token_ids"])
    lengths = [None, None, None, (3, 1)]

    def left(*drop):
        return restore(sp, [*refs, None], lengths=lengths, drop=drop)["kept"]

    assert left() == [0, 1, 2, 3]
    assert left("aborted") == [0, 2, 3]
    assert left("failed") == [0, 1, 2]
    assert left("nonfinite", "aborted") == [0, 3]
    assert left("untrained") == [1, 2]
    assert left("superseded") == [0, 1, 2, 3]


# -- weight versions ---------------------------------------------------------------------------------------------------


def versioned(sp, *spans):
    s = session(sp, None)
    response = counting(spans[-1][2])
    s.append(prompt_token_ids=[1, 2], response_token_ids=response, weight_version=list(spans))
    return s.finalize()[0]


def test_versions_are_numbers_where_all_are(sp):
    refs = [versioned(sp, ("9", 0, 2), ("10", 2, 3)), versioned(sp, ("7", 0, 1))]
    order = version_order(refs, 12)
    assert (order.names, order.current) == (None, 12)
    assert token_versions(refs[0], order).tolist() == [-1, -1, 9, 9, 10]
    assert staleness(token_versions(refs[0], order), order).tolist() == [0, 0, 3, 3, 2]
    batch = restore(sp, refs, version="12", fields=["weight_versions", "staleness", "loss_mask"])
    assert [each.tolist() for each in batch["staleness"]] == [[3, 3, 2], [5]]
    assert "version_names" not in batch


def test_versions_that_are_no_numbers_go_by_their_appearance(sp):
    refs = [versioned(sp, ("step-a", 0, 1), ("step-b", 1, 2)), versioned(sp, ("step-a", 0, 1))]
    batch = restore(sp, refs, version="step-c", fields=["weight_versions", "staleness"])
    assert batch["version_names"] == ["step-a", "step-b", "step-c"]
    assert [each.tolist() for each in batch["weight_versions"]] == [[0, 1], [0]]
    assert [each.tolist() for each in batch["staleness"]] == [[2, 1], [2]]
    named = restore(sp, refs, version=["step-b", "x", "step-a"], fields=["staleness"])
    assert [each.tolist() for each in named["staleness"]] == [[0, 2], [0]]
    with pytest.raises(spool.InputError, match="'step-a' is none of those in version=: step-b; name them all"):
        restore(sp, refs, version=["step-b"])


def test_a_version_that_is_named_twice_is_refused(sp):
    ref = versioned(sp, ("a", 0, 1), ("b", 1, 2))
    for told in (["a", "b", "a"], ("b", "b", "a")):
        said = r"version= names '[ab]' 2 times: name each version once, oldest first, the current one last"
        with pytest.raises(spool.InputError, match=said):
            restore(sp, [ref], version=told)
        with pytest.raises(spool.InputError, match=said):
            select([ref], version=told, max_staleness=0)
    back = restore(sp, [ref], version=["b", "a"], fields=["staleness", "loss_mask"], mask_versions=0)
    assert (back["staleness"][0].tolist(), back["loss_masks"][0].tolist()) == ([0, 1], [1, 0])


def test_the_current_version_is_any_integer_that_can_be_written_out(sp):
    ref = versioned(sp, ("1", 0, 1), ("2", 1, 2))
    for version in (3, "3", np.int64(3), np.uint8(3), np.str_("3")):
        assert restore(sp, [ref], version=version, fields=["staleness"])["staleness"][0].tolist() == [2, 1]
    assert [type(name) for name in named(["2", np.str_("3")])] == [str, str]  # they go to other processes
    with pytest.raises(spool.InputError, match="version= is an integer that Python does not write out"):
        restore(sp, [ref], version=10**5000)


def test_versions_too_long_for_an_integer_keep_their_order(sp):
    refs = [versioned(sp, ("9" * 30, 0, 1), ("5", 1, 2))]
    batch = restore(sp, refs, version="1" + "0" * 30)
    assert batch["version_names"] == ["5", "9" * 30, "1" + "0" * 30]
    assert batch["staleness"][0].tolist() == [1, 2]


def test_tokens_and_segments_by_the_age_of_their_weights(sp):
    refs = [versioned(sp, ("9", 0, 2), ("10", 2, 3)), versioned(sp, ("7", 0, 1))]
    plain_ref = session(sp, None)
    add(plain_ref, [1], [2, 3])
    refs += plain_ref.finalize()

    def masks(**options):
        return [each.tolist() for each in restore(sp, refs, fields=["loss_mask"], **options)["loss_masks"]]

    assert masks() == [[1, 1, 1], [1], [1, 1]]
    assert masks(mask_versions="last") == [[0, 0, 1], [1], [1, 1]]
    assert masks(mask_versions=2, version=11) == [[1, 1, 1], [0], [1, 1]]
    assert masks(mask_versions=0, version=10) == [[0, 0, 1], [0], [1, 1]]
    assert masks(mask_versions="last", version=["7", "10", "9"]) == [[1, 1, 0], [1], [1, 1]]
    assert masks(mask_versions=0, version=["7", "10", "9"]) == [[1, 1, 0], [0], [1, 1]]
    assert restore(sp, refs, fields=[], version=["10", "9", "7"], max_staleness=1)["kept"] == [1, 2]
    assert restore(sp, refs, fields=[], version=11, max_staleness=2)["kept"] == [0, 2]
    assert restore(sp, refs, fields=[], version=11, max_staleness=1)["kept"] == [2]


# -- reading -----------------------------------------------------------------------------------------------------------


def fetched(seen):
    return sum(sum(event.fetched_bytes.values()) for event in seen if hasattr(event, "fetched_bytes"))


def test_rows_that_segments_share_are_read_once(spool_uri):
    seen = []
    with spool.open(spool_uri, observer=seen.append) as sp:
        s, prompt = session(sp), counting(6000)
        for i in range(8):
            add(s, prompt, counting(10, 20_000 + 100 * i), step_id=str(i))
            prompt = prompt if i < 7 else []
        refs = s.view(superseded="keep")
        assert len(refs) == 8
        del seen[:]
        restore(sp, refs[:1])
        one = fetched(seen)
        del seen[:]
        batch = restore(sp, refs)
        assert fetched(seen) < 1.05 * one + 8 * 10 * 64
        assert len([event for event in seen if hasattr(event, "fetched_bytes")]) == 1
        for i, rows in enumerate(batch["rollout_routed_experts"]):
            assert_array_equal(rows, routing(counting(6000) + counting(10, 20_000 + 100 * i)))


def test_from_a_cold_root_and_by_its_uri(cold, tmp_path):
    with spool.open(f"file://{tmp_path}/hot?spill={cold}") as sp:
        refs = [ref for name in ("a", "b") for ref in record(sp, name, n_steps=2)]
        sp.publish(refs, timeout_s=120)
        hot = restore(sp, refs, "packed", version=3)
    there = restore(cold, refs, "packed", version=3)
    assert hot.keys() == there.keys()
    for name, value in hot.items():
        assert_array_equal(value, there[name])
    tensors = restore(cold, refs, framework="torch", device="cpu")
    lazy = restore(cold, refs, framework="torch", lazy=True)["rollout_routed_experts"]
    joined = torch.cat([torch.cat([rows, rows[:1]]) for rows in tensors["rollout_routed_experts"]])
    kept = torch.ones(len(joined), dtype=bool)
    kept[torch.cumsum(torch.tensor(tensors["total_lengths"]), 0) - 1] = False
    for layer in range(6):
        assert torch.equal(lazy.read(layer)[kept], joined[kept][:, layer])


def test_a_layer_of_a_cold_root_is_fetched_without_the_others(tmp_path):
    url, seen = f"file://{tmp_path}/cold", []
    with spool.open(f"file://{tmp_path}/hot?spill={url}") as sp:
        refs = [ref for i in range(4) for ref in record(sp, f"s{i}", n_steps=4, n_prompt=400, n_response=300)]
        sp.publish(refs, timeout_s=120)
    with spool.open(url, observer=seen.append) as there:
        restore(there, refs, fields=["routed_experts"])
        whole = fetched(seen)
        del seen[:]
        LazyRouting(there, refs, budget_bytes=0, ahead=False).read(2)
        assert fetched(seen) < whole / 6 * 1.3


def test_damage_and_deletion_are_told(tmp_path):
    uri = f"file://{tmp_path}/spool?retention=released&grace_s=0.001"
    with spool.open(uri) as sp:
        s = session(sp)
        add(s, counting(5000), counting(40, 9000))
        (ref,) = s.finalize()
        sp.flush()
        (shard,) = (tmp_path / "spool" / "streams").glob("*/routed_experts/c/0/0/0")
        good = shard.read_bytes()
        shard.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
        for options in ({}, {"framework": "torch"}):
            with pytest.raises(spool.IntegrityError, match="routed_experts in stream"):
                restore(sp, ref, **options)
        lazy = LazyRouting(sp, [ref])
        with pytest.raises(spool.IntegrityError):
            lazy.read(1)
        assert restore(sp, ref, verify="never")["tokens"]
        shard.write_bytes(good)
        assert_array_equal(lazy.read(1)[:-1], routing(counting(5000) + counting(40, 9000))[:, 1])
        sp.release(ref)
        for _ in range(2):
            sp.gc()
        lazy.release()
        for call in (lambda: restore(sp, ref), lambda: lazy.read(2)):
            with pytest.raises(spool.ReleasedError):
                call()


def test_real_routing_comes_back(sp, shared_data):
    from spool.importers import import_runs

    import_runs(shared_data / "routing", sp)
    refs = list(sp.segments())
    assert len(refs) >= 8
    for folder in {ref.extents["routed_experts"][0].stream for ref in refs}:
        own = [ref for ref in refs if ref.extents["routed_experts"][0].stream == folder]
        tensors, packed = restore(sp, own, framework="torch"), restore(sp, own, "packed", framework="torch")
        starts = packed["cu_seqlens"].tolist()
        for i, ref in enumerate(own):
            read = sp.read(ref)
            assert_array_equal(tensors["rollout_routed_experts"][i], read["routed_experts"])
            assert_array_equal(tensors["rollout_log_probs"][i], read["logprobs"])
            assert_array_equal(packed["routed_experts"][starts[i] : starts[i + 1] - 1], read["routed_experts"])


def test_a_uri_is_opened_once_a_process_and_works_in_a_child(spool_uri):
    with spool.open(spool_uri) as sp:
        s = session(sp)
        add(s, counting(5), counting(4, 20))
        (ref,) = s.finalize()
    first = restore(spool_uri, ref)["tokens"]
    pid = os.fork()
    if not pid:
        os._exit(int(restore(spool_uri, ref)["tokens"][0].tolist() != first[0].tolist()))
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(spool.NotFoundError):
        restore(f"{spool_uri}-other", ref)


def test_numpy_needs_no_torch(spool_uri):
    with spool.open(spool_uri) as sp:
        s = session(sp)
        add(s, counting(5), counting(4, 20))
        (ref,) = s.finalize()
    code = (
        "import sys, spool; from spool.train import restore\n"
        f"ref = spool.ref_from_json({ref.to_json()!r})\n"
        f"[restore({spool_uri!r}, [ref], layout) for layout in ('slime', 'verl', 'packed')]\n"
        f"restore({spool_uri!r}, [ref], lazy=True)['rollout_routed_experts'].read(1)\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'restore', 'LazyRouting'} <= set(dir(spool.train))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "megatron"}, "layout must be one of slime, miles, verl, nested, packed"),
        ({"framework": "jax"}, "framework must be one of numpy, torch"),
        ({"device": "cpu"}, "device must be None where framework='numpy'"),
        ({"framework": "torch", "device": "nowhere"}, "device must be a device that torch knows"),
        ({"missing": 0}, "missing must be one of error, arange, mask"),
        ({"mask_versions": "first"}, "mask_versions must be all, last, or how many"),
        ({"mask_versions": -1}, "mask_versions must be"),
        ({"mask_versions": True}, "mask_versions must be"),
        ({"mask_versions": 3}, "mask_versions= counts from the current weights; say which"),
        ({"max_staleness": 3}, "max_staleness= counts from the current weights"),
        ({"max_staleness": -1, "version": 1}, "max_staleness must be a number of versions, at least 0"),
        ({"rank_slice": RankSlice(split=lambda n, rank, size: [n])}, "tokens must be slices"),
        ({"lazy": 1}, "lazy must be True or False"),
        ({"max_staleness": "3", "version": 1}, "max_staleness must be an integer"),
        ({"version": []}, "version must be a version, or all of them"),
        ({"version": 1.5}, "version must be a version, or all of them"),
        ({"version": True}, "version must be a version, or all of them, oldest first, got bool True"),
        ({"drop": ["late"]}, "drop='late' is none of completed"),
        ({"drop": "failed"}, r"drop must be a list of names; write drop=\['failed'\]"),
        ({"fields": "logprobs"}, "fields must be a list of names"),
        ({"fields": ["staleness"]}, "staleness is counted from the current weights"),
        ({"rank_slice": 1}, "rank_slice must be a RankSlice"),
        ({"experts": 3}, r"experts must be a spool\.MoEShape or a name"),
        ({"lengths": [None, None]}, "lengths= has 2 entries for 1 references"),
        ({"lengths": (3, 1)}, "lengths= has 2 entries"),
        ({"verify": "sometimes"}, "verify must be one of whole, always, never"),
    ],
)
def test_wrong_arguments_are_named(sp, options, message):
    s = session(sp)
    add(s, counting(5), counting(4, 20))
    with pytest.raises(spool.InputError, match=message):
        restore(sp, s.finalize(), **options)


def test_wrong_references_are_named(sp):
    for refs in ("ref", {"a": 1}, [1], 3):
        with pytest.raises(spool.InputError, match="refs must be references, and None with lengths="):
            restore(sp, refs)
    for lengths in (None, [None], [(1, 2)], [(-1, -1)], [3], [("3", 1)]):
        with pytest.raises(spool.InputError, match=r"lengths must be \(n_tokens, response_length\).*entry 0"):
            restore(sp, [None], lengths=lengths)
    for wrong in (None, 3, b"file:///x"):
        with pytest.raises(spool.InputError, match="sp must be an open spool, or its URI"):
            restore(wrong, [])
    with pytest.raises(spool.NotFoundError, match="nothing"):
        s = session(sp)
        add(s, counting(5), counting(4, 20))
        restore(sp, s.finalize(), fields=["nothing"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp_size": 0}, "cp_size must be at least 1"),
        ({"cp_rank": 2, "cp_size": 2}, "cp_rank must be one of 0"),
        ({"split": "spiral"}, "split must be zigzag, contiguous"),
        ({"layers": 3}, "layers must be a slice"),
    ],
)
def test_wrong_ranks_are_named(options, message):
    with pytest.raises(spool.InputError, match=message):
        RankSlice(**options)


def test_a_recorded_field_may_not_be_called_like_a_derived_one(sp):
    s = sp.session("s", fields=[spool.FieldSpec(name="staleness", dtype="int8", align="token")])
    s.append(prompt_token_ids=[1], response_token_ids=[2], fields={"staleness": [1, 2]})
    with pytest.raises(spool.InputError, match="a recorded field is called staleness"):
        restore(sp, s.finalize())


def test_logprobs_of_the_kit_are_those_read(sp):
    s = session(sp)
    add(s, counting(5), counting(4, 20))
    batch = restore(sp, s.finalize())
    assert_array_equal(batch["rollout_log_probs"][0], probabilities(counting(5) + counting(4, 20), 5))
