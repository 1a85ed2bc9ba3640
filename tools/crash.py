"""Everything between append and collection is killed, at named points and at random; what was promised must still hold.

    python -m tools.crash [--kills N] [--seed N] [--cold URL] [--folder DIR] [--point POINT]...

Writers, a spiller and a reader work on one hot root with a cold one (a folder where no URL is given). Each round one
process dies at the next of `spool.points.POINTS`, or at a random moment, and others with it or not. Then, while those
that are left go on: every acknowledged step reads back equal, or was let go and says so; nothing half-written can be
seen from the hot root, from the cold one, or by zarr-python in the cold arrays. In the end, after a quiet spiller:
catalogs rebuilt from the files of either root equal the one that there was, no file and no object is left that belongs
to nothing, and the account of room is what the files take.
"""

# ruff: noqa: SLF001 - the catalog's dump and account are nobody's business but this check's

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

import spool
from spool import locks
from spool.config import parse_uri
from spool.errors import LockedError, NotFoundError, ReleasedError, SpoolError
from spool.formats import manifest
from spool.logs.keys import FACTS, GONE, MANIFESTS, parse_gone_key
from spool.logs.packs import list_packs, parse_tombstone
from spool.logs.streams import measure, stream_names
from spool.logs.units import GONE_UNITS, Deletions
from spool.model.units import UNITS, unit_path
from spool.points import POINTS, kill_at
from spool.spiller import elect, rollup
from spool.spiller.evict import evict
from spool.stores.objects import Objects
from spool.stores.units import ACCOUNT, HotUnits
from tools import soak
from tools.soak import (
    FOLDER,
    KEPT,
    SHAPE,
    Acknowledged,
    assert_same,
    check_step,
    crc_of,
    kept_ids,
    logprobs,
    packed,
    routing,
)

UNITS_AGE_S = 2.0
OPTIONS = f"hot_bytes=2GiB&grace_s=0.05&publish_interval_s=0.1&cold_deadline_s=20&units_age_s={UNITS_AGE_S}"
SAMPLE = 40
"""Acknowledged steps that are read after each kill, beside those that are new."""
ROLE_OF = {"append": "write", "put": "write", "seal": "write", "release": "before collect", "spill": "spill",
           "evict": "evict", "collect": "collect", "delete": "collect", "rollup": "rollup"}  # fmt: skip
ROLES_WITH_WORK = ("spill", "evict", "collect", "rollup")
LONGEST_S = 20.0


# -- the processes ---------------------------------------------------------------------------------------------------


class Worker(soak.Worker):
    """One thread of a writer: small sessions, in batches that are published and let go together."""

    def size(self) -> int:
        return self.chance.choice([1, 9, 60, 300, 2500])

    def batch(self, number: int, *, ends: bool = False) -> list[Any]:
        """Record one session of steps, transactions and late facts; return its segments, none where it stays open."""
        session_id = f"{self.name}-{number}"
        s = self.sp.session(session_id, group_id=self.name, experts=SHAPE, fields=[KEPT])
        chains: list[Any] = []
        for count in range(self.chance.randrange(1, 5)):
            if self.chance.random() < 0.3:
                self.transaction(s, chains, count)
            else:
                self.step(s, chains, f"s{count}", told=True)
        if chains and self.chance.random() < 0.3:
            self.facts(session_id, chains)
        if ends or self.chance.random() < 0.5:
            self.unit(s)
        if not ends and self.chance.random() < 0.15:
            return []
        refs: list[Any] = s.finalize(view=self.chance.choice(["lineage", "timeline"]))
        self.told.tell("final", session=session_id, refs=[packed(ref) for ref in refs])
        return refs

    def unit(self, s: Any) -> None:
        """Put a unit, twice, and append a step that names it."""
        array = self.rng.integers(0, 256, self.chance.choice([1, 5000, 1_500_000]), dtype=np.uint8)
        key = self.sp.put_unit(array)
        assert self.sp.put_unit(array) == key
        tokens = self.tokens(9)
        values, offsets = kept_ids(tokens, 6)
        s.append(
            prompt_token_ids=tokens[:6],
            response_token_ids=tokens[6:],
            logprobs=logprobs(tokens, 6),
            routed_experts=routing(tokens),
            fields={"kept": spool.Ragged(values, offsets)},
            units=[(key, 2, 1)],
            step_id="unit",
        )
        self.told.tell("unit", session=s.session_id, key=key, crc=zlib.crc32(array))


def write(uri: str, seed: int, n_threads: int) -> None:
    """Record batches until killed; acknowledgements go to standard output."""
    sp, told, chance = spool.open(uri), Acknowledged(1), random.Random(seed)
    workers = [Worker(sp, told, f"w{seed}-{n}", seed * 100 + n) for n in range(n_threads)]
    told.tell("ready")
    for number in range(1_000_000):
        with ThreadPoolExecutor(n_threads) as threads:
            found = threads.map(lambda w, n: w.batch(n), workers, [number] * n_threads)
            made = [ref for refs in found for ref in refs]
        with contextlib.suppress(ReleasedError):
            end_batch(sp, told, chance, made, [f"{w.name}-{number}" for w in workers])


def end_batch(sp: Any, told: Acknowledged, chance: random.Random, made: list[Any], names: Sequence[str]) -> None:
    """Publish a batch or seal it or neither, and let it go or not."""
    act = chance.random()
    if made and act < 0.3:
        sp.publish(made, timeout_s=120)
        told.tell("published", sessions=sorted({ref.session_id for ref in made}))
    elif act < 0.8:
        sp.flush()
    if chance.random() < 0.6:
        told.tell("letting", sessions=list(names))
        sp.release(made)
        for session_id in names:
            if session_id not in {ref.session_id for ref in made}:
                sp.discard(session_id)
        told.tell("let", sessions=list(names))
        sp.flush()


def read(uri: str, cold: str) -> None:
    """Read what can be listed, from the hot root and from the cold one, until killed; say what is wrong."""
    told = Acknowledged(1)
    told.tell("ready")
    while True:
        for place in (uri, cold):
            try:
                with spool.open(place, readonly=True) as sp:
                    for ref in list(sp.segments())[-SAMPLE:]:
                        with contextlib.suppress(ReleasedError):
                            soak.check_segment(sp, ref)
            except NotFoundError as error:
                if "no spool.json" not in str(error):
                    told.tell("wrong", where=place, error=repr(error))
            except (SpoolError, AssertionError) as error:
                told.tell("wrong", where=place, error=repr(error))
        time.sleep(0.1)


def prepare(uri: str, seed: int, role: str) -> None:
    """Make sure that there is work for another process: packs to bring over, to evict, to delete, to roll up."""
    with spool.open(uri) as sp:
        told = Acknowledged(1)
        worker = Worker(sp, told, f"p{seed}", seed)
        n_left, number = (4 if role == "rollup" else 1), 0
        while n_left:
            made, session_id = worker.batch(number, ends=True), f"p{seed}-{number}"
            sp.flush()
            if role == "collect":
                told.tell("letting", sessions=[session_id])
                sp.release(made)
                sp.flush()
            number, n_left = number + 1, n_left - bool(made)  # a session without a generated token has no segment
        if role != "spill":
            fd, spiller = elect.require_lock(str(sp.config.root)), sp._tiers.spiller()
            spiller._feeder.catch_up()
            while spiller._spill():
                pass
            spiller.close()
            locks.release(fd)


def follow(uri: str) -> None:
    """Be a spiller."""
    with spool.open(uri) as sp:
        sp.spill(follow=True)


def evict_all(uri: str) -> None:
    """Evict every pack that is in the cold root, and every unit that no other pack names."""
    with spool.open(uri) as sp:
        root, fd = str(sp.config.root), elect.require_lock(str(sp.config.root))
        sp._feeds.catch_up()
        for row in list(sp._catalog.packs.rows("spilled")):
            evict(root, sp._catalog, row.stream, row.pack)
        with contextlib.closing(sp._tiers.spiller()) as spiller:
            spiller._evict_units(1 << 60, 0)
        locks.release(fd)


def collect(uri: str) -> None:
    """Delete what may go, twice: what was marked first has its objects deleted then."""
    with spool.open(uri) as sp:
        time.sleep(UNITS_AGE_S)
        sp.gc()
        time.sleep(0.06)
        sp.gc()


def roll_up(uri: str) -> None:
    """Roll manifests up, a few at a time."""
    rollup.OBJECTS_ROLLED = 3
    with spool.open(uri) as sp:
        rollup.roll_up(sp._feeds.cold, sp._feeder.stream_names())


# -- what was promised -----------------------------------------------------------------------------------------------


class Claims(soak.Claims):
    """What was acknowledged; sessions in ``loose`` somebody meant to let go, those ``published`` are cold."""

    def __init__(self) -> None:
        super().__init__()
        self.loose: set[str] = set()
        self.published: set[str] = set()
        self.units: dict[str, tuple[str, int]] = {}
        self.new: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.wrong: list[str] = []

    def add(self, line: bytes) -> None:
        fact = json.loads(line)
        with self.lock:
            match fact["kind"]:
                case "letting":
                    self.loose.update(fact["sessions"])
                case "published":
                    self.published.update(fact["sessions"])
                case "let":
                    pass
                case "unit":
                    self.units[fact["key"]] = fact["session"], fact["crc"]
                case "wrong":
                    self.wrong.append(str(fact))
                case _:
                    n_before = len(self.steps)
                    super().add(line)
                    self.new += list(self.steps)[n_before:]

    def chosen(self, chance: random.Random, whole: bool) -> dict[tuple[str, str], Any]:
        """Return acknowledged steps to be checked now: the new ones and some others, or all."""
        with self.lock:
            keys = list(self.steps)
            some = keys if whole else {*self.new, *chance.sample(keys, min(SAMPLE, len(keys)))}
            self.new = []
            return {key: self.steps[key] for key in some}


def check_round(uri: str, cold: str, claims: Claims, chance: random.Random, *, whole: bool = False) -> None:
    """Check, while others work on, what must hold at any time."""
    steps = claims.chosen(chance, whole)
    sessions = sorted({key[0] for key in steps})
    with spool.open(uri, readonly=True) as hot:
        for (session_id, _), (ref, crc) in steps.items():
            check_claim(hot, ref, crc, claims, loose=session_id in claims.loose)
        for session_id in sessions if whole else chance.sample(sessions, min(12, len(sessions))):
            check_session(hot, session_id, claims)
        check_units(hot, claims, claims.units if whole else sample(claims, claims.units, chance))
    try:
        there = spool.open(cold, readonly=True)
    except NotFoundError:
        return
    with there:
        with claims.lock:
            published = sorted(claims.published - claims.loose)
        for session_id in published if whole else chance.sample(published, min(6, len(published))):
            check_session(there, session_id, claims)
        with claims.lock:
            units = [key for key, (session_id, _) in claims.units.items() if session_id in claims.published]
        check_units(there, claims, units if whole else sample(claims, units, chance))
        check_zarr(there._feeds.cold.objects)


def sample(claims: Claims, keys: Iterable[str], chance: random.Random) -> list[str]:
    """Return some of ``keys``."""
    with claims.lock:
        found = list(keys)
    return chance.sample(found, min(12, len(found)))


def check_units(sp: Any, claims: Claims, keys: Iterable[str]) -> None:
    """Check that units that sessions name are there, unless those were let go."""
    for key in list(keys):
        try:
            assert zlib.crc32(sp.read_unit(key)) == claims.units[key][1], f"{key}: another array"
        except NotFoundError:
            with claims.lock:
                assert claims.units[key][0] in claims.loose, f"{key} is gone, and session {claims.units[key][0]} is not"


def check_claim(sp: Any, ref: Any, crc: int, claims: Claims, *, loose: bool) -> None:
    """Check that an acknowledged step reads back equal, or was let go and says so."""
    try:
        assert crc_of(check_step(sp, ref)) == crc, f"{ref.id}: other tokens"
    except ReleasedError:
        with claims.lock:
            loose = loose or ref.session_id in claims.loose
        assert loose, f"{ref.id}: released, and nobody did that"


def check_session(sp: Any, session_id: str, claims: Claims) -> None:
    """Check that a session's acknowledged steps are all listed, and its transactions are whole."""
    visible: dict[tuple[str, str], Any] = {}
    try:
        visible = {(session_id, ref.step_id): ref for ref in sp.steps(session_id)}
    except (NotFoundError, ReleasedError):
        with claims.lock:
            assert session_id in claims.loose, f"{session_id} is not there in {sp.config.url}"
        return
    with claims.lock:
        known = {key: ref for key, (ref, _) in claims.steps.items() if key[0] == session_id}
        loose, gone = session_id in claims.loose, claims.gone & visible.keys()
    assert not gone, f"steps of a block that raised are visible: {gone}"
    soak.check_transactions(visible)
    for key, ref in known.items():
        assert loose or visible.get(key) == ref or visible.get(key, ref).extents == ref.extents, f"{ref.id} is lost"
        assert loose or key in visible, f"{ref.id}: acknowledged, and not listed in {sp.config.url}"


def check_zarr(objects: Objects) -> None:
    """Check that zarr-python finds no rows in cold arrays that are not there: they would read as zeros."""
    import zarr

    for key in [info.key for info in objects.list("streams/") if info.key.endswith("/token_ids/zarr.json")]:
        for start, count in _valid(objects, key):
            try:
                rows = _rows(zarr, objects, key, start, count)
            except (FileNotFoundError, NotFoundError):
                rows = np.zeros(count)
            missing = not rows.any() if count >= 8 else False
            assert not missing or [start, count] not in _valid(objects, key), f"{key}: rows {start}+{count} are zeros"


def _valid(objects: Objects, key: str) -> list[list[int]]:
    try:
        return [list(pair) for pair in json.loads(objects.get(key))["attributes"]["spool:rows"]]
    except NotFoundError:
        return []


def _rows(zarr: Any, objects: Objects, key: str, start: int, count: int) -> Any:
    url = f"{objects.url}/{key.removesuffix('/zarr.json')}"
    array = zarr.open_array(url.removeprefix("file://") if url.startswith("file://") else url, mode="r")
    return np.asarray(array[start : start + count])


# -- the end ---------------------------------------------------------------------------------------------------------


def check_end(uri: str, cold: str, claims: Claims, chance: random.Random) -> None:
    """Let a quiet spiller finish, then check that all is there and nothing is left over."""
    root = str(parse_uri(uri).root)
    age_temporaries(root, cold)
    spill(uri)
    with spool.open(uri) as sp:
        time.sleep(UNITS_AGE_S)
        sp.gc()
    time.sleep(0.1)
    spill(uri)
    with spool.open(uri) as sp:
        sp.gc()
        check_no_other_units(root, sp)
        before = sp._catalog.dump()
        sp.rebuild()
        assert_same(before, sp._catalog.dump(), "hot, rebuilt")
        assert sp._catalog.check() == []
        assert sp._catalog.packs.seal_requests() == {}, "a request that nobody waits for"
        check_account(root, sp)
        objects = sp._feeds.cold.objects
        with spool.open(cold, readonly=True) as there:
            there._feeds.catch_up(fresh=True)
            assert_same(before, there._catalog.dump(), "from the cold root")
        check_hot_files(root)
        check_objects(objects)
        assert objects.abort_stale_uploads(0) == 0, "uploads that never ended"
        assert sp.recover() == []
    check_round(uri, cold, claims, chance, whole=True)


def spill(uri: str) -> None:
    """Run a spiller until nothing needs it."""
    subprocess.run([sys.executable, "-m", "spool", "spill", uri, "--until-idle"], cwd=FOLDER, check=True, timeout=300)


def age_temporaries(root: str, cold: str) -> None:
    """Make temporary files look as old as they have to be to count as left over."""
    for top in (root, cold.removeprefix("file://") if cold.startswith("file://") else root):
        for folder, _, names in os.walk(top):
            for name in names:
                if name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(f"{folder}/{name}", (1, 1))


def check_account(root: str, sp: Any) -> None:
    """Check that the account of room is what the files take; small files in a stream's folder may have come since."""
    usage = sp._catalog.usage()
    assert usage.get(ACCOUNT, 0) == HotUnits(root).measure(), "units take something else than what is accounted"
    for stream in stream_names(root):
        took, accounted = measure(root, stream), usage.get(stream, 0)
        markers = sum(name.endswith((".cold", ".gone")) for name in os.listdir(f"{root}/streams/{stream}/records"))
        assert abs(took - accounted) <= 4096 * (markers + 1), f"{stream} takes {took}, {accounted} are accounted"


def check_no_other_units(root: str, sp: Any) -> None:
    """Check that the units that are left are those that live sessions name, and that nothing waits."""
    needed, objects = sp._tiers.named_units().needed, sp._feeds.cold.objects
    names = [name for path, _, names in os.walk(f"{root}/units") for name in names]
    assert needed.issuperset(names), f"units of the hot root that nobody names: {set(names) - needed}"
    keys = {info.key for info in objects.list(UNITS)} - {info.key for info in objects.list(GONE_UNITS)}
    assert keys <= set(map(unit_path, needed)), f"units of the cold root that nobody names: {keys}"
    assert all(item.gone.done for item in Deletions(objects).all()), "a deletion of units was not completed"


def check_hot_files(root: str) -> None:
    """Check that each file of a hot root belongs to something."""
    left = [name for name in os.listdir(root) if name.startswith(".")]
    left += [name for name in os.listdir(f"{root}/streams") if name.startswith(".")]
    for stream in stream_names(root):
        folder = f"{root}/streams/{stream}"
        packs = list_packs(f"{folder}/records")
        assert not packs.logs, f"{stream}: packs {packs.logs} were not sealed"
        assert not packs.gone & (packs.sealed | packs.cold), f"{stream}: a deletion was not completed"
        for path, _, names in os.walk(folder):
            parts = path.removeprefix(folder).split("/")
            orphan = len(parts) > 3 and parts[2] == "c" and int(parts[3]) not in packs.sealed
            left += [f"{path}/{name}" for name in names if orphan or name.startswith((".", "tail-", "spare-"))]
    assert not left, f"left over in the hot root: {left}"


def check_objects(objects: Objects) -> None:
    """Check that each object belongs to a pack with a manifest, and each pack has its objects."""
    found = {info.key: info.size for info in objects.list("")}
    tombstones = {pack for key in found if key.startswith(GONE) and (pack := parse_gone_key(key))}
    for key in found:
        if key.startswith(GONE):
            assert parse_tombstone(objects.get(key), key).done, f"{key}: a deletion was not completed"
    expected, arrays = {"spool.json"}, set[str]()
    for key in found:
        if key.startswith(MANIFESTS):
            entries = [entry for entry, _ in manifest.decode(objects.get(key))]
            for entry in entries:
                if (entry.stream, entry.pack) not in tombstones:
                    expected |= entry.objects.keys()
                    for name, size in entry.objects.items():
                        assert found.get(name) == size, f"{name}: {found.get(name)} of {size} bytes"
        if key.endswith("/zarr.json"):
            arrays.add(key)
    kept = {key for key in found if key.startswith((MANIFESTS, FACTS, GONE, UNITS))}
    orphans = found.keys() - expected - kept - arrays
    assert not orphans, f"objects of no pack: {sorted(orphans)[:8]} ({len(orphans)})"
    lone = {parse_gone_key(GONE + key.split("-", 1)[1].removesuffix(".parquet")) for key in kept if "rollup" not in key}
    assert not [pack for pack in lone & tombstones if any(_names(key, pack) for key in kept)], "a manifest of no pack"


def _names(key: str, pack: Any) -> bool:
    return key.startswith(MANIFESTS) and key.endswith(f"-{pack[0]}-{pack[1]}.parquet")


# -- rounds ----------------------------------------------------------------------------------------------------------


class Process:
    """A forked process that can be killed; what it acknowledges is drained into the claims."""

    def __init__(
        self, role: str, uri: str, cold: str, claims: Claims, *, seed: int = 0, at: str = "", nth: int = 1
    ) -> None:
        self.role = role
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        out, into = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(into, 1)
            os.dup2(self._errors.fileno(), 2)
            _be_and_end(role, uri, cold, seed, at, nth)
        os.close(into)
        self.returncode: int | None = None
        self._claims, self.ready = claims, threading.Event()
        self._thread = threading.Thread(target=self._drain, args=(out,), daemon=True)
        self._thread.start()

    def _drain(self, out: int) -> None:
        with os.fdopen(out, "rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self._claims.add(line)
                    self.ready.set()
        self.ready.set()

    def wait(self, timeout_s: float) -> int | None:
        """Return how it ended, None where it has not."""
        until = time.monotonic() + timeout_s
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(0.01)
        return self.returncode

    def kill(self) -> bool:
        """Kill it; return whether it was alive. That it ended otherwise, and not well, is a finding."""
        alive = self.wait(0) is None
        if alive:
            os.kill(self.pid, signal.SIGKILL)
        self.wait(60)
        self._thread.join()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        self._errors.close()
        if self.returncode not in (0, -signal.SIGKILL):
            self._claims.wrong.append(f"{self.role} ended with {self.returncode}: {text[-3000:]}")
        return alive


def _be_and_end(role: str, uri: str, cold: str, seed: int, at: str, nth: int) -> NoReturn:
    code = 1
    try:
        elect.start = lambda *_: None  # the harness does
        if at:
            kill_at(at, nth)
        be(role, uri, cold, seed)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def be(role: str, uri: str, cold: str, seed: int) -> None:
    """Be one of the processes."""
    match role:
        case "write":
            write(uri, seed, 2)
        case "read":
            read(uri, cold)
        case "rollup":
            roll_up(uri)
        case _ if role.startswith("before "):
            prepare(uri, seed, role.removeprefix("before "))
        case _:
            with contextlib.suppress(LockedError):
                {"spill": follow, "evict": evict_all, "collect": collect}[role](uri)


class Harness:
    """Rounds of kills on one spool.

    Args:
        folder: of the hot root, and of the cold one where ``cold`` is empty.
        cold: URL of the cold root.
        seed: of what is random.
    """

    def __init__(self, folder: str, cold: str, seed: int) -> None:
        self.cold = cold or f"file://{folder}/cold"
        self.uri = f"file://{folder}/hot?spill={self.cold}&{OPTIONS}"
        self.claims, self.chance = Claims(), random.Random(seed)
        self.kills: Counter[str] = Counter()
        self._seed = seed * 1_000_000
        self._others: list[Process] = []
        spool.open(self.uri).close()

    def run(self, points: Iterable[str], n_kills: int, *, report: Any = sys.stdout) -> None:
        """Kill at ``points``, until there were ``n_kills``; then kill what is left, and check everything.

        Raises:
            AssertionError, SpoolError: what was found.
        """
        started, number = time.monotonic(), 0
        try:
            for point in points:
                if self.kills.total() >= n_kills:
                    break
                died = self._round(point)
                check_round(self.uri, self.cold, self.claims, self.chance)
                assert not self.claims.wrong, self.claims.wrong
                number += 1
                report.write(
                    f"round {number}: {point} {'reached' if died else 'not reached, killed at random'}; "
                    f"{self.kills.total()} kills, {len(self.claims.steps)} steps, {time.monotonic() - started:.0f} s\n"
                )
                report.flush()
        finally:
            for other in self._others:
                self.kills["at random"] += other.kill()
        assert not self.claims.wrong, self.claims.wrong
        check_end(self.uri, self.cold, self.claims, self.chance)

    def _start(self, role: str, at: str = "", nth: int = 1) -> Process:
        self._seed += 1
        return Process(role, self.uri, self.cold, self.claims, seed=self._seed, at=at, nth=nth)

    def _keep(self) -> None:
        """Have a writer, a spiller and sometimes a reader at work beside the victim."""
        self._others = [other for other in self._others if other.wait(0) is None or other.kill()]
        roles = [other.role for other in self._others]
        for role, chance in (("write", 1.0), ("spill", 0.5), ("read", 0.3)):
            if role not in roles and self.chance.random() < chance:
                self._others.append(self._start(role))
        for other in self._others:
            other.ready.wait(LONGEST_S) if other.role == "write" else None

    def _round(self, point: str) -> bool:
        role = ROLE_OF.get(point.partition(".")[0], self.chance.choice(["write", "spill", "collect", "evict"]))
        self._keep()
        if role != "write":  # the others want the spiller's lock, or its work
            self._end("spill")
        if role in ROLES_WITH_WORK:
            before = self._start(f"before {role}")
            assert before.wait(LONGEST_S * 3) is not None, f"{before.role} does not end"
            before.kill()
        nth = self.chance.choice([1, 1, 2, 3]) if point in POINTS and role == "write" else 1
        victim = self._start(role, point if point in POINTS else "", nth)
        died = False
        if point in POINTS:
            died = victim.wait(LONGEST_S if role in ("write", "spill") else 60) == -signal.SIGKILL
        else:
            victim.wait(self.chance.uniform(0.3, 2.0))
        if victim.kill():
            self.kills["at random"] += 1
        elif died:
            self.kills[point] += 1
        if self.chance.random() < 0.4:
            self._end("write")
        return died

    def _end(self, role: str) -> None:
        for other in [other for other in self._others if other.role == role]:
            self.kills["at random"] += other.kill()
            self._others.remove(other)


def each_point(only: Sequence[str], n_random: int, chance: random.Random) -> Iterator[str]:
    """Yield the points in turn, each turn with ``n_random`` random moments among them."""
    while True:
        names = [*(only or POINTS), *["at random"] * n_random]
        if len(only) != 1:
            names.sort(key=lambda name: (POINTS.index(name) if name in POINTS else chance.randrange(len(POINTS)),))
        yield from names


def main() -> None:
    """Kill until something is found, or enough were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", default="", help="URL of an empty cold root; its endpoint and keys from AWS_...")
    parser.add_argument("--folder", help="where the hot root is made")
    parser.add_argument("--point", action="append", default=[], choices=[*POINTS, "at random"])
    given = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="spool-crash-", dir=given.folder)
    harness = Harness(folder, given.cold, given.seed)
    points = each_point(given.point, 5, random.Random(given.seed))
    try:
        harness.run(points, given.kills)
    except (AssertionError, SpoolError) as error:
        sys.stderr.write(f"seed {given.seed}: {error}\nthe spool is left at {folder}\n")
        raise SystemExit(1) from error
    for name, n in sorted(harness.kills.items()):
        sys.stdout.write(f"{n:6} {name}\n")
    sys.stdout.write(f"{harness.kills.total()} kills, {len(harness.claims.steps)} steps, nothing found\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
