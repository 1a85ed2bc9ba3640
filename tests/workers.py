"""What other processes do in the tests: light to import, since each starts a fresh interpreter."""

from __future__ import annotations

import os
import pickle
import signal
import time

import numpy as np
from kit import add, counting, session

import spool


def resume_and_append(uri, token, tokens):
    with spool.open(uri) as sp:
        add(sp.resume(token), [*tokens, 1], [2])


def read_pickled(uri, data, out):
    with spool.open(uri) as sp:
        np.save(out, sp.read(pickle.loads(data))["routed_experts"])


def see_nothing(uri):
    with spool.open(uri) as sp:
        assert [ref for row in sp.sessions() for ref in sp.steps(row.session_id)] == []


def annotate_twice(uri):
    with spool.open(uri) as sp:
        sp.annotate("s", reward=0.5)
        sp.annotate("s", reward=0.75, passed=True)


def discard_session(uri):
    with spool.open(uri) as sp:
        sp.discard("s")


def fail_to_take_over(uri):
    with spool.open(uri) as sp:
        try:
            add(session(sp), [1, 2, 3], [9])
        except spool.LockedError:
            return
        raise AssertionError("a session that another process records was gone on with")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_inside_transaction(uri):
    s = session(spool.open(uri))
    add(s, [1, 2], [3])
    with s.transaction():
        add(s, [1, 2, 3], [4])
        die()


def append_and_die(uri):
    s = session(spool.open(uri))
    add(s, [1, 2], [3])
    add(s, [1, 2, 3, 4], [5])
    die()


def tick(pipe):
    """Wake every millisecond until told to stop, then send how late each time was: the machine's own noise."""
    late_s = []
    pipe.send("ready")
    while not pipe.poll():
        before = time.perf_counter()
        time.sleep(0.001)
        late_s.append(time.perf_counter() - before - 0.001)
    pipe.send(late_s)


def append_many(uri, worker, n_steps, barrier):
    """Append as worker number ``worker``, in five sessions, at the same time as the others."""
    barrier.wait(60)
    with spool.open(uri) as sp:
        for number in range(n_steps):
            s = session(sp, f"{worker}-{number % 5}")
            tokens = [worker + 1, number + 1, *counting(60, 100 * worker)]
            add(s, tokens[:30], tokens[30:], step_id=f"{number}")


def write_ten(uri, pipe):
    """Append up to ten steps, telling each reference, until told to die."""
    s = session(spool.open(uri))
    for number in range(10):
        ref = add(s, [number + 1, *counting(300)], [7, 8])
        pipe.send(ref.to_json())
        if pipe.recv() == "die":
            die()
