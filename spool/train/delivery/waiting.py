"""What a rank waits for, and since when: it is told what happens, and says when nothing did for too long.

The process that reads says every `PULSE_S` that it lives, and what it waits for itself. So a rank knows a slow read
from a reader that stands still, and both from another rank that does.
"""

from __future__ import annotations

import logging

from spool.errors import RankError

log = logging.getLogger("spool.train.delivery")

PULSE_S = 1.0
"""How often the process that reads says that it lives."""
TICK_S = 1.0
"""How often a rank that waits looks whether that is too long."""
STILL_S = 5 * PULSE_S
"""A reader that said nothing for so long stands still, or is close to it."""
START_S = 15.0
"""What the process that reads may take to start, beside the time that ranks have to come."""
REMIND_S = 30.0


class Waiting:
    """The state of a rank's wait. Times are of one clock, in seconds.

    Args:
        now: when the rank asked to be let in.
        join_timeout_s: how long ranks may take to come.
        timeout_s: how long what is planned may take to come.

    Attributes:
        reader: the process that reads; None until it let the rank in.
        n_submitted: mini-batches that this rank submitted.
        finished: it said that no more follow.
    """

    def __init__(self, now: float, *, join_timeout_s: float, timeout_s: float) -> None:
        self._joined = self._began = self._reminded = self._heard = self._since = now
        self._welcome_s, self._timeout_s = join_timeout_s + START_S, timeout_s
        self._n_planned = self._n_micro = self._n_taken = 0
        self._said = self._trouble = ""
        self.reader: int | None = None
        self.n_submitted, self.finished = 0, False

    @property
    def expects(self) -> bool:
        """Whether something is to come: it is planned, or this rank said so, whatever the reader heard of it."""
        return self._n_taken < self._n_micro or self._n_planned < self.n_submitted or self.finished

    # -- what happens ------------------------------------------------------------------------------------------------

    def submitted(self, now: float) -> None:
        """This rank submitted a mini-batch."""
        self._expect(now)
        self.n_submitted += 1

    def finish(self, now: float) -> None:
        """This rank said that no more follow."""
        self._expect(now)
        self.finished = True

    def planned(self, now: float, n_micro: int) -> None:
        """The reader knows another mini-batch."""
        self._expect(now)
        self._n_micro += n_micro
        self._n_planned += 1

    def taken(self) -> None:
        """The rank has another micro-batch."""
        self._n_taken += 1

    def heard(self, now: float) -> None:
        """The reader said something."""
        self._heard = now

    def pulse(self, waits_for: str, trouble: str = "") -> None:
        """The reader lives, waits for that, for nobody where empty, and has that trouble with reading."""
        self._said, self._trouble = waits_for, trouble

    def _expect(self, now: float) -> None:
        if not self.expects:
            self._since = now

    # -- what is too long --------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """The rank begins to wait."""
        self._began = self._reminded = now

    def check(self, now: float) -> None:
        """Say from time to time that nothing is to come.

        Raises:
            RankError: nothing came for too long; says whose fault that is, as far as that is known.
        """
        if self.reader is None:
            self._check_welcome(now)
            return
        waited, silent = now - max(self._began, self._since), now - max(self._began, self._heard)
        if self.expects and waited >= self._timeout_s:
            raise RankError(f"no micro-batch came for {waited:.0f} s, though one is planned: {self._state(silent)}")
        if silent >= max(self._timeout_s, STILL_S):
            raise RankError(f"this feed stands still: {self._state(silent)}")
        if not self.expects and now - self._reminded >= REMIND_S:
            self._reminded = now
            log.warning(
                "no mini-batch is submitted to this feed, since %.0f s, and no rank called finish()", now - self._began
            )

    def _check_welcome(self, now: float) -> None:
        if now - self._joined >= self._welcome_s:
            raise RankError(
                f"the process that reads for this feed did not let this rank in for {now - self._joined:.0f} s: it "
                "stands still, or starts slowly; see the log of the rank that started it, end the process that it "
                "started (python -m spool.train.delivery), or raise join_timeout_s="
            )

    def _state(self, silent: float) -> str:
        who = f"the process that reads for this feed, {self.reader},"
        if silent >= min(STILL_S, self._timeout_s):
            return (
                f"{who} says nothing since {silent:.0f} s: it stands still, or its machine does; see the log of the "
                "rank that started it, end it (kill -9), and connect anew"
            )
        if self._said:
            return f"{who} waits for {self._said}; see what that rank does, or raise timeout_s="
        if self._trouble:
            return (
                f"{who} lives, but {self._trouble}; see the log of the rank that started it for why, and whether that "
                "root answers, or raise timeout_s="
            )
        return f"{who} lives and is not done with it; see the log of the rank that started it, or raise timeout_s="
