# SPDX-License-Identifier: Apache-2.0
"""The lock by which a state directory belongs to one agent."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import backoff, lock_file, sleep
from infranetes_common.errors import FailedPrecondition
from vmserver.containers.oci.index import unwritable

FILE = "lock"
LOCK_SECONDS = 5.0  # for another agent to release the lock
_PAUSES = (0.02, 0.25)


async def locked(clock: IReactorTime, directory: Path) -> int:
    """Lock a state directory. Returns a descriptor that holds the lock while it is open.

    An agent that is killed while it starts a process leaves it to that process for a moment, so this waits.

    :raise FailedPrecondition: another agent has it, or it can't be locked.
    """
    waited = 0.0
    pauses = backoff(*_PAUSES)
    while True:
        try:
            return lock_file(directory / FILE)
        except BlockingIOError:
            if waited >= LOCK_SECONDS:
                raise FailedPrecondition(
                    f"the state directory {directory} is used by another agent that is running; stop that "
                    "one, or give this one another"
                    " `directory` in [providers.oci]"
                ) from None
        except OSError as error:
            raise unwritable(directory / FILE, error) from error
        pause = next(pauses)
        await sleep(clock, pause)
        waited += pause
