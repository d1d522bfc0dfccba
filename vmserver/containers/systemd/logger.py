# SPDX-License-Identifier: Apache-2.0
"""The program that sends one container's output to the journal; a unit of its own, which outlives the agent.

    python -I -S logger.py ID JOURNAL-SOCKET

Descriptors 0 and 1 are the reading ends of the container's stdout and stderr. If descriptor 2 is a socket, it
carries the writing end of the container's stdin, which is held open until SIGUSR1; it does not come from
systemd, which keeps every descriptor that it passes to a unit open itself. The program imports the standard
library alone, so that it starts fast.

Entries use the journal's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL), since the journal drops empty
lines and cuts lines at NUL when it reads a unit's stdout itself. Entries are numbered, so that a reader
notices which ones the journal has deleted. The last entry has no line and is marked as the last.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import time

PART_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
RETRY_SECONDS = 0.2


class JournalWriter:
    """Sends entries to the journal, each exactly once, waiting while the journal is down."""

    def __init__(self, id: str, path: str) -> None:
        self._path = path
        self._number = 0
        self._fixed = f"INFRANETES_CONTAINER={id}\nSYSLOG_IDENTIFIER={id}\n".encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def send(self, stream: str, line: bytes, partial: bool = False, end: bool = False) -> None:
        """Send one entry."""
        self._number += 1
        fields = [
            self._fixed,
            f"INFRANETES_NUMBER={self._number}\nINFRANETES_TIME={time.time_ns()}\n".encode(),
            f"INFRANETES_STREAM={stream}\nPRIORITY={3 if stream == 'stderr' else 6}\n".encode(),
            b"MESSAGE\n" + struct.pack("<Q", len(line)) + line + b"\n",
        ]
        if partial:
            fields.append(b"INFRANETES_PARTIAL=1\n")
        if end:
            fields.append(b"INFRANETES_END=1\n")
        data = b"".join(fields)
        while True:
            try:
                self._socket.sendto(data, self._path)
                return
            except OSError:  # the journal is restarting
                time.sleep(RETRY_SECONDS)


def split(journal: JournalWriter, stream: str, data: bytes, last: bool) -> bytes:
    """Send the complete lines and return the rest. With `last`, no more data will follow, and all is sent."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start, start + PART_BYTES + 1)
        if end >= 0:
            journal.send(stream, data[start:end])
            start = end + 1
        elif len(data) - start > PART_BYTES:
            journal.send(stream, data[start : start + PART_BYTES], partial=True)
            start += PART_BYTES
        elif last:
            journal.send(stream, data[start:], partial=True)
            start = len(data)
        else:
            break
    return data[start:]


def _ready() -> None:
    """Tell systemd that the signal handlers are in place (sd_notify(3))."""
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with contextlib.suppress(OSError, KeyError), socket.socket(socket.AF_UNIX, kind) as notify:
        notify.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))


def main(id: str, path: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stdin: list[int] = []  # the writing end of the container's stdin, until SIGUSR1
    if stat.S_ISSOCK(os.fstat(2).st_mode):
        with socket.socket(fileno=os.dup(2)) as carrier:
            stdin += socket.recv_fds(carrier, 1, 1)[1]

    def close_stdin(*_: object) -> None:
        if stdin:
            os.close(stdin.pop())

    signal.signal(signal.SIGUSR1, close_stdin)
    _ready()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    journal = JournalWriter(id, path)
    selector = selectors.DefaultSelector()
    rest = {}
    for descriptor, stream in ((0, "stdout"), (1, "stderr")):
        os.set_blocking(descriptor, False)
        selector.register(descriptor, selectors.EVENT_READ, stream)
        rest[stream] = b""
    while selector.get_map():
        for key, _ in selector.select():
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    selector.unregister(key.fd)
                rest[key.data] = split(journal, key.data, rest[key.data] + data, not data)
    journal.send("stdout", b"", end=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
