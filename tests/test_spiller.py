"""Bringing packs over: what is checked before the hot copy may go, and how much memory that takes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from tiers import assert_same, record, wait_for

import spool
from spool.errors import IntegrityError, LockedError, StorageError
from spool.formats import cold
from spool.formats.cold_arrays import cold_layout
from spool.formats.frames import encode_event
from spool.logs.keys import gone_key
from spool.logs.packs import read_entry
from spool.model.events import SessionDiscarded, StepCommitted, Transaction
from spool.model.fields import Schema, expert_field, layout
from spool.model.refs import Extent
from spool.retention import Eviction
from spool.spiller import elect
from spool.spiller.buffers import Buffers
from spool.spiller.check import Checker, Named, named_in
from spool.spiller.evict import evict
from spool.spiller.plan import ROUND_PACKS, packs_to_spill
from spool.spiller.status import Damaged, Status, read_status
from spool.spiller.upload import Uploader
from spool.stores.hot import HotStore
from spool.stores.objects import open_objects


def step_event(session_id, extents):
    return StepCommitted(session_id, 0, "s", 1.0, None, 0, 1, 2, 2, extents)


# -- what is checked ---------------------------------------------------------------------------------------------------


def test_the_rows_that_events_of_a_pack_name_in_it():
    whole = Extent("s", 100, 10, 0, 7)
    events = [
        step_event("a", {"x": (whole, Extent("s", 50, 5, 0, 8)), "y": (Extent("s", 3, 2, 0, 9),)}),
        Transaction((step_event("b", {"x": (whole.cut(2, 5), Extent("other", 110, 5, 0, 3))}),)),
        step_event("c", {"x": (Extent("s", 190, 10, 0, 5), Extent("s", 200, 10, 0, 6), Extent("s", 120, 0, 0, 0))}),
        SessionDiscarded("a", 2.0),
    ]
    found = named_in(map(encode_event, events), "s", 1, {"x": 100, "y": 4})
    assert found == {"x": [Named(100, 10, 7, "a"), Named(190, 10, 5, "c")], "y": []}
    assert named_in(map(encode_event, events), "s", 0, {"x": 100, "y": 4})["y"] == [Named(3, 2, 9, "a")]


@pytest.mark.parametrize("piece", [1, 3, 7, 64, 1000])
def test_checksums_over_pieces(piece):
    data = np.random.default_rng(0).integers(0, 256, (100, 8), dtype=np.uint8)
    spans = [(0, 30), (30, 1), (31, 40), (40, 10), (90, 10)]

    def wholes(wrong=None):
        return [
            Named(1000 + row, n, crc32c(data[row : row + n]) ^ (index == wrong), f"s{index}")
            for index, (row, n) in enumerate(spans)
        ]

    def feed(checker, rows):
        for start in range(0, len(rows), piece):
            checker.feed(memoryview(rows[start : start + piece]).cast("B"))
        checker.end()

    feed(Checker("x", wholes(), 8, 1000), data)
    for wrong in range(len(spans)):
        with pytest.raises(IntegrityError, match=f"'s{wrong}'") as caught:
            feed(Checker("x of pack 1", wholes(wrong), 8, 1000), data)
        row, n = spans[wrong]
        assert caught.value.details == {"rows": [1000 + row, 1000 + row + n], "session_id": f"s{wrong}"}
    with pytest.raises(IntegrityError, match="not all there"):
        feed(Checker("x", wholes(), 8, 1000), data[:95])
    with pytest.raises(IntegrityError, match="not all there"):
        Checker("x", wholes(), 8, 1000).end()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("n_rows", [0, 1, 4096, 5000, 12_288])
def test_a_shard_encoded_in_pieces_is_the_same(codec, n_rows):
    schema = Schema.of(expert_field(spool.MoEShape(6, 128, 4)))
    (spec,) = schema.arrays
    plan = cold_layout(spec, layout(schema), codec, layered=True)
    rows = np.random.default_rng(0).integers(0, 16, (n_rows, 6, 4), dtype=np.uint8)
    step = 2 * plan.chunk_rows
    pieces = [rows[start : start + step] for start in range(0, n_rows, step)]
    assert bytes(cold.encode_pieces(plan, pieces, n_rows)) == bytes(cold.encode_shard(plan, rows))


def test_buffers_are_bounded_and_used_again():
    buffers, most, now, lock = Buffers(100), [0], [0], threading.Lock()

    def work(n_bytes):
        for _ in range(50):
            with buffers.lend(n_bytes) as memory:
                assert memory.size >= n_bytes
                with lock:
                    now[0] += min(n_bytes, 100)
                    most[0] = max(most[0], now[0])
                with lock:
                    now[0] -= min(n_bytes, 100)

    threads = [threading.Thread(target=work, args=(n,)) for n in (10, 40, 60, 100, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert 40 <= most[0] <= 100
    with buffers.lend(90) as first:
        pass
    with buffers.lend(90) as second:
        assert second is first


# -- the whole system --------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """A hot root whose packs go up on request only, and its cold root on a shared folder."""
    with spool.open(f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold&spill_when=pressure") as sp:
        yield sp


def damage(root, name):
    """Change the first byte of an array's first shard; return its path."""
    found = [*Path(root, "streams").glob(f"*/{name}/c/0"), *Path(root, "streams").glob(f"*/{name}/c/0/**/*")]
    (path,) = filter(Path.is_file, found)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["routed_experts", "token_ids", "logprobs"])
def test_a_damaged_pack_stays_is_shown_and_publish_says_so_at_once(pair, tmp_path, name):
    hot = str(tmp_path / "hot")
    bad = record(pair, "bad")
    pair.flush()
    good = record(pair, "good")
    wanted = pair.read(good)
    path = damage(hot, name)
    began = time.monotonic()
    with pytest.raises(IntegrityError, match=name) as caught:
        pair.publish([*bad, *good], timeout_s=300)
    assert time.monotonic() - began < 100, "it is not a matter of time"
    stream = bad[0].extents[name][0].stream
    assert (caught.value.details["stream"], caught.value.details["pack"]) == (stream, 0)
    assert "'bad'" in str(caught.value) and "verify" in str(caught.value)
    (found,) = read_status(hot).damaged
    assert (found.stream, found.pack) == (stream, 0) and name in str(found)
    assert os.path.exists(path) and read_entry(hot, stream, 0) is None
    assert not [name for name in os.listdir(tmp_path / "cold" / "manifests") if name.endswith("-0.parquet")]
    pair.publish(good, timeout_s=60)
    assert_same(pair.read(good), wanted)


def test_a_damaged_pack_that_was_asked_for_does_not_keep_a_spiller_alive(pair, tmp_path):
    hot = str(tmp_path / "hot")
    refs = record(pair, "bad")
    pair.flush()
    damage(hot, "token_ids")
    with pytest.raises(IntegrityError, match="token_ids"):
        pair.publish(refs, timeout_s=60)
    pair.close()
    wait_for(lambda: not elect.is_running(hot), timeout_s=30, what="the end of the spiller")


def test_of_a_round_the_damaged_pack_alone_stays(pair, tmp_path):
    hot = str(tmp_path / "hot")
    refs = []
    for number in range(4):
        refs.append(record(pair, f"s{number}"))
        pair.flush()
    damage(hot, "token_ids")
    stream = refs[0][0].extents["token_ids"][0].stream
    (tmp_path / "direct").mkdir()
    objects = open_objects(f"file://{tmp_path}/direct")
    uploader = Uploader(hot, HotStore(hot), objects)
    with pytest.raises(IntegrityError, match="token_ids of pack 0"):
        uploader.upload(stream, [0, 1, 2, 3])
    assert not objects.list("manifests/")
    assert [entry.pack for entry in uploader.upload(stream, [1, 2, 3])] == [1, 2, 3]
    assert len(objects.list("manifests/")) == 3
    uploader.close()


class Forgetful:
    """Objects whose index reads back wrong, or whose puts say so."""

    def __init__(self, objects, *, put=False):
        self._objects, self._put, self.deleted = objects, put, []

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def get_range(self, key, start, stop):
        data = self._objects.get_range(key, start, stop)
        return data[:-1] + bytes([data[-1] ^ 1])

    def put(self, key, data):
        if self._put and "/c/" in key:
            raise IntegrityError("did not read back equal", key=key)
        self._objects.put(key, data)

    def delete(self, keys):
        keys = list(keys)
        self.deleted += keys
        self._objects.delete(keys)


@pytest.mark.parametrize("put", [False, True])
def test_what_reads_back_wrong_is_the_stores_failure_and_leaves_no_pack_there(pair, tmp_path, put):
    refs = record(pair, "a")
    pair.flush()
    hot, stream = str(tmp_path / "hot"), refs[0].extents["token_ids"][0].stream
    (tmp_path / "direct").mkdir()
    objects = Forgetful(open_objects(f"file://{tmp_path}/direct"), put=put)
    uploader = Uploader(hot, HotStore(hot), objects)
    with pytest.raises(StorageError, match="read back"):
        uploader.upload(stream, [0])
    assert not objects.list("manifests/") and read_entry(hot, stream, 0) is None
    if not put:
        assert any("routed_experts" in key for key in objects.deleted)
        assert not any(found.key in objects.deleted for found in objects.list("streams/"))
    uploader.close()


@pytest.mark.parametrize("verify", ["size", "always"])
def test_everything_is_read_back_where_that_is_wanted(tmp_path, s3_root, verify):
    moved = []

    def observe(kind, key, n_bytes, _seconds):
        moved.append((kind, key, n_bytes))

    with spool.open(f"file://{tmp_path}/hot") as sp:
        refs = record(sp, "a", n_prompt=3000)
    hot, stream = str(tmp_path / "hot"), refs[0].extents["token_ids"][0].stream
    uploader = Uploader(hot, HotStore(hot), open_objects(s3_root, verify=verify, observer=observe))
    (entry,) = uploader.upload(stream, [0])
    uploader.close()
    read = {key: sum(n for kind, k, n in moved if (kind, k) == ("get", key)) for key in entry.objects}
    if verify == "always":
        assert all(read[key] >= size for key, size in entry.objects.items())
    else:
        assert sum(n for key, n in read.items() if "/records/" not in key) < 0.5 * entry.stored_bytes
        compressed = [key for key in entry.objects if "routed_experts" in key]
        assert compressed and all(read[key] for key in compressed), "the index is read back"


def test_one_spiller_comes_back_when_it_is_killed_and_ends_when_nobody_needs_it(tmp_path):
    hot = str(tmp_path / "hot")
    with spool.open(f"file://{hot}?spill=file://{tmp_path}/cold") as sp:
        sp.publish(record(sp, "a"), timeout_s=60)
        first = read_status(hot).pid
        assert elect.is_running(hot)
        with pytest.raises(LockedError):
            elect.require_lock(hot)
        os.kill(first, 9)
        sp.publish(record(sp, "b"), timeout_s=60)
        wait_for(lambda: read_status(hot).pid != first)  # the status follows the manifest
    wait_for(lambda: not elect.is_running(hot), timeout_s=60, what="the end of the spiller")


@pytest.mark.parametrize("lost", ["token_ids/c/", "records/", "all"])
def test_what_is_no_longer_in_the_cold_root_is_not_evicted_but_brought_over_again(tmp_path, lost, by_hand):
    with spool.open(str(tmp_path / "hot")) as sp:
        refs = record(sp, "a")
        wanted = sp.read(refs)
    with spool.open(f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        sp.spill()
        objects, spiller = sp._feeds.cold.objects, sp._tiers.spiller()
        objects.delete([info.key for info in objects.list("streams/") if lost == "all" or lost in info.key])
        (row,) = sp._catalog.packs.rows("spilled")
        item = Eviction(row.stream, row.pack, row.hot_bytes, "why")
        tombstone = gone_key(row.stream, row.pack)
        objects.put(tombstone, b'{"at": 1.0, "reason": "released"}')
        assert not spiller._is_safe(item)
        assert not spiller._uploader.is_there(row.stream, row.pack), "what was deleted elsewhere stays deleted"
        objects.delete([tombstone])
        assert not spiller._is_safe(item)
        assert spiller._is_safe(item)
        spiller.close()
        evict(str(tmp_path / "hot"), sp._catalog, row.stream, row.pack)
        assert_same(sp.read(refs), wanted)


def test_a_pack_counts_as_brought_over_only_in_the_cold_root_that_was_joined(tmp_path):
    """The folder was not mounted while the pack was put, and what was there took it."""
    with spool.open(str(tmp_path / "hot")) as sp:
        record(sp, "a")
    with spool.open(f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        spiller = sp._tiers.spiller()
        spiller._take_in()
        spiller._look_at_cold()
        (tmp_path / "cold" / "spool.json").unlink()
        with pytest.raises(StorageError, match="emptied"):
            spiller._spill()
        spiller.close()
        assert not list((tmp_path / "hot").rglob("*.cold"))


def test_by_hand_every_sealed_pack_is_brought_over(tmp_path, monkeypatch):
    """However many there are, whoever waits for which, and how much a spiller that goes on takes at a time."""
    monkeypatch.setitem(packs_to_spill.__kwdefaults__, "round_bytes", 1)
    with spool.open(str(tmp_path / "hot")) as sp:  # without a cold root, so that no spiller is started
        for number in range(ROUND_PACKS + 3):
            ref = record(sp, f"s{number}")[0]
            sp.flush()
    with spool.open(f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold") as sp:
        sp._catalog.packs.request_seal(ref.extents["token_ids"][0].stream, 2)
        assert len(sp.spill(dry_run=True)) == ROUND_PACKS + 3
        assert [row.state for row in sp.spill()] == ["spilled"] * (ROUND_PACKS + 3)
        assert not any(sp._catalog.packs.rows("sealed"))
        assert sp._catalog.packs.seal_requests() == {}


def test_a_status_survives_being_written_and_read(tmp_path):
    status = Status(1, 2.0, damaged=(Damaged("s", 3, "why"),))
    (tmp_path / "spiller.json").write_bytes(msgspec.json.encode(status))
    assert read_status(str(tmp_path)) == status and str(status.damaged[0]) == "why"
    (tmp_path / "spiller.json").write_bytes(b"{")
    assert read_status(str(tmp_path)) is None
