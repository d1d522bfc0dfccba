"""The two units of a container: its program, and the logger that its output goes through."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from vmserver.containers.systemd import logger, records, units
from vmserver.containers.systemd.manager import Manager
from vmserver.containers.systemd.records import Record

JOURNAL_SOCKET = "/run/systemd/journal/socket"


async def begin(manager: Manager, directory: Path, record: Record, located: Any, tasks_max: int) -> None:
    """Have systemd begin both. Begun already: nothing to do.

    :param directory: of the records. :param located: the program, as `programs.locate` found it.
    :raise InvalidArgument: systemd does not take a property."""
    with contextlib.ExitStack() as opened:
        await _begin(manager, directory, record, located, tasks_max, opened)


async def _begin(
    manager: Manager,
    directory: Path,
    record: Record,
    located: Any,
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
    stdin, kept = _stdin(directory / f"{id}.stdin", opened) if config.stdin else (null, null)
    record.logger = f"{units.LOGGER_PREFIX}{id}.{secrets.token_hex(4)}.service"
    records.save(directory, record)
    words = [sys.executable, "-I", "-S", logger.__file__, record.log, JOURNAL_SOCKET]
    await manager.start_transient(
        record.logger,
        [
            ("Description", ("s", f"Output of Infranetes container {id}")),
            ("Type", ("s", "notify")),
            ("CollectMode", ("s", "inactive-or-failed")),
            ("ExecStartEx", ("a(sasas)", [(words[0], words, ["no-env-expand"])])),
            *_streams(reading[0], reading[1], kept),
        ],
    )
    program = units.unit_properties(id, config, located.words, located.path, os.path.exists, tasks_max)
    await manager.start_transient(units.unit_name(id), [*program, *_streams(stdin, writing[0], writing[1])])


def _stdin(path: Path, opened: contextlib.ExitStack) -> tuple[int, int]:
    """The container's end of its stdin, and what keeps that open when nobody is attached."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    both = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    opened.callback(os.close, both)
    reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, reading)
    writing = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    opened.callback(os.close, writing)
    ours, its = socket.socketpair()
    opened.callback(ours.close)
    opened.callback(its.close)
    socket.send_fds(ours, [b"stdin"], [writing])
    return reading, its.fileno()


def _streams(stdin: int, stdout: int, stderr: int) -> list[units.Property]:
    return [
        ("StandardInputFileDescriptor", ("h", stdin)),
        ("StandardOutputFileDescriptor", ("h", stdout)),
        ("StandardErrorFileDescriptor", ("h", stderr)),
    ]
