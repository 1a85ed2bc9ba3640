"""A cold root on an S3 server that is late, drops, cuts, refuses and lies."""

from __future__ import annotations

import contextlib
import logging
import random
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from hostile_s3 import HostileS3
from s3_server import free_port
from tiers import wait_for

from spool.errors import IntegrityError, NotFoundError, SpoolError, StorageError
from spool.stores import remote
from spool.stores.objects import PIECE_BYTES, open_objects
from spool.stores.retry import TransientError, persist

DATA = random.Random(5).randbytes(300_000)
WHOLE = [("k", start, start + 50_000) for start in range(0, 300_000, 50_000)]


@pytest.fixture
def store(s3_root, hostile, caplog):
    caplog.set_level(logging.DEBUG, logger="spool.stores")
    store = open_objects(s3_root, deadline_s=20, concurrency=4)
    store.put("k", DATA)
    hostile.heal()
    yield store
    store.close()


def retries(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "spool.stores"]


# --------------------------------------------------------------------------------------- what another try mends


@pytest.mark.parametrize("action", ["cut", "short", "long", 500, 503])
@pytest.mark.parametrize("times", [1, 3])
def test_a_read_is_tried_again_with_a_fresh_request(store, hostile, caplog, action, times):
    hostile.fault(action, "GET", times=times)
    assert store.get_range("k", 1000, 90_000) == DATA[1000:90_000]
    assert hostile.count("GET") == times + 1
    assert len(retries(caplog)) == times
    assert all("/root/k" in line and "try" in line for line in retries(caplog))


def test_creation_is_exclusive_where_the_server_can(store, hostile):
    assert store.creates_exclusively()  # the proxy keeps to the condition
    assert store.create("new", b"first") and not store.create("new", b"second")
    assert store.get("new") == b"first"
    # the answer is lost: it is there, and the next try finds it
    hostile.fault("mute", "PUT", part="late", times=1)
    assert not store.create("late", b"mine")
    assert store.get("late") == b"mine"
    # a server that does not know the condition puts it all the same
    hostile.fault(501, "PUT", times=1)
    assert store.create("old", b"x") and store.get("old") == b"x"


def test_what_reads_back_wrong_is_put_again_before_it_is_given_up(store, hostile):
    hostile.fault("short", "HEAD", part="twice", times=1)  # as if somebody else had put another one meanwhile
    store.put("twice", DATA)
    assert hostile.count("PUT", "twice") == 2
    assert store.get("twice") == DATA


def test_a_server_that_is_down_for_a_while_is_asked_again(store, s3_server, s3_root, monkeypatch, caplog):
    monkeypatch.setattr(remote, "_OUTAGE_S", 0.0)
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with contextlib.closing(open_objects(s3_root, deadline_s=20)) as late:
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(late.get, "k"), threads.submit(late.list, "")]
            wait_for(lambda: len(retries(caplog)) > 3, what="tries that fail")
            assert late.failing_since is not None
            with HostileS3(s3_server.endpoint, port):
                assert calls[0].result() == DATA
                assert [info.key for info in calls[1].result()] == ["k"]
        assert late.failing_since is None
        assert any(f"the connection to http://127.0.0.1:{port} failed" in line for line in retries(caplog))
        assert any(f"{s3_root} answers again, after " in line for line in retries(caplog))
    with contextlib.closing(open_objects(s3_root, deadline_s=1)) as never, pytest.raises(StorageError) as caught:
        never.get("k")
    assert f"the connection to http://127.0.0.1:{port} failed" in str(caught.value)


@pytest.mark.parametrize("action", ["drop", "cut", "short", "long", 500, 503])
def test_every_call_gets_over_a_bad_spell(store, hostile, action):
    # one that cuts a body and in the same breath lies about the object's size cannot be found out
    for method in ("GET", "PUT", "POST", *(["HEAD"] if action != "short" else [])):
        hostile.fault(action, method, times=2)
    assert store.get("k") == DATA
    assert b"".join(store.get_ranges(WHOLE)) == DATA
    store.put("l", DATA[:1000])
    assert store.info("l").size == 1000
    if action in ("drop", 500, 503):  # a cut listing is an XML error, which the client takes for good
        hostile.fault(action, "GET", part="list-type", times=2)
    assert [info.key for info in store.list("")] == ["k", "l"]
    store.delete(["l"])
    assert store.info("l") is None


def test_a_stalled_body_is_tried_again_long_before_the_deadline(s3_root, hostile, store, caplog):
    quick = open_objects(s3_root, deadline_s=6)
    hostile.fault("stall", "GET", times=1)
    began = time.monotonic()
    assert quick.get_range("k", 0, 300_000) == DATA
    assert 1 < time.monotonic() - began < 6
    assert len(retries(caplog)) == 1
    quick.close()


def test_a_server_that_answers_late_is_waited_for(store, hostile, caplog):
    hostile.fault("delay", n=0.3)
    assert b"".join(store.get_ranges(WHOLE)) == DATA
    assert retries(caplog) == []


def test_bytes_changed_on_the_way_up_are_noticed_and_sent_again(store, hostile, caplog):
    hostile.fault("corrupt", "PUT", times=2)
    store.put("l", DATA)
    assert store.get("l") == DATA
    assert len(retries(caplog)) == 2
    hostile.fault("corrupt", "PUT", part="partNumber=2", times=1)
    large = DATA * (PIECE_BYTES // len(DATA) + 2)
    store.put("m", large)
    assert store.get("m") == large


def test_a_multipart_upload_gets_over_a_bad_spell(store, hostile):
    large = DATA * (2 * PIECE_BYTES // len(DATA) + 1)
    hostile.fault(503, "POST", part="uploads", times=1)
    hostile.fault(500, "PUT", part="partNumber=1", times=2)
    hostile.fault("drop", "PUT", part="partNumber=2", times=1)
    hostile.fault("mute", "POST", part="uploadId", times=1)  # done, but the client does not hear of it
    store.put("m", large)
    assert hostile.count("POST", "uploadId") == 2
    assert store.get("m") == large
    assert store.abort_stale_uploads(0) == 0


# -------------------------------------------------------------------------------------- what no other try mends


def test_short_bodies_said_to_be_whole_are_an_integrity_error_in_the_end(store, hostile):
    hostile.fault("short", "GET", n=10)
    with pytest.raises(IntegrityError, match=r"/root/k.*\[100, 500\).*390.*400") as caught:
        store.get_range("k", 100, 500)
    details = caught.value.details
    assert (details["key"], details["range"], details["got"], details["expected"]) == ("k", [100, 500], 390, 400)
    assert details["tries"] == hostile.count("GET") == 5
    with pytest.raises(IntegrityError, match="/root/k") as caught:
        store.get("k")
    assert (caught.value.details["got"], caught.value.details["expected"]) == (299_990, 300_000)


@pytest.mark.parametrize("action", ["cut", "drop", 503, "stall"])
def test_what_does_not_end_is_given_up_at_the_deadline(s3_root, hostile, store, caplog, action):
    quick = open_objects(s3_root, deadline_s=2)
    quick.info("k")
    hostile.fault(action, "GET")
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"/root/k.*tries"):
        quick.get_range("k", 0, 100_000)
    assert time.monotonic() - began < 4
    assert hostile.count("GET") >= 2
    assert len(retries(caplog)) >= 1
    quick.close()


@pytest.mark.parametrize(
    ("status", "kind"), [(403, StorageError), (404, NotFoundError), (400, StorageError), (501, StorageError)]
)
def test_an_answer_that_cannot_change_is_raised_at_once(store, hostile, caplog, status, kind):
    hostile.fault(status)
    calls = (lambda: store.get_range("k", 0, 9), lambda: store.get("k"), lambda: store.put("k", b"x"))
    for n, call in enumerate(calls, 1):
        with pytest.raises(kind, match="/root/k"):
            call()
        assert len(hostile.requests) == n
    if status != 404:
        for call in (lambda: store.info("k"), lambda: store.list("x"), lambda: store.delete(["k"])):
            with pytest.raises(kind):
                call()
    assert retries(caplog) == []
    hostile.heal()
    assert store.get("k") == DATA


def test_credentials_revoked_half_way_are_said_at_once(store, hostile, caplog):
    hostile.fault(403, after=5)
    assert store.get_ranges(WHOLE[:4]) == [DATA[start:stop] for _, start, stop in WHOLE[:4]]
    with pytest.raises(StorageError, match=r"/root/k.*403.*credentials") as caught:
        store.get_ranges(WHOLE * 4)
    assert caught.value.details["status"] == 403
    assert len(hostile.requests) <= 5 + 4 + 4
    hostile.heal()
    hostile.fault(403, after=2)
    with pytest.raises(StorageError, match=r"/root/m.*credentials"):
        store.put("m", bytes(3 * PIECE_BYTES))
    assert retries(caplog) == []
    hostile.heal()
    assert store.info("m") is None
    assert store.abort_stale_uploads(0) == 1
    store.put("m", b"again")
    assert store.get("m") == b"again"


@pytest.mark.parametrize("size", [1000, PIECE_BYTES + 1])
def test_an_upload_that_does_not_read_back_equal_is_removed(s3_root, hostile, store, size):
    checked = open_objects(s3_root, verify="always")
    hostile.fault("garble", "GET", part="/m", after=size > PIECE_BYTES)
    store.put("m", bytes(size))  # its size is right, and no more is looked at
    assert hostile.count("GET") == 0
    with pytest.raises(IntegrityError, match=r"/root/m.*removed"):
        checked.put("m", bytes(size))
    assert store.info("m") is None
    hostile.heal()
    hostile.fault("short", "HEAD", n=1)
    with pytest.raises(IntegrityError, match=rf"{size - 1} bytes, expected {size}"):
        store.put("m", bytes(size))
    hostile.heal()
    assert store.info("m") is None
    checked.put("m", bytes(size))
    assert store.get("m") == bytes(size)
    checked.close()


@pytest.mark.parametrize("part", ["partNumber=3", "uploadId"])
def test_an_upload_that_fails_leaves_nothing(store, hostile, part):
    store.put("m", b"as it was")
    hostile.fault(400, "PUT" if "part" in part else "POST", part=part)
    with pytest.raises(StorageError, match="/root/m"):
        store.put("m", bytes(3 * PIECE_BYTES))
    assert hostile.count("DELETE", "uploadId") == 1
    hostile.heal()
    assert store.get("m") == b"as it was"
    assert store.abort_stale_uploads(0) == 0
    store.put("m", DATA)
    assert store.get("m") == DATA


def test_a_bucket_that_is_not_there_is_no_missing_object(s3_root, hostile):
    store = open_objects("s3://no-such-bucket/x")
    for call in (
        lambda: store.get("k"),
        lambda: store.get_range("k", 0, 1),
        lambda: store.list(""),
        lambda: store.put("k", b""),
    ):
        with pytest.raises(StorageError, match="no-such-bucket"):
            call()
    store.close()


def test_a_server_that_is_not_there(monkeypatch, s3_root, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:sEcrEt@127.0.0.1:9")
    store = open_objects(s3_root, deadline_s=1)
    with pytest.raises(StorageError, match="reached") as caught:
        store.get("k")
    assert "sEcrEt" not in f"{''.join(traceback.format_exception(caught.value))}{caught.value.details}{caplog.text}"
    store.close()


# ----------------------------------------------------------------------------------------------- what is shown


def test_no_credential_is_in_errors_logs_or_reprs(s3_server, store, s3_root, hostile, caplog, monkeypatch):
    shown = [repr(store), str(store.url)]

    def fail(store, *actions):
        for action in actions:
            hostile.heal()
            if action:
                hostile.fault(action)
            for call in (lambda: store.get_range("k", 0, 9), lambda: store.put("k", b"x"), lambda: store.list("")):
                with pytest.raises(SpoolError) as caught:
                    call()
                shown.extend([repr(caught.value), repr(caught.value.details)])
                shown.extend(traceback.format_exception(caught.value))

    fail(open_objects(s3_root, deadline_s=0.5), 403, 400, 503, "drop")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sEcrEt" * 5)
    fail(open_objects(s3_root, deadline_s=1), None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
    fail(open_objects(s3_root, deadline_s=1), None)
    assert len(shown) > 50
    text = "\n".join([*shown, *retries(caplog)])
    assert retries(caplog)
    for secret in (s3_server.key, s3_server.secret, "sEcrEt", "AKIAWRONG", "Signature="):
        assert secret not in text


# ------------------------------------------------------------------------------------------- the layer itself


def failing(n, **how):
    """Return a call that fails ``n`` times, and the list of its time limits."""
    limits = []

    def call(limit_s):
        limits.append(limit_s)
        if len(limits) <= n:
            raise TransientError("it rained", kind=StorageError, advice="wait", key="k", **how)
        return "done"

    return call, limits


def test_pauses_grow_and_leave_time_for_another_try(caplog):
    call, limits = failing(4)
    began = time.monotonic()
    assert persist(call, what="read x", deadline_s=30) == "done"
    assert 0.7 < time.monotonic() - began < 4
    assert len(limits) == 5
    assert limits == sorted(limits, reverse=True)
    assert limits[0] <= 15
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert all("cannot read x: it rained; try" in line for line in retries(caplog))


def test_patience_ends_with_the_deadline_or_the_tries():
    call, limits = failing(100)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot read x: it rained, \d tries in .* s; wait") as caught:
        persist(call, what="read x", deadline_s=0.5)
    assert time.monotonic() - began <= 0.6
    assert caught.value.details == {"key": "k", "tries": len(limits)}
    call, limits = failing(100, tries=2)
    with pytest.raises(StorageError):
        persist(call, what="read x", deadline_s=60)
    assert len(limits) == 2


def test_other_errors_pass_through():
    def call(_limit_s):
        raise NotFoundError("no x")

    with pytest.raises(NotFoundError):
        persist(call, what="read x", deadline_s=60)
