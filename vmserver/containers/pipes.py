# SPDX-License-Identifier: Apache-2.0
"""Pipes of commands with much input or output.

Twisted reads 8 KiB from a child's pipe in each turn of the reactor, and the kernel lets the child be 64 KiB
ahead. Each turn, each message and each switch between the agent and the command takes time, which limits
a stream where processors are emulated. So these pipes are read to the end, and hold more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from functools import partial

from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.internet.process import Process, ProcessReader

#: The bytes that are read in one turn, and the capacity of a pipe.
READ_BYTES = 128 * 1024
PIPE_BYTES = 256 * 1024
#: The mode of an output's pipe: a command that drops root can still open /dev/stdout.
WRITABLE = 0o622


def open_output(process: Process) -> None:
    """Make the pipes of a process's output writable by any user, by the names /dev/stdout and /dev/stderr."""
    for pipe in process.pipes.values():
        if isinstance(pipe, ProcessReader):
            with contextlib.suppress(OSError):
                os.fchmod(pipe.fileno(), WRITABLE)


def widen(process: Process) -> None:
    """Make the pipes of a process that was just started fast."""
    for pipe in process.pipes.values():
        with contextlib.suppress(OSError):  # the user has too many large pipes: keep the size
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        if isinstance(pipe, ProcessReader):
            pipe.doRead = partial(_read, pipe)  # type: ignore[method-assign]


def _read(pipe: ProcessReader) -> Exception | None:
    """Read once; the answer is that of `IReadDescriptor.doRead`."""
    try:
        data = os.read(pipe.fileno(), READ_BYTES)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return CONNECTION_LOST
    if not data:
        return CONNECTION_DONE
    pipe.dataReceived(data)
    return None
