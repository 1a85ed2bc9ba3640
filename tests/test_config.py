"""Spool URIs: what they mean, and what is wrong with a bad one, without a word of what may be secret."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlencode

import pytest

import spool
from spool.config import OPTIONS, Retention, parse_uri
from spool.errors import ConfigError


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("file:///a/b", "/a/b"), ("FILE:///a", "/a"), ("file://localhost/a", "/a"), ("file:///a%20b", "/a b"),
        ("file:///a%23b", "/a#b"), ("/a/b?direct=false", "/a/b"), ("/a/x:y", "/a/x:y"), (Path("/a/b"), "/a/b"),
        ("/a%20b", "/a%20b"), ("/ü", "/ü"), ("file:///%C3%BC", "/ü"),
    ],
)  # fmt: skip
def test_locations(uri, root):
    assert parse_uri(uri).root == root


def test_relative_paths_are_made_absolute():
    assert parse_uri("a/b").root == os.path.abspath("a/b")
    assert parse_uri("./s3:bucket").root == os.path.abspath("s3:bucket")
    assert parse_uri("~/spool").root == os.path.expanduser("~/spool")


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "empty"), ("?hot_bytes=1GiB", "empty"), ("file://", "empty"), ("http://[::1", "no URI"),
        ("file://[::1", "no URI"), ("file:///a%ff", "not UTF-8"), ("/a\udcff", "not UTF-8"), ("file:/x", "file:///path"),
        ("file:x", "file:///path"), ("s3:bucket", "file:///path"),
        ("file://host/x", "three slashes"), ("file://x", "three slashes"), ("file:///a#b", "%23"),
        ("file:///a\nb", "control"), ("file:///a%0Ab", "control"), ("/a\n", "control"), ("/a\0b", "control"),
        ("file:///a\0b", "control"), ("file:///a%00b", "control"), ("/a\tb", "control"), (5, "int 5"), (b"/a", "bytes"),
        ([], "list"), ("/a?hot_bytes=", "hot_bytes=''"), ("/a?hot_bytes", "hot_bytes=''"),
        ("/a?=5", "unknown option ''"),
        ("/a?hot_bytes=0", "hot_bytes='0'"), ("/a?hot_bytes=-1GiB", "hot_bytes='-1GiB'"), ("/a?hot_bytes=x", "size"),
        ("/a?hot_bytes=" + "9" * 5000, "hot_bytes='9"), ("/a?hot_bytes=" + "9" * 400 + ".5", "hot_bytes='9"),
        ("/a?hot_bytes=9999999PiB", "hot_bytes='9999999PiB'"), ("/a?direct=maybe", "true or false"),
        ("/a?durability=tape", "process, disk"), ("/a?threads=0", "positive"), ("/a?threads=x", "threads"),
        ("/a?append_timeout_s=nan", "positive"), ("/a?threads=2&threads=3", "twice"),
        ("/a?nope=1", "known: spill, hot_bytes"),
    ],
)  # fmt: skip
def test_refused(uri, problem):
    with pytest.raises(ConfigError) as caught:
        parse_uri(uri)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "file://user:hunter2@host/x", "file://user:hunter2@/x", "file://:hunter2@localhost/x", "s3://key:hunter2@bucket",
        "http://user:hunter2@[::1", "user:hunter2@host/x", "file:///x?spill=s3://key:hunter2@bucket",
        "/x?password=hunter2", "file:///x?secret=hunter2&secret=hunter2", "file://user:hunter2@host/x?threads=2",
        "file://user:hunter2@host:port/x", "file://user:hunter2@host/x\n", "file://user:hunter2@ho\u2100st/x",
    ],
)  # fmt: skip
def test_secrets_are_refused_and_not_repeated(uri):
    with pytest.raises(ConfigError) as caught:
        parse_uri(uri)
    error = caught.value
    while error is not None:
        assert "hunter2" not in repr(error) and "hunter2" not in repr(getattr(error, "details", ""))
        error = error.__cause__


def test_an_empty_location_is_not_the_environments(monkeypatch):
    monkeypatch.setenv("SPOOL_URI", "/from/environment")
    assert parse_uri(None).root == "/from/environment"
    with pytest.raises(ConfigError, match="empty"):
        parse_uri("")


def test_a_refused_location_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for uri in ("file:/x", "s3:bucket", "spool\n", "spool?hot_bytes=", "spool?nope=1"):
        with pytest.raises(ConfigError):
            spool.open(uri)
    assert list(tmp_path.iterdir()) == []


def test_a_path_object_names_a_spool(tmp_path):
    with spool.open(tmp_path / "spool") as sp:
        assert sp.config.root == str(tmp_path / "spool")


def test_every_option_may_be_given():
    values = {"hot_bytes": "1GiB", "fields": "token_ids,logprobs", "durability": "disk", "direct": "FALSE",
              "append_timeout_s": "1.5", "session_idle_s": "60", "pack_age_s": "5", "page_cache_bytes": "64MiB",
              "reuse_bytes": "1MiB", "max_open_files": "16", "threads": "2", "spill": "s3://bucket/run",
              "spill_when": "pressure", "verify_upload": "always", "retention": "released,age=7d",
              "publish_interval_s": "2", "grace_s": "5", "units_age_s": "86400", "cold_concurrency": "4",
              "cold_deadline_s": "9"}  # fmt: skip
    assert values.keys() == set(OPTIONS)
    config = parse_uri("/a?" + "&".join(f"{name}={value}" for name, value in values.items()))
    assert (config.hot_bytes, config.fields, config.durability) == (1 << 30, ("token_ids", "logprobs"), "disk")
    assert (config.direct, config.append_timeout_s, config.threads) == (False, 1.5, 2)
    assert (config.spill, config.spill_when, config.retention) == (
        "s3://bucket/run", "pressure", Retention(released=True, age_s=7 * 86400.0)
    )  # fmt: skip
    assert parse_uri(config.uri) == config


@pytest.mark.parametrize("name", ["reuse_bytes", "page_cache_bytes"])
def test_what_is_kept_for_later_may_be_nothing(name, tmp_path):
    uri = f"{tmp_path}/spool?{name}=0"
    assert getattr(parse_uri(uri), name) == 0
    with spool.open(uri) as sp:
        ref = sp.session("s").append(prompt_token_ids=list(range(90_000)), response_token_ids=[1])
        for _ in range(2):
            assert sp.read(ref)["token_ids"][-1] == 1
    with pytest.raises(ConfigError, match=r"\[0, 2\*\*63\)"):
        parse_uri(f"/a?{name}={1 << 63}")
    with pytest.raises(ConfigError, match=r"\[1, 2\*\*63\)"):
        parse_uri("/a?hot_bytes=0")


@pytest.mark.parametrize(
    ("text", "retention"),
    [
        ("keep", Retention(released=False)), ("released", Retention()), ("age=90s", Retention(False, 90.0)),
        ("age=1.5h, released", Retention(True, 5400.0)), ("age=2w", Retention(False, 14 * 86400.0)),
    ],
)  # fmt: skip
def test_retention(text, retention):
    config = parse_uri(f"/a?retention={text}")
    assert config.retention == retention
    assert parse_uri(config.uri) == config


@pytest.mark.parametrize("text", ["", "all", "keep,released", "age", "age=", "age=-1", "age=7y", "released;age=1d"])
def test_what_is_no_retention_is_refused(text):
    with pytest.raises(ConfigError, match="write keep, released"):
        parse_uri(f"/a?retention={text}")


def test_a_cold_root_alone_is_a_location():
    config = parse_uri("s3://bucket/run/?cold_concurrency=4")
    assert (config.root, config.spill, config.urls) == (None, "s3://bucket/run", ("s3://bucket/run",))
    assert parse_uri(config.uri) == config
    with pytest.raises(ConfigError, match="cannot spill"):
        parse_uri("s3://bucket/run?spill=s3://bucket/other")


@pytest.mark.parametrize(
    ("cold", "problem"),
    [
        ("memory://x", "outlives"), ("s3://", "not a cold root"), ("s3:bucket", "not a cold root"),
        ("", "absolute path"), ("bucket/run7", "absolute path"),
        ("/a", "inside"), ("/a/b", "inside"), ("file:///", "inside"), ("s3://bucket/x%23y#z", "fragment"),
    ],
)  # fmt: skip
def test_cold_roots_that_are_refused(cold, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_uri("/a?" + urlencode({"spill": cold}))
