"""`verify`, `rebuild` and `recover` of spools whose packs are evicted, deleted, or on other nodes."""

from __future__ import annotations

import itertools
import os

import msgspec
import pytest
from crc32c import crc32c
from nodes import location
from shell import run
from tiers import assert_same, record

import spool
from spool.formats import records
from spool.spiller.evict import evict
from spool.stores.hot import HotStore


def published(sp, *names):
    """Record sessions, each in a pack of its own, and publish them."""
    refs = []
    for name in names:
        refs += record(sp, name)
        sp.flush()
    sp.publish(refs, timeout_s=120)
    return refs


def evict_all(sp):
    """Take all spilled packs out of the hot root."""
    for row in list(sp._catalog.packs.rows("spilled")):
        evict(sp.config.root, sp._catalog, row.stream, row.pack)


def objects_of(sp):
    return sp._feeds.cold.objects


def shard(sp, array, pack=0):
    """Return the key of a cold shard."""
    return next(found.key for found in objects_of(sp).list("streams/") if f"/{array}/c/{pack}/" in f"{found.key}/")


def test_evicted_and_deleted_packs_are_in_order(cold, tmp_path):
    policy = {"retention": "released", "grace_s": 0.001, "spill_when": "pressure"}
    with spool.open(location(tmp_path / "hot", cold, **policy)) as sp:
        refs = published(sp, "one", "two", "three")
        whole = sp.verify(deep=True)
        assert whole.findings == ()
        evict_all(sp)
        assert sp.verify() == spool.audit.Report(False, 3, whole.n_packs, whole.n_extents, whole.n_bytes, ())
        assert sp.verify(deep=True).findings == ()
        live = record(sp, "four")
        assert sp.verify(deep=True).findings == ()
        sp.release(refs[0])
        sp.gc()
        assert sp.verify(deep=True).findings == ()
        sp.gc()
        report = sp.verify(deep=True)
        assert report.findings == ()
        assert report.n_sessions == 3
        assert len(sp.read(live)) == 1
    with spool.open(cold) as there:
        report = there.verify(deep=True)
        assert report.findings == ()
        assert (report.n_sessions, report.n_packs) == (2, 2)
        assert report.n_bytes > 0


def test_packs_that_leave_while_they_are_verified_are_no_findings(cold, tmp_path, monkeypatch):
    with spool.open(location(tmp_path / "hot", cold, spill_when="pressure")) as sp:
        published(sp, "one", "two", "three")
        packs = [(row.stream, row.pack) for row in sp._catalog.packs.rows("spilled")]
        assert len(packs) == 3
        borrow, n_borrowed = HotStore.borrow, itertools.count()

        def borrow_late(store, key, start, length):
            if packs and next(n_borrowed) % 2:
                evict(sp.config.root, sp._catalog, *packs.pop())
            return borrow(store, key, start, length)

        monkeypatch.setattr(HotStore, "borrow", borrow_late)
        assert sp.verify(deep=True).findings == ()
        assert not packs, "all of them left meanwhile"


def test_an_eviction_that_broke_off_is_no_finding(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold, spill_when="pressure")) as sp:
        refs = published(sp, "one")
        wanted = sp.read(refs)
        (path,) = (tmp_path / "hot").glob("streams/*/token_ids/c/0")
        path.unlink()
        assert sp.verify(deep=True).findings == ()
        assert_same(sp.read(refs), wanted)


def test_another_nodes_packs_are_verified_where_they_are(cold, tmp_path):
    with spool.open(location(tmp_path / "a", cold)) as a, spool.open(location(tmp_path / "b", cold)) as b:
        published(a, "one")
        published(b, "two")
        report = b.verify(deep=True)
        assert (report.n_sessions, report.findings) == (2, ())
        objects_of(a).delete([shard(a, "token_ids")])
        (found, *_) = [item for item in b.verify().findings if item.field == "token_ids"] or b.verify().findings
        assert found.tier == "cold"


@pytest.mark.parametrize("where", ["hot", "cold"])
def test_a_lost_and_a_cut_object_are_found(cold, tmp_path, where):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        published(sp, "one", "two")
        evict_all(sp)
        lost, cut = shard(sp, "token_ids", 0), shard(sp, "logprobs", 1)
        objects_of(sp).put(cut, objects_of(sp).get(cut)[:-9])
        objects_of(sp).delete([lost])
        with spool.open(cold) if where == "cold" else spool.open(str(tmp_path / "hot"), readonly=True) as reader:
            found = {item.file: item for item in reader.verify().findings}
        assert set(found) == {f"{cold}/{lost}", f"{cold}/{cut}"}
        assert all((item.kind, item.tier) == ("integrity", "cold") for item in found.values())
        assert "missing" in found[f"{cold}/{lost}"].text
        assert found[f"{cold}/{lost}"].steps[0] == "one:0"
        assert "bytes" in found[f"{cold}/{cut}"].text


@pytest.mark.parametrize("array", ["token_ids", "routed_experts", "logprobs", "records"])
def test_altered_bytes_are_found_when_all_is_read(cold, tmp_path, array):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        published(sp, "one")
        key = shard(sp, array) if array != "records" else next(
            found.key for found in objects_of(sp).list("streams/") if "/records/" in found.key)  # fmt: skip
        data = bytearray(objects_of(sp).get(key))
        if array == "records":
            sums = b"".join(crc32c(event).to_bytes(4, "little") for event in records.decode(data))
            data[data.index(sums)] ^= 0x10  # compressed like all columns, but sums do not get any smaller
        else:
            data[-40] ^= 0x10
        objects_of(sp).put(key, bytes(data))
        assert sp.verify().findings == ()
        evict_all(sp)
        (found,) = sp.verify(deep=True).findings
        assert (found.field, found.tier, found.file, found.kind) == (array, "cold", f"{cold}/{key}", "integrity")
    result = run("verify", cold, "--deep", "--json", code=5).json
    assert [(item["tier"], item["file"]) for item in result["findings"]] == [("cold", f"{cold}/{key}")]


def test_a_pack_that_no_manifest_lists_is_found(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        published(sp, "one", "two")
        evict_all(sp)
        first = objects_of(sp).list("manifests/")[0].key
        objects_of(sp).delete([first])
        (found,) = [item for item in sp.verify().findings if "manifest" in item.text]
        assert found.steps
        assert found.tier == "cold"


def test_a_damaged_manifest_is_found_and_named(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        published(sp, "one", "two")
        key = objects_of(sp).list("manifests/")[0].key
        data = bytearray(objects_of(sp).get(key))
        data[100] ^= 1
        objects_of(sp).put(key, bytes(data))
    with spool.open(cold) as there:
        assert [row.session_id for row in there.sessions()] == ["two"]
        (found,) = there.verify().findings
        assert (found.file, found.tier, found.kind) == (f"{cold}/{key}", "cold", "integrity")
        assert "damaged" in found.text
        assert there.rebuild()["problems"][0]["file"] == f"{cold}/{key}"
    run("verify", cold, code=5)


def test_documents_that_miss_rows_are_found(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold)) as sp:
        published(sp, "one")
        key = f"streams/{sp._feeder.stream_names()[0]}/token_ids/zarr.json"
        document = msgspec.json.decode(objects_of(sp).get(key))
        document["attributes"]["spool:rows"] = []
        document["shape"][0] = 0
        objects_of(sp).put(key, msgspec.json.encode(document))
        (found,) = sp.verify().findings
        assert (found.field, found.tier, found.file) == ("token_ids", "cold", f"{cold}/{key}")


def test_the_index_is_made_again_from_either_root(cold, tmp_path):
    with spool.open(location(tmp_path / "hot", cold, retention="released", grace_s=0.001)) as sp:
        refs = published(sp, "one", "two", "three")
        wanted = sp.read(refs[1:])
        evict_all(sp)
        sp.annotate("two", reward=1.5)
        sp.release(refs[0])
        sp.gc()
        before = sp._catalog.dump()
        assert sp.rebuild()["problems"] == []
        sp.sessions()
        assert sp._catalog.dump() == before
        assert_same(sp.read(refs[1:]), wanted)
        sp.flush()
        sp.publish(refs[1:], timeout_s=60)
    with spool.open(cold) as there:
        rows = [row.session_id for row in there.sessions()]
        before = there._catalog.dump()
        assert there.rebuild()["n_sessions"] == len(rows) == 2
        assert there._catalog.dump() == before
        with pytest.raises(spool.ReleasedError):
            there.read(refs[0])
    done = run("rebuild", cold, "--json").json
    assert done["problems"] == []
    assert run("recover", str(tmp_path / "hot"), "--json").json["streams"] == []
    assert os.path.exists(tmp_path / "hot")
