# SPDX-License-Identifier: Apache-2.0
"""The limits that were changed after a container's creation.

Docker only knows limits that were changed through Docker. Limits that were written to cgroups are stored here
for a restarted agent.
"""

from __future__ import annotations

from pathlib import Path

from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri
from vmserver.containers.docker.message_store import MessageStore
from vmserver.containers.resources import overlay


class LimitStore(MessageStore[cri.LinuxContainerResources]):
    """The changed limits of each container.

    :param directory: see `MessageStore`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, cri.LinuxContainerResources)

    def put(self, id: str, message: cri.LinuxContainerResources) -> None:
        """Add changes to the stored ones. :raise FailedPrecondition: they can't be written."""
        limits = cri.LinuxContainerResources()
        if (before := self.get(id)) is not None:
            limits.CopyFrom(before)
        overlay(limits, message)
        try:
            super().put(id, limits)
        except OSError as error:
            raise FailedPrecondition(f"the limits of container {id} can't be written: {error}") from error
