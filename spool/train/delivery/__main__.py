"""A reorganiser, as a rank starts it: the socket that it listens on is handed over, the settings are JSON."""

from __future__ import annotations

import logging
import os
import socket
import sys

import msgspec

from spool.train.delivery.link import SocketListener
from spool.train.delivery.memory import Memfds
from spool.train.delivery.reorganiser import Reorganiser
from spool.train.delivery.work import Settings


def main() -> None:
    """Serve the ranks that come."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    fd, settings = sys.argv[1:]
    listener = SocketListener(socket.socket(fileno=int(fd)))
    well = Reorganiser(listener, Memfds(), msgspec.json.decode(settings, type=Settings)).run()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0 if well else 1)  # threads may still read for nobody


if __name__ == "__main__":
    main()
