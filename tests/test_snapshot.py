"""Reading a spool without touching it: a copy of the catalog in memory, and a handle that records nothing."""

import os
import shutil
import subprocess
import sys
import threading
import time

import apsw
import pytest
from kit import SHAPE, add
from recorded import feed, opened, step

import spool
from spool.catalog import Catalog
from spool.catalog.snapshot import load
from spool.formats import records


def path_of(tmp_path):
    return str(tmp_path / "catalog.sqlite")


def filled(tmp_path, n=3):
    catalog = Catalog.open(path_of(tmp_path))
    feed(catalog, [event for number in range(n) for event in (opened(f"s{number}"), step(f"s{number}", 0))])
    return catalog


def listing(folder):
    return sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in os.scandir(folder))


def test_a_copy_holds_what_the_file_does_and_leaves_it_alone(tmp_path):
    catalog = filled(tmp_path)
    want = catalog.dump()
    catalog.close()
    before = listing(tmp_path)
    copy = Catalog.open(path_of(tmp_path), readonly=True)
    assert copy.is_borrowed and copy.dump() == want
    feed(copy, [opened("more")], pack=1)
    assert copy.in_memory
    assert [row.session_id for row in copy.sessions()] == ["more", "s0", "s1", "s2"]
    copy.close()
    assert listing(tmp_path) == before


def test_what_is_only_in_the_wal_is_copied_too(tmp_path):
    catalog = filled(tmp_path, 50)
    assert os.path.getsize(path_of(tmp_path) + "-wal") > os.path.getsize(path_of(tmp_path))
    time.sleep(0.05)
    assert Catalog.open(path_of(tmp_path), readonly=True).dump() == catalog.dump()
    with catalog_transaction(tmp_path):
        assert Catalog.open(path_of(tmp_path), readonly=True).dump() == catalog.dump()


def unreadable(_path):
    raise OSError


class catalog_transaction:  # noqa: N801
    """A transaction of another connection that deletes everything, and never commits."""

    def __init__(self, tmp_path):
        self.connection = apsw.Connection(path_of(tmp_path))

    def __enter__(self):
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute("DELETE FROM sessions; DELETE FROM events")

    def __exit__(self, *_):
        self.connection.execute("ROLLBACK")
        self.connection.close()


@pytest.mark.parametrize("what", ["nothing", "nonsense", "cut", "of another version", "altered"])
def test_without_a_sound_file_the_copy_is_empty(tmp_path, what):
    path = path_of(tmp_path)
    if what != "nothing":
        filled(tmp_path, 300).close()
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            if what == "nonsense":
                file.write(b"x" * size)
            elif what == "cut":
                file.truncate(size // 2)
            elif what == "altered":
                file.seek(4096 * 2)
                file.write(os.urandom(size - 4096 * 2))
    if what == "of another version":
        connection = apsw.Connection(path)
        connection.pragma("user_version", 99)
        connection.close()
    before = listing(tmp_path)
    copy = Catalog.open(path, readonly=True)
    assert list(copy.sessions()) == []
    feed(copy, [opened("a")])
    assert [row.session_id for row in copy.sessions()] == ["a"]
    assert listing(tmp_path) == before


def test_a_file_that_never_rests_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.catalog.snapshot._through_sqlite", unreadable)
    filled(tmp_path).close()
    whole = shutil.copyfile

    def busy(source, target):
        whole(source, target)
        os.utime(source, ns=(1, os.stat(source).st_mtime_ns + 1))

    monkeypatch.setattr(shutil, "copyfile", busy)
    os.utime(path_of(tmp_path), (1, 1))
    assert load(path_of(tmp_path)) is None
    monkeypatch.undo()
    assert load(path_of(tmp_path)) is not None


BUSY = """
import sys, time
sys.path.insert(0, sys.argv[2])
from recorded import feed, opened
from spool.catalog import Catalog
catalog = Catalog.open(sys.argv[1])
print(flush=True)
ends, pack = time.monotonic() + 1.5, 0
while time.monotonic() < ends:
    feed(catalog, [opened(f"{pack:06}-{number:03}-{'x' * 500}") for number in range(100)], pack=pack)
    pack += 1
"""


def test_copies_of_a_file_under_load_are_whole(tmp_path):
    code = [sys.executable, "-c", BUSY, path_of(tmp_path), os.path.dirname(__file__)]
    writer = subprocess.Popen(code, stdout=subprocess.PIPE)
    writer.stdout.readline()
    seen = []
    while writer.poll() is None:
        copy = Catalog.open(path_of(tmp_path), readonly=True)
        assert copy.check() == []
        counts = {}
        for row in copy.sessions():
            counts[row.session_id[:6]] = counts.get(row.session_id[:6], 0) + 1
        assert set(counts.values()) <= {100}
        assert sorted(counts) == [f"{pack:06}" for pack in range(len(counts))]
        seen.append(len(counts))
    assert writer.wait() == 0
    assert max(seen) > min(seen)


def test_a_handle_that_only_reads_records_nothing(tmp_path):
    root = str(tmp_path / "s")
    with pytest.raises(spool.NotFoundError):
        spool.open(root, readonly=True)
    assert not os.path.exists(root)
    with spool.open(root) as sp:
        s = sp.session("s", experts=SHAPE)
        add(s, [1, 2], [3])
        (segment,) = s.finalize()
    before = listing(root), listing(f"{root}/streams")
    with spool.open(root, readonly=True) as sp:
        for call in (
            lambda: add(sp.session("t", experts=SHAPE), [1], [2]),
            lambda: sp.annotate("s", reward=1.0),
            lambda: sp.attach(segment, late=[1.0]),
            lambda: sp.release(segment),
            lambda: sp.discard("s"),
            lambda: sp.checkpointed("x"),
        ):
            with pytest.raises(spool.SessionStateError, match="read only"):
                call()
        assert sp.read(segment)["token_ids"].tolist() == [1, 2, 3]
    assert (listing(root), listing(f"{root}/streams")) == before


def test_events_that_moved_are_not_taken_for_others(tmp_path):
    """A catalog that knows events by numbers that they no longer have says so, and reads no other step's messages."""
    root = str(tmp_path / "s")
    with spool.open(root) as sp:
        s = sp.session("a", experts=SHAPE)
        for number in range(3):
            add(s, [1, 2], [3 + number], messages=[{"role": "user", "content": str(number)}])
    (path,) = (tmp_path / "s").glob("streams/*/records/0.arrow")
    payloads = records.decode(path.read_bytes())
    path.write_bytes(records.encode([payloads[0], *payloads[2:]]))
    with spool.open(root) as sp:
        for ref in sp.steps("a"):
            with pytest.raises(spool.IntegrityError, match="rebuild the catalog"):
                sp.messages(ref)
        sp.rebuild()
        assert [sp.messages(ref)[0]["content"] for ref in sp.steps("a")] == ["1", "2"]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
import spool
from kit import SHAPE, add
sp = spool.open(sys.argv[1])
n = 0
while True:
    s = sp.session(f"s{n}", experts=SHAPE)
    add(s, [1, 2], [3, 4])
    s.finalize()
    sp.flush() if n % 50 == 0 else None
    n += 1
    print(n, flush=True)
"""


def test_a_reader_of_a_live_spool_sees_all_that_was_said_done_and_copies_nothing(tmp_path):
    """While a process records, its index is read where it lies, and has all that this process knows is done."""
    root = str(tmp_path / "s")
    code = [sys.executable, "-c", WRITER, root, os.path.dirname(__file__)]
    writer = subprocess.Popen(code, stdout=subprocess.PIPE, text=True)
    writer.stdout.readline()
    with spool.open(root, readonly=True) as sp:
        for line in writer.stdout:
            if int(line) % 25 == 0:
                assert sp.find_session(f"s{int(line) - 1}").state == "final"
                assert len(sp.listing()) >= int(line)
                assert sp._catalog.is_borrowed
            if int(line) > 200:
                break
    writer.kill()
    writer.wait()
    writer.stdout.close()


def test_what_a_killed_writer_left_behind_its_index_is_taken_into_a_copy(tmp_path):
    root = str(tmp_path / "s")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, root, os.path.dirname(__file__)], stdout=subprocess.PIPE)
    for _ in range(30):
        writer.stdout.readline()
    writer.kill()
    writer.wait()
    last = len(writer.stdout.read().splitlines()) + 30
    writer.stdout.close()
    with apsw.Connection(f"{root}/catalog.sqlite") as connection:
        connection.execute("DELETE FROM events; DELETE FROM sessions; DELETE FROM logs; DELETE FROM packs")
    connection.close()
    before = listing(root)
    with spool.open(root, readonly=True) as sp:
        assert len(sp.listing()) >= last
        assert not sp._catalog.is_borrowed
        assert sp.read(sp.final_segments("s0"))[0]["token_ids"].tolist() == [1, 2, 3, 4]
    assert listing(root) == before


def test_a_file_that_is_opened_meanwhile_is_looked_at_anew(tmp_path):
    filled(tmp_path).close()
    reader = Catalog.open(path_of(tmp_path), readonly=True)
    assert len(list(reader.sessions())) == 3
    writer = Catalog.open(path_of(tmp_path))
    feed(writer, [opened("new")], pack=1)
    assert reader.session("new") is not None
    writer.close()
    assert reader.session("new") is not None
    assert reader.is_borrowed


VISITOR = """
import sys
sys.path.insert(0, sys.argv[2])
from recorded import feed, opened, step
from spool.catalog import Catalog
for line in sys.stdin:
    catalog = Catalog.open(sys.argv[1])
    names = [f"{int(line):04}-{number:03}-{'x' * 300}" for number in range(50)]
    feed(catalog, [event for name in names for event in (opened(name), step(name, 0))], pack=int(line))
    catalog.close()
    print(flush=True)
"""


def test_writers_that_come_and_go_between_two_looks_are_seen(tmp_path):
    """Nobody has the file open before nor after: it is the same file, of another size and time."""
    filled(tmp_path).close()
    code = [sys.executable, "-c", VISITOR, path_of(tmp_path), os.path.dirname(__file__)]
    writer = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    reader = Catalog.open(path_of(tmp_path), readonly=True)
    assert len(list(reader.sessions())) == 3
    version = reader.version
    for visit in range(1, 31):
        writer.stdin.write(f"{visit}\n")
        writer.stdin.flush()
        if visit % 3:  # else it is looked at while the writer is at it
            writer.stdout.readline()
        known = len(list(reader.sessions()))
        assert 3 + 50 * (visit - 1 + bool(visit % 3)) <= known <= 3 + 50 * visit
        assert (reader.version != version) or not visit % 3
        version = reader.version
        if not visit % 3:
            writer.stdout.readline()
        assert len(reader.numbers(None, ("number",))[0]) == 3 + 50 * visit
        assert reader.check() == []
    writer.stdin.close()
    assert writer.wait() == 0
    writer.stdout.close()
    assert reader.is_borrowed


def test_a_file_that_a_process_just_opens_or_closes_is_waited_for(tmp_path):
    """WAL and shared memory are made, and removed, one after the other."""
    filled(tmp_path).close()
    path, half = path_of(tmp_path), f"{path_of(tmp_path)}-wal"
    with open(half, "wb"):
        closing = threading.Timer(0.015, os.unlink, [half])
    closing.start()
    reader = Catalog.open(path, readonly=True)
    assert len(list(reader.sessions())) == 3 and reader.is_borrowed
    closing.join()


def test_a_copy_takes_no_locks_away_from_another_handle_of_the_process(tmp_path):
    root = str(tmp_path / "s")
    with spool.open(root) as sp:
        s = sp.session("s", experts=SHAPE)
        add(s, [1, 2], [3])
        inode = os.stat(f"{root}/catalog.sqlite").st_ino

        def locks():
            with open("/proc/locks") as file:
                return sum(f":{inode} " in line and str(os.getpid()) in line for line in file)

        held = locks()
        copy = Catalog.open(f"{root}/catalog.sqlite", readonly=True)
        feed(copy, [opened("more")], pack=7)
        assert copy.in_memory
        copy.close()
        assert locks() == held > 0


def test_a_large_copy_is_a_file_without_a_name_and_a_child_makes_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("spool.catalog.snapshot.MEMORY_BYTES", 0)
    filled(tmp_path).close()
    copy = Catalog.open(path_of(tmp_path), readonly=True)
    feed(copy, [opened("more")], pack=1)
    with copy._database.reading() as connection:
        assert connection.filename
        assert not os.path.exists(connection.filename)
    pid = os.fork()
    if not pid:
        found = list(copy.sessions())
        os._exit(0 if not found else 1)  # as empty as any index that is fed anew
    assert os.waitpid(pid, 0)[1] == 0
    assert copy.check() == []
    assert len(list(copy.sessions())) == 4


def test_manifests_of_the_root_s_own_packs_need_no_copy_and_those_of_others_do(tmp_path):
    uri = f"file://{tmp_path}/%s?spill=file://{tmp_path}/cold"
    with spool.open(uri % "a") as sp:
        s = sp.session("own", experts=SHAPE)
        add(s, [1, 2], [3])
        sp.publish(s.finalize())
    with spool.open(uri % "a", readonly=True) as sp:
        assert sp.find_session("own").state == "final"
        assert sp._catalog.is_borrowed
        with spool.open(uri % "b") as other:
            s = other.session("other", experts=SHAPE)
            add(s, [1, 2], [3])
            other.publish(s.finalize())
        assert sp.find_session("other").state == "final"
        assert not sp._catalog.is_borrowed


@pytest.mark.parametrize("cold", [False, True])
def test_where_no_copy_can_be_made_the_index_is_fed_anew_from_all_there_is(tmp_path, monkeypatch, cold):
    root = str(tmp_path / "s")
    uri = f"{root}?spill=file://{tmp_path}/cold" if cold else root
    for number in range(3):
        with spool.open(uri) as sp:
            s = sp.session(f"s{number}", experts=SHAPE)
            add(s, [1, 2], [3])
            s.finalize()
    if cold:
        with spool.open(f"{tmp_path}/b?spill=file://{tmp_path}/cold") as other:
            s = other.session("other", experts=SHAPE)
            add(s, [1, 2], [3])
            other.publish(s.finalize())
    else:
        with apsw.Connection(f"{root}/catalog.sqlite") as connection:
            connection.execute("DELETE FROM logs WHERE stream = (SELECT max(stream) FROM logs)")
        connection.close()
    monkeypatch.setattr("spool.catalog.snapshot.load", lambda _path: None)
    with spool.open(uri, readonly=True) as sp:
        assert {row.session_id for row in sp.sessions()} == {"s0", "s1", "s2", *(["other"] if cold else [])}
        assert not sp._catalog.is_borrowed


def test_an_index_that_refuses_what_it_does_not_know_holds_nobody_up(tmp_path, monkeypatch):
    root = str(tmp_path / "s")
    with spool.open(root) as sp:
        add(sp.session("s", experts=SHAPE), [1, 2], [3])
        os.unlink(f"{root}/catalog.sqlite")
        monkeypatch.setattr(Catalog, "ingest", lambda *_, **__: False)
        assert list(sp.sessions()) == []
        assert "rebuild the catalog" in "".join(found.message for found in sp._feeds.hot.problems())
        monkeypatch.undo()


def test_a_root_that_is_away_is_not_an_empty_one(tmp_path):
    root = tmp_path / "s"
    with spool.open(str(root)) as sp:
        s = sp.session("s", experts=SHAPE)
        add(s, [1, 2], [3])
        s.finalize()
    with spool.open(str(root), readonly=True) as sp:
        assert len(sp.listing()) == 1
        root.rename(tmp_path / "away")
        for ask in (lambda: list(sp.sessions()), sp.listing, sp.groups, sp.summary, lambda: sp.find_session("s")):
            with pytest.raises(spool.StorageError, match="moved, removed or replaced"):
                ask()
        (tmp_path / "away").rename(root)
        assert len(sp.listing()) == 1
        assert sp._catalog.is_borrowed


@pytest.mark.parametrize("readonly", [False, True])
def test_a_spool_that_replaced_another_is_not_mixed_with_it(tmp_path, readonly):
    root = tmp_path / "s"
    with spool.open(str(root)) as sp:
        add(sp.session("s", experts=SHAPE), [1, 2], [3])
    sp = spool.open(str(root), readonly=readonly)
    listing, mark = sp.listing(), sp.news()[1]
    root.rename(tmp_path / "away")
    with spool.open(str(root)) as other:
        for name in ("a", "b"):
            add(other.session(name, experts=SHAPE), [1, 2], [3])
    for ask in (
        lambda: list(sp.sessions()), lambda: list(sp.segments()), sp.listing, listing.refresh, sp.groups, sp.summary,
        lambda: sp.find_session("s"), lambda: sp.news(mark), lambda: sp.steps("b"),
    ):  # fmt: skip
        with pytest.raises(spool.ReplacedError, match=f"{root} was replaced .* another spool is there"):
            ask()
    root.rename(tmp_path / "other")
    (tmp_path / "away").rename(root)
    assert [row.session_id for row in sp.sessions()] == ["s"]
    sp.close()


@pytest.mark.parametrize("end", ["sp.close()", ""])
def test_a_process_that_ends_leaves_an_index_that_has_all(tmp_path, end):
    """So that whoever only reads afterwards needs no copy, also where nobody closed the handle."""
    root = str(tmp_path / "s")
    code = f"""
import sys
sys.path.insert(0, sys.argv[2])
import spool
from kit import SHAPE, add
sp = spool.open(sys.argv[1])
s = sp.session("s", experts=SHAPE)
add(s, [1, 2], [3])
s.finalize()
{end}
"""
    subprocess.run([sys.executable, "-c", code, root, os.path.dirname(__file__)], check=True)
    with spool.open(root, readonly=True) as sp:
        assert sp.find_session("s").state == "final"
        assert sp.status().packs.keys() == {"sealed"}
        assert sp._catalog.is_borrowed
