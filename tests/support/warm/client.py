# SPDX-License-Identifier: Apache-2.0
"""Ask the server for a program. As a script: one with this process's directory, environment and files.

    client.py attached|detached ADDRESS ARGUMENTS...

An attached one is as if it were this process: it gets its signals, and its end is this process's. The script
imports as little as can be, since it is on the way of many tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence


def ask(
    address: str,
    arguments: Sequence[str],
    files: Sequence[int],
    directory: str,
    environment: dict[str, str],
    kept: bool,
) -> socket.socket:
    """Ask for `python *arguments`. Return the connection, on which its pid comes, and at last how it ended.

    :param kept: kill it when the connection is lost.
    """
    request = json.dumps([list(arguments), directory, environment, kept]).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], list(files))
    connection.sendall(request)
    return connection


def stand_for(connection: socket.socket) -> None:
    """Pass signals on to the program that was asked for, and end as it ends."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    # A signal that comes just before a system call does not interrupt it; what it writes here does.
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    told, came = b"", b""
    while told.count(b"\n") < 2:
        ready, _, _ = select.select([connection.fileno(), woken], [], [])
        if woken in ready:
            came += os.read(woken, 100)
        if connection.fileno() in ready:
            read = connection.recv(100)
            if not read:
                sys.exit("The server of warm programs has died; what it imports may be broken.")
            told += read
            _close_files()
        if b"\n" in told:
            for each in came:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(told.split(b"\n")[0]), each)
            came = b""
    code = os.waitstatus_to_exitcode(int(told.split(b"\n")[1]))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _close_files() -> None:
    """Leave standard input and outputs to the program, so that what it closes is closed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(nothing, file)
    os.close(nothing)


def main(how: str, address: str, *arguments: str) -> None:
    """Run the script."""
    attached = how == "attached"
    connection = ask(address, arguments, (0, 1, 2), os.getcwd(), dict(os.environ), attached)
    if attached:
        stand_for(connection)
    connection.recv(100)


if __name__ == "__main__":
    main(*sys.argv[1:])
