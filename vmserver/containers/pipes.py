# SPDX-License-Identifier: Apache-2.0
"""Pipes of commands that carry much.

Twisted reads 8 KiB from a child's pipe in each turn of the reactor, and the kernel lets the child be 64 KiB
ahead. Each turn, each message and each change between the agent and the command has its price, which bounds
a stream where processors are emulated. So these pipes are read to the end, and hold more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from functools import partial

from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.internet.process import Process, ProcessReader

#: What is read in one turn, and what a pipe holds.
READ_BYTES = 128 * 1024
PIPE_BYTES = 256 * 1024


def widen(process: Process) -> None:
    """Let the pipes of a process that was just started carry much."""
    for pipe in process.pipes.values():
        with contextlib.suppress(OSError):  # its user has too many: then it stays as it is
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
