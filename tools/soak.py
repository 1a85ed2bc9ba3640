"""Writers that are killed at random, and a reader that checks what they had acknowledged.

    python -m tools.soak [--rounds N] [--writers N] [--seed N] [--folder DIR]

A round starts several writers on one spool, each with threads that append small and large steps, branch, hold
transactions, finalise, annotate, attach and withdraw; whatever a call returned goes to a pipe. After a moment all are
killed. Fresh processes then check, before and after recovery, that every acknowledged reference reads back equal, that
the catalog has all of it, caught up and rebuilt alike, and that nothing half-done can be seen.

Contents are functions of the token ids before them, so any step that is visible can be checked, acknowledged or not.
"""

# ruff: noqa: SLF001 - the catalog's dump is nobody's business but this check's

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from crc32c import crc32c

import spool
from spool.errors import SpoolError

LAYERS, EXPERTS, TOPK = 13, 256, 8
SHAPE = spool.MoEShape(num_layers=LAYERS, num_experts=EXPERTS, topk=TOPK, moe_layers=tuple(range(1, LAYERS)))
KEPT = spool.FieldSpec(name="kept", dtype="int32", align="response", ragged=True)
LEAST_STEPS = 3
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# -- contents: functions of the tokens -------------------------------------------------------------------------------


def prefix_hashes(tokens: Any) -> Any:
    """Return uint64 [T]: the same for the same tokens up to here."""
    values = np.asarray(tokens, np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        sums = np.cumsum(
            values * (np.arange(len(values), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        )
        sums ^= sums >> np.uint64(29)
        return sums * np.uint64(0xBF58476D1CE4E5B9)


def routing(tokens: Any) -> Any:
    """Return int32 [T-1, LAYERS, TOPK]; layer 0 is dense."""
    hashes = prefix_hashes(tokens)[: max(len(tokens) - 1, 0)]
    with np.errstate(over="ignore"):
        first = (
            hashes[:, None] * (2 * np.arange(1, LAYERS, dtype=np.uint64) + np.uint64(1)) >> np.uint64(40)
        ) & np.uint64(255)
    out = np.zeros((len(hashes), LAYERS, TOPK), np.int32)
    out[:, 1:] = (first[:, :, None] + np.arange(TOPK, dtype=np.uint64) * np.uint64(31)).astype(np.int32) & 255
    return out


def logprobs(tokens: Any, n_prompt: int) -> Any:
    """Return float32 [T - n_prompt]."""
    return -((prefix_hashes(tokens)[n_prompt:] >> np.uint64(44)) % np.uint64(4096)).astype(np.float32) / np.float32(256)


def kept_ids(tokens: Any, n_prompt: int) -> tuple[Any, Any]:
    """Return values and offsets of the ragged field: 0 to 3 ids a response token."""
    hashes = prefix_hashes(tokens)[n_prompt:]
    counts = (hashes >> np.uint64(50) & np.uint64(3)).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return np.repeat((hashes >> np.uint64(33)).astype(np.int32) & 0xFFFFF, counts), offsets


def late(tokens: Any, number: int) -> Any:
    """Return float32 [T], to be attached."""
    return (prefix_hashes(tokens) >> np.uint64(44)).astype(np.float32) + np.float32(number)


def check_step(sp: Any, ref: Any) -> Any:
    """Check every field of a step against its tokens; return the tokens."""
    sample = sp.read(ref, verify="always")
    tokens, n_prompt = sample["token_ids"], ref.response_start
    assert len(tokens) == ref.n_tokens, f"{ref.id}: {len(tokens)} of {ref.n_tokens} tokens"
    expected = {"routed_experts": routing(tokens), "logprobs": logprobs(tokens, n_prompt)}
    expected["loss_mask"] = (np.arange(len(tokens)) >= n_prompt).astype(np.uint8)
    for name, array in expected.items():
        if name in sample or name == "loss_mask" or array.size:
            assert sample[name].dtype == array.dtype, f"{ref.id}: {name} has another dtype"
            assert np.array_equal(sample[name], array), f"{ref.id}: {name} differs"
    if "kept" in sample:
        values, offsets = kept_ids(tokens, n_prompt)
        assert np.array_equal(sample["kept"].values, values), f"{ref.id}: kept differs"
        assert np.array_equal(sample["kept"].offsets, offsets), f"{ref.id}: offsets of kept differ"
    return tokens


def check_segment(sp: Any, ref: Any) -> Any:
    """Check a segment's tokens, routing and what it trains; return the tokens."""
    sample = sp.read(ref, fields=["token_ids", "routed_experts", "loss_mask", "logprobs"], verify="always")
    tokens = sample["token_ids"]
    assert np.array_equal(sample["routed_experts"], routing(tokens)), f"{ref.id}: routing differs"
    hashes = logprobs(tokens, 0)
    generated = np.zeros(len(tokens), bool)
    for span in ref.spans:
        generated[span.start : span.stop] = True
    region = slice(ref.response_start, ref.n_tokens)
    assert np.array_equal(sample["logprobs"], np.where(generated, hashes, np.float32(0))[region]), f"{ref.id}: logprobs"
    return tokens


# -- a writer --------------------------------------------------------------------------------------------------------


class Acknowledged:
    """The pipe to the parent: one JSON line for each call that returned."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def tell(self, kind: str, **facts: Any) -> None:
        data = json.dumps({"kind": kind, **facts}).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


def packed(ref: Any) -> str:
    return base64.b64encode(pickle.dumps(ref)).decode()


def crc_of(tokens: Any) -> int:
    return int(crc32c(np.ascontiguousarray(tokens, np.int32).tobytes()))


class Worker:
    """One thread of a writer; it works on sessions of its own until it is killed."""

    def __init__(self, sp: Any, told: Acknowledged, name: str, seed: int) -> None:
        self.sp, self.told, self.name = sp, told, name
        self.chance = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.n_sessions = 0
        self.n_facts = 0

    def run(self) -> None:
        while True:
            self.session()

    def tokens(self, n: int) -> Any:
        return self.rng.integers(0, 150_000, n, dtype=np.int32)

    def size(self) -> int:
        kind = self.chance.random()
        if kind < 0.7:
            return self.chance.randrange(1, 300)
        return self.chance.randrange(300, 6000) if kind < 0.93 else self.chance.randrange(6000, 60_000)

    def session(self) -> None:
        self.n_sessions += 1
        session_id = f"{self.name}-{self.n_sessions}"
        s = self.sp.session(session_id, group_id=self.name, experts=SHAPE, fields=[KEPT])
        chains: list[Any] = []
        number = 0
        for _ in range(self.chance.randrange(LEAST_STEPS, 12)):
            act = self.chance.random()
            if act < 0.15:
                number = self.transaction(s, chains, number)
            else:
                self.step(s, chains, f"s{number}", told=True)
                number += 1
            if chains and self.chance.random() < 0.2:
                self.facts(session_id, chains)
        if self.chance.random() < 0.15:
            ref = self.step(s, chains, "withdrawn", told=False)
            s.discard(ref)
            self.told.tell("withdrawn", session=session_id, step=ref.index)
            chains.pop()
        if self.chance.random() < 0.7:
            view = self.chance.choice(["lineage", "timeline"])
            refs = s.finalize(view=view)
            self.told.tell("final", session=session_id, refs=[packed(ref) for ref in refs])
            if refs and self.chance.random() < 0.3:
                self.sp.release(refs, tag="t")
                self.told.tell("released", session=session_id, n=len(refs))

    def step(self, s: Any, chains: list[Any], step_id: str, *, told: bool) -> Any:
        chosen = self.chance.random()
        before = chains[-1][1] if chains and chosen < 0.7 else None
        if chains and chosen >= 0.85:
            before = self.chance.choice(chains)[1]
        prompt = self.tokens(self.size()) if before is None else np.concatenate((before, self.tokens(self.size() // 4)))
        if len(prompt) > 120_000:
            prompt = self.tokens(100)
        tokens = np.concatenate((prompt, self.tokens(self.chance.choice([0, 1, 7, self.size()]))))
        n_prompt, rows = len(prompt), routing(tokens)
        start = 0
        if before is not None and len(before) > 1 and self.chance.random() < 0.5:
            start = len(before) - 1 if n_prompt == len(prompt) and len(prompt) >= len(before) else 0
        values, offsets = kept_ids(tokens, n_prompt)
        ref = s.append(
            prompt_token_ids=prompt,
            response_token_ids=tokens[n_prompt:],
            logprobs=logprobs(tokens, n_prompt),
            routed_experts=rows[start:],
            routed_experts_start=start,
            weight_version=str(self.n_sessions),
            messages=[{"role": "user", "content": f"{i}"} for i in range(len(chains) + 1)],
            step_id=step_id,
            fields={"kept": spool.Ragged(values, offsets)},
        )
        chains.append((ref, tokens))
        if told:
            self.told.tell("step", ref=packed(ref), crc=crc_of(tokens))
        return ref

    def transaction(self, s: Any, chains: list[Any], number: int) -> int:
        count, before = self.chance.randrange(1, 5), list(chains)
        refs = []
        try:
            with s.transaction():
                refs += [self.step(s, chains, f"t{number}-{i}-{count}", told=False) for i in range(count)]
                if self.chance.random() < 0.25:
                    raise KeyError
        except KeyError:
            chains[:] = before
            self.told.tell("gone", session=s.session_id, steps=[f"t{number}-{i}-{count}" for i in range(count)])
        else:
            crcs = [crc_of(tokens) for _, tokens in chains[len(before) :]]
            self.told.tell("transaction", refs=[packed(ref) for ref in refs], crcs=crcs)
        return number + 1

    def facts(self, session_id: str, chains: list[Any]) -> None:
        self.n_facts += 1
        self.sp.annotate(session_id, n=self.n_facts)
        self.told.tell("note", session=session_id, n=self.n_facts)
        ref, tokens = self.chance.choice(chains)
        if len(tokens) != ref.n_tokens - 1:
            self.sp.attach(ref, align="token", late=late(tokens, self.n_facts))
            self.told.tell("late", ref=packed(ref), n=self.n_facts)


def write(uri: str, seed: int, n_threads: int) -> None:
    """Be a writer until killed; acknowledgements go to standard output."""
    sp, told = spool.open(uri), Acknowledged(1)
    stop = threading.Event()

    def guarded(worker: Worker) -> None:
        try:
            worker.run()
        except BaseException as error:
            told.tell("failed", error=repr(error))
            stop.set()
            raise

    for n in range(n_threads):
        worker = Worker(sp, told, f"w{seed}-{n}", seed * 100 + n)
        threading.Thread(target=guarded, args=(worker,), daemon=True).start()
    told.tell("ready")
    if seed % 2:  # small packs: rolling and sealing beside the appends
        while not stop.wait(0.15):
            sp.flush()
    stop.wait()
    sys.exit(1)


# -- the check -------------------------------------------------------------------------------------------------------


@dataclass
class Claims:
    """What the killed writers had acknowledged."""

    steps: dict[tuple[str, str], tuple[Any, int]] = field(default_factory=dict)
    finals: dict[str, list[Any]] = field(default_factory=dict)
    gone: set[tuple[str, str]] = field(default_factory=set)
    withdrawn: set[tuple[str, int]] = field(default_factory=set)
    notes: dict[str, int] = field(default_factory=dict)
    late: dict[tuple[str, int], tuple[Any, int]] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    n_threads: int = 0

    def add(self, line: bytes) -> None:
        fact = json.loads(line)
        match fact["kind"]:
            case "ready":
                pass
            case "step":
                self._step(fact["ref"], fact["crc"])
            case "transaction":
                for ref, crc in zip(fact["refs"], fact["crcs"], strict=True):
                    self._step(ref, crc)
            case "final":
                self.finals[fact["session"]] = [_unpacked(ref) for ref in fact["refs"]]
            case "gone":
                self.gone |= {(fact["session"], step) for step in fact["steps"]}
            case "withdrawn":
                self.withdrawn.add((fact["session"], fact["step"]))
            case "note":
                self.notes[fact["session"]] = fact["n"]
            case "late":
                ref = _unpacked(fact["ref"])
                self.late[ref.session_id, ref.index] = ref, fact["n"]
            case "released":
                self.released[fact["session"]] = fact["n"]
            case _:
                raise AssertionError(f"a writer failed: {fact}")

    def _step(self, ref: str, crc: int) -> None:
        found = _unpacked(ref)
        self.steps[found.session_id, found.step_id] = found, crc


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def check_reads(sp: Any, claims: Claims) -> None:
    """Read every acknowledged reference; the catalog is not asked."""
    for ref, crc in claims.steps.values():
        assert crc_of(check_step(sp, ref)) == crc, f"{ref.id}: other tokens"
    for refs in claims.finals.values():
        for ref in refs:
            check_segment(sp, ref)


def check_index(sp: Any, claims: Claims) -> None:
    """Check that all of it, and nothing half-done, is found by asking."""
    sessions = {row.session_id: row for row in sp.sessions()}
    visible: dict[tuple[str, str], Any] = {}
    for session_id in sessions:
        for ref in sp.steps(session_id):
            visible[session_id, ref.step_id] = ref
    for key, (ref, _) in claims.steps.items():
        assert visible.get(key) == ref, f"{ref.id}: acknowledged, and not in the catalog as it was"
    assert not claims.gone & visible.keys(), "steps of a block that raised are visible"
    indexes = {(session_id, ref.index) for (session_id, _), ref in visible.items()}
    assert not claims.withdrawn & indexes, "withdrawn steps are visible"
    new = visible.keys() - claims.steps.keys()
    check_transactions(visible)
    for key in new:  # committed, and killed before the call returned
        check_step(sp, visible[key])
    lone = [key for key in new if not key[1].startswith("t")]
    assert len(lone) <= claims.n_threads, f"{len(lone)} steps that nobody knew of: {lone}"
    found: dict[str, list[Any]] = {}
    for ref in sp.segments():
        found.setdefault(ref.session_id, []).append(ref)
    for session_id, refs in claims.finals.items():
        kept = [(ref.id, ref.extents) for ref in found.get(session_id, [])]
        assert kept == [(ref.id, ref.extents) for ref in refs], f"{session_id}: other segments than were returned"
    for session_id, n in claims.notes.items():
        assert sessions[session_id].facts["n"] >= n, f"{session_id}: an annotation is lost"
    for session_id, n in claims.released.items():
        assert len(sp._catalog.released(session_id)) == n, f"{session_id}: a release is lost"
    for ref, n in claims.late.values():
        sample = sp.read(ref, fields=["token_ids", "late"], verify="always")
        base = late(sample["token_ids"], 0)
        numbers = np.unique(sample["late"] - base)
        assert not len(numbers) or (len(numbers) == 1 and numbers[0] >= n), f"{ref.id}: a late array is lost"
    for ref in list(visible.values())[-20:]:
        assert len(sp.messages(ref)) >= 1


def check_transactions(visible: dict[tuple[str, str], Any]) -> None:
    """Check that each transaction is whole or gone."""
    counts: dict[tuple[str, str, int], int] = {}
    for session_id, step_id in visible:
        if step_id.startswith("t"):
            number, _, count = step_id[1:].split("-")
            counts[session_id, number, int(count)] = counts.get((session_id, number, int(count)), 0) + 1
    for (session_id, number, expected), got in counts.items():
        assert got == expected, f"{session_id}: {got} of {expected} steps of transaction {number}"


def check(uri: str, claims_path: str) -> None:
    """Check a spool whose writers are dead; run in a fresh process."""
    with open(claims_path, "rb") as file:
        claims: Claims = pickle.load(file)
    with spool.open(uri) as sp:
        check_reads(sp, claims)
        check_index(sp, claims)
        caught_up = sp._catalog.dump()
        sp.rebuild()
        assert_same(caught_up, sp._catalog.dump(), "rebuilt")
        found = sp.recover()
        for report in found:
            assert report.error is None, report
            assert not report.shortfalls, report
            assert not report.damaged_bytes, report
        check_reads(sp, claims)
        check_index(sp, claims)
        caught_up = sp._catalog.dump()
        sp.rebuild()
        assert_same(caught_up, sp._catalog.dump(), "rebuilt after recovery")
        verified = sp.verify(deep=True)
        assert not [f for f in verified.findings if f.kind == "integrity"], verified.findings[:5]
        assert sp._catalog.check() == []
        assert sp.recover() == []


def assert_same(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    """Compare two dumps of the catalog."""
    for table, rows in one.items():
        if rows != other[table]:
            only = (
                [row for row in rows if row not in other[table]][:2],
                [row for row in other[table] if row not in rows][:2],
            )
            raise AssertionError(f"{what}: {table} differs: {only}")


# -- rounds ----------------------------------------------------------------------------------------------------------


def kill_round(
    uri: str, seeds: list[int], after_s: float, *, n_threads: int = 3, claims: Claims | None = None
) -> Claims:
    """Start a writer for each seed, kill all ``after_s`` after they are ready; return what they had acknowledged."""
    claims = claims or Claims()
    command = [sys.executable, "-m", "tools.soak", "--write", uri, "--threads", str(n_threads), "--seed"]
    writers = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, cwd=FOLDER, stderr=subprocess.PIPE)
        for seed in seeds
    ]
    lines: dict[int, list[bytes]] = {i: [] for i in range(len(writers))}

    def drain(i: int) -> None:
        out = writers[i].stdout
        assert out is not None
        lines[i].extend(out)

    readers = [threading.Thread(target=drain, args=(i,)) for i in range(len(writers))]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 30
    while not all(lines.values()) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(after_s)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    for reader in readers:
        reader.join()
    for i, writer in enumerate(writers):
        assert writer.stderr is not None
        errors = writer.stderr.read().decode()
        writer.wait()
        for pipe in (writer.stdout, writer.stderr):
            if pipe is not None:
                pipe.close()
        for line in lines[i]:
            if line.endswith(b"\n"):
                claims.add(line)
        assert writer.returncode == -signal.SIGKILL, f"writer {seeds[i]} ended by itself:\n{errors}"
        claims.n_threads += n_threads
    return claims


def check_in_fresh_process(uri: str, claims: Claims) -> None:
    """Run `check` in a process of its own; raise what it found."""
    with tempfile.NamedTemporaryFile() as file:
        pickle.dump(claims, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "tools.soak", "--check", uri, "--claims", file.name],
            capture_output=True, text=True, cwd=FOLDER, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"seeds as above, {uri}:\n{done.stderr}"


def main() -> None:
    """Run rounds until one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder")
    parser.add_argument("--options", default="")
    parser.add_argument("--write", metavar="URI", help=argparse.SUPPRESS)
    parser.add_argument("--check", metavar="URI", help=argparse.SUPPRESS)
    parser.add_argument("--claims", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(given.write, given.seed, given.threads)
    if given.check:
        check(given.check, given.claims)
        return
    chance, n_steps, started = random.Random(given.seed), 0, time.monotonic()
    for number in range(given.rounds):
        folder = tempfile.mkdtemp(prefix="spool-soak-", dir=given.folder)
        claims, uri = None, f"file://{folder}/spool{given.options and '?' + given.options}"
        for again in range(chance.choice([1, 1, 2])):
            first = (given.seed * 1000 + number) * 100 + again * 10
            seeds = list(range(first, first + given.writers))
            claims = kill_round(uri, seeds, chance.uniform(0.0, 1.2), n_threads=given.threads, claims=claims)
        assert claims is not None
        try:
            check_in_fresh_process(uri, claims)
        except AssertionError:
            sys.stderr.write(f"round {number} of seed {given.seed} failed; the spool is left at {folder}\n")
            raise
        n_steps += len(claims.steps)
        shutil.rmtree(folder)
        sys.stdout.write(
            f"round {number}: {len(claims.steps)} steps; {n_steps} in {time.monotonic() - started:.0f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except SpoolError as failure:
        sys.stderr.write(f"{failure.kind}: {failure} {failure.details}\n")
        raise
