"""How the ranks of a place find each other: the first one starts the reorganiser, the others connect to it.

The name of the socket is in Linux's abstract namespace: it is no file, and gone with the last process that has it.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time

import msgspec
import xxhash

from spool.errors import RankError
from spool.spiller.elect import import_path
from spool.train.delivery.link import SocketLink
from spool.train.delivery.work import Settings

_RETRY_S = 0.02


def digest_of(name: str, uri: str, place: tuple[int, ...]) -> str:
    """Return what the ranks of a place, and no others, have in common."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode((name, uri, place)))


def join(digest: str, settings: Settings) -> SocketLink:
    """Return a connection to this user's reorganiser of a place on this machine; where there is none, start it.

    Raises:
        RankError: there is none, and none could be started; or it is another user's.
    """
    address = f"\0spool-feed-{os.getuid()}-{digest}"
    started, deadline = None, time.monotonic() + settings.join_timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            connection.close()
            started = started or _start(address, settings)
            if time.monotonic() > deadline:
                raise RankError(f"nobody listens at this feed's socket, {address[1:]}") from None
            time.sleep(0 if started else _RETRY_S)
            continue
        link = SocketLink(connection, started)
        if not link.same_user:
            link.close()
            raise RankError("this feed's socket belongs to a process of another user: give the feed a name (name=)")
        return link


def _start(address: str, settings: Settings) -> subprocess.Popen[bytes] | None:
    """Start a reorganiser, unless another process is about to: whoever binds the address does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        listener.listen(settings.n_ranks + 8)
        process = subprocess.Popen(  # noqa: S603 - our own command line
            [
                sys.executable,
                "-m",
                "spool.train.delivery",
                str(listener.fileno()),
                msgspec.json.encode(settings).decode(),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": import_path()},
        )
    threading.Thread(target=process.wait, name="spool-feed-reap", daemon=True).start()  # or it stays as a zombie
    return process
