"""Reading from the cold tier: equal to the hot one in everything, in few requests, and loud about damage."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cold_workers import digest, measure, read_all, read_in_fork
from hypothesis import given, settings
from hypothesis import strategies as st
from shell import run
from tiers import assert_same, record, remove_root, wait_for

import spool
from spool.errors import IntegrityError, ReleasedError, SpoolError
from spool.model import fields as model_fields
from spool.read import cold as cold_module
from spool.read import ranges, traffic
from spool.read.indexes import Indexes
from spool.read.plan import Piece
from spool.read.sample import Ragged
from spool.spiller.elect import is_running
from spool.spiller.evict import evict
from spool.stores.objects import open_objects
from spool.write import stream as stream_module

FIELDS = (
    spool.FieldSpec(name="kept", dtype="int32", align="token", ragged=True),
    spool.FieldSpec(name="value", dtype="bfloat16", align="response"),
    spool.FieldSpec(name="topic", dtype="float32", align="token", shape=(64,)),
    spool.FieldSpec(name="flag", dtype="bool", align="token"),
    spool.FieldSpec(name="cost", dtype="float64", align="step"),
)
WIDE = spool.MoEShape(num_layers=5, num_experts=300, topk=2, moe_layers=(1, 2, 4))
NARROW = spool.MoEShape(num_layers=6, num_experts=128, topk=4)


def small_layouts(patch):
    """Give streams that are made from now on chunks of 16 rows and shards of 512."""
    patch.setattr(model_fields, "MAX_CHUNK_BYTES", 4096)
    patch.setattr(stream_module, "layout", lambda schema, **_: model_fields.layout(schema, max_shard_bytes=1 << 17))


def experts(rng, n, shape):
    layers = shape.moe_layers or range(shape.num_layers)
    ids = np.argsort(rng.random((n, len(layers), 16)), -1)[..., : shape.topk] * (shape.num_experts // 16)
    out = np.zeros((n, shape.num_layers, shape.topk), "i4")
    out[:, list(layers)] = ids
    return out


def step(session, rng, prompt, n, shape):
    """Append a step with all fields; return its tokens."""
    response = rng.integers(0, 50_000, n).tolist()
    total = len(prompt) + n
    lengths = rng.integers(0, 4, total)
    kept = Ragged(rng.integers(0, 99, lengths.sum()).astype("i4"), np.concatenate([[0], np.cumsum(lengths)]))
    session.append(
        prompt_token_ids=prompt,
        response_token_ids=response,
        logprobs=rng.standard_normal(n).astype("f4"),
        loss_mask=rng.integers(0, 2, n).astype("u1"),
        routed_experts=experts(rng, total - 1, shape),
        fields={
            "kept": kept,
            "value": rng.standard_normal(n).astype(ml_dtypes.bfloat16),
            "topic": np.tile(np.arange(64, dtype="f4"), (total, 1)) * (np.arange(total)[:, None] % 2),
            "flag": rng.integers(0, 2, total).astype(bool),
            "cost": float(rng.standard_normal()),
        },
    )
    return [*prompt, *response]


def record_all(sp):
    """Record sessions of several shapes; return their segments and steps."""
    rng, refs = np.random.default_rng(7), []
    for name, shape in (("narrow", NARROW), ("wide", WIDE)):
        s = sp.session(name, experts=shape)
        tokens = step(s, rng, rng.integers(0, 50_000, 30).tolist(), 470, shape)
        step(s, rng, [*tokens, 1, 2, 3], 700, shape)  # over several shards
        step(s, rng, [*tokens[:100], 7, 7], 150, shape)  # a branch: the prefix is shared
        refs += [*s.steps, *s.finalize(outcome="completed")]
    gappy = sp.session("gappy", experts=NARROW)
    gappy.append(prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5], routed_experts=experts(rng, 4, NARROW))
    gappy.append(prompt_token_ids=[1, 2, 3, 4, 5, 6], response_token_ids=[7], logprobs=np.zeros(1, "f4"))
    refs += gappy.finalize(view="timeline")
    return refs


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.takes_turns) for kind in ("file", "s3")])
def world(request, tmp_path_factory):
    """A spool in a hot root and, published, in a cold one, both open; what is in it; and requests to the cold root."""
    folder, requests = tmp_path_factory.mktemp("world"), []
    with pytest.MonkeyPatch.context() as patch:
        url = f"file://{folder}/cold"
        if request.param == "s3":
            server = request.getfixturevalue("s3_server")
            for name, value in server.environment().items():
                patch.setenv(name, value)
            url = f"s3://spool/{folder.name}"

        def observed(*args, observer=None, **options):
            def see(kind, key, n_bytes, seconds):
                requests.append((kind, key, n_bytes))
                if observer is not None:
                    observer(kind, key, n_bytes, seconds)

            return open_objects(*args, observer=see, **options)

        patch.setattr("spool.root.open_objects", observed)
        with spool.open(f"file://{folder}/hot?spill={url}", fields=FIELDS) as hot:
            with pytest.MonkeyPatch.context() as while_made:
                small_layouts(while_made)
                refs = record_all(hot)
            hot.publish([ref for ref in refs if isinstance(ref, spool.SegmentRef)], timeout_s=120)
            with spool.open(url) as cold:
                yield SimpleNamespace(hot=hot, cold=cold, refs=refs, url=url, requests=requests, folder=folder)


def outcome(read):
    try:
        return read()
    except SpoolError as error:
        return type(error)


def assert_equal(one, other):
    if isinstance(one, type) or isinstance(other, type):
        assert one == other
        return
    for got, want in zip(one, other, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            parts = (value.values, value.offsets) if isinstance(value, Ragged) else (value,)
            found = (got[name].values, got[name].offsets) if isinstance(value, Ragged) else (got[name],)
            for ours, theirs in zip(found, parts, strict=True):
                assert ours.dtype == theirs.dtype, name
                assert ours.shape == theirs.shape, name
                assert ours.tobytes() == theirs.tobytes(), name


def test_whole_references_are_equal(world):
    packs = {extent.row // 512 for ref in world.refs for extent in ref.extents.get("token_ids", ())}
    assert len(packs) > 2
    complete = [ref for ref in world.refs if ref.session_id != "gappy"]
    for dtype in ("train", "stored"):
        for verify in ("whole", "always", "never"):
            wanted = world.hot.read(complete, dtype=dtype, verify=verify)
            assert_equal(world.cold.read(complete, dtype=dtype, verify=verify), wanted)
    codecs = world.cold._readers._readers[world.cold.spool_id]._tiers[0]._layouts
    assert {(name, layout.codec) for own in codecs.values() for name, layout in own.items()} >= {
        ("routed_experts", "zstd"), ("topic", "zstd"), ("token_ids", "raw"), ("value", "raw"), ("kept.values", "raw"),
    }  # fmt: skip


NAMES = ["token_ids", "logprobs", "loss_mask", "routed_experts", "kept", "value", "topic", "flag", "cost"]
BOUND = st.one_of(st.none(), st.integers(-40, 1000))


@st.composite
def reads(draw):
    numbers = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    slices = st.builds(slice, BOUND, BOUND)
    return {
        "numbers": numbers,
        "fields": draw(st.one_of(st.none(), st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))),
        "tokens": [draw(st.one_of(st.none(), slices, st.lists(slices, max_size=3))) for _ in numbers],
        "layers": draw(st.one_of(st.none(), st.builds(slice, st.integers(0, 6), st.integers(0, 6)))),
        "dtype": draw(st.sampled_from(["train", "stored"])),
        "missing": draw(st.sampled_from(["error", 0, 7])),
        "verify": draw(st.sampled_from(["whole", "always", "never"])),
        "out": draw(st.booleans()),
    }


@settings(max_examples=75)
@given(asked=reads())
def test_any_read_is_equal(world, asked):
    refs = [world.refs[number % len(world.refs)] for number in asked.pop("numbers")]
    into = asked.pop("out")
    wanted = outcome(lambda: world.hot.read(refs, **asked))
    if into and not isinstance(wanted, type) and not any(isinstance(v, Ragged) for s in wanted for v in s.values()):
        out = [{name: np.full(v.shape, 99).astype(v.dtype) for name, v in sample.items()} for sample in wanted]
        world.cold.read(refs, out=out, **asked)
        assert_equal(out, wanted)
    assert_equal(outcome(lambda: world.cold.read(refs, **asked)), wanted)


def test_every_alignment_of_a_slice(world):
    ref = next(ref for ref in world.refs if ref.session_id == "narrow" and ref.n_tokens > 800)
    whole = world.hot.read(ref, fields=["token_ids", "routed_experts", "topic"])
    for start in (0, 1, 15, 16, 17, 498, 511, 512, 513, 900):
        for n in (0, 1, 15, 16, 17, 33, 256, 300):
            part = world.cold.read(ref, fields=["token_ids", "routed_experts", "topic"], tokens=slice(start, start + n))
            for name, value in part.items():
                assert (value == whole[name][start : start + n]).all(), (name, start, n)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_read_by_reference_lists_nothing_and_asks_for_documents_and_indexes_once(world):
    ref = next(ref for ref in world.refs if isinstance(ref, spool.SegmentRef) and ref.session_id == "narrow")
    with spool.open(world.url) as there:
        world.requests.clear()
        there.read(ref)
        first = Counter(kind for kind, *_ in world.requests)
        gets = [key for kind, key, _ in world.requests if kind == "get"]
        assert first["list"] == first["put"] == 0
        assert sum(key.endswith("/zarr.json") for key in gets) == 1
        world.requests.clear()
        there.read(ref)
        again = [key for kind, key, _ in world.requests if kind == "get"]
        assert {kind for kind, *_ in world.requests} == {"get"}
        assert not any(key.endswith(".json") for key in again)
        compressed = [key for key in again if "/routed_experts/" in key or "/topic/" in key]
        assert len(gets) - len(again) == 1 + len(set(compressed))
        # one request an object and extent run at most, as all of it is wanted
        runs = sum(len(extents) for extents in ref.extents.values())
        assert len(again) <= runs


def test_rows_where_raw_and_chunks_of_the_wanted_layers_where_compressed(world):
    ref = next(ref for ref in world.refs if ref.session_id == "narrow" and ref.n_tokens > 800)
    for fields, most in ((["token_ids"], 4 * 200 * 1.1), (["value"], 2 * 200 * 1.1)):
        world.cold.read(ref, fields=fields)
        world.requests.clear()
        world.cold.read(ref, fields=fields, tokens=slice(600, 800))
        fetched = sum(n for _, key, n in world.requests)
        assert 0 < fetched <= most * (1 + 4 / (16 * 2)), fields  # a checksum for each chunk of 16 rows
    world.cold.read(ref, fields=["routed_experts"])
    world.requests.clear()
    world.cold.read(ref, fields=["routed_experts"])
    whole = sum(n for *_, n in world.requests)
    world.requests.clear()
    world.cold.read(ref, fields=["routed_experts"], layers=slice(2, 4))
    assert sum(n for *_, n in world.requests) <= 1.2 * whole / 3


def test_fetches_waste_little_whatever_the_stride():
    rng = np.random.default_rng(3)
    for trial in range(300):
        width = int(rng.integers(1, 600))
        gap, n = (int(rng.integers(0, limit)) for limit in (400, 60))
        starts = np.cumsum(rng.integers(1, 80, n + 1) + (gap if trial % 2 else rng.integers(0, gap + 1, n + 1)))
        pieces = [Piece("k", int(start) * width, int(rng.integers(1, 60)) * width, width, 0, 0) for start in starts]
        fetches = ranges.raw_fetches(pieces, parallel=16)
        wanted = np.zeros(int(starts[-1] + 60) * width, bool)
        for piece in pieces:
            wanted[piece.offset : piece.offset + piece.length] = True
        fetched = np.zeros(len(wanted), int)
        for fetch in fetches:
            fetched[fetch.offset : fetch.offset + fetch.length] += 1
        assert fetched.max() == 1
        assert fetched[wanted].all()
        assert fetched.sum() <= 1.0626 * wanted.sum()


def test_narrow_gaps_are_fetched_and_large_ranges_are_split():
    assert ranges.widest_gap([]) == 0
    assert ranges.widest_gap([(0, 100), (103, 200), (205, 300)]) == 5
    assert ranges.widest_gap([(0, 100), (110, 200)]) == 10
    assert ranges.widest_gap([(0, 100), (113, 200)]) == 0
    assert ranges.widest_gap([(0, 50), (20, 30), (53, 100)]) == 3
    assert ranges.widest_gap([(0, 1 << 30), ((1 << 30) + (2 << 20), 1 << 31)]) == 0
    large = [Piece("k", 0, 100 << 20, 1 << 10, 0, 0)]
    assert {fetch.length for fetch in ranges.raw_fetches(large, parallel=4)} == {8 << 20, 4 << 20}
    assert len(ranges.raw_fetches(large, parallel=100)) == 25


class Counting:
    """Objects that count requests under way."""

    def __init__(self, objects, pause_s=0.0):
        self.objects, self.pause_s, self.lock = objects, pause_s, threading.Lock()
        self.now = self.most = 0

    def __getattr__(self, name):
        return getattr(self.objects, name)

    def get_range(self, key, start, stop):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.pause_s)
        try:
            return self.objects.get_range(key, start, stop)
        finally:
            with self.lock:
                self.now -= 1


def test_requests_are_bounded_over_the_process(world, monkeypatch):
    complete = [ref for ref in world.refs if ref.session_id != "gappy"]
    wanted = world.hot.read(complete)
    counting = Counting(open_objects(world.url), 0.002)
    monkeypatch.setattr("spool.root.open_objects", lambda *_, **__: counting)
    handles = [spool.open(f"{world.url}?cold_concurrency=3", readonly=True) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda number: handles[number % 3].read(complete), range(6)))
    for samples in found:
        assert_equal(samples, wanted)
    assert 2 <= counting.most <= 3
    for handle in handles:
        handle.close()


def test_a_fork_forgets_the_requests_of_its_parent():
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with traffic.under_way(1):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    pid = os.fork()
    if pid == 0:
        with traffic.under_way(1):
            os._exit(7)
    status = wait_for(lambda: (found := os.waitpid(pid, os.WNOHANG))[0] and found, what="the child")[1]
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


def test_indexes_are_kept_up_to_a_limit(world):
    tier = world.cold._readers._readers[world.cold.spool_id]._tiers[0]
    complete = [ref for ref in world.refs if ref.session_id != "gappy"]
    world.cold.read(complete)
    keys = list(tier._indexes._kept)
    assert len(keys) > 3
    stream = keys[0].split("/")[1]
    layouts, asked = tier._layouts, []

    def get_range(key, start, stop, batch):
        assert batch is None
        asked.append(key)
        return tier.objects.get_range(key, start, stop)

    layout_of = lambda key: layouts[key.split("/")[1]][key.split("/")[2]]  # noqa: E731
    one = tier._indexes._kept[keys[0]].nbytes
    few = Indexes(get_range, kept_bytes=one)
    for _ in range(2):
        few.of(keys[0], layout_of(keys[0]))
    few.of(keys[1], layout_of(keys[1]))
    few.of(keys[0], layout_of(keys[0]))
    assert asked == [keys[0], keys[1], keys[0]]
    assert stream
    assert few._n_bytes == one
    assert not few.renew(keys[0], layout_of(keys[0]))


# -- several tiers, and what vanishes ---------------------------------------------------------------------------------


@pytest.fixture
def url(cold):
    """The URL of a cold root that does not exist yet."""
    return cold


@pytest.fixture
def open_node(tmp_path, url):
    """Open the hot root of a node that spills to `url`; closed after the test."""
    opened = []

    def open_(name, **options):
        opened.append(spool.open(f"file://{tmp_path}/{name}?spill={url}", **options))
        return opened[-1]

    yield open_
    for sp in reversed(opened):
        sp.close()


def evict_all(sp):
    rows = list(sp._catalog.packs.rows("spilled"))
    for row in rows:
        evict(sp.config.root, sp._catalog, row.stream, row.pack)
    return rows


def test_one_read_spans_hot_cold_and_another_nodes_hot_root(open_node, url, tmp_path):
    here, there = open_node("here"), open_node("there")
    moved = record(here, "moved")
    wanted = here.read(moved)
    here.publish(moved, timeout_s=60)
    assert evict_all(here)
    live, theirs = record(here, "live"), record(there, "theirs")
    refs = [*moved, *live, *theirs]
    wanted += [*here.read(live), *there.read(theirs)]
    assert_same(here.read(refs), wanted)
    assert_same(there.read(refs), wanted)
    with spool.open(url) as trainer:
        assert_same(trainer.read(refs), wanted)


def test_references_outlive_the_hot_root(open_node, url, tmp_path):
    sp = open_node("hot")
    refs = record(sp, "a")
    wanted = sp.read(refs)
    sp.publish(refs, timeout_s=60)
    sp.close()
    os.rename(tmp_path / "hot", tmp_path / "elsewhere")
    with spool.open(url) as there:
        assert_same(there.read(refs), wanted)
    with spool.open(str(tmp_path / "elsewhere")) as moved:
        assert_same(moved.read(refs), wanted)
        evict_all(moved)
        assert_same(moved.read(refs), wanted)
    shutil.rmtree(tmp_path / "elsewhere")
    with spool.open(str(tmp_path / "other")) as other:  # another spool: the references say where their cold root is
        assert_same(other.read(refs), wanted)


def test_eviction_while_reading_goes_unnoticed(open_node):
    sp = open_node("hot")
    segments = [ref for number in range(6) for ref in record(sp, f"e{number}", n_steps=2)]
    sp.flush()
    later = [ref for number in range(6, 12) for ref in record(sp, f"e{number}", n_steps=2)]
    refs = [*segments, *later]
    wanted = sp.read(refs)
    sp.publish(refs, timeout_s=60)
    stop, failed, n_reads = threading.Event(), [], Counter()

    def read(number):
        try:
            while not stop.is_set():
                assert_same(sp.read(refs), wanted)
                n_reads[number] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for least in range(1, 4):
        wait_for(lambda least=least: failed or min(n_reads[n] for n in range(3)) >= least, what="reads")
        evict_all(sp) if least == 2 else None
    n_before = sum(n_reads.values())
    wait_for(lambda: failed or sum(n_reads.values()) > n_before + 6, what="reads after the eviction")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


def test_a_pack_evicted_between_two_fetches_of_one_read(open_node, monkeypatch):
    sp = open_node("hot")
    segments = record(sp, "a")
    wanted = sp.read(segments)
    sp.publish(segments, timeout_s=60)
    hot = sp._readers._readers[sp.spool_id]._tiers[0]
    bring, rows = type(hot).bring, []

    def evict_first(tier, pieces, batch, workers):
        if pieces and not rows:
            found = bring(tier, pieces[:1], batch, workers)
            rows.extend(evict_all(sp))
            return [*found, *bring(tier, pieces[1:], batch, workers)]
        return bring(tier, pieces, batch, workers)

    monkeypatch.setattr(type(hot), "bring", evict_first)
    assert_same(sp.read(segments), wanted)
    assert rows


def test_a_new_pack_is_visible_at_once(open_node, url):
    sp = open_node("hot")
    sp.publish(record(sp, "first"), timeout_s=60)
    with spool.open(url, readonly=True) as reader:
        assert [row.session_id for row in reader.sessions()] == ["first"]
        refs = record(sp, "second")
        wanted = sp.read(refs)
        sp.publish(refs, timeout_s=60)
        assert_same(reader.read(refs), wanted)
        found = wait_for(lambda: list(reader.segments("session_id = 'second'")), timeout_s=5, what="the new session")
        assert_same(reader.read(found), wanted)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def published(open_node, url):
    """Segments in a cold root alone; their samples; its objects by array."""
    sp = open_node("hot")
    refs = record(sp, "a", n_prompt=400, n_response=900)
    wanted = sp.read(refs)
    sp.publish(refs, timeout_s=60)
    sp.close()
    remove_root(sp.config.root)
    objects = open_objects(url)
    keys = {info.key.split("/")[2]: info.key for info in objects.list("streams/") if "/c/" in info.key}
    yield SimpleNamespace(refs=refs, wanted=wanted, objects=objects, keys=keys, url=url)
    objects.close()


def damage(published, array, change):
    """Put another object in the place of an array's."""
    key = published.keys[array]
    data = bytearray(published.objects.get(key))
    published.objects.delete([key])
    published.objects.put(key, bytes(change(data)))


def raw_index_bytes(data):
    """Return how many bytes the index takes that stands before the rows of ``token_ids``."""
    return (len(data) - 4) % (4096 * 4)


def flipped(at):
    def change(data):
        data[at if at >= 0 else len(data) + at] ^= 0x10
        return data

    return change


def refuse(published, field, **asked):
    """Check that a read is refused, and says what, where and that the object is damaged."""
    with spool.open(published.url) as there, pytest.raises(IntegrityError) as found:
        there.read(published.refs[0], fields=[field], **asked)
    details = found.value.details
    assert details["field"] == field
    assert details["stream"] in str(found.value)
    start, stop = details["rows"]
    assert 0 <= start < stop
    assert f"{published.url}/{published.keys[field]}" in str(found.value)
    assert details["file"] == f"{published.url}/{published.keys[field]}"


def test_a_flipped_byte_of_a_raw_object(published):
    damage(published, "token_ids", lambda data: flipped(raw_index_bytes(data) + 4 * 600)(data))
    refuse(published, "token_ids")
    refuse(published, "token_ids", tokens=slice(500, 510), verify="always")
    with spool.open(published.url) as there:
        assert there.read(published.refs[0], fields=["token_ids"], verify="never")
        rest = there.read(published.refs[0], fields=["logprobs", "routed_experts"])
        assert (rest["logprobs"] == published.wanted[0]["logprobs"]).all()


@pytest.mark.parametrize("at", [-5, 4, 100])
def test_a_flipped_byte_of_a_compressed_object(published, at):
    """In the last chunk, in an offset of the index, and in the index further on."""
    damage(published, "routed_experts", flipped(at))
    for verify in ("whole", "always", "never"):
        refuse(published, "routed_experts", verify=verify)
    if at > 0:
        refuse(published, "routed_experts", tokens=slice(3, 4), layers=slice(1, 2))


@pytest.mark.parametrize("array", ["token_ids", "routed_experts"])
def test_a_truncated_object(published, array):
    damage(published, array, lambda data: data[: len(data) - 5000])
    refuse(published, array)
    damage(published, array, lambda data: data[:10])
    refuse(published, array)


@pytest.mark.parametrize("array", ["token_ids", "routed_experts"])
def test_a_deleted_object_is_lost_without_a_tombstone_and_released_with_one(published, array):
    published.objects.delete([published.keys[array]])
    refuse(published, array)
    refuse(published, array, tokens=slice(5, 9), verify="always")
    stream = published.keys[array].split("/")[1]
    published.objects.put(f"gone/{stream}-0", b'{"at": 1700000000.0, "reason": "a test", "done": false}')
    with spool.open(published.url) as there, pytest.raises(ReleasedError, match=r"deleted at 2023-11-14 .*: a test"):
        there.read(published.refs[0], fields=[array])


@pytest.fixture
def both(open_node, url):
    """Segments that are in both tiers, their samples, the hot shard of an array, and what an observer is told."""
    told = []
    sp = open_node("hot", observer=told.append)
    refs = record(sp, "a", n_prompt=400, n_response=900)
    wanted = sp.read(refs)
    sp.publish(refs, timeout_s=60)
    stream = next(iter(refs[0].extents["token_ids"])).stream

    def shard(array):
        folder = f"{sp.config.root}/streams/{stream}/{array}/c/0"
        return next((f"{at}/{name}" for at, _, names in os.walk(folder) for name in names), folder)

    objects = open_objects(url)
    keys = {info.key.split("/")[2]: info.key for info in objects.list("streams/") if "/c/" in info.key}
    yield SimpleNamespace(sp=sp, refs=refs, wanted=wanted, shard=shard, told=told, url=url, objects=objects, keys=keys)
    objects.close()


def spoil(path, change):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    with open(path, "wb") as file:
        file.write(change(data))


@pytest.mark.parametrize("change", [flipped(4 * 600), lambda data: data[:5000]], ids=["flipped", "cut"])
@pytest.mark.parametrize("array", ["token_ids", "routed_experts"])
def test_a_damaged_hot_file_is_read_from_the_cold_root_and_said(both, caplog, array, change):
    spoil(both.shard(array), change)
    assert_same(both.sp.read(both.refs), both.wanted)
    (said,) = [line.getMessage() for line in caplog.records if line.name == "spool.read"]
    assert both.shard(array) in said
    assert f"went on from {both.url}" in said
    (failed,) = [event for event in both.told if isinstance(event, spool.observe.IntegrityFailed)]
    assert failed.file in (both.shard(array), None)
    (read,) = [event for event in both.told if isinstance(event, spool.observe.Read)][1:]
    assert read.fetched_bytes["cold"] > 0


def test_a_hot_root_of_a_backup_with_less_of_a_pack_reads_what_was_published(open_node, url, tmp_path):
    sp = open_node("hot")
    refs = record(sp, "a", n_steps=1, final=False)
    shutil.copytree(tmp_path / "hot", tmp_path / "backup", symlinks=True, ignore=shutil.ignore_patterns("catalog*"))
    refs = [*refs, *record(sp, "b", n_response=9000)]
    wanted = sp.read(refs)
    sp.publish(refs, timeout_s=60)
    sp.close()
    wait_for(lambda: not is_running(sp.config.root), what="the spiller's end")
    remove_root(sp.config.root)
    (tmp_path / "backup").rename(tmp_path / "hot")
    assert_same(open_node("hot").read(refs), wanted)


def test_a_damaged_hot_file_beside_what_is_only_hot(both):
    fresh = record(both.sp, "fresh")
    wanted = [*both.wanted, *both.sp.read(fresh)]
    spoil(both.shard("token_ids"), flipped(4 * 600))
    assert_same(both.sp.read([*both.refs, *fresh]), wanted)


def test_what_is_damaged_in_the_cold_root_is_read_from_the_node_that_recorded_it(both, open_node):
    damage(both, "token_ids", lambda data: flipped(raw_index_bytes(data) + 4 * 600)(data))
    assert_same(open_node("other").read(both.refs), both.wanted)


def test_packs_that_are_damaged_each_in_another_tier_are_read_together(both):
    """What is damaged of one in the hot root is sound in the cold one, and of the other it is the other way round."""
    other = record(both.sp, "b", n_prompt=400, n_response=900)
    wanted = [*both.wanted, *both.sp.read(other)]
    known = {info.key for info in both.objects.list("streams/")}
    both.sp.publish(other, timeout_s=60)
    (key,) = [
        info.key for info in both.objects.list("streams/") if "/token_ids/c/" in info.key and info.key not in known
    ]
    data = both.objects.get(key)
    both.objects.put(key, bytes(flipped(raw_index_bytes(data) + 4 * 600)(bytearray(data))))
    spoil(both.shard("token_ids"), flipped(4 * 600))
    assert_same(both.sp.read([*both.refs, *other]), wanted)


@pytest.mark.parametrize("change", [lambda data: data[:-40], lambda data: b"", lambda data: bytes(len(data))],
                         ids=["cut", "empty", "zeros"])  # fmt: skip
def test_damaged_hot_records_are_read_from_the_cold_root(both, change, caplog):
    wanted = both.sp.messages(both.sp.steps("a")[-1])
    (path,) = Path(both.sp.config.root).glob("streams/*/records/0.arrow")
    spoil(path, change)
    with spool.open(f"{both.sp.config.root}?spill={both.url}", readonly=True) as sp:
        assert sp.messages(sp.steps("a")[-1]) == wanted
    assert str(path) in caplog.text and "from the cold root" in caplog.text
    with spool.open(both.url) as there:
        (key,) = [info.key for info in both.objects.list("streams/") if info.key.endswith("records/0.arrow")]
        both.objects.delete([key])
        with pytest.raises(IntegrityError, match="is lost"):
            there.messages(there.steps("a")[-1])


def test_damaged_records_without_a_cold_root_are_named(tmp_path):
    with spool.open(f"{tmp_path}/hot") as sp:
        record(sp, "a")
        sp.flush()
        step = sp.steps("a")[-1]
        (path,) = (tmp_path / "hot").glob("streams/*/records/0.arrow")
        spoil(path, lambda data: data[:-40])
        with pytest.raises(IntegrityError, match=f"{path}: .*restore it") as found:
            sp.messages(step)
    assert found.value.__cause__ is not found.value


def test_a_file_damaged_in_both_tiers_names_the_hot_one(both):
    spoil(both.shard("token_ids"), flipped(4 * 600))
    damage(both, "token_ids", lambda data: flipped(raw_index_bytes(data) + 4 * 600)(data))
    with pytest.raises(IntegrityError, match="is damaged: restore it") as found:
        both.sp.read(both.refs)
    assert found.value.details["file"] == both.shard("token_ids")


def test_a_damaged_stream_document_names_its_url(published):
    key = f"streams/{published.keys['token_ids'].split('/')[1]}/zarr.json"
    data = published.objects.get(key)
    published.objects.put(key, data[: len(data) // 2])
    with spool.open(published.url) as there, pytest.raises(IntegrityError):
        there.read(published.refs[0])


def test_a_pack_that_is_uploaded_again_with_other_chunks_is_read_anew(published):
    """Its rows are the same; another library may have compressed them into other sizes."""
    with spool.open(published.url) as there:
        assert_same(there.read(published.refs), published.wanted)
        tier = there._readers._readers[there.spool_id]._tiers[0]
        key = published.keys["routed_experts"]
        layout = tier._layouts[key.split("/")[1]]["routed_experts"]
        data = published.objects.get(key)
        spans = [
            (int(start), int(size)) for start, size in tier._indexes.of(key, layout).reshape(-1, 2) if size < 1 << 40
        ]
        rows = [cold_module.cold.decode_chunk(layout, data[start : start + size]) for start, size in spans]
        published.objects.put(key, again(layout, rows))
        assert_same(there.read(published.refs), published.wanted)


def again(layout, chunks):
    """Encode chunks as the spiller does, but at another level."""
    import pyarrow as pa
    from crc32c import crc32c

    codec = pa.Codec("zstd", compression_level=9)
    bodies = [codec.compress(chunk.tobytes(), asbytes=True) for chunk in chunks]
    bodies = [body + crc32c(body).to_bytes(4, "little") for body in bodies]
    index = np.full((layout.n_groups * layout.n_layers, 2), 2**64 - 1, "<u8")
    sizes = np.array([len(body) for body in bodies])
    index[: len(bodies), 1] = sizes
    index[: len(bodies), 0] = layout.index_bytes + np.cumsum(sizes) - sizes
    entries = index.tobytes()
    return b"".join([entries, crc32c(entries).to_bytes(4, "little"), *bodies])


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_other_processes_read_hot_and_cold(open_node, url, method):
    sp = open_node("hot")
    cold = record(sp, "cold")
    sp.publish(cold, timeout_s=60)
    evict_all(sp)
    refs = [*cold, *record(sp, "hot")]
    wanted = digest(sp.read(refs))
    context = multiprocessing.get_context(method)
    found = context.Queue()
    target, first = (read_in_fork, sp) if method == "fork" else (read_all, sp.config.root)
    children = [context.Process(target=target, args=(first, refs, found, dict(os.environ))) for _ in range(2)]
    for child in children:
        child.start()
    assert [found.get(timeout=240) for _ in children] == [wanted] * 2
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert digest(sp.read(refs)) == wanted


class Steps:
    """A map-style dataset over references, with a handle that was opened before the workers were started."""

    def __init__(self, sp, refs):
        self.sp, self.refs = sp, refs

    def __len__(self):
        return len(self.refs)

    def __getitem__(self, number):
        return {name: np.asarray(value) for name, value in self.sp.read(self.refs[number]).items()}


def test_a_dataloader_with_two_workers_over_hot_and_cold(open_node):
    from torch.utils.data import DataLoader

    sp = open_node("hot")
    cold = record(sp, "cold")
    sp.publish(cold, timeout_s=60)
    evict_all(sp)
    refs = [*cold, *record(sp, "hot"), *cold]
    wanted = sp.read(refs)
    loader = DataLoader(Steps(sp, refs), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=100)
    for _ in range(2):
        assert_same([{name: value.numpy() for name, value in item.items()} for item in loader], wanted)
    assert_same(sp.read(refs), wanted)


def test_a_large_batch_takes_a_bounded_amount_of_memory_beside_its_result(tmp_path):
    """Measured in a fresh process: 192 MiB of rows, 4 requests at a time of at most 8 MiB and their decoded rows."""
    shape = spool.MoEShape(num_layers=32, num_experts=256, topk=8)
    specs = (spool.FieldSpec(name="hidden", dtype="float32", align="token", shape=(1024,)),)
    url = f"file://{tmp_path}/cold"
    with spool.open(f"file://{tmp_path}/hot?spill={url}", fields=specs) as sp:
        rng, refs = np.random.default_rng(0), []
        for number in range(3):
            s = sp.session(f"s{number}", experts=shape)
            n = 16_384
            rows = np.repeat(rng.standard_normal((n // 64, 1024)).astype("f4"), 64, axis=0)
            tokens = rng.integers(0, 1000, n).tolist()
            ids = np.broadcast_to(np.arange(8) + np.arange(n)[:, None, None] % 240, (n, 32, 8))[: n - 1]
            s.append(prompt_token_ids=tokens[:-1], response_token_ids=tokens[-1:], routed_experts=ids.astype("u1"),
                     fields={"hidden": rows})  # fmt: skip
            refs += s.finalize()
        sp.publish(refs, timeout_s=120)
    remove_root(tmp_path / "hot")
    found = multiprocessing.get_context("spawn").Queue()
    child = multiprocessing.get_context("spawn").Process(
        target=measure, args=(f"{url}?cold_concurrency=4", refs, ["hidden", "routed_experts"], found)
    )
    child.start()
    n_bytes, grown = found.get(timeout=120)
    child.join()
    assert n_bytes > 200 << 20
    assert grown - n_bytes < 4 * 2 * ranges.FETCH_BYTES + (24 << 20)


# -- places -----------------------------------------------------------------------------------------------------------


def test_locate_names_the_bytes(published):
    """A look at the bytes alone, and their values: raw rows are there as they are, chunks with their checksums."""
    ref, wanted = published.refs[0], published.wanted[0]
    with spool.open(published.url) as there:
        for tokens in (slice(None), slice(100, 700)):
            found = there.locate(ref, fields=["token_ids", "logprobs"], tokens=tokens)
            bodies = {"token_ids": b"", "logprobs": b""}
            for part in found:
                key = part.file.removeprefix(f"{published.url}/")
                bodies[part.field] += published.objects.get_range(key, part.offset, part.offset + part.length)
                assert part.length == 4 * (part.rows[1] - part.rows[0])
            assert bodies["token_ids"] == wanted["token_ids"][tokens].tobytes()
        chunks = there.locate(ref, fields=["routed_experts"], tokens=slice(100, 700))
    assert chunks
    from crc32c import crc32c

    for part in chunks:
        key = part.file.removeprefix(f"{published.url}/")
        body = published.objects.get_range(key, part.offset, part.offset + part.length)
        assert key == published.keys["routed_experts"]
        assert crc32c(body[:-4]) != 0
    shown = run("locate", published.url, ref.session_id, "--field", "token_ids", "--json")
    assert shown.code == 0, shown.err
    rows = shown.json
    assert {row["file"] for row in rows} == {f"{published.url}/{published.keys['token_ids']}"}
    parts = [published.objects.get_range(published.keys["token_ids"], row["offset"], row["offset"] + row["length"])
             for row in rows]  # fmt: skip
    assert b"".join(parts) == wanted["token_ids"].tobytes()
    is_file = published.url.startswith("file://")
    shown = run("locate", published.url, ref.session_id, "--field", "token_ids", "--dd", code=0 if is_file else 2)
    if is_file:
        bodies = [subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout for line in
                  shown.text.splitlines()]  # fmt: skip
        assert b"".join(bodies) == wanted["token_ids"].tobytes()
