"""The seventeen rules of what a session means, each through the public API alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import pickle
import shutil
import signal
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import workers
from kit import SHAPE, add, counting, probabilities, routing, session
from numpy.testing import assert_array_equal

import spool
from spool import (
    FieldSpec,
    GapError,
    InputError,
    NotFoundError,
    PayloadError,
    SessionStateError,
    StepConflictError,
)
from spool.upkeep import Upkeep

spawn = multiprocessing.get_context("spawn")


def tokens_of(sp, ref):
    return sp.read(ref, fields=["token_ids"])["token_ids"].tolist()


def mask_of(sp, ref):
    return sp.read(ref, fields=["loss_mask"])["loss_mask"].tolist()


def rows_of(ref, field="token_ids"):
    """Return the set of stored rows that ``ref`` names."""
    return {(e.stream, e.row + i) for e in ref.extents.get(field, ()) for i in range(e.n)}


def in_process(function, *arguments):
    """Run ``function`` in a fresh interpreter and wait for it."""
    process = spawn.Process(target=function, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0


# ---------------------------------------------------------------------------------------------- rule 1: chains


def test_rule_01_a_step_extends_the_longest_chain_its_prompt_starts_with(shared_sp):
    s = session(shared_sp, None)
    refs = [
        add(s, [1, 2], [3]),
        add(s, [1, 2, 3, 4], [5]),
        add(s, [1, 2, 3, 4, 5, 6], [7]),
    ]
    assert [ref.parent for ref in refs] == [None, 0, 1]
    assert [ref.index for ref in refs] == [0, 1, 2]
    for ref, tokens in zip(refs, ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]), strict=True):
        assert tokens_of(shared_sp, ref) == tokens
        assert (ref.n_tokens, ref.n_rows) == (len(tokens), len(tokens))


def test_rule_01_a_chain_that_ends_in_an_inner_step_branches(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    add(s, [1, 2, 3, 4], [5])
    branch = add(s, [1, 2, 3, 9], [8])
    assert branch.parent == 0
    assert tokens_of(shared_sp, branch) == [1, 2, 3, 9, 8]


def test_rule_01_a_rewritten_history_begins_a_new_chain(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    for prompt in ([1, 7], [2, 3], [1, 2], [1]):
        assert add(s, prompt, [5]).parent is None


def test_rule_01_a_named_parent_goes_before_the_longest(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3], step_id="a")
    add(s, [1, 2, 3], [4], step_id="b")
    assert add(s, [1, 2, 3, 4], [5], parent="a").parent == 0
    assert add(s, [1, 2, 3, 4], [5], parent=0).parent == 0
    assert add(s, [1, 2, 3, 4], [5]).parent == 1
    with pytest.raises(InputError, match="a"):
        add(s, [7, 2, 3], [5], parent="a")
    with pytest.raises((InputError, NotFoundError), match="nobody"):
        add(s, [1, 2, 3], [5], parent="nobody")
    assert len(s.steps) == 5


def test_rule_01_trimmed_response_tokens_leave_the_chain(sp):
    s = session(sp, trim=1)
    add(s, [1, 2], [3, 4])
    child = add(s, [1, 2, 3, 9], [5])
    assert child.parent == 0
    sample = sp.read(s.view("lineage")[0])
    assert sample["token_ids"].tolist() == [1, 2, 3, 9, 5]
    assert sample["loss_mask"].tolist() == [0, 0, 1, 0, 1]
    first, second = probabilities([1, 2, 3, 4], 2), probabilities([1, 2, 3, 9, 5], 4)
    assert_array_equal(sample["logprobs"], [first[0], 0.0, second[0]])
    assert tokens_of(sp, s.steps[0]) == [1, 2, 3, 4]


def test_rule_01_trim_is_a_limit_and_never_reaches_into_the_prompt(sp):
    s = session(sp, "trimmed", trim=2)
    add(s, [1, 2], [3, 4, 5])
    assert add(s, [1, 2, 9], [5]).parent is None
    assert add(s, [1, 2, 3, 9], [5]).parent == 0
    t = session(sp, "prompt", trim=2)
    add(t, [1, 2], [3])
    assert add(t, [1, 9], [5]).parent is None
    u = session(sp, "default")
    add(u, [1, 2], [3, 4])
    assert add(u, [1, 2, 3, 9], [5]).parent is None


def test_rule_01_of_equal_chains_the_untrimmed_wins_then_the_latest(shared_sp):
    s = session(shared_sp, None, trim=1)
    add(s, [1, 2], [3])
    add(s, [1], [2, 3, 4])
    add(s, [1], [2, 3])
    assert add(s, [1, 2, 3, 9], [5]).parent == 2


def test_rule_01_chains_longer_than_many_blocks(sp):
    s = session(sp)
    first, middle = counting(1500), counting(700, 9000)
    a = add(s, first[:1000], first[1000:])
    b = add(s, [*first, *middle], [1, 2, 3])
    c = add(s, [*first, *middle[:-1], 5], [1])
    assert [x.parent for x in (a, b, c)] == [None, 0, 0]
    assert tokens_of(sp, c) == [*first, *middle[:-1], 5, 1]
    assert_array_equal(sp.read(c)["routed_experts"], routing([*first, *middle[:-1], 5, 1]))


# ------------------------------------------------------------------------------------- rule 2: sharing of storage


def test_rule_02_a_chain_shares_the_rows_of_its_parent(shared_sp):
    s = session(shared_sp, None)
    a = add(s, counting(40), [1, 2])
    b = add(s, [*counting(40), 1, 2, 3], [4])
    for field in ("token_ids", "routed_experts"):
        assert rows_of(a, field) < rows_of(b, field)
    assert len(rows_of(b) - rows_of(a)) == 2


def test_rule_02_a_branch_stores_its_shared_prefix_once(shared_sp):
    s = session(shared_sp, None)
    a = add(s, counting(600), [1])
    observed = [*counting(600), 1, *counting(600, 5000)]
    b = add(s, observed, [2])
    c = add(s, [*observed, 3], [4])
    assert (b.parent, c.parent) == (0, 0)
    fresh = rows_of(c) - rows_of(a) - rows_of(b)
    assert len(fresh) < 256 + 2
    assert tokens_of(shared_sp, c) == [*observed, 3, 4]


@pytest.mark.parametrize("shared", [255, 256, 900, 1024])
def test_rule_02_a_new_chain_shares_the_longest_prefix_to_256_tokens(shared_sp, shared):
    s = session(shared_sp, None)
    old = counting(1100)
    a = add(s, old, [1])
    tokens = [*old[:shared], *counting(50, 7000)]
    b = add(s, tokens, [2])
    assert b.parent is None
    assert len(rows_of(b) & rows_of(a)) >= shared // 256 * 256
    assert len(rows_of(b, "routed_experts") & rows_of(a, "routed_experts")) >= max(shared // 256 * 256 - 1, 0)
    sample = shared_sp.read(b)
    assert sample["token_ids"].tolist() == [*tokens, 2]
    assert_array_equal(sample["routed_experts"], routing([*tokens, 2]))


def test_rule_02_shared_rows_need_not_be_sent_again(shared_sp):
    s = session(shared_sp, None)
    old = counting(700)
    add(s, old, [1])
    tokens = [*old[:600], 5, 6]
    rewritten = add(s, tokens[:-1], tokens[-1:], routed_experts=routing(tokens)[512:], routed_experts_start=512)
    assert_array_equal(shared_sp.read(rewritten)["routed_experts"], routing(tokens))


def test_rule_02_a_prefix_that_differs_in_one_token_is_not_shared_beyond_it(shared_sp):
    s = session(shared_sp, None)
    old = counting(600)
    a = add(s, old, [1])
    other = [*old[:300], 5, *old[301:]]
    b = add(s, other, [1])
    assert len(rows_of(b) & rows_of(a)) <= 300
    assert tokens_of(shared_sp, b) == [*other, 1]


def test_rule_02_the_same_placeholder_with_another_image_is_another_prefix(shared_sp):
    s = session(shared_sp, None)
    tokens = counting(300)
    n_rows = 301 + 4
    one, other = (routing(list(range(first, first + n_rows))) for first in (1, 5000))
    a = add(s, tokens, [1], units=[("image-a", 10, 5)], routed_experts=one)
    b = add(s, tokens, [1], units=[("image-b", 10, 5)], routed_experts=other)
    assert_array_equal(shared_sp.read(a)["routed_experts"], one)
    assert_array_equal(shared_sp.read(b)["routed_experts"], other)


def test_rule_02_the_suspend_token_stays_small_and_resumes_anywhere(sp, spool_uri):
    s = session(sp, trim=1)
    tokens = counting(20_000)
    add(s, tokens[:-1], tokens[-1:])
    token = s.suspend()
    assert len(token) < 4096
    json.loads(token)
    with pytest.raises(SessionStateError):
        add(s, [*tokens, 1], [2])
    in_process(workers.resume_and_append, spool_uri, token, tokens)
    parents = [ref.parent for ref in sp.steps("s")]
    assert parents == [None, 0]


# ---------------------------------------------------------------------------------------------- rule 3: views


def test_rule_03_timeline_is_one_segment_a_step(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    add(s, [1, 2, 3, 4], [5, 6])
    add(s, [9], [8])
    segments = s.view("timeline")
    assert [tokens_of(shared_sp, ref) for ref in segments] == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [9, 8]]
    assert [mask_of(shared_sp, ref) for ref in segments] == [[0, 0, 1], [0, 0, 0, 0, 1, 1], [0, 1]]
    assert [(ref.index, ref.count, ref.view) for ref in segments] == [(i, 3, "timeline") for i in range(3)]
    assert_array_equal(shared_sp.read(segments[1])["logprobs"], probabilities([1, 2, 3, 4, 5, 6], 4))


def test_rule_03_lineage_is_one_segment_a_leaf_and_trains_a_prefix_once(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    add(s, [1, 2, 3, 4], [5])
    add(s, [1, 2, 3, 9], [8])
    segments = s.view("lineage")
    assert [ref.steps for ref in segments] == [(0, 1), (0, 2)]
    assert [mask_of(shared_sp, ref) for ref in segments] == [[0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
    assert [ref.trainable_tokens for ref in segments] == [2, 1]
    every = s.view("lineage", train_shared_prefix="all")
    assert [mask_of(shared_sp, ref) for ref in every] == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1]]
    second = shared_sp.read(segments[1])
    assert_array_equal(second["logprobs"], [probabilities([1, 2, 3], 2)[0], 0.0, probabilities([1, 2, 3, 9, 8], 4)[0]])
    assert_array_equal(second["routed_experts"], routing([1, 2, 3, 9, 8]))


def test_rule_03_a_request_sent_again_supersedes_its_first_answer(sp):
    s = session(sp)
    add(s, [1, 2], [3])
    add(s, [1, 2, 3, 4], [5])
    add(s, [1, 2, 3, 4], [6])
    add(s, [1, 2, 3, 4, 6, 7], [8])
    kept = s.view("lineage")
    assert [ref.steps for ref in kept] == [(0, 2, 3)]
    assert mask_of(sp, kept[0]) == [0, 0, 1, 0, 1, 0, 1]
    every = s.view("lineage", superseded="keep")
    assert {ref.steps: ref.superseded for ref in every} == {(0, 1): True, (0, 2, 3): False}
    assert len(s.view("timeline", superseded="keep")) == 4


def test_rule_03_the_first_request_sent_again_supersedes_too(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    add(s, [1, 2], [4])
    assert [tokens_of(shared_sp, ref) for ref in s.view("lineage")] == [[1, 2, 4]]


def test_rule_03_an_earlier_answer_that_goes_on_is_a_branch_not_superseded(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    add(s, [1, 2], [4])
    add(s, [1, 2, 3], [5])
    assert sorted(tokens_of(shared_sp, ref) for ref in s.view("lineage")) == [[1, 2, 3, 5], [1, 2, 4]]


def test_rule_03_a_segment_ends_at_its_last_generated_token(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    add(s, [1, 2, 3, 4, 5], [], routed_experts=None)
    (cut,) = s.view("lineage")
    assert (tokens_of(shared_sp, cut), cut.cut_tokens) == ([1, 2, 3], 2)
    (kept,) = s.view("lineage", trailing="keep", gaps="keep")
    assert (tokens_of(shared_sp, kept), kept.cut_tokens) == ([1, 2, 3, 4, 5], 0)
    sample = shared_sp.read(kept, missing=-9)
    assert_array_equal(sample["routed_experts"][:2], routing([1, 2, 3]))
    assert (sample["routed_experts"][2:] == -9).all()
    with pytest.raises(GapError):
        shared_sp.read(kept, fields=["routed_experts"])


def test_rule_03_a_segment_ends_before_a_routing_gap(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3, 4, 5])
    holed = routing([1, 2, 3, 4, 5, 6, 7, 8])
    holed[5] = -1
    add(s, [1, 2, 3, 4, 5, 6], [7, 8], routed_experts=holed)
    (cut,) = s.view("lineage")
    assert (tokens_of(shared_sp, cut), cut.cut_tokens) == ([1, 2, 3, 4, 5], 3)
    (kept,) = s.view("lineage", gaps="keep")
    assert (kept.n_tokens, kept.cut_tokens) == (8, 0)
    filled = shared_sp.read(kept, missing=-1)["routed_experts"]
    assert_array_equal(filled, holed)


def test_rule_03_views_need_no_payload_and_no_live_session(open_spool, spool_uri, tmp_path):
    sp = open_spool()
    s = session(sp)
    for i in range(6):
        add(s, counting(3 + 2 * i), [1003 + 2 * i])
    add(s, [7], [8])
    expected = {view: s.view(view) for view in ("timeline", "lineage")}
    assert {view: sp.view("s", view) for view in expected} == expected
    sp.close()
    for folder in (tmp_path / "spool" / "streams").glob("*"):
        for field in ("token_ids", "routed_experts", "logprobs"):
            shutil.rmtree(folder / field)
    again = open_spool()
    for view, segments in expected.items():
        got = again.view("s", view)
        assert [(r.n_tokens, r.spans, r.extents) for r in got] == [(r.n_tokens, r.spans, r.extents) for r in segments]


# -------------------------------------------------------------------------------------- rule 4: mask and response


def test_rule_04_the_response_region_starts_at_the_first_generated_token(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    step = add(s, [1, 2, 3, 4, 5], [6])
    assert (step.response_start, step.response_length) == (5, 1)
    (segment,) = s.view("lineage")
    assert (segment.response_start, segment.response_length) == (2, 4)
    sample = shared_sp.read(segment)
    assert len(sample["logprobs"]) == 4
    assert sample["loss_mask"].dtype == np.uint8
    assert sample["loss_mask"].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 0, 1, 0, 1], np.array([True, False, True])])
def test_rule_04_append_may_clear_generated_tokens(shared_sp, mask):
    s = session(shared_sp, None)
    step = add(s, [1, 2], [3, 4, 5], loss_mask=mask)
    assert mask_of(shared_sp, step) == [0, 0, 1, 0, 1]
    child = add(s, [1, 2, 3, 4, 5], [6])
    assert mask_of(shared_sp, s.view("lineage")[0]) == [0, 0, 1, 0, 1, 1]
    assert mask_of(shared_sp, child) == [0, 0, 0, 0, 0, 1]
    assert_array_equal(shared_sp.read(step)["logprobs"], probabilities([1, 2, 3, 4, 5], 2))


@pytest.mark.parametrize("mask", [[1, 1], [1, 0, 1, 1, 1], [0, 0, 1, 1], [0, 2, 1]])
def test_rule_04_a_mask_that_trains_the_prompt_or_does_not_fit_is_refused(shared_sp, mask):
    s = session(shared_sp, None)
    with pytest.raises(PayloadError, match="loss_mask"):
        add(s, [1, 2], [3, 4, 5], loss_mask=mask)
    assert s.steps == []


# ------------------------------------------------------------------------------ rule 5: shape of routing and units


def test_rule_05_layers_are_absolute_and_dense_ones_are_not_stored(shared_sp):
    s = session(shared_sp, None)
    step = add(s, [1, 2, 3], [4, 5])
    routed = shared_sp.read(step)["routed_experts"]
    assert (routed.shape, routed.dtype) == ((4, 3, 2), np.int32)
    assert_array_equal(routed, routing([1, 2, 3, 4, 5]))
    assert shared_sp.read(step, fields=["routed_experts"], dtype="stored")["routed_experts"].dtype == np.uint8
    for layers in (slice(0, 1), slice(1, 3), slice(0, 2), slice(2, 3)):
        part = shared_sp.read(step, fields=["routed_experts"], layers=layers)["routed_experts"]
        assert_array_equal(part, routed[:, layers])


def test_rule_05_a_non_zero_dense_layer_is_refused(shared_sp):
    s = session(shared_sp, None)
    wrong = routing([1, 2, 3])
    wrong[1, 0, 1] = 7
    with pytest.raises(PayloadError, match="routed_experts"):
        add(s, [1, 2], [3], routed_experts=wrong)
    assert s.steps == []


def test_rule_05_a_placeholder_counts_the_rows_it_expands_to(shared_sp):
    s = session(shared_sp, None)
    rows = routing(counting(7))
    step = add(s, [1, 2, 3], [4], units=[("img", 1, 4)], routed_experts=rows[:6])
    assert (step.n_tokens, step.n_rows) == (4, 7)
    sample = shared_sp.read(step)
    assert len(sample["token_ids"]) == 4
    assert_array_equal(sample["routed_experts"], rows[:6])
    longer = routing(counting(10))
    child = add(s, [1, 2, 3, 4, 5, 6], [7], units=[("img", 1, 4)], routed_experts=longer[:9])
    assert (child.parent, child.n_tokens, child.n_rows) == (0, 7, 10)
    assert_array_equal(shared_sp.read(child)["routed_experts"], longer[:9])
    for count in (3, 8):
        with pytest.raises(PayloadError, match="routed_experts"):
            add(s, [1, 2, 3], [4], units=[("img", 1, 4)], routed_experts=routing(counting(count + 1)))


# ------------------------------------------------------------------------------------------ rule 6: rows and chunks


def test_rule_06_a_step_owns_the_rows_after_its_parents(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3])
    child = add(s, [1, 2, 3, 4], [5], routed_experts=routing([1, 2, 3, 4, 5])[2:], routed_experts_start=2)
    assert_array_equal(shared_sp.read(child)["routed_experts"], routing([1, 2, 3, 4, 5]))
    places = sorted((e.position, e.n) for e in child.extents["routed_experts"])
    assert sum(n for _, n in places) == 4
    assert [p for p, _ in places] == [sum(n for _, n in places[:i]) for i in range(len(places))]


@pytest.mark.parametrize(("start", "count"), [(0, 6), (0, 7), (2, 4), (2, 5), (2, 6), (2, 7), (6, 0), (5, 1), (5, 6)])
def test_rule_06_the_row_count_decides_what_was_sent(shared_sp, start, count):
    tokens = counting(7)
    every = np.concatenate([routing(tokens), np.zeros((1, 3, 2), np.int32)])
    every[6] = every[5]
    first = start if count in (6 - start, 7 - start) else 0
    s = session(shared_sp, None)
    step = add(s, tokens[:4], tokens[4:], routed_experts=every[first : first + count], routed_experts_start=start)
    expected = routing(tokens).copy()
    expected[:first] = -5
    assert_array_equal(shared_sp.read(step, missing=-5).get("routed_experts", np.full_like(expected, -5)), expected)


@pytest.mark.parametrize(("start", "count"), [(0, 5), (0, 8), (0, 0), (2, 3), (2, 8), (3, 0)])
def test_rule_06_a_count_that_fits_neither_is_refused(shared_sp, start, count):
    tokens = counting(7)
    s = session(shared_sp, None)
    with pytest.raises(PayloadError, match=r"routed_experts.*\b6\b") as caught:
        add(s, tokens[:4], tokens[4:], routed_experts=routing(counting(count + 1))[:count], routed_experts_start=start)
    assert caught.value.details["got"] == count
    assert s.steps == []


def test_rule_06_chunks_have_their_own_start_and_version(sp):
    tokens = counting(9)
    rows = routing(tokens)
    s = session(sp)
    chunks = [
        spool.Chunk(rows=rows[:5], start=0, weight_version="3"),
        spool.Chunk(rows=rows[5:], start=5, weight_version="4"),
    ]
    step = add(s, tokens[:3], tokens[3:], routed_experts=chunks)
    assert_array_equal(sp.read(step)["routed_experts"], rows)
    gap = [spool.Chunk(rows=rows[:3], start=0), spool.Chunk(rows=rows[5:], start=5)]
    step = add(session(sp, "gap"), tokens[:3], tokens[3:], routed_experts=gap)
    expected = rows.copy()
    expected[3:5] = -1
    assert_array_equal(sp.read(step, missing=-1)["routed_experts"], expected)


def test_rule_06_all_zero_moe_layers_are_refused(shared_sp):
    tokens = counting(200)
    wrong = routing(tokens)
    wrong[:, 2] = 0
    s = session(shared_sp, None)
    with pytest.raises(PayloadError, match="layer"):
        add(s, tokens[:100], tokens[100:], routed_experts=wrong)
    fine = routing(tokens)
    fine[:50, 2] = 0
    assert_array_equal(shared_sp.read(add(s, tokens[:100], tokens[100:], routed_experts=fine))["routed_experts"], fine)


# -------------------------------------------------------------------------------------------- rule 7: first and last


@pytest.mark.parametrize(("prefer", "salt"), [("first", 0), ("last", 99)])
def test_rule_07_rows_sent_again(shared_sp, prefer, salt):
    s = session(shared_sp, None, prefer=prefer)
    parent = add(s, [1, 2], [3, 4])
    tokens = [1, 2, 3, 4, 5, 6]
    child = add(s, tokens[:-1], tokens[-1:], routed_experts=routing(tokens, salt=99))
    sibling = add(s, [1, 2, 3, 4, 8], [9], routed_experts=routing([1, 2, 3, 4, 8, 9])[3:], routed_experts_start=3)
    expected = routing(tokens, salt=99)
    expected[:3] = routing(tokens, salt=salt)[:3]
    assert_array_equal(shared_sp.read(child)["routed_experts"], expected)
    assert_array_equal(shared_sp.read(parent)["routed_experts"], routing([1, 2, 3, 4]))
    assert_array_equal(shared_sp.read(sibling)["routed_experts"], routing([1, 2, 3, 4, 8, 9]))
    grandchild = add(s, [*tokens, 7], [8], routed_experts=routing([*tokens, 7, 8])[5:], routed_experts_start=5)
    assert_array_equal(shared_sp.read(grandchild)["routed_experts"][:5], expected[:5])


def test_rule_07_first_checks_rows_sent_again_before_it_drops_them(shared_sp):
    s = session(shared_sp, None)
    add(s, [1, 2], [3, 4])
    wrong = routing([1, 2, 3, 4, 5, 6])
    wrong[0, 1, 0] = 256
    with pytest.raises(PayloadError):
        add(s, [1, 2, 3, 4, 5], [6], routed_experts=wrong)
    assert len(s.steps) == 1


def test_rule_07_first_fills_a_gap_with_rows_sent_again(shared_sp):
    s = session(shared_sp, None)
    holed = routing([1, 2, 3, 4])
    holed[1] = -1
    add(s, [1, 2], [3, 4], routed_experts=holed)
    tokens = [1, 2, 3, 4, 5, 6]
    child = add(s, tokens[:-1], tokens[-1:])
    assert_array_equal(shared_sp.read(child)["routed_experts"], routing(tokens))
    assert s.view("lineage")[0].cut_tokens == 0


def test_rule_07_prefer_is_fixed_when_the_session_opens(open_spool):
    sp = open_spool()
    add(session(sp, prefer="last"), [1, 2], [3, 4])
    sp.close()
    again = open_spool()
    tokens = [1, 2, 3, 4, 5, 6]
    child = add(session(again, prefer="last"), tokens[:-1], tokens[-1:], routed_experts=routing(tokens, salt=9))
    assert_array_equal(again.read(child)["routed_experts"], routing(tokens, salt=9))
    with pytest.raises(InputError):
        session(again, "other", prefer="newest")


# ------------------------------------------------------------------------------------------- rule 8: missing rows


def test_rule_08_rows_of_minus_one_are_gaps_never_data(shared_sp):
    s = session(shared_sp, None)
    holed = routing(counting(6))
    holed[[0, 3]] = -1
    step = add(s, counting(3), counting(3, 1003), routed_experts=holed)
    assert sum(e.n for e in step.extents["routed_experts"]) == 3
    with pytest.raises(GapError, match="routed_experts"):
        shared_sp.read(step)
    for missing in (-1, -7, 0):
        expected = holed.copy()
        expected[[0, 3]] = missing
        assert_array_equal(shared_sp.read(step, missing=missing)["routed_experts"], expected)
    part = shared_sp.read(step, fields=["routed_experts"], tokens=slice(1, 3))["routed_experts"]
    assert_array_equal(part, holed[1:3])


def test_rule_08_a_field_that_was_never_sent_is_never_made_up(shared_sp):
    s = session(shared_sp, None)
    step = add(s, [1, 2], [3], routed_experts=None, logprobs=None)
    for field in ("routed_experts", "logprobs"):
        with pytest.raises((GapError, NotFoundError), match=field):
            shared_sp.read(step, fields=[field])
    assert set(shared_sp.read(step)) == {"token_ids", "loss_mask"}
    child = add(s, [1, 2, 3, 4], [5], logprobs=[-0.5])
    (segment,) = s.view("lineage")
    with pytest.raises(GapError, match="logprobs"):
        shared_sp.read(segment, fields=["logprobs"])
    assert shared_sp.read(segment, fields=["logprobs"], missing=-7)["logprobs"].tolist() == [-7.0, 0.0, -0.5]
    assert_array_equal(shared_sp.read(child)["routed_experts"], routing([1, 2, 3, 4, 5]))


def test_rule_08_minus_one_inside_a_row_needs_a_signed_spec(sp):
    rows = routing([1, 2, 3])
    rows[1, 2, 1] = -1
    with pytest.raises(PayloadError, match="routed_experts") as caught:
        add(session(sp), [1, 2], [3], routed_experts=rows)
    details = caught.value.details
    assert (details["field"], details["token"], details["layer"], details["value"]) == ("routed_experts", 1, 2, -1)
    signed = spool.expert_field(SHAPE, signed=True)
    s = sp.session(session_id="signed", fields=[signed])
    step = s.append(prompt_token_ids=[1, 2], response_token_ids=[3], routed_experts=rows)
    assert_array_equal(sp.read(step, fields=["routed_experts"])["routed_experts"], rows)


@pytest.mark.parametrize("value", [256, 257, 511, 65536, -2, -256, 2**31 - 1])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rule_08_an_id_outside_is_refused_by_name_and_never_wrapped(shared_sp, value, dtype):
    s = session(shared_sp, None)
    rows = routing(counting(30)).astype(dtype)
    rows[17, 1, 1] = value
    with pytest.raises(PayloadError, match=str(value)) as caught:
        add(s, counting(10), counting(20, 1010), routed_experts=rows)
    details = caught.value.details
    assert (details["field"], details["token"], details["layer"], details["value"]) == ("routed_experts", 17, 1, value)
    assert "step" in details
    assert s.steps == []


def test_rule_08_all_256_ids_of_uint8_are_experts(shared_sp):
    s = session(shared_sp, None)
    rows = np.zeros((128, 3, 2), np.int32)
    rows[:, 1] = np.arange(256).reshape(128, 2)
    rows[:, 2] = np.arange(256)[::-1].reshape(128, 2)
    step = s.append(prompt_token_ids=counting(100), response_token_ids=counting(29), routed_experts=rows)
    assert_array_equal(shared_sp.read(step, missing=-1)["routed_experts"], rows)


# ----------------------------------------------------------------------------------------------- rule 9: logprobs


def test_rule_09_logprobs_survive_bit_for_bit_and_are_counted(shared_sp):
    s = session(shared_sp, None)
    quiet = np.array([0x7FC00123], np.uint32).view(np.float32)[0]
    probs = np.array([-0.1, quiet, -np.inf, -0.0, np.inf], np.float32)
    step = add(s, [1], [2, 3, 4, 5, 6], logprobs=probs, loss_mask=[1, 0, 0, 1, 1])
    assert step.n_nonfinite == 3
    got = shared_sp.read(step)["logprobs"]
    assert got.dtype == np.float32
    assert_array_equal(got.view(np.uint32), probs.view(np.uint32))
    add(s, [1, 2, 3, 4, 5, 6, 7], [8], logprobs=[np.nan])
    (segment,) = s.view("lineage")
    assert segment.n_nonfinite == 4


def test_rule_09_observations_have_zero(shared_sp):
    s = session(shared_sp, None)
    add(s, [1], [2], logprobs=[-0.5])
    add(s, [1, 2, 3, 4], [5], logprobs=[-0.25])
    (segment,) = s.view("lineage")
    assert shared_sp.read(segment)["logprobs"].tolist() == [-0.5, 0.0, 0.0, -0.25]


@pytest.mark.parametrize("probs", [[-0.5], [-0.5, -0.5, -0.5], [-0.5, None], [[-0.5, -0.5]]])
def test_rule_09_logprobs_of_another_length_or_with_holes_are_refused(shared_sp, probs):
    s = session(shared_sp, None)
    with pytest.raises(PayloadError, match="logprobs"):
        add(s, [1], [2, 3], logprobs=probs)
    assert s.steps == []


# -------------------------------------------------------------------------------------------- rule 10: user fields

USER = (
    FieldSpec(name="position", dtype="int64", align="token", positions=True),
    FieldSpec(name="entropy", dtype="float64", align="response"),
    FieldSpec(name="hidden", dtype="bfloat16", align="forward", shape=(2, 3)),
    FieldSpec(name="flag", dtype="bool", align="token"),
    FieldSpec(name="value", dtype="float16", align="step", shape=(4,)),
    FieldSpec(name="kept_ids", dtype="int32", align="response", ragged=True),
)


def user_data(n_tokens, n_response, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "position": np.arange(n_tokens) + 2**40,
        "entropy": rng.random(n_response),
        "hidden": rng.standard_normal((n_tokens - 1, 2, 3)).astype(ml_dtypes.bfloat16),
        "flag": rng.random(n_tokens) < 0.5,
        "value": rng.random(4).astype(np.float16),
        "kept_ids": [np.arange(k, dtype=np.int32) + 7 for k in rng.integers(0, 5, n_response)],
    }


def check_user(sample, data):
    for name in ("position", "entropy", "hidden", "flag"):
        got, expected = sample[name], np.asarray(data[name])
        assert got.shape == expected.shape, name
        assert got.tobytes() == expected.astype(got.dtype).tobytes(), name
    assert_array_equal(np.asarray(sample["value"]).reshape(-1), data["value"])
    ragged = sample["kept_ids"]
    assert ragged.offsets.tolist() == [0, *np.cumsum([len(v) for v in data["kept_ids"]]).tolist()]
    assert_array_equal(ragged.values, np.concatenate(data["kept_ids"]))


def test_rule_10_fields_of_every_alignment_come_back(open_spool):
    sp = open_spool(fields=USER)
    s = session(sp)
    data = user_data(5, 3)
    step = add(s, [1, 2], [3, 4, 5], fields=data)
    sample = sp.read(step)
    check_user(sample, data)
    assert sample["hidden"].dtype == ml_dtypes.bfloat16
    assert sample["flag"].dtype == np.bool_
    assert sample["entropy"].dtype == np.float64


def test_rule_10_fields_may_be_declared_by_the_session(sp):
    s = session(sp, fields=USER)
    first, second = user_data(5, 3), user_data(8, 2, seed=1)
    add(s, [1, 2], [3, 4, 5], fields=first)
    child = add(s, [1, 2, 3, 4, 5, 6], [7, 8], fields=second)
    sample = sp.read(child)
    assert_array_equal(sample["entropy"], second["entropy"])
    assert_array_equal(sample["position"][5:], second["position"][5:])
    assert_array_equal(sample["hidden"][4:], second["hidden"][4:])
    assert_array_equal(sample["hidden"][:4], first["hidden"])
    (segment,) = s.view("lineage")
    whole = sp.read(segment, fields=["entropy"], missing=0)["entropy"]
    assert_array_equal(whole, [*first["entropy"], 0.0, *second["entropy"]])


@pytest.mark.parametrize("name", ["position", "entropy", "hidden", "kept_ids"])
def test_rule_10_a_field_of_another_length_is_refused(shared_sp, name):
    s = session(shared_sp, None, fields=USER)
    data = user_data(5, 3)
    with pytest.raises(PayloadError, match=name):
        add(s, [1, 2], [3, 4, 5], fields={**data, name: data[name][:1]})
    assert s.steps == []


def test_rule_10_an_undeclared_field_is_refused_by_name(shared_sp):
    s = session(shared_sp, None)
    with pytest.raises(InputError, match="surprise"):
        add(s, [1, 2], [3], fields={"surprise": [1]})


def test_rule_10_a_forward_field_with_its_own_bound_and_layers(sp):
    spec = FieldSpec(
        name="indexer",
        dtype="int16",
        align="forward",
        shape=(2, 4),
        bound=3000,
        num_layers=5,
        layers=(1, 4),
        missing=-1,
    )
    s = sp.session(session_id="s", fields=[spec])
    rows = np.zeros((4, 5, 4), np.int32)
    rows[:, [1, 4]] = np.random.default_rng(0).integers(0, 3000, (4, 2, 4))
    rows[2, 4, 3] = -1
    step = s.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5], fields={"indexer": rows})
    assert_array_equal(sp.read(step, fields=["indexer"])["indexer"], rows)
    assert_array_equal(sp.read(step, fields=["indexer"], layers=slice(4, 5))["indexer"], rows[:, 4:])
    rows[0, 1, 0] = 3000
    with pytest.raises(PayloadError, match="indexer"):
        s.append(prompt_token_ids=[7, 2, 3], response_token_ids=[4, 5], fields={"indexer": rows})


def test_rule_10_only_the_fields_named_are_stored(open_spool):
    sp = open_spool(options="fields=token_ids,routed_experts")
    s = session(sp)
    step = add(s, [1, 2], [3], loss_mask=[0])
    assert set(step.extents) == {"token_ids", "routed_experts"}
    assert_array_equal(sp.read(step, fields=["routed_experts"])["routed_experts"], routing([1, 2, 3]))
    with pytest.raises(PayloadError, match="logprobs"):
        add(s, [1, 2, 3], [4], logprobs=[0.0, 0.0])


# ---------------------------------------------------------------------------------------- rule 11: weight versions


def test_rule_11_every_generated_token_knows_its_version(sp):
    s = session(sp)
    add(s, [1, 2], [3, 4], weight_version="9")
    step = add(s, [1, 2, 3, 4, 5], [6, 7, 8], weight_version=[("9", 0, 1), ("10", 1, 3)])
    assert [(v.version, v.start, v.stop) for v in step.versions] == [("9", 5, 6), ("10", 6, 8)]
    (segment,) = s.view("lineage")
    versions = {t: v.version for v in segment.versions for t in range(v.start, v.stop)}
    assert versions == {2: "9", 3: "9", 5: "9", 6: "10", 7: "10"}
    assert segment.version_span == ("9", "10")


def test_rule_11_versions_that_are_no_numbers_order_by_appearance(sp):
    s = session(sp)
    add(s, [1], [2], weight_version="zebra")
    add(s, [1, 2], [3], weight_version="10")
    add(s, [1, 2, 3], [4], weight_version="ape")
    (segment,) = s.view("lineage")
    assert segment.version_span == ("zebra", "ape")
    t = session(sp, "numbers")
    for i, version in enumerate(["100", "20", "3"]):
        add(t, counting(1 + i), [1001 + i], weight_version=version)
    (segment,) = t.view("lineage")
    assert segment.version_span == ("3", "100")


@pytest.mark.parametrize("spans", [[("1", 0, 4)], [("1", 0, 1)], [("1", 1, 3), ("2", 0, 1)], [("1", -1, 3)]])
def test_rule_11_spans_that_do_not_fit_the_response_are_refused(shared_sp, spans):
    s = session(shared_sp, None)
    with pytest.raises(InputError, match="version"):
        add(s, [1], [2, 3, 4], weight_version=spans)
    assert s.steps == []


# --------------------------------------------------------------------------------------------- rule 12: identity


def test_rule_12_identity_travels_in_every_reference(sp):
    identity = {
        "group_id": "p17@40", "sample_index": 3, "rollout_step": 40, "source": "swe", "prompt_id": "p17",
        "split": "train", "attempt": 2,
    }  # fmt: skip
    s = session(sp, **identity)
    step = add(s, [1, 2], [3, 4], weight_version="5", finish_reason="stop")
    add(s, [9], [8])
    segments = s.finalize(outcome="truncated")
    for ref in (step, *segments, *sp.segments(), *sp.steps("s")):
        assert {name: getattr(ref, name) for name in identity} == identity
        assert ref.session_id == "s"
        assert ref.spool_id == step.spool_id != ""
        assert pickle.loads(pickle.dumps(ref)) == ref
        assert spool.ref_from_json(ref.to_json()) == ref
    first = segments[0]
    assert (first.n_tokens, first.n_rows, first.response_length, first.trainable_tokens) == (4, 4, 2, 2)
    assert (first.version_span, first.outcome, first.finish_reason) == (("5", "5"), "truncated", "stop")
    assert [(ref.index, ref.count) for ref in segments] == [(0, 2), (1, 2)]
    assert len(pickle.dumps(first)) <= 400 + 64 * sum(map(len, first.extents.values())) + 200


def test_rule_12_a_reference_alone_reads_in_another_process(sp, spool_uri, tmp_path):
    step = add(session(sp), [1, 2], [3])
    in_process(workers.read_pickled, spool_uri, pickle.dumps(step), str(tmp_path / "out.npy"))
    assert_array_equal(np.load(tmp_path / "out.npy"), routing([1, 2, 3]))


# ---------------------------------------------------------------------------- rule 13: idempotence, discard, finalise


def test_rule_13_the_same_step_again_returns_the_same_reference(sp):
    s = session(sp)
    once = add(s, [1, 2], [3], step_id="a", messages=[{"role": "user", "content": "hi"}], weight_version="1")
    again = add(s, [1, 2], [3], step_id="a", messages=[{"role": "user", "content": "hi"}], weight_version="1")
    assert (again, len(s.steps)) == (once, 1)
    changes = [
        {"logprobs": [-9.0]},
        {"routed_experts": routing([1, 2, 3], salt=5)},
        {"messages": [{"role": "user", "content": "ho"}]},
        {"weight_version": "2"},
        {"finish_reason": "stop"},
    ]
    same = {"messages": [{"role": "user", "content": "hi"}], "weight_version": "1"}
    for change in changes:
        with pytest.raises(StepConflictError, match="a"):
            add(s, [1, 2], [3], step_id="a", **{**same, **change})
    with pytest.raises(StepConflictError):
        add(s, [1, 2], [4], step_id="a", **same)
    assert s.steps == [once]


def test_rule_13_a_step_id_is_known_after_the_spool_was_opened_again(open_spool):
    sp = open_spool()
    once = add(session(sp), [1, 2], [3], step_id="a")
    sp.close()
    again = open_spool()
    s = session(again)
    assert add(s, [1, 2], [3], step_id="a").extents == once.extents
    with pytest.raises(StepConflictError):
        add(s, [1, 2], [4], step_id="a")
    assert len(s.steps) == 1


def test_rule_13_a_step_without_an_id_never_collides_with_one_that_was_named(shared_sp):
    s = session(shared_sp, None)
    unnamed = add(s, [5, 6], [7])
    for number, name in enumerate(("1", "2", "#2", "#4", unnamed.step_id.replace("0", "6"))):
        assert add(s, [1, 2], [3 + number], step_id=name).step_id == name
    for number in range(4):
        add(s, [5, 6], [8 + number])
    assert len({ref.step_id for ref in s.steps}) == 10
    assert add(s, [1, 2], [3], step_id="1").index == 1


def test_rule_13_discard_withdraws_a_leaf(sp):
    s = session(sp)
    a = add(s, [1, 2], [3])
    b = add(s, [1, 2, 3, 4], [5], step_id="b")
    with pytest.raises(SessionStateError):
        s.discard(a)
    s.discard("b")
    assert [ref.index for ref in s.steps] == [0]
    assert [ref.index for ref in sp.steps("s")] == [0]
    with pytest.raises((InputError, NotFoundError)):
        s.discard("b")
    c = add(s, [1, 2, 3, 4, 5], [6])
    assert (c.parent, c.index > b.index) == (0, True)
    assert [ref.steps for ref in s.view("lineage")] == [(0, c.index)]
    s.discard(c)
    s.discard(a)
    assert (s.steps, s.finalize()) == ([], [])


def test_rule_13_finalise_is_idempotent_and_ends_the_session(open_spool):
    sp = open_spool()
    s = session(sp)
    add(s, [1, 2], [3])
    segments = s.finalize(outcome="completed")
    assert s.finalize(outcome="completed") == segments
    with pytest.raises(SessionStateError, match="s"):
        add(s, [1, 2, 3], [4])
    with pytest.raises(SessionStateError):
        s.discard(0)
    assert list(sp.segments()) == segments
    sp.close()
    again = open_spool()
    assert list(again.segments()) == segments
    with pytest.raises(SessionStateError):
        add(session(again), [1, 2, 3], [4])


def test_rule_13_a_refused_step_leaves_the_session_as_it_was(sp):
    s = session(sp)
    add(s, [1, 2], [3], messages=[{"role": "user", "content": "x"}])
    before, segments = s.steps, s.view("lineage")
    refusals = [
        {"logprobs": [0.0, 0.0]},
        {"loss_mask": [1, 1]},
        {"routed_experts": routing([1, 2])},
        {"routed_experts": routing([1, 2, 3, 4]) + 256},
        {"weight_version": [("1", 0, 9)]},
        {"fields": {"nope": [1]}},
        {"messages": [object()]},
        {"parent": "nobody"},
    ]
    for refusal in refusals:
        with pytest.raises((InputError, NotFoundError)):
            add(s, [1, 2, 3], [4], **refusal)
        assert (s.steps, s.view("lineage"), sp.steps("s")) == (before, segments, before)
    for prompt in ([-1], [2**31], [1.5], ["a"], [[1]], None):
        with pytest.raises(InputError):
            s.append(prompt_token_ids=prompt, response_token_ids=[None])
    assert s.steps == before
    assert add(s, [1, 2, 3], [4]).parent == 0


def test_rule_13_a_cancelled_append_is_whole_or_absent(sp):
    async def run():
        s = session(sp)
        cancelled = 0
        for i in range(60):
            tokens = [7, *counting(40, 1000 * i)]
            task = asyncio.ensure_future(
                s.append_async(
                    prompt_token_ids=tokens[:20],
                    response_token_ids=tokens[20:],
                    routed_experts=routing(tokens),
                    step_id=f"{i}",
                )
            )
            await asyncio.sleep(0.0002 * (i % 5))
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
        return s, cancelled

    s, cancelled = asyncio.run(run())
    time.sleep(0.1)
    for ref in s.steps:
        tokens = [7, *counting(40, 1000 * int(ref.step_id))]
        sample = sp.read(ref, fields=["token_ids", "routed_experts"])
        assert sample["token_ids"].tolist() == tokens
        assert_array_equal(sample["routed_experts"], routing(tokens))
    assert len(s.steps) >= 60 - cancelled


# ------------------------------------------------------------------------------------------ rule 14: transactions


def test_rule_14_a_block_that_raises_leaves_nothing(open_spool):
    sp = open_spool()
    s = session(sp)
    add(s, [1, 2], [3])
    with pytest.raises(RuntimeError, match="boom"), s.transaction():
        add(s, [1, 2, 3], [4])
        add(s, [1, 2, 3, 4], [5])
        assert len(s.steps) == 3
        raise RuntimeError("boom")
    assert [ref.n_tokens for ref in s.steps] == [3]
    assert add(s, [1, 2, 3, 4, 5], [6]).parent == 0
    sp.close()
    assert [ref.n_tokens for ref in open_spool().steps("s")] == [3, 6]


def test_rule_14_a_block_that_ends_keeps_everything_together(open_spool, spool_uri):
    sp = open_spool()
    s = session(sp)
    with s.transaction():
        add(s, [1, 2], [3])
        add(s, [1, 2, 3], [4])
        in_process(workers.see_nothing, spool_uri)
    assert [ref.n_tokens for ref in sp.steps("s")] == [3, 4]
    assert [ref.parent for ref in s.steps] == [None, 0]
    sp.close()
    again = open_spool()
    assert_array_equal(again.read(again.steps("s")[1])["routed_experts"], routing([1, 2, 3, 4]))


def test_rule_14_only_what_its_own_task_appended_is_gone(sp):
    async def run():
        s = session(sp)
        inside, outside = asyncio.Event(), asyncio.Event()

        async def failing():
            async with s.transaction():
                await s.append_async(prompt_token_ids=[1], response_token_ids=[2], routed_experts=routing([1, 2]))
                inside.set()
                await outside.wait()
                raise RuntimeError("boom")

        task = asyncio.ensure_future(failing())
        await inside.wait()
        await s.append_async(prompt_token_ids=[5], response_token_ids=[6], routed_experts=routing([5, 6]))
        outside.set()
        with pytest.raises(RuntimeError):
            await task
        return s

    s = asyncio.run(run())
    assert [tokens_of(sp, ref) for ref in s.steps] == [[5, 6]]


def test_rule_14_a_writer_killed_inside_a_block_leaves_nothing_of_it(spool_uri, open_spool):
    process = spawn.Process(target=workers.die_inside_transaction, args=(spool_uri,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    sp = open_spool()
    assert [ref.n_tokens for ref in sp.steps("s")] == [3]


# ------------------------------------------------------------------------------------------- rule 15: late facts


def test_rule_15_facts_arrive_late_from_any_process_and_the_last_wins(open_spool, spool_uri):
    sp = open_spool()
    s = session(sp)
    add(s, [1, 2], [3])
    s.finalize()
    sp.annotate("s", reward=0.25, judge="a")
    in_process(workers.annotate_twice, spool_uri)
    deadline = time.monotonic() + 5
    while (ref := next(iter(sp.segments(view="lineage")))).reward != 0.75 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (ref.reward, ref.facts["judge"], ref.facts["passed"]) == (0.75, "a", True)
    assert [r.session_id for r in sp.segments(where="reward > 0.5 and n_tokens < 32768")] == ["s"]
    for view in ("lineage", "timeline"):
        assert [(r.reward, r.facts["passed"]) for r in sp.view("s", view)] == [(0.75, True)]
    assert list(sp.segments(where="reward > 0.8")) == []
    sp.close()
    for left in Path(spool_uri.removeprefix("file://")).glob("catalog.sqlite*"):
        left.unlink()
    assert next(iter(open_spool().segments())).reward == 0.75


@pytest.mark.parametrize("view", ["lineage", "timeline"])
def test_rule_15_what_was_said_before_the_end_is_in_the_references(sp, view):
    s = session(sp)
    add(s, [1, 2], [3])
    assert s.view(view)[0].facts == {}
    sp.annotate(s.session_id, reward=0.25, judge="a")
    (early,) = s.view(view)
    assert (early.reward, early.facts) == (0.25, {"judge": "a"})
    sp.annotate(s.session_id, segment=early, reward=0.5)
    sp.attach(early, teacher=np.arange(3, dtype="f4"))
    (made,) = s.finalize(view)
    assert (made.reward, made.facts) == (0.5, {"judge": "a"})
    assert_array_equal(sp.read(made, fields=["teacher"])["teacher"], np.arange(3, dtype="f4"))
    assert sp.final_segments(s.session_id) == [made] == s.finalize(view)


def test_rule_15_arrays_arrive_late(open_spool):
    sp = open_spool()
    s = session(sp)
    add(s, [1, 2], [3])
    add(s, [1, 2, 3, 4], [5, 6])
    (segment,) = s.finalize()
    teacher = np.array([-1.0, 0.0, -2.0, -3.0], np.float32)
    sp.attach(segment, teacher_logprobs=teacher)
    found = next(iter(sp.segments()))
    assert_array_equal(sp.read(found, fields=["teacher_logprobs"])["teacher_logprobs"], teacher)
    sp.attach(segment, teacher_logprobs=teacher * 2)
    sp.close()
    again = open_spool()
    found = next(iter(again.segments()))
    assert_array_equal(again.read(found, fields=["teacher_logprobs"])["teacher_logprobs"], teacher * 2)


def test_rule_15_a_late_array_of_an_empty_response_has_no_rows(open_spool, tmp_path):
    sp = open_spool()
    s = session(sp)
    add(s, [1, 2, 3], [])
    (early,) = s.finalize(outcome="aborted")
    sp.attach(early, align="response", advantages=np.zeros(0, np.float32))
    sp.close()
    again = open_spool()
    (fresh,) = again.segments()
    for ref in (early, fresh):
        got = again.read(ref, fields=["advantages"])["advantages"]
        assert (got.dtype, got.shape) == (np.float32, (0,))
        (covered,) = again.coverage([ref], ["advantages"])
        assert (covered["advantages"].spec.align, covered["advantages"].gaps) == ("response", ())
        assert again.locate(ref, fields=["advantages"]) == []
    assert again.read(fresh)["advantages"].shape == (0,)
    for form in ("parquet", "spool"):
        assert again.export(None, tmp_path / f"as-{form}", form).n_segments == 1


def test_rule_15_facts_about_nobody_are_refused(sp):
    with pytest.raises(NotFoundError, match="nobody"):
        sp.annotate("nobody", reward=1.0)


# ------------------------------------------------------------------------------------ rule 16: how a session ends


def test_rule_16_an_exception_inside_with_ends_the_session_as_failed(sp):
    with pytest.raises(RuntimeError), session(sp) as s:
        add(s, [1, 2], [3])
        raise RuntimeError
    assert [ref.outcome for ref in sp.view("s", "lineage")] == ["failed"]


@pytest.mark.parametrize("finalised", [False, True])
def test_rule_16_any_process_may_discard_a_session(sp, spool_uri, finalised):
    s = session(sp)
    add(s, [1, 2], [3])
    add(session(sp, "other"), [1, 2], [3])
    if finalised:
        s.finalize()
        in_process(workers.discard_session, spool_uri)
    else:
        sp.discard("s")
        with pytest.raises(SessionStateError):
            add(s, [1, 2, 3], [4])

    def kept():
        return [row.session_id for row in sp.sessions() if row.state != "discarded"]

    deadline = time.monotonic() + 5
    while kept() != ["other"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert kept() == ["other"]
    assert list(sp.segments(view="timeline")) == []
    for look in (lambda: sp.view("s", "lineage"), lambda: sp.view("s", "timeline"), lambda: sp.steps("s")):
        with contextlib.suppress(NotFoundError):
            assert look() == []
    with pytest.raises(InputError):
        add(session(sp), [1, 2, 3], [4])


def test_rule_16_a_session_that_goes_on_does_not_end_as_idle(sp, monkeypatch):
    """One with an open transaction holds up no other; a clock that is stepped does not end what lives here."""
    monkeypatch.setattr(Upkeep, "watch", lambda *_: None)
    one, other, long = (session(sp, name, idle_s=idle_s) for name, idle_s in (("a", 0.2), ("b", 0.2), ("c", 3600.0)))
    for s in (one, other, long):
        add(s, [1, 2], [3])
    with one.transaction():
        add(one, [1, 2, 3], [4])
        time.sleep(0.3)
        assert sp.expire_idle() == ["b"]
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 2 * 3600)
    assert sp.expire_idle() == ["a"]
    monkeypatch.undo()
    add(long, [1, 2, 3], [4])
    assert {row.session_id: row.state for row in sp.sessions()} == {"a": "final", "b": "final", "c": "open"}


def test_rule_16_an_idle_session_ends_as_timeout(sp):
    s = session(sp, idle_s=0.2)
    add(s, [1, 2], [3])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.1)
        sp.expire_idle()
        if sp.view("s", "lineage")[0].outcome == "timeout":
            break
    assert sp.view("s", "lineage")[0].outcome == "timeout"
    with pytest.raises(SessionStateError):
        add(s, [1, 2, 3], [4])


def test_rule_16_the_session_of_a_dead_writer_is_resumed_by_id(open_spool, spool_uri):
    process = spawn.Process(target=workers.append_and_die, args=(spool_uri,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    sp = open_spool()
    s = session(sp)
    assert [ref.n_tokens for ref in s.steps] == [3, 5]
    child = add(s, [1, 2, 3, 4, 5, 6], [7], routed_experts=routing([1, 2, 3, 4, 5, 6, 7])[4:], routed_experts_start=4)
    assert (child.parent, child.index) == (1, 2)
    assert_array_equal(sp.read(child)["routed_experts"], routing([1, 2, 3, 4, 5, 6, 7]))
    (segment,) = s.finalize()
    assert_array_equal(sp.read(segment)["token_ids"], [1, 2, 3, 4, 5, 6, 7])


def test_rule_16_a_session_of_a_live_writer_is_not_taken_over(sp, spool_uri):
    s = session(sp)
    add(s, [1, 2], [3])
    in_process(workers.fail_to_take_over, spool_uri)
    assert add(s, [1, 2, 3], [4]).index == 1
    assert [ref.n_tokens for ref in sp.steps("s")] == [3, 4]


def test_rule_16_release_is_idempotent_and_outcomes_are_checked(sp):
    s = session(sp)
    add(s, [1, 2], [3])
    with pytest.raises(InputError, match="finished"):
        s.finalize(outcome="finished")
    segments = s.finalize(outcome="context_overflow")
    sp.release(segments, tag="ckpt-1")
    sp.release(segments, tag="ckpt-1")
    sp.checkpointed("ckpt-1")
    sp.checkpointed("ckpt-1")
    sp.release(segments)


# ----------------------------------------------------------------------------- rule 17: messages, tools, empty things


def test_rule_17_messages_are_kept_as_a_delta_and_read_whole(open_spool, tmp_path):
    sp = open_spool()
    s = session(sp)
    long = [{"role": "system", "content": "x" * 100_000}, {"role": "user", "content": "é\u2028"}]
    tokens, refs, lists = [1], [], []
    for i in range(20):
        long = [
            *long,
            {"role": "assistant", "content": f"turn {i}", "tool_calls": [{"id": i, "function": {"a": None}}]},
        ]
        refs.append(add(s, tokens, [i + 2], messages=long, tools=[{"name": "look", "description": "y" * 50_000}]))
        lists.append(long)
        tokens = [*tokens, i + 2, 100 + i]
    rewritten = add(s, [99], [98], messages=[{"role": "user", "content": "new"}])
    for ref, expected in zip(refs, lists, strict=True):
        assert sp.messages(ref) == expected
        assert sp.tools(ref) == [{"name": "look", "description": "y" * 50_000}]
    assert sp.messages(rewritten) == [{"role": "user", "content": "new"}]
    logged = sum(path.stat().st_size for path in (tmp_path / "spool" / "streams").glob("*/records/*"))
    assert logged < 400_000
    sp.close()
    again = open_spool()
    assert [again.messages(ref) for ref in refs[::7]] == lists[::7]
    assert again.tools(refs[-1])[0]["name"] == "look"


def test_rule_17_a_list_that_does_not_start_with_the_parents_is_kept_whole(sp):
    s = session(sp)
    add(s, [1], [2], messages=[{"c": "a"}, {"c": "b"}])
    for i, messages in enumerate(([{"c": "b"}], [{"c": "a"}], [{"c": "a"}, {"c": "x"}, {"c": "b"}], [])):
        child = add(s, [1, 2, 3 + i], [4], messages=messages)
        assert sp.messages(child) == messages
    assert sp.messages(add(s, [1, 2, 9], [4])) in ([], [{"c": "a"}, {"c": "b"}])


def test_rule_17_empty_aborted_and_zero_length_things_come_back_as_they_were(sp):
    s = session(sp)
    empty = s.append(finish_reason="abort", messages=[{"role": "user", "content": ""}])
    aborted = add(s, [1, 2, 3], [], finish_reason="abort", routed_experts=None)
    single = add(s, [], [7], routed_experts=np.zeros((0, 3, 2), np.int32), logprobs=[-1.5])
    assert [(ref.n_tokens, ref.n_rows) for ref in (empty, aborted, single)] == [(0, 0), (3, 3), (1, 1)]
    sample = sp.read(empty)
    assert sample["token_ids"].shape == (0,)
    assert sample["loss_mask"].shape == (0,)
    assert sp.messages(empty) == [{"role": "user", "content": ""}]
    assert mask_of(sp, aborted) == [0, 0, 0]
    got = sp.read(single)
    assert (got["token_ids"].tolist(), got["logprobs"].tolist(), got["loss_mask"].tolist()) == ([7], [-1.5], [1])
    assert len(got.get("routed_experts", ())) == 0
    assert [ref.finish_reason for ref in s.steps] == ["abort", "abort", None]
    s.finalize(outcome="aborted")
    nothing = session(sp, "nothing").finalize(outcome="aborted")
    assert nothing == []
    assert {row.session_id for row in sp.sessions()} == {"s", "nothing"}


@pytest.mark.parametrize("align", ["token", "forward"])
@pytest.mark.parametrize("ragged", [True, False])
def test_rows_on_both_sides_of_what_is_there_already_are_stored(sp, align, ragged):
    spec = spool.FieldSpec(name="kept", dtype="int32", align=align, ragged=ragged, shape=() if ragged else (1,))

    def rows(tokens):
        n = len(tokens) - (align == "forward")
        return [[t] * (1 + ragged * (t % 3)) for t in tokens[:n]]

    s, a = sp.session("x", fields=[spec]), list(range(300))
    b = [*a[:280], 999]
    s.append(prompt_token_ids=a[:1], response_token_ids=a[1:2])
    s.append(prompt_token_ids=a, response_token_ids=[900], fields={"kept": rows([*a, 900])})
    s.append(prompt_token_ids=b, response_token_ids=[901])
    last = [*b, 901, 5, 902]
    ref = s.append(prompt_token_ids=last[:-1], response_token_ids=last[-1:], fields={"kept": rows(last)})
    got = sp.read(ref, fields=["kept"])["kept"]
    if ragged:
        got = np.split(got.values, got.offsets[1:-1])
    assert [row.tolist() for row in got] == rows(last)
    assert sp.verify(deep=True).findings == ()


def test_rule_13_a_step_id_stands_for_all_of_a_step(sp):
    s = session(sp)
    root = add(s, [1, 2], [3], step_id="root")
    other = add(s, [7, 8], [9], step_id="other")
    said = {
        "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "t"}], "finish_reason": None,
        "metadata": {"node": 1}, "parent": "root", "units": [("image", 3, 1)], "weight_version": "1",
        "routed_experts": None,
    }  # fmt: skip
    ref = add(s, [1, 2, 3, 4], [5], step_id="x", **said)
    for same in (said, {**said, "parent": root}, {**said, "parent": 0}):
        assert add(s, [1, 2, 3, 4], [5], step_id="x", **same) == ref
    joined = json.dumps({"role": "user", "content": "a"}, separators=(",", ":"))
    for change in [
        {"finish_reason": "None"}, {"finish_reason": ""}, {"metadata": {"node": 2}}, {"metadata": None},
        {"parent": None}, {"parent": other}, {"units": [("image", 3, 2)]}, {"units": ()}, {"weight_version": "2"},
        {"messages": [*said["messages"], {"name": "t"}], "tools": None}, {"tools": None},
        {"messages": [], "tools": [json.loads(joined), {"name": "t"}]},
    ]:  # fmt: skip
        with pytest.raises(StepConflictError):
            add(s, [1, 2, 3, 4], [5], step_id="x", **{**said, **change})
    assert len(s.steps) == 3
