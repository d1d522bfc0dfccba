# SPDX-License-Identifier: Apache-2.0
"""The start of a container's two units: its program, and the logger that sends its output to the journal."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path

from vmserver.containers import records
from vmserver.containers.records import Record
from vmserver.containers.systemd import logger, units
from vmserver.containers.systemd.manager import Manager
from vmserver.containers.systemd.programs import Located

JOURNAL_SOCKET = "/run/systemd/journal/socket"


async def start_units(
    manager: Manager, directory: Path, record: Record, located: Located, tasks_max: int
) -> None:
    """Start both units by systemd. Existing units are left as they are.

    :param directory: that of the records. :param located: the program to run.
    :raise InvalidArgument: systemd refuses a property."""
    with contextlib.ExitStack() as opened:
        await _start_units(manager, directory, record, located, tasks_max, opened)


async def _start_units(
    manager: Manager,
    directory: Path,
    record: Record,
    located: Located,
    tasks_max: int,
    opened: contextlib.ExitStack,
) -> None:
    config, id = record.config, record.state.id
    reading, writing = [], []
    for _ in range(2):
        ends = os.pipe2(os.O_CLOEXEC)
        for end in ends:
            opened.callback(os.close, end)
        reading.append(ends[0])
        writing.append(ends[1])
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    opened.callback(os.close, null)
    stdin, carrier = _stdin(directory / f"{id}.stdin", opened) if config.stdin else (null, null)
    record.logger = f"{units.LOGGER_PREFIX}{id}.{secrets.token_hex(4)}.service"
    records.save(directory, record)
    command = [sys.executable, "-I", "-S", logger.__file__, record.log, JOURNAL_SOCKET]
    await manager.start_transient(
        record.logger,
        [
            ("Description", ("s", f"Output of Infranetes container {id}")),
            ("Type", ("s", "notify")),
            ("CollectMode", ("s", "inactive-or-failed")),
            (
                "LogRateLimitBurst",
                ("u", 1 << 28),
            ),  # or the journal drops what comes fast; 0 means its default
            ("ExecStartEx", ("a(sasas)", [(command[0], command, ["no-env-expand"])])),
            *_streams(reading[0], reading[1], carrier),
        ],
    )
    program = units.unit_properties(id, config, located.command, located.path, os.path.exists, tasks_max)
    await manager.start_transient(units.unit_name(id), [*program, *_streams(stdin, writing[0], writing[1])])


def _stdin(path: Path, opened: contextlib.ExitStack) -> tuple[int, int]:
    """Return the container's end of its stdin, and a socket that carries the other end to the logger."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    both = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    opened.callback(os.close, both)
    reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, reading)
    writing = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    opened.callback(os.close, writing)
    sender, carrier = socket.socketpair()
    opened.callback(sender.close)
    opened.callback(carrier.close)
    socket.send_fds(sender, [b"stdin"], [writing])
    return reading, carrier.fileno()


def _streams(stdin: int, stdout: int, stderr: int) -> list[units.Property]:
    return [
        ("StandardInputFileDescriptor", ("h", stdin)),
        ("StandardOutputFileDescriptor", ("h", stdout)),
        ("StandardErrorFileDescriptor", ("h", stderr)),
    ]
