"""How the ranks of a place find each other: the first one starts the reorganiser, the others connect to it.

The name of the socket is in Linux's abstract namespace: it is no file, and gone with the last process that has it.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time

import msgspec
import xxhash

from spool.errors import DeliveryError
from spool.spiller.elect import import_path
from spool.train.delivery.link import Link
from spool.train.delivery.work import Settings

_RETRY_S = 0.02


def address_of(name: str, uri: str, place: tuple[int, ...]) -> str:
    """Return the address at which the ranks of a place meet."""
    digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode((os.getuid(), name, uri, place)))
    return f"\0spool-feed-{digest}"


def join(address: str, settings: Settings) -> tuple[Link, subprocess.Popen[bytes] | None]:
    """Return a connection to the reorganiser at an address, and its process where this one started it.

    Raises:
        DeliveryError: there is none, and none could be started; or it is another user's.
    """
    started, deadline = None, time.monotonic() + settings.join_timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            connection.close()
            started = started or _start(address, settings)
            if time.monotonic() > deadline:
                raise DeliveryError(f"nobody listens at this feed's socket, {address[1:]}") from None
            time.sleep(0 if started else _RETRY_S)
            continue
        link = Link(connection)
        if not link.same_user:
            link.close()
            raise DeliveryError("this feed's socket belongs to a process of another user: give the feed a name (name=)")
        return link, started


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
        return subprocess.Popen(  # noqa: S603 - our own command line
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
