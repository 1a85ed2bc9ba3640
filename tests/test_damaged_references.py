"""References that something changed on their way: an error of Spool's own, soon, without taking memory."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import time

import numpy as np
import pytest
from kit import SHAPE, add, counting

import spool
from spool import FieldSpec, IntegrityError, SpoolError

FIELDS = (
    FieldSpec(name="kept", dtype="int32", align="token", ragged=True),
    FieldSpec(name="score", dtype="float32", align="step"),
)
NUMBERS = (-1, 0, 1, 7, 2**31 - 1, 2**31, 2**40, 2**48, 2**62, -(2**40))
TEXTS = ("", "x", "../..", "20261130T054312-9f3a1c5e", "a" * 300, "\0")
LIMIT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with spool.open(tmp_path_factory.mktemp("world") / "spool", fields=FIELDS) as sp:
        s = sp.session("s", experts=SHAPE)
        tokens = counting(12)
        for n in (4, 8, 12):
            more = {"kept": [[t] for t in tokens[:n]], "score": np.float32(n)}
            add(s, tokens[: n - 2], tokens[n - 2 : n], fields=more, units=[])
        other = sp.session("other")
        add(other, [1, 2], [3], routed_experts=None)
        sp.flush()  # of what is being written a reader waits for more
        yield sp, [*s.steps, *s.finalize()], other.steps[0].extents["token_ids"][0].stream


def places(value, path=()):
    """Return the paths of all leaves of a JSON value."""
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in places(each, (*path, key))]
    if isinstance(value, list):
        return [found for i, each in enumerate(value) for found in places(each, (*path, i))]
    return [path]


def mutated(value, random_, streams):
    value = json.loads(json.dumps(value))
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        path = random_.choice(places(value))
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        old = holder[path[-1]]
        if isinstance(old, bool) or old is None:
            continue
        holder[path[-1]] = (
            random_.choice(NUMBERS) if isinstance(old, int | float) else random_.choice((*TEXTS, *streams))
        )
    return value


def attempt(call):
    began = time.process_time()
    with contextlib.suppress(SpoolError):
        call()
    assert time.process_time() - began < 1


@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_reference_does_more_than_raise(world, seed):
    sp, refs, other = world
    random_ = random.Random(seed)
    plain = [json.loads(ref.to_json()) for ref in refs]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for _ in range(100):
        try:
            ref = spool.ref_from_json(json.dumps(mutated(random_.choice(plain), random_, [other])))
        except spool.InputError:
            continue
        attempt(lambda ref=ref: sp.read(ref))
        attempt(lambda ref=ref: sp.read(ref, verify="always", tokens=slice(2, 5)))
        attempt(lambda ref=ref: sp.locate(ref))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    assert grown < LIMIT_BYTES


def changed(ref, name, **numbers):
    extent = ref.extents[name][0]
    plain = json.loads(ref.to_json())
    at = {"stream": 0, "row": 1, "n": 2, "position": 3, "crc": 4, "before": 5, "after": 6}
    values = [*plain["extents"][name][0], 0, 0][:7]
    for key, value in numbers.items():
        values[at[key]] = value
    assert extent.stream == plain["extents"][name][0][0]
    plain["extents"][name][0] = values
    return spool.ref_from_json(json.dumps(plain))


def test_rows_of_steps_are_not_made_room_for_by_what_a_position_says(world):
    sp, refs, _ = world
    for call in (sp.read, sp.locate):
        with pytest.raises(IntegrityError, match="damaged"):
            call(changed(refs[0], "score", position=2**40))


def test_values_of_another_stream_are_refused(world):
    sp, refs, other = world
    for call in (sp.read, sp.locate):
        with pytest.raises(IntegrityError, match="end offsets"):
            call(changed(refs[-1], "kept.values", stream=other))


def test_locate_looks_at_the_lengths_as_read_does(world):
    sp, refs, _ = world
    plain = json.loads(refs[0].to_json())
    ref = spool.ref_from_json(json.dumps({**plain, "n_tokens": 2**40}))
    for call in (sp.read, sp.locate):
        with pytest.raises(IntegrityError, match="damaged"):
            call(ref)
