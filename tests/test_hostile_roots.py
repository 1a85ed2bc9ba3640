"""Roots that go away and come back, what else lies in them, and an index that is taken from under its processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from s3_server import free_port
from shell import run
from tiers import FIELDS, assert_same, record, wait_for

import spool
from spool import publishing
from spool import root as roots
from spool.catalog import Catalog, files
from spool.errors import SpoolError, StorageError
from spool.logs.packs import GoneMark
from spool.model.fields import Schema
from spool.spiller import turns
from spool.spiller.collect import bury
from spool.spiller.evict import evict
from spool.spiller.mend import unlisted
from spool.spiller.rollup import OBJECTS_ROLLED
from spool.spiller.status import read_status
from spool.stores import shared as shared_module
from spool.stores.objects import open_objects
from spool.stores.remote import RemoteStore
from spool.stores.shared import SharedFolder
from spool.write import stream


@pytest.fixture
def cold(tmp_path):
    return tmp_path / "cold"


@pytest.fixture
def uri(tmp_path, cold):
    return f"file://{tmp_path}/hot?spill=file://{cold}&publish_interval_s=0.1"


@pytest.fixture
def sp(uri):
    with spool.open(uri) as sp:
        yield sp


# -- a cold root that is away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_facts_are_refused_while_the_root_is_away_and_none_is_lost(sp, cold, left):
    for name in ("a", "b", "c"):
        sp.publish(record(sp, name), timeout_s=60)
    with spool.open(f"file://{cold}") as there:
        refs = {ref.session_id: ref for ref in there.segments()}
        cold.rename(f"{cold}-away")
        if left != "nothing":
            cold.mkdir()
        for say in (
            lambda: there.annotate("a", reward=1.0),
            lambda: there.release(refs["b"]),
            lambda: there.discard("c"),
        ):
            with pytest.raises(spool.StorageError, match=r"mounted|emptied"):
                say()
        if left == "nothing":
            assert not cold.exists()
        else:
            shutil.rmtree(cold)
        Path(f"{cold}-away").rename(cold)
        there.annotate("a", reward=2.0)
    with spool.open(f"file://{cold}") as again:
        assert {row.session_id: (row.state, row.reward) for row in again.sessions()} == {
            "a": ("final", 2.0), "b": ("final", None), "c": ("final", None),
        }  # fmt: skip


def test_a_status_says_at_once_that_the_cold_root_does_not_answer(tmp_path, hostile, s3_root):
    with spool.open(f"file://{tmp_path}/hot?spill={s3_root}&publish_interval_s=0.1") as sp:
        sp.publish(record(sp, "a"), timeout_s=60)
        hostile.fault("drop")
        record(sp, "b")
        sp.flush()
        said = wait_for(
            lambda: (found := read_status(f"{tmp_path}/hot")) and found.error, timeout_s=20, what="an error"
        )
        assert s3_root in said
        hostile.heal()
        wait_for(lambda: read_status(f"{tmp_path}/hot").error is None, timeout_s=40, what="its end")


def test_an_append_hardly_waits_for_a_cold_root_that_is_away(tmp_path, s3_root, monkeypatch):
    with spool.open(f"file://{tmp_path}/hot?spill={s3_root}"):
        pass
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with spool.open(f"file://{tmp_path}/hot") as sp:
        waited = []
        for name in ("first", "second", "third"):
            began = time.monotonic()
            sp.session(name).append(prompt_token_ids=[1], response_token_ids=[2])
            waited.append(time.monotonic() - began)
        assert max(waited) < 10 and waited[1] + waited[2] < 0.5 * max(waited[0], 1.0)


def test_a_publish_that_a_stopped_spiller_holds_up_says_so(sp, monkeypatch):
    monkeypatch.setattr(publishing, "SILENT_S", 1.0)
    sp.publish(record(sp, "a"), timeout_s=60)
    spiller = read_status(sp.config.root).pid
    os.kill(spiller, signal.SIGSTOP)
    try:
        with pytest.raises(spool.StorageError, match=rf"process {spiller}, has said nothing for \d+ s"):
            sp.publish(record(sp, "b"), timeout_s=5)
    finally:
        os.kill(spiller, signal.SIGCONT)
    sp.publish(list(sp.segments()), timeout_s=60)


def test_a_publish_says_why_it_waits(tmp_path, hostile, s3_root, caplog):
    with spool.open(f"file://{tmp_path}/hot?spill={s3_root}&publish_interval_s=0.1") as sp:
        sp.publish(record(sp, "a"), timeout_s=60)
        hostile.fault(403, "PUT")
        with pytest.raises(spool.StorageError, match="403"):
            sp.publish(record(sp, "b"), timeout_s=8)
        assert "publish waits; the spiller says: " in caplog.text
        hostile.heal()
        sp.publish(list(sp.segments()), timeout_s=60)


# -- what else lies in a cold root -----------------------------------------------------------------------------------


def test_names_that_are_no_text_and_numbers_that_are_none_are_passed_over(sp, cold):
    sp.publish(record(sp, "a"), timeout_s=60)
    stream = next(iter(sp.segments())).extents["token_ids"][0].stream
    for folder in ("gone", "facts", "manifests"):
        (cold / folder).mkdir(exist_ok=True)
        (Path(os.fsdecode(os.fsencode(cold) + f"/{folder}/".encode() + b"\xff\xfe"))).write_bytes(b"x")
    for number in ("00", "\u0660", "-0", "0x0"):
        (cold / "gone" / f"{stream}-{number}").write_bytes(b"{}")
    refs = record(sp, "b")
    sp.publish(refs, timeout_s=60)
    with spool.open(f"file://{cold}") as there:
        assert {row.session_id for row in there.sessions()} == {"a", "b"}
        assert_same(there.read(refs), sp.read(refs))


@pytest.mark.parametrize("during", [1, 2])
def test_a_listing_never_misses_both_what_was_rolled_up_and_the_roll_up(tmp_path, monkeypatch, during):
    store = open_objects(f"file://{tmp_path}")
    store.put("m/1", b"x")
    store.put("m/2", b"x")
    real, walks = type(store)._walk, []

    def walk(self, folder, prefix=""):
        walks.append(folder)
        found = list(real(self, folder, prefix))
        if len(walks) == during:  # it passes the roll-up's place before that is put, the originals' when they are gone
            self.put("m/roll", b"xx")
            self.delete(["m/1", "m/2"])
            return iter([])
        return iter(found)

    monkeypatch.setattr(type(store), "_walk", walk)
    assert [found.key for found in store.list("m/")] == (["m/roll"] if during == 1 else ["m/1", "m/2"])


def test_nothing_that_one_owner_released_goes_where_another_recorded_the_session_too(tmp_path, cold):
    uris = [f"file://{tmp_path}/{name}?spill=file://{cold}&publish_interval_s=0.1&retention=released&grace_s=0.001"
            for name in "ab"]  # fmt: skip
    with spool.open(uris[0]) as a, spool.open(uris[1]) as b:
        own, other = record(a, "same", seed=1), record(b, "same", seed=2)
        a.publish(own, timeout_s=60)
        b.publish(other, timeout_s=60)
        wanted = b.read(other)
        a.release(own)
        for sp in (a, b):
            sp.flush()
            assert not any(item.go for item in sp.gc())
        assert_same(b.read(other), wanted)
        b.discard("same")
        b.flush()
        assert wait_for(lambda: any(item.go for item in b.gc()), what="the end of what was discarded")


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_cold_root_tells_when_it_was_made(tmp_path, s3_root, kind):
    url, began = (f"file://{tmp_path}/cold" if kind == "file" else s3_root), time.time()
    with spool.open(f"file://{tmp_path}/hot?spill={url}") as sp:
        sp.publish(record(sp, "a"), timeout_s=60)
    with spool.open(url) as there:
        assert began - 2 < there.info()["created_at"] < time.time() + 2
    assert run("info", url, "--json").json["created_at"] == pytest.approx(began, abs=60)


# -- documents that were altered -------------------------------------------------------------------------------------


def misspell(path, key):
    text = path.read_text()
    assert f'"spool:{key}"' in text
    path.write_text(text.replace(f'"spool:{key}"', f'"spool:{key[:-1]}z"'))


def stream_of(sp):
    return next(iter(sp.segments())).extents["token_ids"][0].stream


@pytest.mark.parametrize("key", ["format", "stream", "created", "schema", "layout"])
def test_a_stream_whose_document_lacks_an_attribute_says_which_and_where(sp, cold, key, caplog):
    """It is read from the cold root, unless that one is damaged too."""
    refs = record(sp, "a")
    sp.publish(refs, timeout_s=60)
    wanted = sp.read(refs)
    hot, there = (root / "streams" / stream_of(sp) / "zarr.json" for root in (Path(sp.config.root), cold))
    misspell(hot, key)
    with spool.open(sp.config.root, readonly=True) as again:
        assert_same(again.read(refs), wanted)
        assert f"{hot} cannot be used" in caplog.text and f"went on with file://{there}" in caplog.text
    misspell(there, key)
    for path, location in ((hot, sp.config.root), (there, f"file://{cold}")):
        with spool.open(location, readonly=True) as again:
            with pytest.raises(spool.IntegrityError, match=rf"{path} cannot be used: .*spool:{key}"):
                again.read(refs)
            found = [each for each in again.verify().findings if f"spool:{key}" in each.text]
            assert found and str(path) in found[0].text


@pytest.mark.parametrize("key", ["rows", "dtype"])
def test_an_array_whose_document_lacks_an_attribute_is_found(tmp_path, cold, key):
    with spool.open(f"file://{tmp_path}/hot?spill=file://{cold}&publish_interval_s=0.1", fields=FIELDS) as sp:
        s = sp.session("a")
        s.append(prompt_token_ids=[1], response_token_ids=[2], fields={"value": np.zeros(1, "f4")})
        (ref,) = s.finalize()
        sp.publish([ref], timeout_s=60)
        name = "token_ids" if key == "rows" else "value"
        for root in (Path(sp.config.root), cold):
            path = root / "streams" / stream_of(sp) / name / "zarr.json"
            misspell(path, key)
            findings = run("verify", root, "--json", code=5).json["findings"]
            assert [found["field"] for found in findings] == [name] and str(path) in findings[0]["file"]


def test_attributes_of_later_versions_are_passed_over(sp, cold):
    refs = record(sp, "a")
    sp.publish(refs, timeout_s=60)
    wanted = sp.read(refs)
    hot = Path(sp.config.root) / "streams" / stream_of(sp)
    for path in [*hot.rglob("zarr.json"), hot / "lock", *cold.rglob("zarr.json")]:
        path.write_text(path.read_text().replace('"attributes": {', '"attributes": {"spool:later": [1], ', 1))
        assert "spool:later" in path.read_text()
    for location in (sp.config.url, f"file://{cold}"):
        with spool.open(location, readonly=True) as again:
            assert_same(again.read(refs), wanted)
            assert not again.verify(deep=True).findings


# -- two copies of one hot root --------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.takes_turns) for kind in ("file", "s3")])
def shared(request, cold):
    """The URL of a cold root in a store that creates exclusively."""
    if request.param == "file":
        return f"file://{cold}"
    request.getfixturevalue("hostile")  # the proxy does, the server behind it does not
    return request.getfixturevalue("s3_root")


@pytest.fixture
def copies(tmp_path, shared, by_hand):
    """Two copies of one hot root with a pack of the same name in each: the original has a session more in it."""
    first, second = (f"file://{tmp_path}/{name}?spill={shared}&spill_when=pressure" for name in ("hot", "copy"))
    with spool.open(first) as sp:
        record(sp, "both")
        shutil.copytree(tmp_path / "hot", tmp_path / "copy")
        record(sp, "original only")
    with spool.open(second) as sp:
        sp.recover()
    return first, second


def blind(info):
    """Return what `info` is to one who looks for records too early."""
    return lambda self, key: None if key.endswith(".arrow") else info(self, key)


def bring(uri):
    with spool.open(uri) as sp:
        return [row.state for row in sp.spill()], {ref.session_id: sp.read(ref, fields=["token_ids"])
                                                   for ref in sp.segments()}  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("together", [False, True])
def test_of_two_copies_of_a_hot_root_one_brings_a_pack_over_and_the_other_keeps_its_own(
    copies, shared, monkeypatch, order, together
):
    if together:  # each looks before the other has put anything
        for store in (SharedFolder, RemoteStore):
            monkeypatch.setattr(store, "info", blind(store.info))
    (states, had), (kept, has) = (bring(copies[n]) for n in order)
    assert states == ["spilled"] and kept == ["sealed"]
    said = read_status(copies[order[1]].partition("?")[0].removeprefix("file://")).damaged
    assert "two copies of one hot root are in use" in said[0].why and "take this copy out of use" in said[0].why
    with spool.open(shared) as there:
        assert {ref.session_id for ref in there.segments()} == set(had)
        assert not there.verify(deep=True).findings
        for ref in there.segments():
            assert_same([there.read(ref, fields=["token_ids"])], [had[ref.session_id]])
    with spool.open(copies[order[1]]) as sp:
        assert ["two copies of one hot root" in found.text for found in sp.verify(deep=True).findings] == [True]
        assert {ref.session_id: sp.read(ref, fields=["token_ids"])["token_ids"].tolist() for ref in sp.segments()} == {
            name: sample["token_ids"].tolist() for name, sample in has.items()
        }


# -- uploads that arrive late ----------------------------------------------------------------------------------------


def test_a_document_that_arrives_late_is_put_again(tmp_path, cold, monkeypatch):
    with spool.open(f"file://{tmp_path}/hot?spill=file://{cold}&spill_when=pressure") as sp:
        record(sp, "a")
        sp.flush()
        with contextlib.closing(sp._tiers.spiller()) as spiller:
            spiller.once()
            before = {path: path.read_bytes() for path in cold.glob("streams/*/*/zarr.json")}
            record(sp, "b")
            sp.flush()
            spiller.once()
            wanted = {path: path.read_bytes() for path in before}
            late = [path for path in before if wanted[path] != before[path]]
            assert len(late) == 3
            late[0].unlink()
            late[1].write_bytes(b"{")
            late[2].write_bytes(before[late[2]])  # as a server does with a request that was under way all the time
            spiller._kept_at = spiller._tidied_at = float("-inf")
            spiller.once()
            assert {path: path.read_bytes() for path in before} == wanted
            spiller._kept_at = spiller._tidied_at = float("-inf")
            monkeypatch.setattr(SharedFolder, "put", None)  # all is as it should be, so nothing is put again
            spiller.once()


# -- the index under live processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["delete it", "delete its WAL", "cut its WAL", "delete its shared memory"])
def test_an_index_that_is_taken_away_is_made_again_under_live_processes(tmp_path, harm):
    root = tmp_path / "hot"
    index = root / "catalog.sqlite"
    names = []
    with spool.open(f"file://{root}") as sp, spool.open(f"file://{root}") as beside:
        for n in range(6):
            record(sp, f"s{n}", n_steps=1)
            names.append(f"s{n}")
            assert len(list(beside.sessions())) == len(names)
            if n == 2:
                if harm == "delete it":
                    index.unlink()
                elif harm == "delete its WAL":
                    Path(f"{index}-wal").unlink()
                elif harm == "cut its WAL":
                    os.truncate(f"{index}-wal", 0)
                else:
                    Path(f"{index}-shm").unlink()
            assert {row["session_id"] for row in run("ls", root, "--json").json} == set(names)
    assert run("verify", root, "--deep").code == 0


# -- who waits for whom ----------------------------------------------------------------------------------------------


def test_a_process_that_is_stopped_with_the_lock_holds_nobody_up_for_ever(sp, tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "WAIT_S", 0.3)
    with open(tmp_path / "hot" / "cold.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        began = time.monotonic()
        with pytest.raises(spool.LockedError, match=r"cold\.lock"), turns.turn(f"{tmp_path}/hot", alone=True):
            raise AssertionError
        assert time.monotonic() - began < 5


def test_a_root_inside_another_one_is_refused(sp, tmp_path):
    with pytest.raises(spool.ConfigError, match="lies inside the spool"):
        spool.open(f"file://{tmp_path}/hot/streams/mine")
    assert not (tmp_path / "hot" / "streams" / "mine").exists()


def test_what_a_handle_may_not_do_it_refuses_at_once(sp, uri, cold, tmp_path):
    refs = record(sp, "a")
    with spool.open(uri, readonly=True) as only:
        for call in (lambda: only.publish(refs), lambda: only.session("x")):
            with pytest.raises(spool.SessionStateError, match="read only"):
                call()
    sp.publish(refs, timeout_s=60)
    with spool.open(f"file://{cold}") as there, pytest.raises(spool.SessionStateError, match="needs a hot root"):
        there.session("x")
    with spool.open(f"file://{tmp_path}/alone") as alone, pytest.raises(spool.ConfigError, match="no cold root"):
        alone.spill(follow=True)


def test_a_handle_that_is_pickled_is_opened_anew(sp, uri):
    refs = record(sp, "a")
    with pickle.loads(pickle.dumps(sp)) as other:
        assert other is not sp and other.config == sp.config
        assert_same(other.read(refs), sp.read(refs))
    assert len(repr(refs[0])) < 100


def test_layers_that_no_field_has_are_refused(sp):
    refs = record(sp, "a")
    (sample,) = sp.read(refs, layers=slice(4, 60))
    assert sample["routed_experts"].shape[1] == 2
    for start in (6, 50):
        with pytest.raises(spool.InputError, match="layers 0 to 5"):
            sp.read(refs, layers=slice(start, 60))


# -- a hot root that goes away under its writer ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_hot_root_that_goes_away_takes_no_more_and_is_not_made_again(tmp_path, monkeypatch, how, durability):
    monkeypatch.setattr(stream, "LOOK_S", 0.0)
    root, away = tmp_path / "hot", tmp_path / "away"
    sp = spool.open(f"file://{root}?durability={durability}&session_idle_s=0.2")
    s = sp.session("s")
    ref = s.append(prompt_token_ids=[1], response_token_ids=[2])
    root.rename(away)
    if how == "removed":
        shutil.rmtree(away)
    if how == "replaced":
        with spool.open(str(root)) as other:
            record(other, "other")
    before = _but_the_index(root)
    for call in (
        lambda: s.append(prompt_token_ids=[1, 2], response_token_ids=[3]),
        lambda: s.append(prompt_token_ids=[1, 2], response_token_ids=np.arange(300_000)),
        s.finalize,
        lambda: sp._recorder.writer(Schema.of(*FIELDS)),
        lambda: record(sp, "new"),
        lambda: sp.annotate("s", reward=1.0),
    ):
        with pytest.raises(StorageError, match=rf"hot root {root} was .* open the spool where it is now"):
            call()
    for call in (sp.flush, sp.close):
        with contextlib.suppress(SpoolError):
            call()
    assert _but_the_index(root) == before
    if how != "removed":
        with spool.open(str(away)) as sp:
            sp.recover()
            assert sp.read(ref)["token_ids"].tolist() == [1, 2]


def test_a_root_that_is_replaced_by_a_copy_and_its_copy_lose_nothing(tmp_path):
    """What is appended before the writer notices goes where its files are, and nothing is taken out of the copy."""
    root, copy, away = tmp_path / "hot", tmp_path / "copy", tmp_path / "away"
    sp = spool.open(str(root))
    record(sp, "early")
    refs = sp.view("early") + record(sp, "late")
    wanted = sp.read(refs)
    shutil.copytree(root, copy)
    root.rename(away)
    copy.rename(root)
    before = {path: path.read_bytes() for path in root.rglob("streams/**/*") if path.is_file()}
    for n in range(3):
        with contextlib.suppress(StorageError):
            record(sp, f"n{n}", n_steps=1, n_response=40_000)
    with pytest.raises(StorageError, match="open the spool where it is now"):
        sp.close()
    assert {path: path.read_bytes() for path in root.rglob("streams/**/*") if path.is_file()} == before
    for place in (root, away):
        with spool.open(str(place)) as there:
            there.recover()
            assert_same(there.read(refs), wanted)
            assert not there.verify(deep=True).findings


def test_another_spool_s_cold_root_is_not_taken_for_the_own_one(tmp_path, by_hand):
    """Mounted for a while in its place, it is neither read into the index nor written to."""
    uri = f"file://{tmp_path}/%s?spill=file://{tmp_path}/cold"
    for name, other in (("theirs", True), ("own", False)):
        with spool.open(uri % name) as sp:
            refs = record(sp, "same")
            if other:
                sp.discard("same")
                record(sp, "more")
            sp.flush()
            sp.spill()
        if other:
            (tmp_path / "cold").rename(tmp_path / "cold-theirs")
    (tmp_path / "cold").rename(tmp_path / "cold-own")
    (tmp_path / "cold-theirs").rename(tmp_path / "cold")
    before = sorted((tmp_path / "cold").rglob("*"))
    for readonly in (False, True):
        with spool.open(uri % "own", readonly=readonly) as sp:
            assert [row.session_id for row in sp.sessions()] == ["same"]
            for call in (sp.spill, sp.gc) if not readonly else ():
                with pytest.raises((StorageError, spool.ConfigError), match=r"another cold root|mounted"):
                    call()
    assert sorted((tmp_path / "cold").rglob("*")) == before
    (tmp_path / "cold").rename(tmp_path / "cold-theirs")
    (tmp_path / "cold-own").rename(tmp_path / "cold")
    with spool.open(uri % "own") as sp:
        assert [(row.session_id, row.state) for row in sp.sessions()] == [("same", "final")]
        sp.spill()
        assert sp.read(refs)[0]["token_ids"].size


def _but_the_index(root):
    return sorted(path for path in root.rglob("*") if not path.name.startswith("catalog.sqlite"))


def test_a_hot_root_that_is_moved_back_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "LOOK_S", 0.0)
    root = tmp_path / "hot"
    with spool.open(str(root)) as sp:
        s = sp.session("s")
        s.append(prompt_token_ids=[1], response_token_ids=[2])
        root.rename(tmp_path / "away")
        with pytest.raises(StorageError):
            s.append(prompt_token_ids=[1, 2], response_token_ids=[3])
        (tmp_path / "away").rename(root)
        s.append(prompt_token_ids=[1, 2], response_token_ids=[3])
        assert [ref.n_tokens for ref in s.finalize()] == [3]


def test_documents_that_arrive_after_the_spiller_ended_are_put_again_by_hand(tmp_path, cold, by_hand):
    """One that lacks rows, and one that lists deleted ones; `verify` names both."""
    uri = f"file://{tmp_path}/hot?spill=file://{cold}&spill_when=pressure&grace_s=0.001"
    with spool.open(uri) as sp:
        first = record(sp, "a")
        sp.flush()
        sp.spill()
        (path,) = cold.glob("streams/*/token_ids/zarr.json")
        early = path.read_bytes()
        record(sp, "b")
        sp.flush()
        sp.spill()
        both = path.read_bytes()
        path.write_bytes(early)
        assert "Zarr readers miss them" in "".join(found.text for found in sp.verify().findings)
        sp.spill()
        assert path.read_bytes() == both
        sp.release(first)
        sp.gc()
        time.sleep(0.01)
        sp.gc()
        after = path.read_bytes()
        assert after != both
        path.write_bytes(both)
        assert "were deleted" in "".join(found.text for found in sp.verify().findings)
        sp.spill()
        assert path.read_bytes() == after
        assert not sp.verify().findings


def test_a_cold_root_that_is_not_mounted_has_lost_nothing(tmp_path, by_hand):
    with spool.open(f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        refs = record(sp, "a")
        sp.flush()
        sp.spill()
    with spool.open(f"file://{tmp_path}/cold", readonly=True) as reader:
        (tmp_path / "hot").rename(tmp_path / "away")
        (tmp_path / "cold").rename(tmp_path / "cold-away")
        for make in (lambda: None, (tmp_path / "cold").mkdir):
            make()
            with pytest.raises(StorageError, match="is not mounted"):
                reader.read(refs)
        (tmp_path / "cold").rmdir()
        (tmp_path / "cold-away").rename(tmp_path / "cold")
        assert reader.read(refs)[0]["token_ids"].size


def test_an_index_made_anew_after_an_evicted_pack_was_deleted_elsewhere_starts_sessions(tmp_path, by_hand):
    cold = f"file://{tmp_path}/cold"
    with spool.open(f"file://{tmp_path}/hot?spill={cold}") as sp:
        refs = record(sp, "a")
        sp.flush()
        sp.spill()
        (row,) = sp._catalog.packs.rows()
        evict(str(tmp_path / "hot"), sp._catalog, row.stream, row.pack)
    with spool.open(f"{cold}?grace_s=0.001") as sp:
        sp.release(refs)
        sp.gc()
        sp.gc()
    for path in (tmp_path / "hot").glob("catalog.sqlite*"):
        path.unlink()
    with spool.open(f"file://{tmp_path}/hot?spill={cold}") as sp:
        record(sp, "b", final=False)
        record(sp, "a", final=False)


@pytest.mark.parametrize(("at", "value"), [(18, 3), (19, 9), (47, 7)])
def test_an_index_whose_header_is_of_no_sqlite_we_know_is_made_again(tmp_path, at, value):
    root = tmp_path / "hot"
    with spool.open(str(root)) as sp:
        refs = record(sp, "a")
    with open(root / "catalog.sqlite", "r+b") as file:
        file.seek(at)
        file.write(bytes([value]))
    for readonly in (True, False):
        with spool.open(str(root), readonly=readonly) as sp:
            assert [row.session_id for row in sp.sessions()] == ["a"]
            assert sp.read(refs)[0]["token_ids"].size


# -- mounts that come and go -----------------------------------------------------------------------------------------


@pytest.fixture
def quiet(tmp_path, by_hand):
    """The URI of a spool with a cold root in a folder, and nothing at work but the test."""
    return f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold"


@pytest.fixture
def away(tmp_path, monkeypatch):
    """Returns a function: the cold root's mount is away while the first file with a part of a name is written."""

    def during(part):
        done = []

        def wrapped(write):
            def written(path, *arguments, **options):
                if part not in path or done:
                    return write(path, *arguments, **options)
                done.append(path)
                (tmp_path / "cold").rename(tmp_path / "mounted")
                Path(path).parent.mkdir(parents=True)
                try:
                    return write(path, *arguments, **options)
                finally:
                    (tmp_path / "cold").rename(tmp_path / "bare")
                    (tmp_path / "mounted").rename(tmp_path / "cold")

            return written

        for name in ("write_atomic", "create_atomic"):
            monkeypatch.setattr(shared_module, name, wrapped(getattr(shared_module, name)))
        return done

    return during


@pytest.mark.parametrize("part", ["token_ids/c", "records/", "token_ids/zarr.json", "manifests/"])
def test_what_was_put_while_the_root_was_away_is_put_again(quiet, tmp_path, away, part):
    with spool.open(quiet) as sp:
        record(sp, "first")
        sp.flush()
        sp.spill()
        refs = record(sp, "a")
        sp.flush()
        wanted = sp.read(refs)
        done = away(part)
        with pytest.raises(StorageError, match=r"was written while .* was away|is its file system mounted"):
            sp.spill()
        assert done
        sp.spill()
        sp.publish(refs, timeout_s=20)
    shutil.rmtree(tmp_path / "hot")
    with spool.open(f"file://{tmp_path}/cold") as there:
        assert_same(there.read(refs), wanted)
        assert {row.session_id for row in there.sessions()} == {"first", "a"}
        assert not there.verify(deep=True).findings


def test_a_roll_up_that_went_elsewhere_takes_nothing_along(quiet, tmp_path, away):
    n = OBJECTS_ROLLED + 4
    with spool.open(quiet) as sp:
        for number in range(n):
            record(sp, f"a{number}", n_steps=1)
        sp.flush()
        sp.spill()
    with spool.open(f"file://{tmp_path}/cold") as there:
        for number in range(n):
            there.annotate(f"a{number}", reward=float(number))
    assert away("rollup") == []
    with spool.open(quiet) as sp:
        with pytest.raises(StorageError, match=r"was written while .* was away"):
            sp.spill()
        sp.spill()
    for uri in (quiet, f"file://{tmp_path}/cold"):
        with spool.open(uri) as sp:
            assert {row.reward for row in sp.sessions()} == set(map(float, range(n)))


def test_facts_that_were_out_of_sight_are_taken_in_again(quiet, tmp_path):
    with spool.open(quiet) as sp:
        record(sp, "a")
        sp.flush()
        sp.spill()
    with spool.open(f"file://{tmp_path}/cold") as there:
        there.annotate("a", reward=1.0)

    def reward(sp):
        sp.status()
        return sp.find_session("a").reward

    with spool.open(quiet) as sp:
        assert reward(sp) == 1.0
        (tmp_path / "cold/facts").rename(tmp_path / "facts")
        assert reward(sp) is None
        (tmp_path / "facts").rename(tmp_path / "cold/facts")
        assert reward(sp) == 1.0


def test_another_root_in_the_place_of_the_cold_one_is_named_by_reads(quiet, tmp_path):
    with spool.open(f"file://{tmp_path}/other?spill=file://{tmp_path}/theirs") as other:
        record(other, "b")
        other.flush()
        other.spill()
    with spool.open(quiet) as sp:
        refs = record(sp, "a")
        sp.flush()
        sp.spill()
    shutil.rmtree(tmp_path / "hot")
    with spool.open(f"file://{tmp_path}/cold") as there:
        (tmp_path / "cold").rename(tmp_path / "own")
        (tmp_path / "theirs").rename(tmp_path / "cold")
        with pytest.raises(StorageError, match=r"belongs to spool .* now, not to spool"):
            there.read(refs)


# -- an index that changes while it is read --------------------------------------------------------------------------


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("how", ["rebuilt", "deleted"])
@pytest.mark.parametrize("listed", ["sessions", "segments"])
def test_who_lists_an_index_that_is_made_anew_is_told(tmp_path, readonly, how, listed):
    """Numbers of rows mean others then: nothing is left out, comes twice, or is another's."""
    root = str(tmp_path / "hot")
    with spool.open(root) as sp:
        for number in range(300):
            s = sp.session(f"a{number}")
            s.append(prompt_token_ids=[1], response_token_ids=[2])
            s.finalize()
    with spool.open(root, readonly=readonly) as sp:
        rows = getattr(sp, listed)("n_tokens > 0")
        first = next(rows).session_id
        if how == "deleted":
            for path in (tmp_path / "hot").glob("catalog.sqlite*"):
                path.unlink()
            with spool.open(root) as other:
                record(other, "b", n_steps=1)
        else:
            with spool.open(root) as other:
                other.rebuild()
        found = [first]
        with pytest.raises(StorageError, match="was made anew after 256 of 300"):
            found.extend(row.session_id for row in rows)
        assert len(set(found)) == len(found) == 256
        assert sum(1 for _ in getattr(sp, listed)()) == 300 + (how == "deleted")


def test_an_index_that_another_thread_feeds_while_it_is_asked_is_asked_again(tmp_path):
    catalog, answers = Catalog.open(f"{tmp_path}/catalog.sqlite"), []
    database = catalog._database

    def feed():
        database.fed = database.generation()

    def question(connection):
        answers.append(connection.execute("SELECT count(*) FROM sessions").get)
        if len(answers) == 1:
            feed()  # by another thread, behind what this has seen
        return len(answers)

    database.feed, database.fed = feed, "the index that was there before"
    assert database.ask_fed(question) == (2, database.generation())
    catalog.close()


QUESTIONS = {
    "sessions": lambda sp: [row.session_id for row in sp.sessions()],
    "those with a late fact": lambda sp: [row.session_id for row in sp.sessions("mine = 1")],
    "segments": lambda sp: [ref.session_id for ref in sp.segments()],
    "a view": lambda sp: [ref.session_id for ref in sp.segments(view="timeline")],
    "listing": lambda sp: len(sp.listing()),
    "groups": lambda sp: [(group.group_id, group.n_sessions) for group in sp.groups()],
    "summary": lambda sp: sp.summary().totals.n_sessions,
    "slowest": lambda sp: sorted(row.session_id for row in sp.slowest()),
    "sample": lambda sp: len(sp.sample(9)),
    "find": lambda sp: (sp.find_session("a").n_steps, sp.find_session("b").n_steps),
    "steps": lambda sp: (len(sp.steps("a")), len(sp.steps("b"))),
    "final segments": lambda sp: [ref.facts for ref in sp.final_segments("b")],
    "usage": lambda sp: len(sp.usage()),
    "verify": lambda sp: (sp.verify().n_extents, sp.verify().findings),
    "packs": lambda sp: sorted((item.why, item.go) for item in sp.gc(dry_run=True)),
}


@pytest.mark.parametrize("how", ["deleted", "moved aside"])
@pytest.mark.parametrize("readonly", [False, True])
def test_a_question_is_answered_by_the_index_that_was_fed(quiet, tmp_path, monkeypatch, how, readonly):
    """What is asked after the look finds another file; it is fed first, also of what the cold root has."""
    with spool.open(quiet) as sp:
        record(sp, "a", group_id="g", n_steps=2)
        sp.flush()
        sp.spill()
    other = f"file://{tmp_path}/other?spill=file://{tmp_path}/cold"
    index = tmp_path / "other/catalog.sqlite"
    with spool.open(other) as sp:
        record(sp, "b", group_id="g", n_steps=1)
        sp.annotate("b", mine=1)
        sp.flush()
    with spool.open(other, readonly=readonly) as sp:
        expected = {name: ask(sp) for name, ask in QUESTIONS.items()}
        assert expected["sessions"] == ["a", "b"] and expected["find"] == (2, 1)
        look, looks = sp._feeds.catch_up, []

        def looked(**options):
            found = look(**options)
            if not looks and index.exists():
                if how == "deleted":
                    for path in (tmp_path / "other").glob("catalog.sqlite*"):
                        path.unlink()
                else:
                    files.move_aside(str(index), files.identity(str(index)))
            looks.append(options)
            return found

        monkeypatch.setattr(sp._feeds, "catch_up", looked)
        for name, ask in QUESTIONS.items():
            looks.clear()
            assert ask(sp) == expected[name], name
            if not readonly:
                assert len(looks) > 1, name
                assert index.exists(), name


def test_an_index_that_is_replaced_while_no_connection_is_open_is_another_one(tmp_path):
    """As after a fork: the new file may have the number of the old one."""
    root, index = tmp_path / "hot", tmp_path / "hot/catalog.sqlite"
    with spool.open(str(root)) as sp:
        for name in ("a", "b"):
            record(sp, name)
        sp.flush()
        os.utime(root / "streams" / stream_of(sp) / "records", (0, 0))
        assert len(list(sp.sessions())) == 2
        sp._catalog.close()
        for path in root.glob("catalog.sqlite*"):
            path.unlink()
        Catalog.open(str(index)).close()
        assert len(list(sp.sessions())) == 2


@pytest.mark.parametrize("nth", [1, 2])
def test_an_index_that_is_made_anew_while_it_is_opened_is_not_the_one_that_was_opened(tmp_path, monkeypatch, nth):
    """The n-th connection is to a file that is deleted by then, though another one is at its path."""
    root, index = tmp_path / "hot", tmp_path / "hot/catalog.sqlite"
    prepare, opened = files._prepare, []

    def replaced(connection, path, file):
        prepare(connection, path, file)
        opened.append(path)
        if len(opened) == nth:
            for part in root.glob("catalog.sqlite*"):
                part.unlink()
            files.connect(str(index)).close()

    with spool.open(str(root)) as sp:
        record(sp, "a")
        index.unlink()
        monkeypatch.setattr(files, "_prepare", replaced)
        assert [row.session_id for row in sp.sessions()] == ["a"]
        record(sp, "b")
        assert {row.session_id for row in sp.sessions()} == {"a", "b"} and sp.find_session("b")
        assert len(opened) > nth


def test_an_index_that_is_replaced_while_it_is_opened_to_read_only_is_not_read(tmp_path, monkeypatch):
    index, check = tmp_path / "catalog.sqlite", files._check_version
    Catalog.open(str(index)).close()

    def replaced(connection, path, file):
        check(connection, path, file)
        index.rename(tmp_path / "away")
        shutil.copy(tmp_path / "away", index)

    monkeypatch.setattr(files, "_check_version", replaced)
    with pytest.raises(files.DamagedError, match="was replaced while it was opened"):
        files.connect_readonly(str(index))


def test_an_index_that_is_cut_to_nothing_under_its_processes_is_made_anew(tmp_path, monkeypatch):
    """What is to make its tables waits for those who hold it as it was, but not for good."""
    monkeypatch.setattr(files, "BLANK_S", 0.5)
    root, index = tmp_path / "hot", tmp_path / "hot/catalog.sqlite"
    with spool.open(str(root)) as sp:
        record(sp, "a")
        assert sp.find_session("a")
        os.truncate(index, 0)
        began = time.monotonic()
        assert len(sp.listing()) == 1
        with spool.open(str(root)) as other:
            assert other.find_session("a")
        assert time.monotonic() - began < 10
        record(sp, "b")
        assert sorted(row.session_id for row in sp.sessions()) == ["a", "b"]


def test_an_index_that_lost_its_tables_is_made_anew(tmp_path):
    with spool.open(str(tmp_path / "hot")) as sp:
        record(sp, "a")
        assert sp.find_session("a")
        with contextlib.closing(sqlite3.connect(tmp_path / "hot/catalog.sqlite")) as another:
            another.execute("DROP TABLE sessions")
        assert sp.find_session("a")


@pytest.mark.parametrize("how", ["deleted", "rebuilt"])
@pytest.mark.parametrize("order", [("-number",), ("session_id",)])
def test_a_listing_of_an_index_that_was_made_anew_says_so_until_it_is_refreshed(tmp_path, how, order):
    root = tmp_path / "hot"
    with spool.open(str(root)) as sp:
        for name in ("a", "b", "c"):
            record(sp, name, n_steps=1)
        listing = sp.listing(order=order)
        assert len(listing.rows(0, 3)) == 3 and not listing.refresh()
        if how == "deleted":
            for path in root.glob("catalog.sqlite*"):
                path.unlink()
        else:
            with spool.open(str(root)) as other:
                other.rebuild()
        with pytest.raises(StorageError, match="was made anew after they were listed"):
            listing.rows(0, 3)
        assert listing.refresh()
        assert sorted(row.session_id for row in listing.rows(0, 3)) == ["a", "b", "c"]
        assert not listing.refresh()


def test_what_the_index_has_is_not_whole_while_the_cold_root_does_not_answer(quiet, monkeypatch):
    with spool.open(quiet) as sp:
        record(sp, "a")
        sp.flush()
        feeds = sp._feeds
        feeds.catch_up(whole=True)
        assert feeds.are_whole()

        def fails(**_):
            raise StorageError("it does not answer")

        with monkeypatch.context() as patched:
            patched.setattr(feeds.cold, "catch_up", fails)
            feeds.catch_up(fresh=True)
        assert not feeds.are_whole(), "units that only other nodes name would go"
        feeds.catch_up(whole=True)
        assert feeds.are_whole()


def test_an_index_whose_time_lies_ahead_is_read_at_once(tmp_path):
    root = tmp_path / "hot"
    with spool.open(str(root)) as sp:
        record(sp, "a")
    ahead = time.time() + 7200
    os.utime(root / "catalog.sqlite", (ahead, ahead))
    with spool.open(str(root), readonly=True) as sp:
        assert [row.session_id for row in sp.sessions()] == ["a"]


@pytest.mark.parametrize("evicted", [False, True])
def test_a_manifest_that_is_lost_is_put_again(quiet, tmp_path, evicted):
    with spool.open(quiet) as sp:
        record(sp, "a")
        sp.flush()
        sp.spill()
        (row,) = sp._catalog.packs.rows()
        if evicted:
            evict(str(tmp_path / "hot"), sp._catalog, row.stream, row.pack)
        (path,) = (tmp_path / "cold/manifests").iterdir()
        before = path.read_bytes()
        path.unlink()
        sp.spill()
        assert path.read_bytes() == before
        path.unlink()
        bury(sp._feeds.cold.objects, (row.stream, row.pack), GoneMark(time.time()))
        assert unlisted(str(tmp_path / "hot"), sp._feeds.cold) == [], "what was deleted is not listed again"


# -- a cold root whose identity is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["streams", "manifests", "units", "facts", "gone"])
def test_a_new_node_does_not_make_a_cold_root_that_lost_its_identity_another_spools(quiet, tmp_path, left):
    cold = tmp_path / "cold"
    with spool.open(quiet) as sp:
        refs = record(sp, "a")
        sp.flush()
        sp.spill()
        spool_id = sp.spool_id
    identity = (cold / "spool.json").rename(tmp_path / "identity")
    kept = tmp_path / "kept"
    cold.rename(kept)
    (cold / left).mkdir(parents=True)
    if (kept / left).exists():
        shutil.copytree(kept / left, cold / left, dirs_exist_ok=True)
    else:
        (cold / left / "one").write_bytes(b"")
    before = sorted(cold.rglob("*"))
    with pytest.raises(spool.IntegrityError, match=r"its spool.json is lost.*`spool recover`"):
        spool.open(f"file://{tmp_path}/new?spill=file://{cold}")
    with pytest.raises(spool.NotFoundError):
        spool.open(f"file://{tmp_path}/new", create=False)
    assert sorted(cold.rglob("*")) == before and not (tmp_path / "new/spool.json").exists()
    shutil.rmtree(cold)
    kept.rename(cold)
    assert "written again" in run("recover", tmp_path / "hot").err
    assert spool_id in (cold / "spool.json").read_text() and spool_id in identity.read_text()
    with spool.open(f"file://{tmp_path}/new?spill=file://{cold}") as sp:
        assert sp.spool_id == spool_id and sp.read(refs)[0]["token_ids"].size


def test_a_folder_with_nothing_of_a_spool_in_it_becomes_a_cold_root(tmp_path):
    (tmp_path / "cold/of-mine").mkdir(parents=True)
    (tmp_path / "cold/streams").mkdir()
    (tmp_path / "cold/of-mine/notes.txt").write_text("mine")
    with spool.open(f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        assert sp.spool_id in (tmp_path / "cold/spool.json").read_text()


def test_a_hot_root_whose_packs_are_in_a_cold_one_gives_it_its_identity_again(quiet, tmp_path):
    with spool.open(quiet) as sp:
        refs = record(sp, "a")
        sp.flush()
        sp.spill()
        spool_id = sp.spool_id
    for path in (tmp_path / "hot").rglob("*.cold"):
        path.write_text(path.read_text().replace('"root":', '"was":'))
    (tmp_path / "hot/spool.json").unlink()
    (tmp_path / "cold/spool.json").unlink()
    assert "?spill=URL" in run("recover", tmp_path / "hot").err
    with spool.open(quiet) as sp:
        assert sp.spool_id == spool_id in (tmp_path / "cold/spool.json").read_text()
        assert sp.read(refs)[0]["token_ids"].size


def test_a_node_that_finds_a_cold_root_that_another_is_just_making_joins_that(quiet, tmp_path, monkeypatch):
    with spool.open(quiet) as sp:
        record(sp, "a")
        sp.flush()
        sp.spill()
        spool_id = sp.spool_id
    found = roots.read_cold_identity
    answers = [None]
    monkeypatch.setattr(roots, "read_cold_identity", lambda cold: answers.pop() if answers else found(cold))
    with spool.open(f"file://{tmp_path}/new?spill=file://{tmp_path}/cold") as sp:
        assert sp.spool_id == spool_id and not answers


def test_a_root_that_goes_away_while_its_packs_are_deleted_is_told(tmp_path, quiet):
    with spool.open(f"file://{tmp_path}/hot?retention=released") as sp:
        record(sp, "a")
        sp.flush()
        collector = sp._tiers.collector()
        plan = collector.plan()
        (tmp_path / "hot").rename(tmp_path / "away")
        with pytest.raises(SpoolError, match="list"):
            collector.run(plan)
        (tmp_path / "away").rename(tmp_path / "hot")
