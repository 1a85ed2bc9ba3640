"""The whole system on an object store that fails in every way, and what it never tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import assert_same, record, wait_for

import spool
from spool.config import parse_uri
from spool.errors import ConfigError, StorageError
from spool.spiller.status import read_status

PASSWORD = "hunter2-secret"


@pytest.fixture
def open_hot(tmp_path, s3_root):
    """Open a hot root that spills to the S3 server; closed after the test."""
    opened = []

    def open_(**options):
        query = "&".join(
            f"{key}={value}" for key, value in {"spill": s3_root, "cold_deadline_s": 20, **options}.items()
        )
        opened.append(spool.open(f"file://{tmp_path}/hot?{query}"))
        return opened[-1]

    yield open_
    for sp in opened:
        sp.close()


def spiller_log(tmp_path):
    path = tmp_path / "hot" / "spiller.log"
    return path.read_text() if path.exists() else ""


def assert_nothing_secret(tmp_path, *secrets, texts=()):
    """Check that no file of the spool, no text and no command line holds a secret."""
    wanted = [secret.encode() for secret in secrets]
    for path in Path(tmp_path).rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(secret in data for secret in wanted), path
    for text in texts:
        assert not any(secret in text for secret in secrets)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line, mine = (process / "cmdline").read_bytes(), str(tmp_path).encode()
        except OSError:
            continue
        assert mine not in line or not any(secret in line for secret in wanted), line


TROUBLE = {
    "503": [(503, "PUT", {"times": 3}), (503, "GET", {"times": 2}), (503, "HEAD", {"times": 1})],
    "500": [(500, "", {"times": 4, "after": 2})],
    "drops": [("drop", "PUT", {"times": 2}), ("drop", "GET", {"times": 2})],
    "unheard": [("mute", "PUT", {"times": 2}), ("mute", "POST", {"times": 1})],
    "damaged on the way": [("corrupt", "PUT", {"times": 2})],
    "late": [("delay", "", {"n": 0.05})],
}


@pytest.mark.parametrize("kind", TROUBLE)
def test_what_passes_is_tried_again_and_nobody_notices(open_hot, tmp_path, hostile, s3_server, s3_root, kind):
    for action, method, how in TROUBLE[kind]:
        hostile.fault(action, method, **how)
    sp = open_hot()
    refs = [ref for number in range(2) for ref in record(sp, f"s{number}")]
    wanted = sp.read(refs)
    sp.publish(refs, timeout_s=120)
    hostile.heal()
    with spool.open(s3_root) as there:
        assert_same(there.read(refs), wanted)
    if kind in ("503", "drops"):
        assert read_status(str(tmp_path / "hot")).error is None
    retries = [line for line in spiller_log(tmp_path).splitlines() if "try " in line]
    assert len(retries) <= 12 and len(set(retries)) == len(retries), "one line a retry"
    assert_nothing_secret(tmp_path, s3_server.key, s3_server.secret, texts=[repr(refs)])


@pytest.mark.parametrize(
    ("action", "how"),
    [
        ("cut", {"times": 3}),
        ("short", {"times": 2}),
        ("stall", {"times": 1}),
        ("drop", {"times": 3}),
        (503, {"times": 3}),
    ],
)
def test_reads_from_the_cold_root_survive_it_too(open_hot, hostile, s3_root, action, how):
    sp = open_hot()
    refs = record(sp, "a")
    wanted = sp.read(refs)
    sp.publish(refs, timeout_s=60)
    with spool.open(f"{s3_root}?cold_deadline_s=20") as there:
        assert there.find_session("a")
        hostile.fault(action, "GET", **how)
        assert_same(there.read(refs), wanted)


def test_credentials_revoked_half_way(open_hot, tmp_path, hostile, s3_server, s3_root):
    hot = str(tmp_path / "hot")
    sp = open_hot()
    sp.publish(record(sp, "before"), timeout_s=60)
    hostile.fault(403, "", after=3)
    refs = record(sp, "during")
    wanted = sp.read(refs)
    with pytest.raises(StorageError, match="403") as caught:
        sp.publish(refs, timeout_s=6)
    assert "nothing is lost" in str(caught.value)
    status = read_status(hot)
    assert "403" in status.error and not status.damaged
    n_tries = hostile.count("PUT")
    assert n_tries < 40, "a 403 is not tried again and again"
    (row,) = (row for row in sp._catalog.packs.rows("sealed"))
    assert_same(sp.read(refs), wanted)
    assert row.hot_bytes and sorted(sp._catalog.packs.seal_requests()) == [row.stream]
    hostile.heal()
    sp.publish(refs, timeout_s=60)
    assert read_status(hot).error is None
    wait_for(lambda: not sp._catalog.packs.seal_requests(), what="served requests")
    with spool.open(s3_root) as there:
        assert_same(there.read(refs), wanted)
    assert_nothing_secret(tmp_path, s3_server.key, s3_server.secret, texts=[str(caught.value), status.error])


def test_a_missing_bucket_says_so_and_all_goes_on_once_it_is_there(tmp_path, s3_server, s3_root):
    bucket = s3_root.rsplit("/", 2)[1] + "-late"
    with pytest.raises((StorageError, spool.NotFoundError)) as caught:
        spool.open(f"file://{tmp_path}/hot?spill=s3://{bucket}/x&cold_deadline_s=5")
    assert bucket in str(caught.value)
    s3_server.make_bucket(bucket)
    with spool.open(f"file://{tmp_path}/hot?spill=s3://{bucket}/x") as sp:
        sp.publish(record(sp, "a"), timeout_s=60)


def test_nothing_is_under_a_final_key_after_an_interrupted_put(open_hot, tmp_path, hostile, s3_root):
    hostile.fault(403, "PUT", part="records/")  # shards may arrive, the records never
    sp = open_hot()
    refs = record(sp, "a")
    with pytest.raises(StorageError, match="records"):
        sp.publish(refs, timeout_s=10)
    with spool.open(s3_root) as there:
        assert there.find_session("a") is None and not list(there.sessions())
    stream = refs[0].extents["token_ids"][0].stream
    assert os.path.exists(f"{tmp_path}/hot/streams/{stream}/records/0.arrow")
    assert not os.path.exists(f"{tmp_path}/hot/streams/{stream}/records/0.cold")
    hostile.heal()
    sp.publish(refs, timeout_s=60)
    with spool.open(s3_root) as there:
        assert there.find_session("a")


def test_the_spiller_killed_while_it_uploads_leaves_nothing_half(open_hot, tmp_path, hostile, s3_root):
    hostile.fault("delay", "PUT", n=1.0)
    sp = open_hot()
    refs = record(sp, "a")
    wanted = sp.read(refs)
    sp.flush()

    def begun(n_before):
        sp._tiers._nudge()
        return hostile.count("PUT", "/c/") > n_before

    for _ in range(3):
        n_before = hostile.count("PUT", "/c/")
        wait_for(lambda n=n_before: begun(n), timeout_s=90, what="an upload")
        os.kill(_spiller_pid(tmp_path), 9)
        time.sleep(0.2)
        if sp._catalog.packs.get(refs[0].extents["token_ids"][0].stream, 0).state == "sealed":
            with spool.open(s3_root) as there:
                assert there.find_session("a") is None
    hostile.heal()
    sp.publish(refs, timeout_s=60)
    with spool.open(s3_root) as there:
        assert_same(there.read(refs), wanted)


def _spiller_pid(tmp_path):
    mine = f"{tmp_path}/hot"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if mine in line and "--lock-fd" in line:
            return int(process.name)
    raise AssertionError("no spiller")


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://key:{PASSWORD}@bucket/prefix",
        f"file:///tmp/x?spill=s3://key:{PASSWORD}@bucket/prefix",
        f"file:///tmp/x?spill=s3%3A%2F%2Fkey%3A{PASSWORD}%40bucket%2Fprefix",
        f"file:///tmp/x?spill=https://user:{PASSWORD}@host/path",
        f"file:///tmp/x?spill=s3://{PASSWORD}@bucket/x",
        f"s3://key%3A{PASSWORD}%40bucket/prefix",
    ],
)
@pytest.mark.parametrize("how", ["argument", "environment", "command line"])
def test_a_url_with_a_password_is_refused_and_not_repeated(monkeypatch, uri, how):
    if how == "command line":
        done = subprocess.run([sys.executable, "-m", "spool", "ls", uri], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and PASSWORD not in done.stdout + done.stderr
        return
    if how == "environment":
        monkeypatch.setenv("SPOOL_URI", uri)
    with pytest.raises(ConfigError, match="credentials") as caught:
        parse_uri(None if how == "environment" else uri)
    assert PASSWORD not in str(caught.value) + repr(caught.value.details)


def test_what_is_told_of_a_spool_holds_no_keys(open_hot, tmp_path, s3_server, s3_root):
    sp = open_hot()
    refs = record(sp, "a")
    sp.publish(refs, timeout_s=60)
    with spool.open(s3_root) as there:
        texts = [
            *(ref.to_json() for ref in refs),
            repr(there),
            repr(there.info()),
            repr(sp.info()),
            sp.config.uri,
            str(there.read(refs[0]).ref),
        ]
        objects = there._feeds.cold.objects
        texts += [objects.get(found.key).decode("latin-1") for found in objects.list("")]
    assert_nothing_secret(tmp_path, s3_server.key, s3_server.secret, texts=texts)
    assert len(texts) > 10 and re.search(r"s3://", texts[0])
