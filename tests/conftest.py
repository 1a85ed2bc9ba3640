"""Fixtures of every test."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from zlib import crc32

import pytest
from hostile_s3 import HostileS3
from hypothesis import HealthCheck, settings
from s3_server import S3Server

KINDS = ("file", "s3")
"""A cold root is on a shared folder, or on S3."""

SOAK = int(os.environ.get("SPOOL_SOAK", "1"))
"""How many times more the randomised tests try; 1 in CI."""

settings.register_profile(
    "spool",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("spool")


@pytest.fixture
def spool_uri(tmp_path):
    """A URI of a spool that does not exist yet."""
    return f"file://{tmp_path}/spool"


@pytest.fixture
def open_spool(spool_uri):
    """Open a spool (by default `spool_uri`) that is closed after the test: ``open_spool(options="hot_bytes=1GiB")``."""
    import spool

    opened = []

    def open_(uri=None, *, options="", fields=()):
        uri = spool_uri if uri is None else uri
        sp = spool.open(f"{uri}?{options}" if options else uri, fields=fields)
        opened.append(sp)
        return sp

    yield open_
    for sp in reversed(opened):
        sp.close()


@pytest.fixture
def sp(open_spool):
    """An open, empty spool."""
    return open_spool()


@pytest.fixture
def by_hand(monkeypatch):
    """No spiller is started: what is to be brought over a test brings over itself."""
    from spool.spiller import elect

    monkeypatch.setattr(elect, "start", lambda *_: None)


@pytest.fixture(scope="module")
def shared_sp(tmp_path_factory):
    """An open spool for all tests of a module that look at their own session only: name no session."""
    import spool

    with spool.open(str(tmp_path_factory.mktemp("shared") / "spool")) as sp:
        yield sp


def pytest_addoption(parser):
    parser.addoption(
        "--both-tiers", action="store_true", help="tests of a cold root run on a folder and on S3, not on one of them"
    )


def pytest_collection_modifyitems(config, items):
    """Run each test of `cold` on one kind of cold root, the same one each time; half of them on either."""
    if config.getoption("both_tiers"):
        return
    left = [item for item in items if not _has_turn(item)]
    items[:] = [item for item in items if _has_turn(item)]
    config.hook.pytest_deselected(items=left)


def _has_turn(item):
    if item.get_closest_marker("takes_turns") is None:
        return True
    parts = item.callspec.id.split("-")
    (kind,) = set(parts) & set(KINDS)
    parts.remove(kind)
    return kind == KINDS[crc32(f"{item.originalname}{parts}".encode()) % len(KINDS)]


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server, the same for all tests of a process."""
    with S3Server() as server:
        server.make_bucket("spool")
        yield server


@pytest.fixture
def s3_root(s3_server, monkeypatch):
    """The URL of an empty cold root on the S3 server; its endpoint and keys are in the environment."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://spool/{secrets.token_hex(4)}/root"


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.takes_turns) for kind in KINDS])
def cold(request, tmp_path):
    """The URL of a cold root that does not exist yet: on a shared folder, or on the S3 server."""
    return f"file://{tmp_path}/cold" if request.param == "file" else request.getfixturevalue("s3_root")


@pytest.fixture
def hostile(s3_server, s3_root, monkeypatch):
    """A proxy in front of the S3 server that does harm when told; the environment leads to it."""
    with HostileS3(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data; a run without it fails here and says so."""
    path = Path(os.environ.get("SPOOL_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    if not (path / "routing" / "README.md").is_file():
        pytest.fail(
            f"the real data that this test reads is not at {path}: put it there, or name its folder in SPOOL_TEST_DATA"
        )
    return path
