# SPDX-License-Identifier: Apache-2.0
"""One farm per directory and socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from infranetes_common.concurrency import lock_file, sleep
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor

END_SECONDS = 10.0
"""The longest wait for a farm that is ending."""
_LOOK_SECONDS = 0.02
_LOCK = "lock"


class Ending(FailedPrecondition):
    """Another farm has the directory, and listens no longer."""


async def claim_in_time(reactor: IReactor, directory: Path, path: Path) -> int:
    """Do what `claim` does, but wait for a farm that is ending."""
    deadline = reactor.seconds() + END_SECONDS
    while True:
        try:
            return claim(directory, path)
        except Ending:
            if reactor.seconds() > deadline:
                raise
        await sleep(reactor, _LOOK_SECONDS)


def claim(directory: Path, path: Path) -> int:
    """Become the one farm of `directory`, and remove the unix socket `path` if nothing answers there.

    :return: a descriptor; the claim lasts as long as it is open.
    :raise FailedPrecondition: another farm has the directory, or something answers on the socket.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = lock_file(directory / _LOCK)
    except BlockingIOError:
        kind = FailedPrecondition if path.exists() else Ending
        raise kind(f"another farm holds {directory}; stop it, or take another --state") from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return descriptor
        except OSError:
            path.unlink(missing_ok=True)
            return descriptor
    os.close(descriptor)
    raise FailedPrecondition(f"something answers on {path} already; stop it, or take another --socket")
