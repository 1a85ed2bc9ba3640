"""Waiting for room: every verb that commits waits alike, and says no after ``append_timeout_s``."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from kit import SHAPE, add

import spool
from spool.write.space import Grants


class Full:
    """Refuses all room until `open` is called."""

    def __init__(self, monkeypatch):
        self.full, self.refusals, real = False, 0, Grants.take

        def take(grants, n_bytes):
            if self.full:
                self.refusals += 1
                raise spool.CapacityError("full")
            real(grants, n_bytes)

        monkeypatch.setattr(Grants, "take", take)

    def for_a_while(self):
        self.full = True
        threading.Timer(0.15, setattr, (self, "full", False)).start()


async def in_transaction(s):
    async with s.transaction():
        await s.append_async(prompt_token_ids=[9, 9], response_token_ids=[8], logprobs=[-1.0])
        FULL[0].for_a_while()


def in_block(s):
    with s.transaction():
        s.append(prompt_token_ids=[9, 9], response_token_ids=[8], logprobs=[-1.0])
        FULL[0].for_a_while()


FULL: list[Full] = []
VERBS = {
    "append": lambda sp, s, ref: add(s, [5], [6]),
    "finalize": lambda sp, s, ref: s.finalize(),
    "finalize_async": lambda sp, s, ref: asyncio.run(s.finalize_async()),
    "step discard": lambda sp, s, ref: s.discard(ref),
    "step discard_async": lambda sp, s, ref: asyncio.run(s.discard_async(ref)),
    "annotate": lambda sp, s, ref: sp.annotate("s", reward=1.0),
    "attach": lambda sp, s, ref: sp.attach(ref, align="step", late=[1.0]),
    "release": lambda sp, s, ref: sp.release(s.view()),
    "checkpointed": lambda sp, s, ref: sp.checkpointed("tag"),
    "discard": lambda sp, s, ref: sp.discard("s"),
    "discard_async": lambda sp, s, ref: asyncio.run(sp.discard_async("s")),
    "transaction": lambda sp, s, ref: in_block(s),
    "async transaction": lambda sp, s, ref: asyncio.run(in_transaction(s)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_commits_waits_for_room(open_spool, monkeypatch, verb):
    sp = open_spool(options="append_timeout_s=5")
    s = sp.session("s", experts=SHAPE)
    ref = add(s, [1, 2], [3])
    FULL[:] = [Full(monkeypatch)]
    if "transaction" not in verb:
        FULL[0].for_a_while()
    VERBS[verb](sp, s, ref)
    assert FULL[0].refusals > 1
    if "transaction" in verb:
        assert len(s.steps) == 2 == len(sp.steps("s"))


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_waits_for_ever_and_a_refusal_changes_nothing(open_spool, monkeypatch, verb):
    sp = open_spool(options="append_timeout_s=0.05")
    s = sp.session("s", experts=SHAPE)
    ref = add(s, [1, 2], [3])
    FULL[:] = [Full(monkeypatch)]
    FULL[0].full = "transaction" not in verb
    monkeypatch.setattr(FULL[0], "for_a_while", lambda: setattr(FULL[0], "full", True), raising=False)
    start = time.monotonic()
    with pytest.raises(spool.CapacityError):
        VERBS[verb](sp, s, ref)
    assert time.monotonic() - start < 3
    FULL[0].full = False
    assert s.steps == [ref] == sp.steps("s")
    add(s, [1, 2, 3, 4], [5])
    assert len(s.finalize()) == 1
