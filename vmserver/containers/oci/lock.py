# SPDX-License-Identifier: Apache-2.0
"""The lock by which a state directory belongs to one agent."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.interfaces import IReactorTime

from infranetes_common.concurrency import lock_file_within
from infranetes_common.errors import FailedPrecondition
from vmserver.containers.oci.index import unwritable

FILE = "lock"
LOCK_SECONDS = 5.0  # for another agent to release the lock


async def locked(clock: IReactorTime, directory: Path) -> int:
    """Lock a state directory. Returns a descriptor that holds the lock while it is open.

    :raise FailedPrecondition: another agent has it, or it can't be locked.
    """
    try:
        return await lock_file_within(clock, directory / FILE, LOCK_SECONDS)
    except BlockingIOError:
        raise FailedPrecondition(
            f"the state directory {directory} is used by another agent that is running; stop that one, or "
            "give this one another `directory` in [providers.oci]"
        ) from None
    except OSError as error:
        raise unwritable(directory / FILE, error) from error
