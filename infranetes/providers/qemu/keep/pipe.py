# SPDX-License-Identifier: Apache-2.0
"""The pipe by which QEMU's stream of a VM's state reaches a file.

QEMU gets the pipe and not the file: what it has written it can't change later, it can write no more than is
allowed, and the file's pages count as the daemon's and not as the pod's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event

import attrs
from twisted.python.failure import Failure

from infranetes_common.concurrency import KEEPING, Flight, run_in_thread, settled
from infranetes_common.errors import InfranetesError, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor

_PIPE_BYTES = 1 << 20
_LOOK_MILLISECONDS = 100  # between looks whether the stream is still wanted


@attrs.frozen
class StatePipe:
    """A pipe whose other end is a file. :ivar writer: the descriptor for QEMU; the caller closes it."""

    reader: int
    writer: int

    @classmethod
    def make(cls) -> StatePipe:
        """Make the pipe. :raise ResourceExhausted: there are no descriptors."""
        try:
            reader, writer = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            raise ResourceExhausted(f"no pipe for a VM's state: {error.strerror}") from None
        with contextlib.suppress(OSError):  # a smaller one is only slower
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return cls(reader, writer)

    def thd_drain(self, path: Path, most: int, unwanted: Event) -> int:
        """Write what comes to a new file until the writers have closed their ends; close the reader.

        :param most: bytes. :param unwanted: set when nobody wants the stream any more.
        :return: the file's size.
        :raise ResourceExhausted: there is no room, or more than `most` came.
        :raise Unavailable: `unwanted` was set."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                return self._drain(file, most, unwanted)
            finally:
                os.close(file)
        except OSError as error:
            raise as_error(error, f"a VM's state can't be written to {path}") from None
        finally:
            os.close(self.reader)

    def _drain(self, file: int, most: int, unwanted: Event) -> int:
        written = 0
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        while True:
            if unwanted.is_set():
                raise Unavailable("the keeping of a VM was ended")
            if not poll.poll(_LOOK_MILLISECONDS):
                continue
            count = os.splice(self.reader, file, _PIPE_BYTES)
            if not count:
                return written
            written += count
            if written > most:
                raise ResourceExhausted(f"a VM's state has more than the {most} bytes that it can have")


@contextlib.asynccontextmanager
async def drained(reactor: IReactor, path: Path, most: int) -> AsyncIterator[int]:
    """Write to a new file what QEMU writes to the block's value, a descriptor that the block closes.

    :param most: bytes.
    :raise ResourceExhausted: there is no room, or more came, whatever the block raises because of that."""
    pipe, unwanted = StatePipe.make(), Event()
    draining = Flight(run_in_thread(reactor, pipe.thd_drain, path, most, unwanted, purpose=KEEPING))
    try:
        yield pipe.writer
        await draining.join()
    except BaseException:
        unwanted.set()
        [outcome] = await settled([draining.join()])
        if isinstance(outcome, Failure) and outcome.check(ResourceExhausted) is not None:
            outcome.raiseException()  # because of which QEMU could not write
        raise


def as_error(error: OSError, what: str) -> InfranetesError:
    """Return the error for a file that can't be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    kind = ResourceExhausted if full else Unavailable
    return kind(f"{what}: {error.strerror}{'; make room' if full else ''}")
