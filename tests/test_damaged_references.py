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
from spool.read.memory import Memory
from spool.stores import hot

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


def as_plain(ref, change):
    plain = json.loads(ref.to_json())
    change(plain)
    return spool.ref_from_json(json.dumps(plain))


def set_(**values):
    return lambda plain: plain.update(values)


def repeated(name):
    """The first extent once more, in front of the second: the same rows stand for the same positions twice."""

    def change(plain):
        plain["extents"][name].insert(1, plain["extents"][name][0])

    return change


def moved(name, *, from_=0, to=1):
    """The rows of one extent for the positions of another one, as long as that is."""

    def change(plain):
        one, other = (plain["extents"][name][n] for n in (from_, to))
        other[1] = one[1]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_(n_tokens=10**9), "its 1000000000 tokens expand to 1000000000 rows, and it says 12"),
        (set_(n_rows=10**9), "12 tokens expand to 12 rows"),
        (lambda plain: plain["spans"][-1].__setitem__(2, 10**9), "its spans end at 1000000000, behind its 12 tokens"),
        (lambda plain: plain["spans"].reverse(), r"its spans have \[\d+, \d+\) behind"),
        (set_(versions=[["7", 2, 10**9]]), "its versions end at 1000000000"),
        (set_(units=[["image", 10**9, 4]]), "units outside of its 12 tokens"),
        (set_(units=[["image", 3, -4]]), "or of no rows"),
        *((repeated(name), rf"rows .* of {name.partition('.')[0]} in stream .* stand for positions .* in front of it")
          for name in ("token_ids", "routed_experts", "logprobs", "kept.offsets", "score")),
        *((moved(name), rf"rows .* of {name} in stream .* and rows up to \d+ stand for those from 0 on")
          for name in ("token_ids", "routed_experts")),
    ],
)  # fmt: skip
def test_a_reference_that_contradicts_itself_is_refused_and_says_where(world, change, said):
    sp, refs, _ = world
    ref = as_plain(refs[-1], change)
    for call in (sp.read, sp.locate, lambda ref: sp.coverage([ref])):
        with pytest.raises(IntegrityError, match=said) as caught:
            call(ref)
        assert "take it from the catalog again" in str(caught.value)


def test_a_mask_is_looked_at_too(open_spool):
    sp = open_spool()
    s = sp.session("s")
    for prompt, response in (([1], [2, 3]), ([1, 2, 3], [4, 5])):
        s.append(prompt_token_ids=prompt, response_token_ids=response, loss_mask=[0, 1])
    (ref,) = s.finalize()
    with pytest.raises(IntegrityError, match="of loss_mask in stream"):
        sp.read(as_plain(ref, repeated("loss_mask")), fields=["loss_mask"])


def test_no_room_is_made_for_what_is_refused(world):
    sp, refs, _ = world
    ref = as_plain(refs[-1], set_(n_tokens=10**9, n_rows=10**9))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with pytest.raises(spool.GapError, match=r"\[12, 1000000000\)"):
        sp.read(ref, fields=["logprobs", "token_ids"])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < LIMIT_BYTES


def test_more_than_memory_takes_says_what_to_do(world):
    sp, refs, _ = world
    most = 2**31 - 1
    ref = as_plain(refs[-1], set_(n_tokens=most, n_rows=most))
    with pytest.raises(spool.CapacityError, match="read fewer tokens"):
        Memory(0).empty((most, 1 << 20), np.dtype(np.int64))
    with pytest.raises(spool.GapError):
        sp.read(ref)


def test_rows_that_were_never_written_are_waited_for_once(open_spool):
    sp = open_spool()
    s = sp.session("s")
    for n in (2, 4, 6, 8):  # in the tail of a pack in the making
        s.append(prompt_token_ids=counting(n - 1), response_token_ids=counting(n)[-1:])
    (ref,) = s.finalize()

    def scattered(plain):
        for extent in plain["extents"]["token_ids"]:
            extent[1] += 5000 * (1 + extent[3])

    began = time.monotonic()
    with pytest.raises(IntegrityError):
        sp.read(as_plain(ref, scattered), fields=["token_ids"], verify="never")
    assert time.monotonic() - began < 2 * hot.PATIENCE_S


def test_locate_looks_at_the_lengths_as_read_does(world):
    sp, refs, _ = world
    plain = json.loads(refs[0].to_json())
    ref = spool.ref_from_json(json.dumps({**plain, "n_tokens": 2**40}))
    for call in (sp.read, sp.locate):
        with pytest.raises(IntegrityError, match="damaged"):
            call(ref)
