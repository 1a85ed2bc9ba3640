"""Damage is found, told with stream, field, rows and file, and has its exit code; what is sound is left in peace."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kit import SHAPE, add, counting
from shell import environment, on_terminal, run
from tiers import record

import spool as library
from spool.formats import records
from spool.root import read_identity
from spool.spiller.plan import Pressure

WIDTHS = {"token_ids": 4, "logprobs": 4, "loss_mask": 1, "routed_experts": 4}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A root with one stream of two sealed packs: sessions ``one`` and ``two``, three steps each, and a late array."""
    root = tmp_path_factory.mktemp("cli") / "healthy"
    with library.open(str(root)) as sp:
        for name, first in (("one", 100), ("two", 5000)):
            s, tokens = sp.session(name, experts=SHAPE), counting(200, first)
            for turn in range(3):
                mask = np.arange(50) % 2
                said = {"messages": [{"role": "user", "content": f"{name} {turn} " * 20}], "loss_mask": mask}
                add(s, tokens, counting(50, 90000 + turn), **said)
                tokens += counting(80, 90000 + turn)
            s.finalize()
            sp.flush()
        sp.annotate("one", reward=1.0)
    assert len(list(root.glob("streams/*"))) == 1
    return root


@pytest.fixture
def root(healthy, tmp_path):
    """A copy to be damaged."""
    return Path(shutil.copytree(healthy, tmp_path / "s"))


DYING = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from kit import SHAPE, add, counting
import spool
sp = spool.open(sys.argv[1])
for name in ("one", "two", "three"):
    s = sp.session(name, experts=SHAPE, idle_s=0.5)
    add(s, counting(200), counting(50, 7), messages=[{"role": "user", "content": name * 30}])
    add(s, [*counting(200), *counting(50, 7), 1], counting(5, 3))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path):
    """What a killed writer left: a log that nobody sealed."""
    root = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", DYING, root, os.path.dirname(__file__)], env=environment(), capture_output=True
    )
    assert done.returncode == -9, done
    return root


def one(root, pattern):
    (path,) = root.glob(f"streams/*/{pattern}")
    return path


def flip(path, offset, mask=1):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ mask]))


def verify(root, *options, code):
    found = run("verify", root, *options, "--json", code=code).json
    text = run("verify", root, *options, code=code)
    assert len(text.rows if found["findings"] else []) == len(found["findings"])
    assert f"{len(found['findings'])} finding" in text.err or not found["findings"]
    return found["findings"]


# -- payload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "routed_experts", "loss_mask"])
def test_a_flipped_byte_is_found_by_a_deep_look_and_by_a_read(root, field):
    stream = one(root, "zarr.json").parent.name
    path = one(root, f"{field}/c/1{'/0/0' if field == 'routed_experts' else ''}")
    with library.open(str(root), readonly=True) as sp:
        extent = sp.steps("two")[0].extents[field][0]
    flip(path, 9 * WIDTHS[field])
    assert verify(root, code=0) == []
    (found,) = verify(root, "--deep", code=5)
    assert found["kind"] == "integrity"
    assert (found["stream"], found["field"], found["file"]) == (stream, field, str(path))
    assert found["rows"] == [extent.row, extent.row + extent.n]
    assert (found["n_steps"], found["steps"]) == (1, ["two:0"])
    done = run("cat", root, "two:0", code=5)
    assert all(part in done.err for part in (stream, field, str(extent.row)))
    assert run("cat", root, "one").json
    shown = on_terminal("verify", root, "--deep", code=5)
    assert "two:0" in shown
    assert f"rows [{extent.row}, {extent.row + extent.n})" in " ".join(shown.split())


@pytest.mark.parametrize("left", ["nothing", "half"])
def test_a_shard_that_is_short_or_gone_is_found_at_once(root, left):
    path = one(root, "token_ids/c/0")
    with library.open(str(root), readonly=True) as sp:
        steps = sp.steps("one")
        n_rows = sum(extent.n for extent in steps[-1].extents["token_ids"])
    if left == "nothing":
        path.unlink()
    else:
        os.truncate(path, 300 * 4)
    for options in ((), ("--deep",)):
        (found,) = verify(root, *options, code=5)
        assert (found["field"], found["file"]) == ("token_ids", str(path))
        assert ("missing" if left == "nothing" else "cut off") in found["text"]
        assert found["rows"][1] == n_rows
        assert found["rows"][0] == (0 if left == "nothing" else 250)
        assert found["steps"] == (["one:0", "one:1", "one:2"] if left == "nothing" else ["one:1", "one:2"])
    assert run("cat", root, "one:2", code=5).out == b""


def test_the_index_of_a_shard_is_checked(root):
    path = one(root, "token_ids/c/0")
    flip(path, path.stat().st_size - 7)
    (found,) = verify(root, code=5)
    assert (found["field"], found["file"]) == ("token_ids", str(path))
    assert "index" in found["text"]
    assert run("cat", root, "one").json


@pytest.mark.parametrize("name", ["routed_experts/zarr.json", "zarr.json"])
def test_metadata_without_content_is_found_and_made_again(root, name):
    path = one(root, name)
    before = path.read_bytes()
    path.write_bytes(b"")
    (*_, found) = verify(root, code=5)
    assert found["file"] == str(path)
    assert found["stream"] == path.parts[path.parts.index("streams") + 1]
    assert str(path.relative_to(root / "streams" / found["stream"])) in run("recover", root, "--dry-run").text
    assert path.read_bytes() == b""
    run("recover", root)
    assert path.read_bytes() == before
    assert verify(root, "--deep", code=0) == []


def test_metadata_that_says_something_else_is_found(root):
    path = one(root, "zarr.json")
    text = path.read_text()
    altered = text.replace('"chunk_rows": {"logprobs": 4096', '"chunk_rows": {"logprobs": 2048')
    assert altered != text
    path.write_text(altered)
    assert str(path) in [found["file"] for found in verify(root, code=5)]
    path.write_text(text)
    path = one(root, "logprobs/zarr.json")
    path.write_text(path.read_text().replace("float32", "float64"))
    assert str(path) in [found["file"] for found in verify(root, code=5)]


def test_a_stream_that_is_gone_is_found(root):
    stream = one(root, "zarr.json").parent
    shutil.rmtree(stream)
    found = verify(root, code=5)
    assert {item["stream"] for item in found} == {stream.name}
    assert {item["field"] for item in found} >= {"token_ids", "routed_experts", "records"}


def test_a_spool_without_its_name_is_damaged(root):
    (root / "spool.json").write_bytes(b"")
    for call in (("ls", root), ("verify", root), ("show", root, "one")):
        assert "spool.json" in run(*call, code=5).err


# -- records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("catalog", [True, False])
def test_records_that_are_gone_are_found(root, catalog):
    path = one(root, "records/0.arrow")
    path.unlink()
    if not catalog:
        (root / "catalog.sqlite").unlink()
    (found,) = verify(root, code=5)
    assert (found["field"], found["file"]) == ("records", str(path))
    assert "missing" in found["text"]


def test_any_altered_byte_of_the_records_is_found(root):
    path = one(root, "records/1.arrow")
    whole = path.read_bytes()
    payloads = records.decode(whole)
    rng = random.Random(1)
    with library.open(str(root), readonly=True) as sp:
        for _ in range(120):
            at = rng.randrange(len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
            if not sp.verify(deep=True).findings:  # it is padding, or of a column that only repeats
                assert records.decode(path.read_bytes()) == payloads
    path.write_bytes(whole)
    flip(path, len(whole) - 3)
    (found,) = verify(root, "--deep", code=5)
    assert (found["field"], found["file"]) == ("records", str(path))


@pytest.mark.parametrize("catalog", [True, False])
def test_a_log_that_is_damaged_in_the_middle_is_found_and_the_rest_is_saved(killed, catalog):
    if catalog:
        run("rebuild", killed)
    log = one(killed, "records/0.log")
    flip(log, log.read_bytes().index(b"two" * 30))
    (found,) = verify(killed, "--deep", code=5)
    assert (found["field"], found["file"]) == ("records", str(log))
    assert "damaged" in found["text"]
    dry = run("recover", killed, "--dry-run", "--json", code=5).json["streams"]
    done = run("recover", killed, "--json", code=5).json["streams"]
    assert dry == done
    assert done[0]["damaged_bytes"] > 90
    assert done[0]["n_events"] >= 6
    assert not log.exists()
    assert run("rebuild", killed).err == ""
    assert "three" in [row["session_id"] for row in run("ls", killed, "--json").json]
    assert run("cat", killed, "three:1").json[0]["fields"]["token_ids"][-1] == 7


def test_a_log_that_lost_its_end_is_found(killed):
    run("rebuild", killed)
    log = one(killed, "records/0.log")
    os.truncate(log, log.stat().st_size // 2)
    (found, *_) = verify(killed, code=5)
    assert found["file"] == str(log)
    assert "lost" in found["text"]


# -- what killed writers leave --------------------------------------------------------------------------------------


def test_an_unfinished_event_is_no_loss(killed):
    log = one(killed, "records/0.log")
    with log.open("ab") as file:
        file.write(b"\x10\x00\x00\x00half of an")
    (found,) = verify(killed, code=1)
    assert (found["kind"], found["file"]) == ("unfinished", str(log))
    assert "recover" in found["text"]
    stream = log.parts[-3]
    time.sleep(0.6)
    shown = on_terminal("recover", killed, "--dry-run")
    assert f"{stream}: pack 0 would be sealed with" in shown
    assert "14 bytes of an unfinished event would be dropped" in shown
    assert "idle session 'one' would be ended" in shown
    assert log.exists()
    done = run("recover", killed)
    (row,) = done.rows
    assert (row["stream"], row["packs"], row["torn_bytes"]) == (stream, "[0]", "14")
    assert done.err.count("is ended as timeout") == 3
    assert not log.exists()
    assert {row["outcome"] for row in run("ls", killed, "--json").json} == {"timeout"}
    assert verify(killed, "--deep", code=0) == []
    again = run("recover", killed)
    assert (again.err, len(again.rows)) == ("nothing to recover\n", 0)
    assert run("recover", killed, "--json").json == {"streams": [], "ended": []}


def test_rows_that_never_reached_the_disk_are_told(killed):
    tail = next(path for path in one(killed, "zarr.json").parent.glob("routed_experts/tail-*"))
    os.truncate(tail, 100)
    found = verify(killed, code=5)
    assert {item["field"] for item in found} == {"routed_experts"}
    shown = on_terminal("recover", killed, code=5)
    assert "LOST: " in shown
    assert "of routed_experts in pack 0" in shown


def test_implausible_routing_is_lint(tmp_path):
    with library.open(str(tmp_path / "s")) as sp:
        rows = np.zeros((20, 3, 2), int)
        rows[:, 1:] = [[[n, n + 1], [n, n + 1]] for n in range(20)]
        rows[7, 2] = [9, 9]
        s = sp.session("s", experts=SHAPE)
        s.append(prompt_token_ids=counting(19), response_token_ids=[1, 2], routed_experts=rows)
    assert verify(tmp_path / "s", code=0) == []
    (found,) = verify(tmp_path / "s", "--deep", code=1)
    assert (found["kind"], found["field"]) == ("lint", "routed_experts")
    assert "token 7" in found["text"]


def test_the_same_fault_in_many_steps_is_one_finding(tmp_path):
    good = np.arange(21)[:, None, None] % 32 * [[0], [1], [1]] + [[0, 0], [0, 1], [0, 1]]
    with library.open(str(tmp_path / "s")) as sp:
        for n in range(12):
            s = sp.session(f"s{n}", experts=SHAPE)
            rows = good[: 10 + n].copy()
            if n % 2:
                rows[n, 1:] = [[n, n], [9, 9]]
            s.append(prompt_token_ids=counting(9 + n), response_token_ids=[n, 2], routed_experts=rows)
    (found,) = verify(tmp_path / "s", "--deep", code=1)
    assert (found["kind"], found["field"], found["n_steps"]) == ("lint", "routed_experts", 6)
    assert found["steps"] == [f"s{n}:0" for n in range(1, 12, 2)]
    assert "first expert 1 at token" in found["text"]
    assert found["text"].endswith("; the like in 5 other runs of rows")
    assert found["rows"] == [10, 21], "the first place"


# -- any byte, and no false alarm -----------------------------------------------------------------------------------


def test_any_flipped_byte_of_a_stream_is_found(root):
    """But for what holds nothing or only repeats.

    That is padding, columns of the records, and the count of rows of an earlier pack where it claims more of its chunk.
    """
    stream = one(root, "zarr.json").parent
    files = sorted(path for path in stream.rglob("*") if path.is_file())
    assert len(files) > 12
    rng = random.Random(2)
    with library.open(str(root), readonly=True) as sp:
        assert not sp.verify(deep=True).findings
        for number in range(20 * len(files)):
            path = files[number % len(files)]
            content = path.read_bytes()
            at = rng.randrange(len(content))
            flip(path, at, 1 << rng.randrange(8))
            if not sp.verify(deep=True).findings:
                array = path.relative_to(stream).parts[0]
                if path.suffix == ".arrow":
                    assert records.decode(path.read_bytes()) == records.decode(content)
                elif "/c/" in str(path):
                    n_bytes = (410 if array in ("token_ids", "routed_experts") else 150) * WIDTHS[array]
                    assert n_bytes - WIDTHS[array] <= at < len(content) - 16, (path, at)
                else:
                    assert content[at : at + 1].isdigit(), (path, at)
                    assert b'"spool:rows": [[0, ' in content[at - 21 : at + 1], (path, at)
            path.write_bytes(content)


WRITING = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from kit import SHAPE, add, counting
import spool
enough, stop, gives_up = int(sys.argv[3]), sys.argv[4], time.monotonic() + 120
with spool.open(sys.argv[1]) as sp:
    number = 0
    while (number < enough or not os.path.exists(stop)) and time.monotonic() < gives_up:
        s = sp.session(experts=SHAPE)
        with s.transaction():
            add(s, counting(300), counting(40, number))
        add(s, [*counting(300), *counting(40, number), 1], counting(9))
        if number % 3:
            s.finalize()
        if number % 17 == 0:
            sp.flush()
        number += 1
print(number)
"""


def test_nothing_is_wrong_with_a_spool_that_is_being_written(tmp_path):
    root, stop = tmp_path / "s", tmp_path / "stop"
    code = [sys.executable, "-c", WRITING, root, os.path.dirname(__file__), "50", stop]
    writer = subprocess.Popen(code, env=environment(), stdout=subprocess.PIPE)
    while not list(root.glob("streams/2*/records/1.*")):
        assert writer.poll() is None
        time.sleep(0.01)
    looks, seen = 0, set()
    while writer.poll() is None:
        with library.open(str(root), readonly=True) as sp:
            report = sp.verify(deep=looks % 2 == 0)
            assert report.findings == ()
            seen.add(report.n_extents)
        looks += 1
        if looks == 3:
            assert run("verify", root, "--deep", "--json").json["findings"] == []
        if looks > 3 and len(seen) > 3:
            stop.touch()
    assert int(writer.communicate()[0]) >= 50
    assert looks > 3
    assert len(seen) > 3
    assert run("verify", root, "--deep").err.endswith("nothing wrong\n")


def test_a_lost_identity_is_restored_from_the_streams(root):
    with library.open(str(root)) as sp:
        spool_id, refs = sp.spool_id, sp.steps("one")
    (root / "spool.json").unlink()
    with pytest.raises(library.IntegrityError, match="spool recover"):
        library.open(str(root))
    with pytest.raises(library.NotFoundError):
        library.open(str(root), create=False)
    run("ls", root, code=3)
    assert spool_id in run("recover", root, "--dry-run").err and not (root / "spool.json").exists()
    assert spool_id in run("recover", root).err
    with library.open(str(root)) as sp:
        assert sp.spool_id == spool_id and len(sp.read(refs)) == 3
    assert "spool.json" not in run("recover", root).err


def test_a_lost_identity_is_restored_with_the_cold_root_that_packs_are_in(tmp_path, by_hand):
    root = tmp_path / "hot"
    with library.open(str(root)) as sp:
        record(sp, "a")
    with library.open(f"file://{root}?spill=file://{tmp_path}/cold") as sp:
        sp.spill()
    before = read_identity(str(root))
    (root / "spool.json").unlink()
    assert f"cold root file://{tmp_path}/cold" in run("recover", root).err
    after = read_identity(str(root))
    assert (after.id, after.tier, after.spill) == (before.id, "hot", f"file://{tmp_path}/cold")


def test_where_the_cold_root_is_forgotten_that_is_said_and_no_pack_in_it_goes(tmp_path, by_hand):
    """The markers of earlier versions do not name it."""
    root = tmp_path / "hot"
    with library.open(str(root)) as sp:
        refs = record(sp, "a")
    with library.open(f"file://{root}?spill=file://{tmp_path}/cold") as sp:
        sp.spill()
    for path in root.rglob("*.cold"):
        path.write_text(path.read_text().replace('"root":', '"was":'))
    (root / "spool.json").unlink()
    assert "?spill=URL" in run("recover", root).err
    with library.open(f"file://{root}?hot_bytes=32MiB&grace_s=0.001") as sp:
        sp.release(refs)
        assert [item.why for item in sp.gc() if not item.go and "?spill=URL" in item.why]
        spiller = sp._tiers.spiller()
        spiller._pressure = lambda: Pressure(used=100, high=2, low=1, limit=3)
        spiller.work()
        spiller._say(error=spiller._missing_cold())
        spiller.close()
        assert "?spill=URL" in sp.status().spiller.error
        assert next(sp._catalog.packs.rows("spilled"), None) is not None
    with library.open(f"file://{root}?spill=file://{tmp_path}/cold&grace_s=0.001") as sp:
        assert any(item.go for item in sp.gc())


@pytest.mark.parametrize("kept", ["streams", "catalog.sqlite"])
def test_a_lost_identity_that_no_stream_keeps_is_not_made_up(root, kept):
    for path in root.glob("streams/*/zarr.json"):
        path.write_text(path.read_text().replace("spool:id", "spool:of"))
    for name in {"streams", "catalog.sqlite"} - {kept}:
        shutil.rmtree(root / name) if name == "streams" else (root / name).unlink()
    (root / "spool.json").unlink()
    with pytest.raises(library.IntegrityError, match=r"spool\.json is lost"):
        library.open(str(root))
    assert "by hand" in run("recover", root, code=5).err
    assert not (root / "spool.json").exists()
