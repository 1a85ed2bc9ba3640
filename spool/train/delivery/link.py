"""Messages, and memory with them, between two processes of one machine over a Unix socket."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from spool.errors import RankError
from spool.train.delivery import memory
from spool.train.delivery.messages import Message

CLOSE_S = 2.0
HELLO_S = 5.0
HELLO_BYTES = 1 << 20
_HEADER = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class SocketLink:
    """One end of a connection, a `RankLink`. Sending never waits: a thread does it, in order.

    Args:
        connection: a connected stream socket; this owns it from now on.
        process: the one at the other end, where this one started it.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._connection, self._process = connection, process
        self._out: SimpleQueue[tuple[bytes, int | None] | None] = SimpleQueue()
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
        """Send a message, and memory: its descriptor, of which this makes a copy."""
        body = _encode(message)  # what cannot be said is the caller's to hear of
        self._out.put((_HEADER.pack(len(body)) + body, None if fd is None else os.dup(fd)))

    def receive(self) -> tuple[Message, int | None]:
        """Return the next message, and the descriptor of the memory that came with it, which is the caller's to close.

        Raises:
            EOFError: the other end is gone, or what came in says nothing that a rank says first.
            RankError: memory came, and this process may open no more files.
        """
        header, fd = self._take_header()
        (n_bytes,), known = _HEADER.unpack(header), self._connection.gettimeout() is None
        if not known and n_bytes > HELLO_BYTES:
            raise EOFError
        message = _decode(self._take(n_bytes))
        if not known:
            self._connection.settimeout(None)
        return message, fd

    def map(self, fd: int, n_bytes: int) -> mmap.mmap:
        """Return a mapping of memory that came, whose pages are shared until this process writes to one."""
        try:
            return memory.reading(fd, n_bytes)
        finally:
            os.close(fd)

    def drop(self, fd: int | None) -> None:
        """Close the descriptor of memory that came."""
        if fd is not None:
            os.close(fd)

    def death(self, pid: int | None) -> str:
        """Return in words how the process at the other end died."""
        how = ""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                code = self._process.wait(2)
                how = f", by signal {-code}" if code < 0 else f", with exit code {code}"
        return (
            f"the process that reads for this feed, {pid}, died{how}: see its last lines in the log of the rank that "
            "started it, and the kernel's, which says so where memory ran out"
        )

    def close(self) -> None:
        """Send what is waiting, but for at most `CLOSE_S`, and let go of the connection."""
        self._out.put(None)
        if threading.current_thread() is not self._sender:
            self._sender.join(CLOSE_S)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if not self._sender.is_alive():
            self._drain()  # what came behind the last that could be sent

    def _send_all(self) -> None:
        while (item := self._out.get()) is not None:
            data, fd = item
            try:
                self._send(data, fd)
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
            data, fds, flags, _ = socket.recv_fds(self._connection, _HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise EOFError from error
        if flags & socket.MSG_CTRUNC:
            raise RankError("this process may open no more files, and a micro-batch is one: raise ulimit -n")
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


class SocketListener:
    """Where ranks of this machine and user come in.

    Args:
        listener: a Unix socket that listens; this owns it from now on.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def accept(self, timeout_s: float) -> SocketLink | None:
        """Return a link to a process that came; None where none did in time, or it was another user's."""
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except (TimeoutError, BlockingIOError):
            return None
        connection.settimeout(HELLO_S)  # until it says something
        link = SocketLink(connection)
        if link.same_user:
            return link
        link.close()
        return None

    def close(self) -> None:
        """Free the name."""
        self._listener.close()


_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in _links:
        link.abandon()


os.register_at_fork(after_in_child=_after_fork)
