"""A page in headless Chromium, without a network: what it became, what was said on its console, and a picture."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0",
)  # fmt: skip


def chromium():
    """Return the browser's path; a machine without it fails here and says what to do."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    return pytest.fail("this test shows pages in Chromium, which is not here: apt-get install chromium")


def _run(page, *flags, dark=False):
    # of its own per run: a profile in use makes the next browser hand the page over to the first
    with tempfile.TemporaryDirectory(prefix="spool-chromium-") as profile:
        colours = ("--blink-settings=preferredColorScheme=0",) if dark else ("--blink-settings=preferredColorScheme=1",)
        done = subprocess.run(
            [chromium(), *_FLAGS, *colours, f"--user-data-dir={profile}", *flags, Path(page).as_uri()],
            capture_output=True, timeout=120, env={**os.environ, "HOME": profile},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def dom(page):
    """Return the document as HTML once it is loaded, and the lines of the console."""
    out, err = _run(page, "--dump-dom")
    return out, [line for line in err.splitlines() if "CONSOLE" in line]


def picture(page, target, *, dark=False, width=1280, height=2400):
    """Return a screenshot as an array [height, width, 3] of uint8."""
    from matplotlib.image import imread

    _run(page, f"--screenshot={target}", f"--window-size={width},{height}", dark=dark)
    return (imread(str(target))[..., :3] * 255).round().astype("uint8")
