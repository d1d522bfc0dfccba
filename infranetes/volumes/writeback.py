# SPDX-License-Identifier: Apache-2.0
"""Bringing what a container or a command wrote to volumes to the node, before its end is reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.volumes.volume import Volume
from infranetes_common.concurrency import Flight, settled, shielded, sleep, start, within
from infranetes_common.errors import DeadlineExceeded, InfranetesError, Unavailable

STILL_SECONDS = 10.0  # the longest that a container's end is held back while nothing arrives
WHOLE_SECONDS = 90.0  # the longest that it is held back at all: kubelet waits for two minutes
TRIES = 5  # to carry a tree that is being written meanwhile
MAX_WORDS = 1024
COMMAND_SECONDS = 5.0  # the longest that a command's end is held back
COMMAND_ENTRIES = 1000  # of a volume: a larger one takes too long for a command to wait for it

_log = Logger()


class WriteBack:
    """Brings back to the node what containers wrote. :param sync: makes both sides of a volume the same."""

    def __init__(
        self, clock: IReactorTime, sync: Callable[[Sandbox, Volume], Coroutine[object, object, None]]
    ) -> None:
        self._clock = clock
        self._sync = sync

    async def run(self, container: Container, volumes: Iterable[Volume]) -> str:
        """Bring the volumes to the node, side by side. Return words for what is missing; "": nothing."""
        missing = []
        for words in await settled([start(self._write_back(container, volume)) for volume in volumes]):
            if isinstance(words, Failure):
                words.raiseException()
            if words:
                missing.append(words)
        return (
            f"not everything that it wrote is on the node: {'; '.join(missing)}"[:MAX_WORDS]
            if missing
            else ""
        )

    async def _write_back(self, container: Container, volume: Volume) -> str:
        try:
            for left in reversed(range(TRIES)):
                try:
                    await self._while_it_progresses(volume, start(self._sync(container.sandbox, volume)))
                    break
                except Unavailable:
                    if not left:
                        raise
                    await sleep(self._clock, 0.1)
        except (InfranetesError, OSError) as error:
            _log.warn(
                "what container {container} of sandbox {sandbox} wrote last to {path} "
                "is not on the node: {error}",
                container=container.id,
                sandbox=container.sandbox.id,
                path=volume.source.path,
                error=error,
            )
            return f"{volume.source.path}: {error}"
        return ""

    async def _while_it_progresses(self, volume: Volume, work: Deferred[None]) -> None:
        """Wait for `work` as long as something comes from the VM. :raise DeadlineExceeded: nothing did."""
        flight = Flight(work)
        until = self._clock.seconds() + WHOLE_SECONDS
        while True:
            received = volume.received
            try:
                words = "bringing back what was written"
                return await within(self._clock, STILL_SECONDS, flight.join(), words)
            except DeadlineExceeded:
                if volume.received == received or self._clock.seconds() >= until:
                    flight.cancel()
                    raise


async def catch_up(
    clock: IReactorTime, volumes: Iterable[Volume], compare: Callable[[Volume], Deferred[None]]
) -> None:
    """Wait until volumes are the same on both sides, as far as that is soon. Comparisons go on after that.

    :param compare: compares a volume; does not fail.
    """
    soon = [each for each in volumes if not each.trouble and len(each.base or ()) <= COMMAND_ENTRIES]
    comparisons = [compare(each) for each in soon]
    with contextlib.suppress(DeadlineExceeded):
        waits = settled([shielded(each) for each in comparisons])
        await within(clock, COMMAND_SECONDS, waits, "bringing back what was written")
