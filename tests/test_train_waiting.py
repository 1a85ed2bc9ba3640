"""How long a rank of a feed waits, for what, and whom it names; by a clock of the test's own."""

from __future__ import annotations

import logging

import pytest

from spool.errors import RankError
from spool.train.delivery.waiting import REMIND_S, START_S, STILL_S, Waiting


def let_in(timeout_s=600.0):
    waiting = Waiting(0.0, join_timeout_s=60.0, timeout_s=timeout_s)
    waiting.reader = 77
    return waiting


def lived(waiting, start, stop, waits_for=""):
    """Let the reader say that it lives, each second, and the rank look as often."""
    now = start
    while now < stop:
        now += 1.0
        waiting.heard(now)
        waiting.pulse(waits_for)
        waiting.check(now)
    return now


def test_time_counts_from_when_something_is_planned():
    waiting = let_in(timeout_s=4.0)
    waiting.begin(0.0)
    now = lived(waiting, 0.0, 7.9)
    waiting.planned(now, 2)
    now = lived(waiting, now, now + 3)
    with pytest.raises(RankError, match=r"no micro-batch came for 4 s, though one is planned: .*, 77, lives"):
        lived(waiting, now, now + 1)


def test_what_keeps_the_reader_from_reading_is_said():
    waiting = let_in(timeout_s=4.0)
    waiting.planned(0.0, 1)
    waiting.begin(0.0)
    waiting.heard(3.0)
    waiting.pulse("", "requests to the cold root fail and are tried again")
    with pytest.raises(RankError, match=r"77, lives, but requests to the cold root fail .* again; see the log"):
        waiting.check(4.0)
    waiting.pulse("", "")
    with pytest.raises(RankError, match="lives and is not done with it"):
        waiting.check(4.0)


def test_time_counts_from_when_a_rank_asks():
    waiting = let_in(timeout_s=4.0)
    waiting.planned(0.0, 2)
    waiting.heard(99.0)
    waiting.begin(100.0)
    waiting.check(103.0)
    waiting.taken()
    waiting.begin(200.0)
    waiting.heard(200.0)
    with pytest.raises(RankError, match="for 4 s"):
        lived(waiting, 200.0, 204.0)


@pytest.mark.parametrize("said", ["submitted", "finish"])
def test_what_this_rank_said_counts_whatever_the_reader_heard_of_it(said):
    waiting = let_in(timeout_s=30.0)
    assert not waiting.expects
    getattr(waiting, said)(1.0)
    assert waiting.expects
    waiting.begin(1.0)
    waiting.check(30.0)
    with pytest.raises(RankError, match=r"for 30 s.*process that reads for this feed, 77, says nothing since 30 s"):
        waiting.check(31.0)


def test_a_mini_batch_that_was_taken_is_waited_for_no_more():
    waiting = let_in()
    waiting.submitted(0.0)
    waiting.planned(1.0, 2)
    for _ in range(2):
        assert waiting.expects
        waiting.taken()
    assert not waiting.expects
    waiting.finish(2.0)
    assert waiting.expects  # the end


def test_who_is_waited_for_is_named():
    waiting = let_in(timeout_s=9.0)
    waiting.planned(0.0, 1)
    waiting.begin(0.0)
    with pytest.raises(RankError, match="77, waits for rank tp=1; see what that rank does, or raise timeout_s="):
        lived(waiting, 0.0, 9.0, waits_for="rank tp=1")


def test_a_reader_that_stands_still_is_named_though_nothing_is_planned():
    waiting = let_in(timeout_s=2.0)
    waiting.begin(0.0)
    now = lived(waiting, 0.0, 1000.0)
    waiting.check(now + STILL_S - 1)
    with pytest.raises(RankError, match=r"stands still: the process that reads for this feed, 77, says nothing since"):
        waiting.check(now + STILL_S)
    waiting.begin(now + 5000)  # the rank did something else meanwhile, and nobody read for it
    waiting.check(now + 5001)


def test_a_rank_that_is_not_let_in_says_so():
    waiting = Waiting(5.0, join_timeout_s=60.0, timeout_s=1.0)
    waiting.begin(6.0)
    waiting.check(5.0 + 60.0 + START_S - 1)
    with pytest.raises(RankError, match=f"did not let this rank in for {60 + START_S:.0f} s.*join_timeout_s="):
        waiting.check(5.0 + 60.0 + START_S)


def test_that_nothing_is_to_come_is_said_from_time_to_time(caplog):
    waiting = let_in()
    waiting.begin(0.0)
    with caplog.at_level(logging.WARNING):
        lived(waiting, 0.0, 2 * REMIND_S + 1)
    assert [record.message.split(", ")[1] for record in caplog.records] == ["since 30 s", "since 60 s"]
