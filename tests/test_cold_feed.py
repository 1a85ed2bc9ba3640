"""The index fed from a cold root: manifests, roll-ups, fact files and tombstones that come and go meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from nodes import location
from s3_server import free_port
from tiers import record

import spool
from spool.catalog import Catalog
from spool.formats import manifest
from spool.formats.cold_arrays import cold_group_metadata
from spool.formats.frames import encode_event
from spool.formats.manifest import PackEntry
from spool.logs.cold import ColdFeeder
from spool.logs.keys import gone_key, is_rollup, manifest_key
from spool.model.events import SessionOpened
from spool.model.fields import Schema, layout
from spool.spiller import rollup
from spool.spiller.rollup import OBJECTS_ROLLED, roll_up
from spool.stores.objects import open_objects

MANIFESTS = 1100
"""More than one page of a listing holds."""


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.takes_turns) for kind in ("file", "s3")])
def cold(request, tmp_path):
    """The URL of a cold root where nothing is yet."""
    (tmp_path / "cold").mkdir()
    return f"file://{tmp_path}/cold" if request.param == "file" else request.getfixturevalue("s3_root")


class Counting:
    """A cold root that counts requests, and does something before one."""

    def __init__(self, objects):
        self._objects = objects
        self.requests = []
        self.before_get = lambda key: None

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def get(self, key):
        self.requests.append(("get", key))
        self.before_get(key)
        return self._objects.get(key)

    def get_range(self, key, start, stop):
        self.requests.append(("get", key))
        self.before_get(key)
        return self._objects.get_range(key, start, stop)

    def list(self, prefix):
        self.requests.append(("list", prefix))
        return self._objects.list(prefix)

    def gets(self):
        """Return the keys that were read since the last call."""
        found, self.requests = [key for kind, key in self.requests if kind == "get"], []
        return found


def put_manifest(objects, pack, *, stream="20260101T000000-00000001", session=None):
    """Put the manifest of a pack that holds the opening of one session; return its key."""
    event = encode_event(SessionOpened(session_id=session or f"s{pack}", at=float(pack)))
    entry = PackEntry(stream, pack, 1, 1000.0 + pack, {}, {}, 0, 0, {})
    objects.put(manifest_key(entry), manifest.encode([(entry, [event])]))
    return manifest_key(entry)


def put_group(objects, stream="20260101T000000-00000001"):
    """Put a spool's identity, and a stream's group that has no arrays."""
    objects.put("spool.json", b'{"format": 1, "id": "0123456789abcdef", "tier": "cold"}')
    schema = Schema()
    data = cold_group_metadata(schema, layout(schema), {}, stream=stream, created=0.0)
    objects.put(f"streams/{stream}/zarr.json", data)


def ids(catalog):
    """Return the ids of the sessions in an index."""
    return {row.session_id for row in catalog.sessions()}


def fed(objects):
    """Return an index fed from a cold root now."""
    catalog = Catalog.open("", readonly=True)
    ColdFeeder(objects, catalog).catch_up()
    return catalog


@pytest.fixture
def objects(cold):
    """A cold root with one stream in it."""
    found = Counting(open_objects(cold))
    put_group(found)
    return found


@pytest.mark.parametrize("cold", ["s3"], indirect=True)
def test_thousands_of_manifests_are_listed_and_each_is_read_once(objects):
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda pack: put_manifest(objects, pack), range(MANIFESTS)))
    catalog = Catalog.open("", readonly=True)
    feeder = ColdFeeder(objects, catalog)
    feeder.catch_up()
    assert ids(catalog) == {f"s{pack}" for pack in range(MANIFESTS)}
    read = objects.gets()
    assert len(read) == len(set(read)) == MANIFESTS + 2
    put_manifest(objects, MANIFESTS)
    feeder.catch_up()
    assert len(objects.gets()) == 2  # and whose root it is
    feeder.catch_up()
    assert objects.gets() == []
    before = catalog.dump()
    roll_up(feeder, ["20260101T000000-00000001"])
    n_rolled, n_left = divmod(MANIFESTS + 1, OBJECTS_ROLLED)
    assert len(objects.list("manifests/")) == n_rolled + n_left
    feeder.catch_up()
    assert catalog.dump() == before
    assert fed(objects).dump() == before


def test_what_is_rolled_up_while_another_reads_is_found(objects):
    keys = [put_manifest(objects, pack) for pack in range(OBJECTS_ROLLED)]
    catalog, feeder = Catalog.open("", readonly=True), None
    feeder = ColdFeeder(objects, catalog)
    other = ColdFeeder(open_objects(objects.url), Catalog.open("", readonly=True))

    def roll(key):
        if key in keys:
            objects.before_get = lambda _: None
            roll_up(other, ["20260101T000000-00000001"])

    objects.before_get = roll
    feeder.catch_up()
    assert ids(catalog) == {f"s{pack}" for pack in range(OBJECTS_ROLLED)}
    assert [is_rollup(found.key) for found in objects.list("manifests/")] == [True]


def test_readers_beside_one_who_writes_and_rolls_up_miss_nothing(objects):
    stop, seen, failures = threading.Event(), [], []

    def read():
        catalog = Catalog.open("", readonly=True)
        feeder = ColdFeeder(open_objects(objects.url), catalog)
        known = set()
        try:
            while not stop.is_set():
                feeder.catch_up()
                assert known <= ids(catalog)
                known = ids(catalog)
            feeder.catch_up()
            seen.append(ids(catalog))
        except BaseException as error:
            failures.append(error)
            raise

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    writer = ColdFeeder(objects, Catalog.open("", readonly=True))
    for pack in range(2 * OBJECTS_ROLLED):
        put_manifest(objects, pack)
        if pack % 40 == 39:
            roll_up(writer, ["20260101T000000-00000001"])
    stop.set()
    for reader in readers:
        reader.join(120)
    assert failures == []
    assert seen == [{f"s{pack}" for pack in range(2 * OBJECTS_ROLLED)}] * 3


def test_a_damaged_manifest_hides_no_other(objects, caplog):
    keys = [put_manifest(objects, pack) for pack in range(5)]
    whole = objects.get(keys[2])
    objects.put(keys[2], whole[:-7])
    objects.put("manifests/0000000000007-not-a-manifest.txt", b"?")
    catalog = Catalog.open("", readonly=True)
    feeder = ColdFeeder(objects, catalog)
    problems = feeder.catch_up()
    assert ids(catalog) == {"s0", "s1", "s3", "s4"}
    assert {problem.file for problem in problems} == {
        f"{objects.url}/{keys[2]}", f"{objects.url}/manifests/0000000000007-not-a-manifest.txt"
    }  # fmt: skip
    objects.gets()
    assert feeder.catch_up() == problems
    assert objects.gets() == [], "a damaged object is not read again while it is the same"
    objects.put(keys[2], whole)
    objects.delete(["manifests/0000000000007-not-a-manifest.txt"])
    assert feeder.catch_up() == []
    assert ids(catalog) == {f"s{pack}" for pack in range(5)}
    roll_up(feeder, ["20260101T000000-00000001"])
    assert len(objects.list("manifests/")) == 5, "few are left as they are"


def test_a_roll_up_leaves_damaged_and_deleted_packs_out(objects):
    keys = [put_manifest(objects, pack) for pack in range(OBJECTS_ROLLED + 2)]
    objects.put(keys[3], b"torn")
    objects.put(gone_key("20260101T000000-00000001", 5), b'{"at": 1.0, "reason": "released", "done": true}')
    feeder = ColdFeeder(objects, Catalog.open("", readonly=True))
    roll_up(feeder, ["20260101T000000-00000001"])
    left = {found.key for found in objects.list("manifests/") if not is_rollup(found.key)}
    assert left >= {keys[3], keys[5]}
    assert ids(fed(objects)) == {f"s{pack}" for pack in range(OBJECTS_ROLLED + 2)} - {"s3", "s5"}


def test_deleted_packs_in_a_roll_up_stay_forgotten(objects):
    for pack in range(OBJECTS_ROLLED):
        put_manifest(objects, pack)
    feeder = ColdFeeder(objects, Catalog.open("", readonly=True))
    roll_up(feeder, ["20260101T000000-00000001"])
    objects.put(gone_key("20260101T000000-00000001", 5), b'{"at": 1.0, "reason": "released"}')
    objects.put(gone_key("20260101T000000-00000001", 6), b"torn")
    catalog = fed(objects)
    assert ids(catalog) == {f"s{pack}" for pack in range(OBJECTS_ROLLED)} - {"s5", "s6"}
    assert catalog.packs.get("20260101T000000-00000001", 5).reason == "released"


def test_fact_files_are_rolled_up_and_say_the_same(cold, tmp_path, monkeypatch):
    monkeypatch.setattr(rollup, "OBJECTS_ROLLED", 8)
    with spool.open(location(tmp_path / "hot", cold, retention="keep")) as sp, spool.open(cold) as trainer:
        refs = record(sp, "one")
        sp.publish(refs, timeout_s=120)
        for number in range(8):
            trainer.annotate("one", segment=refs[number % len(refs)], **{f"judge{number % 3}": number})
        trainer.annotate("one", reward=1.0)
        trainer.release(refs[:1], tag="step-1")
        trainer.checkpointed("step-1")
        objects = sp._feeds.cold.objects
        single = {found.key: objects.get(found.key) for found in objects.list("facts/")}
        assert len(single) == 11

        def known(handle):
            (row,) = handle.sessions()
            return row, list(handle.segments()), sorted(map(repr, handle._catalog.released("one")))

        before = known(sp)
        assert before == known(trainer)
        roll_up(sp._feeds.cold)
        assert [is_rollup(found.key) for found in objects.list("facts/")].count(True) == 1
        assert len(objects.list("facts/")) == 4
        list(sp.sessions())
        assert (sp.status().facts.n_packs, "gone" in sp.status().packs) == (4, False)
        # another node that listed before may have them in a roll-up of its own
        for again in ({}, dict(list(single.items())[2:8])):
            for key, data in again.items():
                objects.put(key, data)
            with spool.open(cold) as fresh:
                assert known(sp) == known(trainer) == known(fresh) == before
                assert fresh.verify(deep=True).findings == ()


@pytest.mark.parametrize("cold", ["file"], indirect=True)
@pytest.mark.parametrize("instead", ["nothing", "another"])
def test_facts_outlive_a_cold_root_that_is_out_of_sight(cold, tmp_path, instead):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        sp.publish([*record(sp, "one"), *record(sp, "two")], timeout_s=120)
        with spool.open(cold) as trainer:
            trainer.annotate("one", reward=1.0)
            trainer.discard("two")
        assert [(row.session_id, row.reward) for row in sp.sessions()] == [("one", 1.0)]
        (tmp_path / "cold").rename(tmp_path / "away")
        if instead == "another":
            spool.open(location(tmp_path / "other", cold)).close()
        else:
            (tmp_path / "cold").mkdir()
        for _ in range(2):
            assert [(row.session_id, row.reward) for row in sp.sessions()] == [("one", 1.0)]
            sp._feeds._ask_again_at = 0.0
        shutil.rmtree(tmp_path / "cold")
        (tmp_path / "away").rename(tmp_path / "cold")
        assert [(row.session_id, row.reward) for row in sp.sessions()] == [("one", 1.0)]


def test_a_fact_file_that_vanishes_is_forgotten(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        refs = record(sp, "one")
        sp.publish(refs, timeout_s=120)
        with spool.open(cold) as trainer:
            trainer.annotate("one", reward=1.0)
            trainer.annotate("one", reward=2.0)
            assert trainer.find_session("one").reward == 2.0
            assert sp.find_session("one").reward == 2.0
            objects = sp._feeds.cold.objects
            first, last = [found.key for found in objects.list("facts/")]
            objects.delete([last])
            for handle in (sp, trainer):
                assert handle.find_session("one").reward == 1.0
            objects.delete([first])
            for handle in (sp, trainer):
                assert handle.find_session("one").reward is None
        with spool.open(cold) as other:
            assert other._catalog.dump()["facts"] == []


def test_a_fact_file_that_another_process_takes_in_meanwhile_is_kept(objects, tmp_path):
    """Two feeders of one index: what the second takes in after the first one's listing is not lost for that."""
    path = str(tmp_path / "catalog.sqlite")
    catalog = Catalog.open(path)
    first = ColdFeeder(objects, catalog)
    first.catch_up()
    second = ColdFeeder(open_objects(objects.url), Catalog.open(path))
    listing = objects._objects.list

    class Slow:
        def list(self, prefix):
            found = listing(prefix)
            if prefix == "facts/":
                second.write_facts([SessionOpened(session_id="late", at=1.0)])
            return found

        def __getattr__(self, name):
            return getattr(objects, name)

    first.objects = Slow()
    first.catch_up()
    first.objects = objects
    first.catch_up()
    assert ids(catalog) == {"late"}


def test_many_facts_of_one_call_are_one_object(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        many = []
        for number in range(4096):
            s = sp.session(f"u{number}")
            s.append(prompt_token_ids=[number], response_token_ids=[2])
            many += s.finalize()
        sp.publish(many, timeout_s=120)
        with spool.open(cold) as trainer:
            trainer.release(many, tag="t")
            assert len(sp._feeds.cold.objects.list("facts/")) == 1
            trainer.release([])
            assert len(sp._feeds.cold.objects.list("facts/")) == 1
        sp.find_session("u0")
        assert len(sp._catalog.released("u4095")) == 1
        assert sp._catalog.dump()["releases"] != []


def test_log_records_and_manifest_of_a_pack_say_the_same(cold, tmp_path):
    hot = location(tmp_path / "hot", cold)
    with spool.open(hot) as sp:
        refs = record(sp, "one") + record(sp, "two")
        with sp.session("three") as s:
            with s.transaction():
                s.append(prompt_token_ids=[1], response_token_ids=[2], tools=[{"name": "a"}], messages=[{"a": 1}])
            s.append(prompt_token_ids=[9], response_token_ids=[2], tools=[{"name": "a"}])
        sp.annotate("one", reward=1.0)
        sp.sessions()
        from_log = sp._catalog.dump()
        sp.flush()
        sp.rebuild()
        from_records = sp._catalog.dump()
        sp.publish([*refs, *sp.steps("three")], timeout_s=120)
        with spool.open(cold) as there:
            there.sessions()
            from_manifest = there._catalog.dump()
    for table, rows in from_log.items():
        if table != "logs":  # it says whether they are sealed
            assert from_records[table] == rows, table
        assert from_manifest[table] == from_records[table], table


def test_threads_and_forked_children_feed_on_their_own(objects):
    for pack in range(20):
        put_manifest(objects, pack)
    catalog = Catalog.open("", readonly=True)
    feeder = ColdFeeder(open_objects(objects.url), catalog)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: feeder.catch_up(), range(8)))
    put_manifest(objects, 20)
    child = os.fork()
    if not child:
        code = 1
        try:
            own = Catalog.open("", readonly=True)
            feeder._catalog = own
            feeder.catch_up()
            code = 0 if ids(own) == {f"s{pack}" for pack in range(21)} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    feeder.catch_up()
    assert ids(catalog) == {f"s{pack}" for pack in range(21)}


def test_an_unreachable_cold_root_holds_up_no_list_of_local_sessions(s3_root, tmp_path, monkeypatch, caplog):
    uri = location(tmp_path / "hot", s3_root)
    with spool.open(uri) as sp:
        refs = record(sp, "one")
        sp.publish(refs, timeout_s=120)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with spool.open(str(tmp_path / "hot"), readonly=True) as sp, caplog.at_level(logging.WARNING, "spool.logs"):
        began = time.monotonic()
        for _ in range(3):
            assert [row.session_id for row in sp.sessions()] == ["one"]
            assert len(list(sp.segments())) == 1
        assert time.monotonic() - began < 20
        assert len([entry for entry in caplog.records if "is not known here" in entry.message]) == 1
        assert len(sp.read(refs)) == 1
    with pytest.raises(spool.StorageError):
        spool.open(f"{s3_root}?cold_deadline_s=0.5").sessions()


def test_tools_are_stored_once_a_pack(cold, tmp_path):
    tools = [{"type": "function", "function": {"name": "ls"}}]
    with spool.open(location(tmp_path / "hot", cold, retention="released", grace_s=0.001)) as sp:
        refs = []
        for name in ("one", "two"):
            s = sp.session(name)
            for step in range(3):
                s.append(prompt_token_ids=[step], response_token_ids=[2], tools=tools)
            with s.transaction():
                for step in range(3, 6):
                    s.append(prompt_token_ids=[step], response_token_ids=[2], tools=tools)
            refs += s.finalize()
            sp.flush()
        sp.sessions()
        places = sp._catalog.dump()["tools"]
        assert len(places) == 2
        stored = [event for stream in sp._feeder.stream_names() for pack in (0, 1)
                  for event in _tools_in(f"{tmp_path}/hot/streams/{stream}/records/{pack}.arrow")]  # fmt: skip
        assert len(stored) == 2
        sp.publish(refs, timeout_s=120)
        sp.release([ref for ref in refs if ref.session_id == "one"])
        sp.gc()
        (left, *_) = [ref for ref in refs if ref.session_id == "two"]
        assert sp.tools(left) == tools
        with spool.open(cold) as there:
            assert there.tools(left) == tools


def _tools_in(path):
    from pathlib import Path

    from spool.formats import records
    from spool.formats.frames import decode_event
    from spool.model.events import ToolsStored, parts

    for payload in records.decode(Path(path).read_bytes()):
        yield from (part for part in parts(decode_event(payload)) if isinstance(part, ToolsStored))
