"""Multimodal units between the tiers: published with their packs, read from anywhere, evicted, and gone by age."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from imaging import QUICK, age, image, run_python, same, unit_files, with_units
from nodes import location
from tiers import remove_root, wait_for

import spool
from spool import locks
from spool.formats.units import encode
from spool.logs.units import GONE_UNITS, MERGED, Deletions
from spool.model.units import unit_path
from spool.retention import Policy, StoredUnit, aged_units, held_units, unit_evictions
from spool.spiller import elect
from spool.spiller.units import UnitUploader
from spool.stores.objects import open_objects
from spool.stores.units import ACCOUNT, HotUnits, disk_bytes

MIB = 1 << 20


@pytest.fixture
def cold(cold, tmp_path):
    """The URL of a cold root where nothing is yet."""
    (tmp_path / "cold").mkdir()
    return cold


@pytest.fixture
def local_cold(tmp_path):
    (tmp_path / "cold").mkdir()
    return f"file://{tmp_path}/cold"


# -- publishing --------------------------------------------------------------------------------------------------------


def test_what_is_published_is_read_from_anywhere(cold, tmp_path):
    """By another process on the node, a reader of the cold root alone, another node, and once the node is lost."""
    arrays = [image(0), np.float32(1.5), image(1, (0, 4)), image(2, (9 * MIB,))]
    uri = location(tmp_path / "hot", cold, **QUICK)
    with spool.open(uri) as sp:
        keys = [sp.put_unit(array) for array in arrays]
        refs = with_units(sp, "a", [*keys, "my own"])
        sp.publish(refs, timeout_s=120)
        objects = open_objects(cold)
        assert {info.key for info in objects.list("units/")} == set(map(unit_path, keys))
    code = "import sys, spool\nprint([int(a.sum()) for a in spool.open(sys.argv[1]).read_units(sys.argv[2:])])"
    sums = [int(np.asarray(array).sum()) for array in arrays]
    assert json.loads(run_python(code, uri, *keys)) == sums
    assert json.loads(run_python(code, cold, *keys)) == sums
    remove_root(tmp_path / "hot")
    with spool.open(location(tmp_path / "other", cold)) as other:
        for got, wanted in zip(other.read_units(keys), arrays, strict=True):
            assert same(got, wanted)
        assert other.verify(deep=True).findings == ()
        assert unit_files(tmp_path / "other") == {}
        (segment,) = other.segments()
        assert [unit.key for unit in segment.units] == [*keys, "my own"]


def test_two_nodes_store_an_object_once(cold, tmp_path, by_hand):
    puts = []
    for name in ("a", "b"):
        with spool.open(location(tmp_path / name, cold, **QUICK)) as sp:
            key = sp.put_unit(image(0))
            with_units(sp, f"{name}-1", [key])
            sp.flush()
            objects = sp._feeds.cold.objects
            objects._observer = lambda kind, key, *_: puts.append(key) if kind in ("put", "multipart") else None
            sp.spill()
            with_units(sp, f"{name}-2", [key])
            sp.flush()
            sp.spill()
    assert puts.count(unit_path(key)) == 1


def test_a_unit_that_is_put_after_its_pack_was_published_follows(local_cold, tmp_path, caplog):
    with spool.open(location(tmp_path / "hot", local_cold, **QUICK)) as sp:
        array = image(5)
        key = encode(array).key
        refs = with_units(sp, "a", [key])
        sp.publish(refs, timeout_s=120)
        assert f"{key} is named by what is published, and is neither here nor in the cold root" in caplog.text
        (finding,) = sp.verify().findings
        assert (finding.field, finding.steps) == ("units", ("a",))
        with spool.open(local_cold) as reader:
            (finding,) = reader.verify().findings
            assert finding.tier == "cold"
        assert sp.put_unit(array) == key
        asyncio.run(sp.publish_async(refs, timeout_s=120))
        assert sp.verify(deep=True).findings == ()
    with spool.open(local_cold) as reader:
        assert same(reader.read_unit(key), array)
        assert reader.verify(deep=True).findings == ()


def test_the_manifest_comes_after_the_units(local_cold, tmp_path, by_hand):
    """Whoever can list a session can read its units: at no time is the manifest there without them."""
    with spool.open(location(tmp_path / "hot", local_cold, **QUICK)) as sp:
        with_units(sp, "a", [sp.put_unit(image(n)) for n in range(5)])
        sp.flush()
        order = []
        sp._feeds.cold.objects._observer = lambda kind, key, *_: order.append(key) if kind == "put" else None
        sp.spill()
    manifest = next(number for number, key in enumerate(order) if key.startswith("manifests/"))
    assert sum(key.startswith("units/") for key in order[:manifest]) == 5
    assert not any(key.startswith("units/") for key in order[manifest:])


def test_a_damaged_unit_keeps_its_pack_and_publish_says_so(local_cold, tmp_path):
    with spool.open(location(tmp_path / "hot", local_cold, **QUICK)) as sp:
        key = sp.put_unit(image(0))
        refs = with_units(sp, "a", [key])
        path = HotUnits(sp.config.root).path(key)
        with open(path, "r+b") as file:
            file.seek(300)
            file.write(b"damaged")
        with pytest.raises(spool.IntegrityError, match=path):
            sp.publish(refs, timeout_s=120)
        assert open_objects(local_cold).list("manifests/") == []
        os.unlink(path)
        sp.put_unit(image(0))
        wait_for(lambda: publishes(sp, refs), timeout_s=120)


def publishes(sp, refs):
    with contextlib.suppress(spool.IntegrityError):
        sp.publish(refs, timeout_s=90)
        return True
    return False


def test_damage_in_the_cold_root_is_found(local_cold, tmp_path):
    with spool.open(location(tmp_path / "hot", local_cold, **QUICK)) as sp:
        key = sp.put_unit(image(0))
        sp.publish(with_units(sp, "a", [key]), timeout_s=120)
        path = tmp_path / "cold" / unit_path(key)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        (finding,) = sp.verify(deep=True).findings
        assert (finding.tier, finding.field, finding.file) == ("cold", "units", f"{local_cold}/{unit_path(key)}")
        assert same(sp.read_unit(key), image(0))
    with spool.open(local_cold) as reader:
        with pytest.raises(spool.IntegrityError, match=str(path)):
            reader.read_unit(key)
        path.unlink()
        (finding,) = reader.verify().findings
        assert "in no tier" in finding.text


def test_units_are_counted(local_cold, tmp_path):
    with spool.open(location(tmp_path / "hot", local_cold, hot_bytes="64MiB", **QUICK)) as sp:
        assert sp.status().units is None
        assert not [row for row in sp.usage() if row["field"] == "units"]
        before = sp.status().hot.used_bytes
        sizes = [encode(image(n)).size for n in range(3)]
        keys = [sp.put_unit(image(n)) for n in range(3)]
        sp.publish(with_units(sp, "a", keys[:2]), timeout_s=120)
        found = sp.status().units
        assert (found.n_hot, found.hot_bytes, found.n_cold, found.cold_bytes) == (3, sum(sizes), 2, sum(sizes[:2]))
        assert sp.status().hot.used_bytes > before + sum(sizes)
        (row,) = [row for row in sp.usage() if row["field"] == "units"]
        assert (row["file_bytes"], row["cold_bytes"]) == (sum(sizes), sum(sizes[:2]))
        report = sp.verify(deep=True)
        assert (report.n_units, report.unit_bytes, report.findings) == (3, sum(sizes), ())
        assert "3 units" in report.summary()
        for verb in ("status", "du", "verify", "gc --dry-run", "info"):
            command = [sys.executable, "-m", "spool", *verb.split(), sp.config.uri]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
            assert done.returncode == 0, done.stderr
            assert "units" in done.stdout + done.stderr or verb in ("gc --dry-run", "info")
    with spool.open(local_cold) as reader:
        found = reader.status().units
        assert (found.n_hot, found.n_cold) == (None, 2)


# -- room --------------------------------------------------------------------------------------------------------------


def test_units_that_are_safe_make_room(cold, tmp_path):
    """Ten times what the hot root takes: whoever puts waits for the spiller, and everything reads back."""
    uri = location(tmp_path / "hot", cold, hot_bytes="64MiB", append_timeout_s=60, **QUICK)
    with spool.open(uri) as sp:
        keys, most = [], 0
        for n in range(20):
            keys.append(sp.put_unit(image(n, (8 * MIB,))))
            if n % 3 == 0:
                with_units(sp, f"s{n}", keys[-2:])
            most = max(most, HotUnits(sp.config.root).measure())
        assert most <= 64 * MIB
        assert len(unit_files(sp.config.root)) < 9
        assert sp._catalog.usage()[ACCOUNT] <= 64 * MIB
        for n in (0, 7, 19):
            assert same(sp.read_unit(keys[n]), image(n, (8 * MIB,)))
        assert sp.put_unit(image(0, (8 * MIB,))) == keys[0]
        assert sp.verify().findings == ()


def test_what_only_an_unpublished_pack_names_stays(local_cold, tmp_path, by_hand):
    with spool.open(location(tmp_path / "hot", local_cold, hot_bytes="64MiB", **QUICK)) as sp:
        named, other = (sp.put_unit(image(n, (MIB,))) for n in range(2))
        with_units(sp, "open", [named], final=False)
        sp._feeds.catch_up()
        fd = elect.require_lock(str(sp.config.root))
        with contextlib.closing(sp._tiers.spiller()) as spiller:
            before = sp._catalog.usage()[ACCOUNT]
            freed = spiller._evict_units(10**9, 0)
            assert freed == before - sp._catalog.usage()[ACCOUNT] == disk_bytes(MIB + 72)
        locks.release(fd)
        assert list(unit_files(sp.config.root)) == [named]
        assert same(sp.read_unit(other), image(1, (MIB,)))


def test_an_old_object_is_renewed_before_the_hot_copy_goes(local_cold, tmp_path):
    """The node may still need it, and no other node knows."""
    (tmp_path / "hot").mkdir()
    units, objects = HotUnits(str(tmp_path / "hot")), open_objects(local_cold)
    unit = encode(image(0))
    units.store(unit.key, [unit.head, unit.body], sync=False)
    uploader = UnitUploader(units, objects)
    assert uploader.bring([unit.key]) == []
    path = tmp_path / "cold" / unit_path(unit.key)
    os.utime(path, (1, 1))
    assert uploader.bring([unit.key]) == []
    assert path.stat().st_mtime == 1
    with spool.open(str(tmp_path / "hot")) as sp:
        assert uploader.evict([unit.key], sp._catalog, renew_before=time.time() - 60) > 0
    assert path.stat().st_mtime > 1
    assert units.info(unit.key) is None
    assert uploader.bring([unit.key, "unit-" + "0" * 64]) == ["unit-" + "0" * 64]


# -- age ---------------------------------------------------------------------------------------------------------------


def test_units_go_by_age_unless_a_live_session_names_them(cold, tmp_path, by_hand):
    uri = location(tmp_path / "hot", cold, units_age_s=1.5, retention="released", hot_bytes="64MiB", **QUICK)
    with spool.open(uri) as sp:
        root = str(sp.config.root)
        live, over = (sp.put_unit(image(n)) for n in range(2))
        kept = with_units(sp, "live", [live])
        released = with_units(sp, "over", [over, live])
        sp.flush()
        sp.spill()
        sp.publish([*kept, *released], timeout_s=1)
        sp.release(released)
        alone, fresh = sp.put_unit(image(2)), sp.put_unit(image(3))
        time.sleep(1.6)
        age(root, live, over, alone)
        assert sp.put_unit(image(3)) == fresh
        (planned,) = [item for item in sp.gc(dry_run=True) if item.stream == ACCOUNT]
        assert (planned.pack, planned.go) == (2, True)
        assert set(unit_files(root)) == {live, over, alone, fresh}
        wait_for(lambda: (sp.gc(), set(unit_files(root)) == {live, fresh})[1])
        objects = open_objects(cold)
        wait_for(lambda: (sp.gc(), objects.info(unit_path(over)) is None)[1])
        assert objects.info(unit_path(live)) is not None
        for key in (over, alone):
            with pytest.raises(spool.ReleasedError, match=r"was deleted at .*put it again"):
                sp.read_unit(key)
        with spool.open(cold) as reader, pytest.raises(spool.ReleasedError, match="was deleted at"):
            reader.read_unit(over)
        assert same(sp.read_unit(live), image(0))
        assert sp.put_unit(image(1)) == over
        assert same(sp.read_unit(over), image(1))
        assert sp.verify(deep=True).findings == ()
        assert sp._catalog.usage()[ACCOUNT] == HotUnits(root).measure()


def test_without_a_cold_root_units_go_by_age_too(spool_uri):
    with spool.open(f"{spool_uri}?units_age_s=100&hot_bytes=64MiB") as sp:
        root = str(sp.config.root)
        named, alone = sp.put_unit(image(0)), sp.put_unit(image(1))
        refs = with_units(sp, "a", [named])
        age(root, named, alone)
        sp.gc()
        assert list(unit_files(root))[:1] == [named] or named in unit_files(root)
        assert alone not in unit_files(root)
        with pytest.raises(spool.ReleasedError):
            sp.read_unit(alone)
        assert sp._catalog.usage()[ACCOUNT] == disk_bytes(encode(image(0)).size)
        sp.release(refs)
        sp.gc()
        assert named not in unit_files(root)
        assert ACCOUNT not in sp._catalog.usage()


def test_what_is_kept_keeps_its_units(spool_uri):
    with spool.open(f"{spool_uri}?units_age_s=1&retention=keep") as sp:
        alone = sp.put_unit(image(0))
        age(str(sp.config.root), alone)
        sp.gc()
        assert same(sp.read_unit(alone), image(0))
    with spool.open(f"{spool_uri}?units_age_s=1&retention=age=7d") as sp:
        named = sp.put_unit(image(1))
        sp.release(with_units(sp, "a", [named]))
        age(str(sp.config.root), alone, named)
        sp.gc()
        assert same(sp.read_unit(named), image(1))
        with pytest.raises(spool.ReleasedError):
            sp.read_unit(alone)


def test_a_put_that_meets_a_deletion_wins_or_stores_anew(tmp_path, monkeypatch):
    """Whoever was told that a unit is there finds it afterwards, wherever the deletion is at that moment."""
    units, unit = HotUnits(str(tmp_path)), encode(image(0))

    def put():
        return units.touch(unit.key) or units.store(unit.key, [unit.head, unit.body], sync=False)

    put()
    os.utime(units.path(unit.key), (1, 1))
    real = os.rename

    def before(source, target):  # it is put between the look at its age and the deletion
        assert put()
        real(source, target)

    monkeypatch.setattr(os, "rename", before)
    assert units.remove(unit.key, unless_used_after=time.time() - 100) == 0
    assert units.read(unit.key) is not None

    def after(source, target):  # and behind it
        real(source, target)
        assert units.read(unit.key) is not None
        assert put()

    os.utime(units.path(unit.key), (1, 1))
    monkeypatch.setattr(os, "rename", after)
    assert units.remove(unit.key, unless_used_after=time.time() - 100) > 0
    monkeypatch.undo()
    assert bytes(units.read(unit.key) or b"") == unit.head + bytes(unit.body)
    assert len(unit_files(tmp_path)) == 1


def test_a_pack_that_names_a_unit_whose_deletion_is_announced_saves_it(cold, tmp_path, by_hand):
    """Node a announces; node b, which put the unit again, publishes; when a's grace is over the unit stays."""
    slow = {"units_age_s": 1, "grace_s": 2, "publish_interval_s": 0.1}
    objects = open_objects(cold)
    with (
        spool.open(location(tmp_path / "a", cold, **slow)) as a,
        spool.open(location(tmp_path / "b", cold, **slow)) as b,
    ):
        key = a.put_unit(image(0))
        refs = with_units(a, "a", [key])
        a.flush()
        a.spill()
        a.release(refs)
        time.sleep(1.2)
        a.gc()
        assert key in Deletions(objects).pending()
        assert objects.info(unit_path(key)) is not None
        assert b.put_unit(image(0)) == key
        with_units(b, "b", [key])
        b.flush()
        b.spill()
        time.sleep(2.1)
        for _ in range(2):
            a.gc()
        assert Deletions(objects).pending() == set()
        assert objects.info(unit_path(key)) is not None
        with spool.open(cold) as reader:
            assert same(reader.read_unit(key), image(0))
            assert [row.session_id for row in reader.sessions()][-1] == "b"


def test_a_unit_that_is_put_again_during_the_grace_stays(local_cold, tmp_path, by_hand):
    """Also where nobody names it yet: its object is another one by then."""
    with spool.open(location(tmp_path / "a", local_cold, units_age_s=1.5, grace_s=1, publish_interval_s=0.1)) as sp:
        key = sp.put_unit(image(0))
        sp.release(with_units(sp, "a", [key]))
        sp.flush()
        sp.spill()
        time.sleep(1.6)
        sp.gc()
        assert key in Deletions(open_objects(local_cold)).pending()
        assert sp.put_unit(image(0)) == key
        sp._tiers._units._uploader.bring([key])
        time.sleep(1.1)
        sp.put_unit(image(0))
        sp.gc()
        assert open_objects(local_cold).info(unit_path(key)) is not None
        with pytest.raises(spool.NotFoundError):
            sp.read_unit("unit-" + "1" * 64)


def test_what_another_node_lost_is_brought_again(local_cold, tmp_path, by_hand):
    """A hot copy that a published session names heals the cold root."""
    with spool.open(location(tmp_path / "a", local_cold, **QUICK)) as sp:
        key = sp.put_unit(image(0))
        with_units(sp, "a", [key])
        sp.flush()
        sp.spill()
        objects = open_objects(local_cold)
        objects.delete([unit_path(key)])
        sp.gc()
        assert objects.info(unit_path(key)) is not None


def test_a_unit_that_another_node_put_is_brought_over_once_it_is_known_to_be_needed(local_cold, tmp_path, by_hand):
    places = [location(tmp_path / name, local_cold, **QUICK) for name in "ab"]
    with spool.open(places[0]) as a, spool.open(places[1]) as b:
        key = b.put_unit(image(0))
        with_units(a, "a", [key])
        a.flush()
        a.spill()
        objects = open_objects(local_cold)
        assert objects.info(unit_path(key)) is None
        b.gc()
        assert same(a.read_unit(key), image(0))
        assert a.verify(deep=True).findings == b.verify(deep=True).findings == ()


def test_nothing_goes_while_records_cannot_be_read(local_cold, tmp_path, by_hand, caplog):
    with spool.open(location(tmp_path / "a", local_cold, units_age_s=0.2, **QUICK)) as sp:
        key = sp.put_unit(image(0))
        with_units(sp, "a", [key])
        sp.flush()
        sp.spill()
    (tmp_path / "cold" / "manifests" / "0000000000001-x-0.parquet").write_bytes(b"torn")
    time.sleep(0.3)
    with spool.open(location(tmp_path / "b", local_cold, units_age_s=0.2, **QUICK)) as other:
        alone = other.put_unit(image(1))
        age(tmp_path / "b", alone)
        other.gc()
        assert "no units are deleted for now" in caplog.text
        assert same(other.read_unit(alone), image(1))


def test_gc_of_a_cold_root_deletes_what_nobody_names(cold, tmp_path, by_hand):
    with spool.open(location(tmp_path / "a", cold, **QUICK)) as sp:
        live, over = sp.put_unit(image(0)), sp.put_unit(image(1))
        with_units(sp, "live", [live])
        refs = with_units(sp, "over", [over])
        sp.flush()
        sp.spill()
        sp.release(refs)
        sp.flush()
        sp.spill()
    remove_root(tmp_path / "a")
    time.sleep(1.1)
    objects = open_objects(cold)
    with spool.open(f"{cold}?units_age_s=1&grace_s=0.001") as there:
        for _ in range(3):
            there.gc()
            time.sleep(0.05)
        assert objects.info(unit_path(over)) is None
        assert same(there.read_unit(live), image(0))
        with pytest.raises(spool.ReleasedError):
            there.read_unit(over)


def test_deletions_are_merged_and_the_old_forgotten(local_cold):
    objects = open_objects(local_cold)
    book = Deletions(objects)
    for n in range(MERGED + 3):
        book.announce({f"unit-{n:064x}": 0.0}, done=n != 5)
    book.merge()
    assert len(objects.list(GONE_UNITS)) == 2
    assert book.find(f"unit-{0:064x}") is not None
    assert book.pending() == {f"unit-{5:064x}"}
    assert book.find("unit-" + "f" * 64) is None
    objects.put(f"{GONE_UNITS}0-torn.json", b"{")
    assert book.pending() == {f"unit-{5:064x}"}


# -- pure --------------------------------------------------------------------------------------------------------------


def test_who_holds_a_unit():
    named = {"a": ["live", "over"], "b": ["over"], "c": ["over", "over too"]}
    assert held_units(named, {"over", "over too"}, Policy(released=True)) == {"a"}
    assert held_units(named, {"over", "over too"}, Policy(age_s=3.0)) == {"a", "b", "c"}
    units = [StoredUnit(key, 10, at) for key, at in (("a", 0.0), ("b", 0.0), ("c", 95.0))]
    assert [unit.key for unit in aged_units(units, {"a"}, age_s=10, now=100.0)] == ["b"]


def test_the_oldest_units_are_evicted_first():
    units = [StoredUnit(f"u{n}", 10, float(n)) for n in (3, 1, 2, 0)]
    assert [unit.key for unit in unit_evictions(units, {"u1"}, used=100, low=75)] == ["u0", "u2", "u3"]
    assert unit_evictions(units, (), used=10, low=10) == []


# -- the index, exports ------------------------------------------------------------------------------------------------


def test_a_rebuilt_index_knows_the_same_units(local_cold, tmp_path, by_hand):
    with spool.open(location(tmp_path / "a", local_cold, **QUICK)) as sp:
        keys = [sp.put_unit(image(n)) for n in range(3)]
        with_units(sp, "a", keys[:2])
        sp.flush()
        with_units(sp, "b", keys[1:])
        sp.flush()
        sp.spill()
        before = sp._catalog.dump()
        assert sp._catalog.units.named() == {keys[0]: ["a"], keys[1]: ["a", "b"], keys[2]: ["b"]}
        assert sp._catalog.units.unpublished() == set()
        sp.rebuild()
        assert sp._catalog.dump() == before
        with spool.open(local_cold) as reader:
            reader._feeds.catch_up(fresh=True)
            assert reader._catalog.dump() == before
        sp.discard("a")
        sp.gc()
        time.sleep(0.01)
        sp.gc()
        assert sp._catalog.units.named() == {keys[1]: ["b"], keys[2]: ["b"]}


def test_an_export_takes_the_units_along(local_cold, tmp_path, caplog):
    with spool.open(location(tmp_path / "a", local_cold, **QUICK)) as sp:
        keys = [sp.put_unit(image(n)) for n in range(3)]
        lost = encode(image(9)).key
        refs = with_units(sp, "a", [*keys[:2], "own", lost])
        with_units(sp, "b", keys[2:])
        sp.publish(refs, timeout_s=120)
        HotUnits(str(sp.config.root)).remove(keys[0])  # it comes from the cold root
        sp.export(refs, tmp_path / "copy", "spool")
        assert f"{lost} is named by session 'a'" in caplog.text
    remove_root(tmp_path / "a")
    with spool.open(str(tmp_path / "copy")) as copy:
        assert set(unit_files(tmp_path / "copy")) == set(keys[:2])
        for got, n in zip(copy.read_units(keys[:2]), range(2), strict=True):
            assert same(got, image(n))
        (segment,) = copy.segments()
        assert [unit.key for unit in segment.units] == [*keys[:2], "own", lost]


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", ["spill.unit", "spill.manifest", "evict.unit", "collect.units", "delete.unit", "collect.unit"]
)
def test_a_kill_leaves_nothing_for_good(local_cold, tmp_path, by_hand, point):
    uri = location(tmp_path / "hot", local_cold, units_age_s=1, hot_bytes="64MiB", **QUICK)
    with spool.open(uri) as sp:
        keys = [sp.put_unit(image(n, (MIB,))) for n in range(4)]
        live = with_units(sp, "live", keys[:2])
        sp.release(with_units(sp, "over", keys[2:]))
        sp.flush()
    code = (
        "import sys, time, contextlib, spool\nfrom spool.points import kill_at\nfrom spool.spiller import elect\n"
        "from spool.stores.units import HotUnits\n"
        "elect.start = lambda *_: None\nkill_at(sys.argv[2])\nsp = spool.open(sys.argv[1])\n"
        "list(map(HotUnits(sp.config.root).touch, sys.argv[3:]))\nsp.spill()\n"
        "with contextlib.closing(sp._tiers.spiller()) as spiller:\n"
        "    spiller._evict_units(10**9, 10**9 - 3 * 2**20 if sys.argv[2] == 'evict.unit' else 10**9)\n"
        "for _ in range(3):\n    time.sleep(1.1)\n    sp.gc()\n"
    )
    with pytest.raises(subprocess.CalledProcessError) as died:
        run_python(code, uri, point, *keys)
    assert died.value.returncode == -9
    with spool.open(uri) as sp:
        sp.spill()
        objects, units = open_objects(local_cold), HotUnits(str(sp.config.root))
        time.sleep(1.1)
        for name, path in unit_files(sp.config.root).items():
            if name.startswith("."):
                os.utime(path, (1, 1))
        units.sweep(older_than_s=3600)
        for _ in range(3):
            sp.gc()
            time.sleep(0.05)
        assert set(unit_files(sp.config.root)) <= set(keys[:2])
        found = {info.key for info in objects.list("units/") if not info.key.startswith(GONE_UNITS)}
        assert found == set(map(unit_path, keys[:2]))
        for n in range(2):
            assert same(sp.read_unit(keys[n]), image(n, (MIB,)))
        sp._feeder.account()
        assert sp._catalog.usage().get(ACCOUNT, 0) == units.measure()
        assert sp.verify(deep=True).findings == ()
        assert all(item.gone.done for item in Deletions(objects).all())
        assert live
