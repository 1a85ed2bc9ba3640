"""The oracle against hand-made answers: a judge that is wrong judges nothing."""

from __future__ import annotations

import pytest
from oracle import GAP, OracleSession, RefusedError, accept_rows


def rows(tokens, salt=""):
    return [f"{tokens[: p + 1]}{salt}" for p in range(len(tokens) - 1)]


def test_longest_chain_wins_and_inner_steps_branch():
    s = OracleSession()
    a = s.append([1, 2], [3])
    b = s.append([1, 2, 3, 4], [5])
    c = s.append([1, 2, 3, 4, 5, 6], [7])
    d = s.append([1, 2, 3, 9], [8])
    e = s.append([1, 2], [4])
    assert [x.parent for x in (a, b, c, d, e)] == [None, 0, 1, 0, None]
    assert [x.base for x in (a, b, c, d, e)] == [0, 3, 5, 3, 0]


def test_trimmed_tokens_leave_the_chain():
    s = OracleSession(trim=1)
    s.append([1, 2], [3, 4], logprobs=[-1, -2], rows=rows([1, 2, 3, 4]))
    b = s.append([1, 2, 3, 9], [5], logprobs=[-3], rows=rows([1, 2, 3, 9, 5]))
    assert (b.parent, b.base) == (0, 3)
    (segment,) = s.lineage()
    assert segment.tokens == [1, 2, 3, 9, 5]
    assert segment.mask == [0, 0, 1, 0, 1]
    assert segment.logprobs == [-1, 0.0, -3]
    assert OracleSession().find_parent([1]) == (None, 0)


def test_a_chain_of_equal_length_prefers_the_untrimmed_then_the_latest():
    s = OracleSession(trim=1)
    s.append([1, 2], [3])
    s.append([1], [2, 3, 4])
    s.append([1], [2, 3])
    assert s.find_parent([1, 2, 3, 9]) == (2, 3)
    assert s.find_parent([1, 2, 3, 4]) == (1, 4)


def test_named_parent_must_fit():
    s = OracleSession()
    s.append([1, 2], [3])
    s.append([1, 2, 3], [4])
    assert s.append([1, 2, 3, 4], [5], parent=0).parent == 0
    with pytest.raises(RefusedError):
        s.append([7], [5], parent=0)


def test_rows_of_a_child_and_of_first_and_last():
    for prefer, expected in (("first", "a"), ("last", "b")):
        s = OracleSession(prefer=prefer)
        s.append([1, 2], [3], rows=["a0", "a1"])
        child = s.append([1, 2, 3, 4], [5], rows=["b0", "b1", "b2", "b3"])
        assert child.rows == [{f"{expected}0"}, {f"{expected}1"}, {"b2"}, {"b3"}]
        assert s.steps[0].rows == [{"a0"}, {"a1"}]


def test_gaps_are_kept_and_filled():
    s = OracleSession()
    s.append([1, 2], [3], rows=["a0", GAP])
    child = s.append([1, 2, 3, 4], [5], rows=["b3"], start=3)
    assert child.rows == [{"a0"}, {GAP}, {GAP}, {"b3"}]
    (segment,) = s.lineage()
    assert (segment.tokens, segment.cut_tokens, segment.certain) == ([], 5, False)
    (segment,) = s.lineage(gaps="keep")
    assert segment.tokens == [1, 2, 3, 4, 5]
    grand = s.append([1, 2, 3, 4, 5, 6], [7], rows=rows([1, 2, 3, 4, 5, 6, 7]))
    assert all(GAP not in row for row in grand.rows)


def test_gap_cuts_before_it_and_at_the_last_generated_token():
    s = OracleSession()
    s.append([1], [2, 3], rows=rows([1, 2, 3]))
    s.append([1, 2, 3, 4, 5], [6], rows=[*rows([1, 2, 3, 4]), GAP, "r"])
    (segment,) = s.lineage()
    assert (segment.tokens, segment.cut_tokens) == ([1, 2, 3], 3)
    assert segment.steps == [0, 1]


def test_a_session_without_routing_is_not_cut():
    s = OracleSession()
    s.append([1], [2, 3])
    assert [(segment.tokens, segment.cut_tokens) for segment in s.lineage()] == [([1, 2, 3], 0)]
    s.append([9], [8], rows=["r"])
    assert [segment.certain for segment in s.lineage()] == [False, True]


def test_retry_is_superseded_and_shared_prefix_trained_once():
    s = OracleSession()
    s.append([1], [2])
    s.append([1, 2, 3], [4])
    s.append([1, 2, 3], [5])
    s.append([1, 2, 6], [7])
    kept = s.lineage()
    assert [segment.steps for segment in kept] == [[0, 2], [0, 3]]
    assert [segment.mask for segment in kept] == [[0, 1, 0, 1], [0, 0, 0, 1]]
    every = s.lineage(superseded="keep", train_shared_prefix="all")
    assert [segment.superseded for segment in every] == [True, False, False]
    assert all(segment.mask == [0, 1, 0, 1] for segment in every)


def test_trailing_observations():
    s = OracleSession()
    s.append([1], [2])
    s.append([1, 2, 3, 4], [])
    (cut,) = s.lineage()
    (kept,) = s.lineage(trailing="keep")
    assert (cut.tokens, cut.cut_tokens) == ([1, 2], 2)
    assert (kept.tokens, kept.mask, kept.logprobs) == ([1, 2, 3, 4], [0, 1, 0, 0], [GAP, 0.0, 0.0])


def test_discard_and_timeline():
    s = OracleSession()
    s.append([1], [2])
    s.append([1, 2], [3], loss_mask=[0, 0, 0])
    with pytest.raises(RefusedError):
        s.discard(0)
    s.discard(1)
    with pytest.raises(RefusedError):
        s.discard(1)
    assert [segment.tokens for segment in s.timeline()] == [[1, 2]]
    assert s.append([1, 2, 3], [4]).parent == 0


def test_row_counts():
    five = ["a", "b", "c", "d", "e"]
    assert accept_rows(five[:4], 0, 5) == {0: "a", 1: "b", 2: "c", 3: "d"}
    assert accept_rows(five, 0, 5) == {0: "a", 1: "b", 2: "c", 3: "d"}
    assert accept_rows(five[:2], 2, 5) == {2: "a", 3: "b"}
    assert accept_rows(five[:3], 2, 5) == {2: "a", 3: "b"}
    assert accept_rows(five[:4], 2, 5) == {0: "a", 1: "b", 2: "c", 3: "d"}
    assert accept_rows([], 4, 5) == {}
    for count, start in ((3, 0), (0, 0), (1, 2), (6, 0)):
        with pytest.raises(RefusedError):
            accept_rows(["x"] * count, start, 5)


def test_shared_blocks_need_not_be_sent_again():
    s = OracleSession()
    long = list(range(300))
    s.append(long, [1], rows=rows([*long, 1]))
    other = s.append([*long[:280], 7], [8], rows=[GAP] * 281)
    assert other.parent is None
    assert all(GAP not in row for row in other.rows[:256])
    assert all(GAP in row for row in other.rows[256:])
    assert len(other.rows[270]) == 2
    assert other.rows[280] == {GAP}
