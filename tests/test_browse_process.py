"""The browser as a process in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys

import pytest
from tiers import record


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGQUIT])
def test_a_process_that_is_ended_leaves_the_terminal_as_it_was(sp, which):
    record(sp, "s29", n_steps=1)
    pid, terminal = pty.fork()
    if not pid:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-m", "spool", "browse", sp.config.root])
    shown, sent = b"", False
    with contextlib.suppress(OSError):  # the other end is gone
        while select.select([terminal], [], [], 60)[0]:
            shown += os.read(terminal, 1 << 16)
            if b"s29" in shown and not sent:
                sent = True
                os.kill(pid, which)
    assert sent
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + which
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    os.close(terminal)
