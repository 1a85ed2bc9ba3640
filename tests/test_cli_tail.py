"""`spool tail`: what is newest, and what happens, in a spool that other processes write."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kit import add, session
from shell import HOSTILE, SCRIPT, environment, on_terminal, run
from tiers import record, wait_for

import spool
from spool.look.follow import follow, newest

ROOT = Path(__file__).parents[1]


class Tail:
    """A running ``spool tail -f``."""

    def __init__(self, *args):
        self.process = subprocess.Popen(
            [SCRIPT, "tail", "-f", *map(str, args)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        self.lines = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.decode())

    def told(self):
        """Return what happened to which session, of lines that are JSON."""
        return [(found["what"], found["session_id"]) for found in map(json.loads, self.lines)]

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(30)
        return code, self.process.stderr.read().decode()


@pytest.fixture
def tail():
    started = []

    def start(*args):
        started.append(Tail(*args))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        one.process.stdout.close()
        one.process.stderr.close()


def test_the_newest_come_last_and_say_how_they_stand(sp):
    for number in range(5):
        add(s := session(sp, f"s{number}", source="swe"), [1, 2], [3])
        if number != 4:
            s.finalize(outcome="failed")
    sp.annotate("s3", reward=0.5)
    sp.discard("s2")
    root = sp.config.root
    rows = run("tail", root, "-n", "3").rows
    assert [(row["what"], row["session_id"]) for row in rows] == [
        ("discarded", "s2"), ("finished", "s3"), ("opened", "s4")
    ]  # fmt: skip
    assert (rows[1]["outcome"], rows[1]["reward"], rows[1]["n_tokens"], rows[2]["outcome"]) == (
        "failed",
        "0.5",
        "3",
        "-",
    )
    lines = run("tail", root, "--json").text.splitlines()
    assert [json.loads(line)["session_id"] for line in lines] == [f"s{number}" for number in range(5)]
    assert run("tail", root, "--where", "reward > 0.1").rows[0]["session_id"] == "s3"
    assert run("tail", root, "-n", "0").rows == []
    shown = on_terminal("tail", root, "-n", "2").splitlines()
    assert "finished   s3  failed  1 steps, 3 tokens  reward 0.5  swe" in shown[0]
    assert "rewrd" in run("tail", root, "--where", "rewrd > 1", code=2).err
    run("tail", root, "-n", "-1", code=2)


def test_hostile_names_have_no_effect(sp):
    name = "s" + "".join(HOSTILE) + "\n\t\U0001f600"
    add(session(sp, name, source=name), [1], [2])
    shown = on_terminal("tail", sp.config.root, columns=200)
    assert not any(char in shown for char in HOSTILE) and len(shown.splitlines()) == 1
    (row,) = run("tail", sp.config.root).rows
    assert not any(char in row["session_id"] for char in HOSTILE)
    assert json.loads(run("tail", sp.config.root, "--json").text)["session_id"] == name


def test_follows_what_another_process_does(sp, tail):
    record(sp, "old")
    found = tail(sp.config.root, "--json", "-n", "1")
    wait_for(lambda: found.lines, what="the first line")
    s = session(sp, "new")
    add(s, [1, 2], [3, 4])
    wait_for(lambda: len(found.lines) == 2, what="the opening")
    sp.annotate("new", reward=0.25)
    wait_for(lambda: len(found.lines) == 3, what="the reward")
    s.finalize(outcome="aborted")
    wait_for(lambda: len(found.lines) == 4, what="the end")
    sp.annotate("new", reward=None)
    sp.annotate("old", judge="no reward")
    sp.discard("old")
    wait_for(lambda: len(found.lines) == 6, what="the withdrawal")
    code, err = found.end()
    assert (code, err.strip()) == (130, "")
    assert found.told() == [
        ("finished", "old"), ("opened", "new"), ("reward", "new"), ("finished", "new"), ("reward", "new"),
        ("discarded", "old"),
    ]  # fmt: skip
    rows = [json.loads(line) for line in found.lines]
    assert [row["reward"] for row in rows] == [None, None, 0.25, 0.25, None, None]
    assert (rows[3]["outcome"], rows[3]["n_steps"], rows[3]["n_tokens"]) == ("aborted", 1, 4)


def test_a_filter_is_asked_when_something_happens(sp, tail):
    record(sp, "old", source="swe")
    found = tail(sp.config.root, "--json", "--where", "source = 'swe' and n_steps > 0")
    wait_for(lambda: found.lines, what="the first line")
    for name, source in (("a", "tau"), ("b", "swe")):
        record(sp, name, source=source)
    wait_for(lambda: len(found.lines) == 3, what="two more lines")
    found.end()
    assert found.told() == [("finished", "old"), ("opened", "b"), ("finished", "b")]


def test_many_writers_and_nothing_is_told_twice_or_not_at_all(tmp_path, tail):
    root = str(tmp_path / "s")
    with spool.open(root) as sp:
        record(sp, "first")
    found = tail(root, "--json")
    wait_for(lambda: found.lines, what="the first line")
    code = (
        "import sys, spool\nfrom tiers import record\nwith spool.open(sys.argv[1]) as sp:\n"
        "    for number in range(25):\n        record(sp, f'{sys.argv[2]}-{number}', n_steps=2)\n"
        "        sp.annotate(f'{sys.argv[2]}-{number}', reward=1.0)\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    writers = [subprocess.Popen([sys.executable, "-c", code, root, str(number)], env=env) for number in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    wait_for(lambda: len(found.lines) > 3 * 25 * 3, what="all lines")
    time.sleep(1.5)
    found.end()
    names = [f"{writer}-{number}" for writer in range(3) for number in range(25)]
    told = found.told()
    assert told.pop(0) == ("finished", "first")
    assert sorted(told) == sorted((what, name) for name in names for what in ("opened", "finished", "reward"))
    for name in names:
        assert [what for what, of in told if of == name] == ["opened", "finished", "reward"]


def test_follows_a_cold_root(tmp_path, tail):
    cold = f"file://{tmp_path}/cold"
    with spool.open(f"{tmp_path}/hot?spill={cold}") as sp:
        sp.publish(record(sp, "first"))
        found = tail(cold, "--json")
        wait_for(lambda: found.lines, what="the first line")
        sp.publish(record(sp, "second"))
        wait_for(lambda: len(found.lines) == 3, what="what was published", timeout_s=60)
    assert found.end()[0] == 130
    assert found.told() == [("finished", "first"), ("opened", "second"), ("finished", "second")]


def test_it_ends_when_the_reader_is_gone(sp):
    record(sp, "a")
    process = subprocess.Popen(
        [SCRIPT, "tail", "-f", sp.config.root], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_run_that_is_started_anew_in_the_folder_follows_from_its_beginning(tmp_path, tail):
    root = tmp_path / "s"
    with spool.open(str(root)) as sp:
        for number in range(3):
            record(sp, f"old{number}", n_steps=1)
    found = tail(root, "--json", "-n", "1")
    wait_for(lambda: found.lines, what="the first line")
    time.sleep(0.5)
    for run_name in ("new", "newest"):
        shutil.rmtree(root)
        with spool.open(str(root)) as sp:
            for number in range(6):
                record(sp, f"{run_name}{number}", n_steps=1)
            wait_for(lambda: f"{run_name}5" in found.lines[-1], what="the new run")  # noqa: B023
    code, said = found.end()
    assert code == 130 and said.count("started anew: it follows from its beginning") == 2
    told = [("finished", "old2")]
    told += [(what, f"{name}{n}") for name in ("new", "newest") for n in range(6) for what in ("opened", "finished")]
    assert found.told() == told


def test_waiting_costs_next_to_nothing(sp, tail):
    for number in range(30):
        record(sp, f"s{number}", n_steps=1)
    found = tail(sp.config.root)
    wait_for(lambda: len(found.lines) == 11, what="the first lines")
    time.sleep(3)
    before = used_s(found.process.pid)
    time.sleep(6)
    assert used_s(found.process.pid) - before < 0.3
    found.end()


def mark_of(sp):
    """Return the mark behind all that is recorded."""
    newest(sp, 0)
    return sp.news()[1]


def used_s(pid):
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def test_a_root_that_cannot_be_read_is_said_once_and_asked_again(sp, monkeypatch, caplog):
    record(sp, "a")
    mark = mark_of(sp)
    real, calls = sp.news, []

    def failing(*args):
        calls.append(args)
        if len(calls) < 3:
            raise spool.StorageError("the disk is away")
        return real(*args)

    record(sp, "b")
    monkeypatch.setattr(sp, "news", failing)
    told = list(follow(sp, mark, None, wait=lambda _: len(calls) > 3, anew=None))
    assert [(item.what, item.row.session_id) for item in told] == [("opened", "b"), ("finished", "b")]
    assert caplog.text.count("the disk is away") == 1


def test_pauses_grow_while_nothing_happens(sp):
    record(sp, "a")
    pauses = []
    wait = lambda s: pauses.append(s) or len(pauses) > 20  # noqa: E731
    assert list(follow(sp, mark_of(sp), None, wait=wait, anew=None)) == []
    assert pauses == sorted(pauses) and pauses[0] < 0.2 and pauses[-1] == 1.0


def test_a_session_that_goes_on_elsewhere_is_resumed(spool_uri):
    with spool.open(spool_uri) as one:
        add(session(one, "a"), [1], [2])
    with spool.open(spool_uri) as other:
        mark = mark_of(other)
        add(session(other, "a"), [1, 2, 3], [4])
        told, _ = other.news(mark)
        assert [(item.what, item.row.n_steps) for item in told] == [("resumed", 2)]
        assert [item.row.session_id for item in newest(other, 5)] == ["a"]
