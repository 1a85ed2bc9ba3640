"""Multimodal units where the cold root harms: what was put is read or an error says so, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from imaging import QUICK, age, image, same, unit_files, with_units
from nodes import location

import spool
from spool.formats.units import encode
from spool.logs.units import Deletions
from spool.model.units import unit_path
from spool.spiller.units import UnitUploader
from spool.stores.objects import open_objects
from spool.stores.units import HotUnits

SHORT = {"cold_deadline_s": 3, **QUICK}


@pytest.fixture
def published(hostile, s3_root, tmp_path, by_hand):
    """A hot root whose one session names three units, all of it in the cold root; the keys."""
    with spool.open(location(tmp_path / "hot", s3_root, **SHORT)) as sp:
        keys = [sp.put_unit(image(n)) for n in range(3)]
        with_units(sp, "a", keys)
        sp.flush()
        sp.spill()
    hostile.heal()
    return keys


@pytest.mark.parametrize("action", ["drop", "cut", "short", 500, 503])
def test_a_read_is_tried_again(hostile, s3_root, published, action):
    with spool.open(f"{s3_root}?cold_deadline_s=20") as reader:
        hostile.fault(action, "GET", part="unit-", times=2)
        for got, n in zip(reader.read_units(published), range(3), strict=True):
            assert same(got, image(n))


def test_what_comes_altered_is_an_error_that_names_the_object(hostile, s3_root, published):
    with spool.open(f"{s3_root}?cold_deadline_s=3") as reader:
        hostile.fault("garble", "GET", part="unit-")
        with pytest.raises(spool.IntegrityError, match=f"{s3_root}/{unit_path(published[0])}"):
            reader.read_unit(published[0])
        hostile.heal()
        assert same(reader.read_unit(published[0]), image(0))


def test_a_cold_root_that_is_away_is_a_storage_error_and_the_hot_copy_does(hostile, s3_root, published, tmp_path):
    with spool.open(location(tmp_path / "hot", s3_root, **SHORT)) as sp:
        HotUnits(str(sp.config.root)).remove(published[2])
        hostile.fault("drop")
        assert same(sp.read_unit(published[0]), image(0))
        with pytest.raises(spool.StorageError):
            sp.read_units(published)
        assert sp.put_unit(image(7)) == encode(image(7)).key
        with pytest.raises(spool.StorageError):
            sp.gc()
        hostile.heal()
        assert same(sp.read_units(published)[2], image(2))


@pytest.mark.parametrize("action", [500, "mute", "corrupt"])
def test_an_upload_that_fails_is_done_again_and_no_manifest_is_there_before(
    hostile, s3_root, tmp_path, by_hand, action
):
    with spool.open(location(tmp_path / "hot", s3_root, **SHORT)) as sp:
        key = sp.put_unit(image(0))
        with_units(sp, "a", [key])
        sp.flush()
        hostile.fault(action, "PUT", part="unit-")
        with pytest.raises((spool.StorageError, spool.IntegrityError)):
            sp.spill()
        objects = open_objects(s3_root)
        assert objects.list("manifests/") == []
        hostile.heal()
        sp.spill()
        assert same(sp.read_unit(key), image(0))
        assert objects.info(unit_path(key)) is not None
        assert len(objects.list("manifests/")) == 1
        assert sp.verify(deep=True).findings == ()


def test_a_damaged_unit_holds_up_no_collection(tmp_path, by_hand, caplog):
    cold = tmp_path / "cold"
    cold.mkdir()
    with spool.open(location(tmp_path / "hot", f"file://{cold}", units_age_s=100, **QUICK)) as sp:
        key, alone = sp.put_unit(image(0)), sp.put_unit(image(1))
        with_units(sp, "a", [key])
        sp.flush()
        sp.spill()
        (cold / unit_path(key)).unlink()
        path = HotUnits(str(sp.config.root)).path(key)
        with open(path, "r+b") as file:
            file.seek(500)
            file.write(b"damaged")
        age(sp.config.root, alone)
        sp.gc()
        assert "cannot be kept in the cold root" in caplog.text
        assert alone not in unit_files(sp.config.root)
        units = UnitUploader(HotUnits(str(sp.config.root)), sp._feeds.cold.objects)
        with contextlib.closing(units) as uploader:
            with pytest.raises(spool.IntegrityError, match=path):
                uploader.bring([key])
            assert uploader.evict([key], sp._catalog, renew_before=0.0) == 0
        assert key in unit_files(sp.config.root)


def test_a_torn_or_foreign_object_among_units_is_passed_over(tmp_path, by_hand):
    cold = tmp_path / "cold"
    cold.mkdir()
    with spool.open(location(tmp_path / "hot", f"file://{cold}", units_age_s=100, **QUICK)) as sp:
        key = sp.put_unit(image(0))
        with_units(sp, "a", [key])
        for name in ("units/gone/0000000000001-torn.json", "units/readme.txt", f"units/zz/{key}", "units/ab/x"):
            path = cold / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{")
        sp.flush()
        sp.spill()
        sp.gc()
        assert sp.verify(deep=True).findings == ()
        assert sp.status().units.n_cold == 1
        assert Deletions(sp._feeds.cold.objects).all() == []
        with pytest.raises(spool.NotFoundError):
            sp.read_unit("unit-" + "0" * 64)


def test_the_command_line_tells_of_units(tmp_path, by_hand):
    uri = f"file://{tmp_path}/spool?units_age_s=100"
    with spool.open(uri) as sp:
        keys = [sp.put_unit(image(n)) for n in range(3)]
        with_units(sp, "a", keys[:1])
        age(sp.config.root, *keys)

    def command(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        return subprocess.run(
            [sys.executable, "-m", "spool", *arguments], capture_output=True, text=True, env=environment, timeout=120
        )

    n_bytes = sum(encode(image(n)).size for n in (1, 2))
    done = command("gc", "--dry-run", "--json", uri)
    (row,) = [row for row in json.loads(done.stdout) if row["stream"] == "units"]
    assert (row["pack"], row["go"], row["n_bytes"]) == (2, True, n_bytes)
    assert "2 units would go" in command("gc", "--dry-run", uri).stderr
    done = command("gc", uri)
    assert "0 of 1 packs went" in done.stderr
    assert "2 units went" in done.stderr
    assert [name for name in unit_files(tmp_path / "spool") if name.startswith("unit-")] == keys[:1]
    (line,) = [line for line in command("status", uri).stdout.splitlines() if line.startswith("units_hot_bytes")]
    assert str(encode(image(0)).size) in line
    assert json.loads(command("status", "--json", uri).stdout)["units"]["n_hot"] == 1
    rows = json.loads(command("du", "--json", uri).stdout)["fields"]
    assert [row["file_bytes"] for row in rows if row["field"] == "units"] == [encode(image(0)).size]
    path = HotUnits(f"{tmp_path}/spool").path(keys[0])
    os.unlink(path)
    done = command("verify", uri)
    assert done.returncode == 5
    assert path in done.stdout
