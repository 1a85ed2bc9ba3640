"""Copies of one hot root beside each other: neither loses what only it has, and a dead one holds nobody up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiers import assert_same, record

import spool
from spool.audit import cold as audit_cold
from spool.logs.keys import gone_key, records_key
from spool.read.valid import ListedRows
from spool.spiller import claims
from spool.spiller.status import read_status
from spool.spiller.upload import Uploader
from spool.stores.objects import open_objects

TWO = "two copies of one hot root are in use"


@pytest.fixture(autouse=True)
def spillers(by_hand):
    """Have spillers work only where a test says so."""


@pytest.fixture
def cold(cold, request):
    """The URL of a cold root in a store that creates exclusively."""
    if cold.startswith("s3"):
        request.getfixturevalue("hostile")
    return cold


@pytest.fixture
def objects(cold):
    return open_objects(cold)


@pytest.fixture
def uri(tmp_path, cold):
    return located(tmp_path / "hot", cold)


def located(root, cold, **options):
    chosen = {"spill": cold, "spill_when": "pressure", "retention": "released", "grace_s": 0.001, **options}
    return f"file://{root}?" + "&".join(f"{name}={value}" for name, value in chosen.items())


def copy_of(sp, cold):
    """Copy a hot root under its writer; return the URI of the copy."""
    target = Path(sp.config.root).with_name("copy")
    shutil.copytree(sp.config.root, target, ignore=shutil.ignore_patterns("spiller*", "catalog*"))
    return located(target, cold)


def bring(uri):
    """Seal what a copy has, as whoever opens it does, and bring it over; return how the packs are then."""
    with spool.open(uri) as sp:
        sp.recover()
        return [row.state for row in sp.spill()]


def pack_of(ref):
    return ref.extents["token_ids"][0].stream, 0


def refused(sp):
    return [found.why for found in read_status(sp.config.root).damaged]


def stay(sp, refs, wanted):
    """Assert that nothing of these segments goes, whatever is done."""
    for _ in range(2):
        sp.gc()
        sp.spill()
    assert_same(sp.read(refs), wanted)
    assert {ref.session_id for ref in refs} <= {row.session_id for row in sp.sessions()}


# -- the packs that both have ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "made anew"])
def test_what_is_recorded_on_beside_a_copy_is_listed_and_stays(uri, cold, again):
    with spool.open(uri) as sp:
        first = record(sp, "first")
        assert bring(copy_of(sp, cold)) == ["spilled"]
        sp.gc()  # the manifest is seen while the pack of its name is open here
        later = record(sp, "later")
        record(sp, "open", final=False)
        if again:
            sp.rebuild()
        assert {row.session_id: row.state for row in sp.sessions()} == {
            "first": "final", "later": "final", "open": "open",
        }  # fmt: skip
        sp.flush()
        wanted = sp.read(later)
        sp.release(first)
        stay(sp, later, wanted)
        assert {row.session_id for row in sp.sessions()} == {"first", "later", "open"}
        assert TWO in refused(sp)[0]
        assert [TWO in found.text for found in sp.verify(deep=True).findings] == [True]


def test_a_pack_that_a_copy_brought_over_otherwise_is_not_deleted(uri, cold):
    with spool.open(uri) as sp:
        refs = record(sp, "first")
        other = copy_of(sp, cold)
        refs += record(sp, "later")
        assert bring(other) == ["spilled"]
        sp.flush()
        wanted = sp.read(refs)
        sp.release(refs)
        assert [(item.go, TWO in item.why) for item in sp.gc() if item.pack == 0] == [(False, True)]
        assert_same(sp.read(refs), wanted)
        with spool.open(other) as copy:
            assert_same(copy.read(refs[:1]), wanted[:1])


def test_an_open_pack_that_a_copy_brought_over_is_named_at_once(uri, cold):
    with spool.open(uri) as sp:
        record(sp, "first")
        assert bring(copy_of(sp, cold)) == ["spilled"]
        record(sp, "later")
        assert [TWO in found.text for found in sp.verify().findings] == [True]
        sp.spill()
        assert TWO in refused(sp)[0]


# -- deletions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [False, True], ids=["waits for readers", "done"])
def test_the_deletion_of_a_copys_pack_is_not_that_of_this_ones(uri, cold, objects, done):
    with spool.open(uri) as sp:
        refs = record(sp, "first")
        other = copy_of(sp, cold)
        refs += record(sp, "later")
        sp.flush()
        assert bring(other) == ["spilled"]
        wanted = sp.read(refs)
        with spool.open(f"{cold}?retention=released&grace_s={0.001 if done else 1000}") as there:
            there.release(refs[:1])
            assert [item.go for item in there.gc() if not item.stream.startswith("facts-")] == [True]
            there.gc()
        assert objects.info(gone_key(*pack_of(refs[0]))) is not None
        assert (objects.info(records_key(*pack_of(refs[0]))) is None) == done
        stay(sp, refs, wanted)
        assert "is deleted, and it is not deleted here" in refused(sp)[0]
        sp.rebuild()
        stay(sp, refs, wanted)


def test_a_pack_that_is_the_same_in_both_copies_is_deleted_in_both(uri, cold):
    with spool.open(uri) as sp:
        refs = record(sp, "first")
        sp.flush()
        assert bring(copy_of(sp, cold)) == ["spilled"]
        with spool.open(f"{cold}?retention=released&grace_s=1000") as there:
            there.release(refs)
            there.gc()
        sp.gc()
        with pytest.raises(spool.ReleasedError):
            sp.read(refs)


# -- what a dead one left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [b"", b"XXXX", 0.5, 0.99])
@pytest.mark.parametrize("when", ["before", "after"])
def test_damaged_records_in_the_cold_root_are_put_again(uri, cold, objects, left, when):
    with spool.open(uri) as sp:
        refs = record(sp, "first")
        sp.flush()
        key = records_key(*pack_of(refs[0]))
        whole = Path(sp.config.root, key).read_bytes()
        torn = left if isinstance(left, bytes) else whole[: int(len(whole) * left)]
        if when == "after":
            sp.spill()
            Path(sp.config.root, key).with_suffix(".cold").unlink()
        objects.put(key, torn)
        sp._catalog.packs.mark(*pack_of(refs[0]), "sealed")
        sp.rebuild()
        assert [row.state for row in sp.spill()] == ["spilled"]
        assert objects.get(key) == whole
        with spool.open(cold) as there:
            assert_same(there.read(refs), sp.read(refs))
            assert not there.verify(deep=True).findings


def test_damaged_records_of_a_copys_pack_are_the_copys_to_mend(uri, cold, objects):
    with spool.open(uri) as sp:
        refs = record(sp, "first")
        other = copy_of(sp, cold)
        record(sp, "later")
        sp.flush()
        bring(other)
        objects.put(records_key(*pack_of(refs[0])), b"")
        assert [row.state for row in sp.spill()] == ["sealed"]
        assert "damaged" in refused(sp)[0]
        assert objects.get(records_key(*pack_of(refs[0]))) == b""


@pytest.fixture
def claimed(uri, cold, objects):
    """A hot root, its segments, and the records of its pack as a copy has them, which died when it had put them."""
    with spool.open(uri) as sp:
        refs = record(sp, "first")
        other = copy_of(sp, cold)
        with spool.open(other) as copy:
            copy.recover()
            theirs = Path(copy.config.root, records_key(*pack_of(refs[0]))).read_bytes()
        refs += record(sp, "later")
        sp.flush()
        yield sp, refs, theirs


def test_records_of_a_copy_that_died_are_replaced_after_a_while(claimed, cold, objects, monkeypatch):
    sp, refs, theirs = claimed
    key = records_key(*pack_of(refs[0]))
    objects.put(key, theirs)
    assert [row.state for row in sp.spill()] == ["sealed"]
    assert "no manifest lists yet; if none does 15 minutes after they were put" in refused(sp)[0]
    assert objects.get(key) == theirs
    monkeypatch.setattr(claims, "CLAIM_S", -5.0)  # so long ago that is
    assert [row.state for row in sp.spill()] == ["spilled"]
    with spool.open(cold) as there:
        assert_same(there.read(refs), sp.read(refs))
        assert not there.verify(deep=True).findings


def test_who_was_taken_for_dead_notices_before_its_pack_is_listed(claimed, objects, monkeypatch):
    sp, refs, theirs = claimed
    describe = Uploader._describe

    def late(self, stream, new):
        describe(self, stream, new)
        objects.put(records_key(*pack_of(refs[0])), theirs)

    monkeypatch.setattr(Uploader, "_describe", late)
    assert [row.state for row in sp.spill()] == ["sealed"]
    assert TWO in refused(sp)[0]
    assert not objects.list("manifests/")


def test_what_a_lost_node_left_without_a_manifest_is_named(uri, cold, objects, monkeypatch):
    with spool.open(uri) as sp:
        refs = record(sp, "first")
        monkeypatch.setattr(Uploader, "_put_all", lambda *_: 1 / 0)
        sp.flush()
        with pytest.raises(ZeroDivisionError):
            sp.spill()
    shutil.rmtree(sp.config.root)
    with spool.open(cold) as there:
        assert not there.verify().findings  # it may be on its way
        monkeypatch.setattr(audit_cold, "LEFT_S", -5.0)
        (found,) = there.verify().findings
        assert (found.kind, found.stream) == ("unfinished", pack_of(refs[0])[0])
        assert "4 objects of pack 0, and no manifest" in found.text


def test_rows_that_a_pack_sealed_without_are_not_read_as_zeros(tmp_path):
    """An old copy of a root, put back, seals fewer rows than references name: where they lie there is padding."""
    root, backup = tmp_path / "hot", tmp_path / "backup"
    with spool.open(str(root)) as sp:
        early = record(sp, "early")
        shutil.copytree(root, backup)
        late = record(sp, "late")
        wanted = sp.read(early)
    shutil.rmtree(root)
    with spool.open(str(backup)) as sp:
        sp.recover()
        for tokens in (slice(20, 30), slice(0, None), slice(-3, None)):
            for fields in (["token_ids"], ["routed_experts"], None):
                with pytest.raises(spool.IntegrityError, match="are not there"):
                    sp.read(late[0], tokens=tokens, fields=fields)
        with pytest.raises(spool.IntegrityError):
            sp.locate(late[0])
        assert_same(sp.read(early), wanted)


@pytest.mark.parametrize("layers", [None, slice(1, 3)])
def test_rows_that_a_cold_pack_lacks_are_not_read_as_zeros(tmp_path, cold, layers, monkeypatch):
    """The copy that was put back spills its short pack; no document is asked for rows that are other than zeros."""
    looked, look = [], ListedRows._look
    monkeypatch.setattr(ListedRows, "_look", lambda self, key: looked.append(key) or look(self, key))
    root, backup = tmp_path / "hot", tmp_path / "backup"
    with spool.open(str(root)) as sp:
        early = record(sp, "early")
        shutil.copytree(root, backup)
        late = record(sp, "late")
        wanted = sp.read(early[0], tokens=slice(2, 9), fields=["routed_experts"], layers=layers)
    shutil.rmtree(root)
    with spool.open(located(backup, cold)) as sp:
        sp.recover()
        sp.spill()
    shutil.rmtree(backup)
    with spool.open(cold) as sp:
        assert_same([sp.read(early[0], tokens=slice(2, 9), fields=[*wanted], layers=layers)], [wanted])
        assert not looked
        for tokens in (slice(50, 60), slice(-3, None)):
            for fields in (["token_ids"], ["routed_experts"], ["logprobs"], None):
                with pytest.raises(spool.IntegrityError, match="are not there"):
                    sp.read(late[0], tokens=tokens, fields=fields, layers=layers)
        assert len(looked) == len(set(looked)) > 1, "each document is read once"
        with pytest.raises(spool.IntegrityError, match="are not there"):
            sp.locate(late[0])


def test_rows_that_a_restored_root_lacks_come_from_the_cold_one(tmp_path):
    root, backup, cold = tmp_path / "hot", tmp_path / "backup", f"file://{tmp_path}/cold"
    with spool.open(f"{root}?spill={cold}") as sp:
        early = record(sp, "early")
        shutil.copytree(root, backup)
        late = record(sp, "late")
        sp.flush()
        sp.spill()
        wanted = sp.read([*early, *late]), sp.read(late[0], tokens=slice(10, 20))
    shutil.rmtree(root)
    backup.rename(root)
    with spool.open(f"{root}?spill={cold}") as sp:
        sp.recover()
        assert_same(sp.read([*early, *late]), wanted[0])
        assert_same([sp.read(late[0], tokens=slice(10, 20))], [wanted[1]])
