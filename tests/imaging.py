"""What the tests of multimodal units share: arrays, sessions that name units, and what a root has of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from spool.stores.units import HotUnits

QUICK = {"grace_s": 0.001, "publish_interval_s": 0.1}
"""Options of a root that tests do not wait for."""


def image(seed, shape=(3, 40, 50)):
    """Return an array that nobody else has."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def same(got, wanted):
    """Whether two arrays are equal bit for bit, as values."""
    wanted = np.asarray(wanted)
    little = np.ascontiguousarray(wanted, wanted.dtype.newbyteorder("<")).reshape(wanted.shape)
    return got.dtype == little.dtype and got.shape == little.shape and got.tobytes() == little.tobytes()


def with_units(sp, session_id, keys, *, final=True):
    """Record a session of a step that names units; return its segments."""
    s = sp.session(session_id)
    s.append(
        prompt_token_ids=list(range(10, 20 + len(keys))),
        response_token_ids=[1, 2, 3],
        units=[(key, position, 4) for position, key in enumerate(keys)],
    )
    return s.finalize() if final else s.steps


def unit_files(root):
    """Return the files below ``units`` of a root, by name."""
    return {path.name: path for path in Path(root, "units").rglob("*") if path.is_file()}


def age(root, *keys):
    """Make the hot copies of units look as if nobody had used them for long."""
    for key in keys:
        os.utime(HotUnits(root).path(key), (1, 1))


def run_python(code, *arguments):
    """Run code in a fresh interpreter; return what it printed."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=True,
        timeout=120,
    )  # fmt: skip
    return done.stdout.strip()
