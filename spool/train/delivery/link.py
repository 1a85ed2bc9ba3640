"""Messages, and memory with them, between two processes of one machine over a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from spool.train.delivery.messages import Message

_HEADER = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Link:
    """One end of a connection. Sending never waits: a thread does it, in order.

    Args:
        connection: a connected stream socket; this owns it from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._out: SimpleQueue[tuple[Message, int | None] | None] = SimpleQueue()
        _links.add(self)
        self._sender = threading.Thread(target=self._send_all, name="spool-feed-send", daemon=True)
        self._sender.start()

    def abandon(self) -> None:
        """In a forked child: close its copy, so that the other end hears when the parent dies."""
        self._connection.close()

    @property
    def same_user(self) -> bool:
        """Whether the process at the other end is of this user."""
        found = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message, and memory; safe from any thread, and from finalizers.

        Args:
            message: what to say.
            fd: of the memory; this makes a copy of it.
        """
        self._out.put((message, None if fd is None else os.dup(fd)))

    def receive(self) -> tuple[Message, int | None]:
        """Return the next message, and the memory that came with it, which is the caller's to close.

        Raises:
            EOFError: the other end is gone.
        """
        header, fd = self._take_header()
        return _decode(self._take(_HEADER.unpack(header)[0])), fd

    def close(self, *, wait_s: float = 2.0) -> None:
        """Send what is waiting, but for at most ``wait_s``, and let go of the connection."""
        self._out.put(None)
        if threading.current_thread() is not self._sender:
            self._sender.join(wait_s)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        while (item := self._out.get()) is not None:
            message, fd = item
            body = _encode(message)
            try:
                self._send(_HEADER.pack(len(body)) + body, fd)
            except OSError:
                self._drain()  # the other end is gone: whoever receives hears of it
                return
            finally:
                if fd is not None:
                    os.close(fd)

    def _send(self, data: bytes, fd: int | None) -> None:
        sent = 0 if fd is None else socket.send_fds(self._connection, [data], [fd])
        self._connection.sendall(memoryview(data)[sent:])

    def _drain(self) -> None:
        while not self._out.empty():
            item = self._out.get()
            if item is not None and item[1] is not None:
                os.close(item[1])

    def _take_header(self) -> tuple[bytes, int | None]:
        try:
            data, fds, _, _ = socket.recv_fds(self._connection, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return data + self._take(_HEADER.size - len(data)), fds[0] if fds else None

    def _take(self, n: int) -> bytearray:
        data = bytearray(n)
        view = memoryview(data)
        while view:
            try:
                got = self._connection.recv_into(view)
            except OSError as error:
                raise EOFError from error
            if not got:
                raise EOFError
            view = view[got:]
        return data


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork() -> None:
    for link in _links:
        link.abandon()


os.register_at_fork(after_in_child=_after_fork)
