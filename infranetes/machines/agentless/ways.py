# SPDX-License-Identifier: Apache-2.0
"""The ways into one guest, and which of them is open: found out when one is needed, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.machines.agentless.access import IGuestAccess
from infranetes_common.concurrency import Flight, settled, start, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable

PROBE_SECONDS = 5.0  # that a guest has to answer by one way
LOOK_AGAIN_SECONDS = 30.0  # before better ways are asked again
NONE = "none"

_log = Logger()


class Ways:
    """The ways into one guest.

    :param make: makes them, best first, when one is needed first.
    :ivar current: the one that answered last; None: none has, or it was lost.
    :ivar troubles: why the others did not answer, by their names.
    """

    def __init__(
        self, clock: IReactorTime, sandbox_id: str, make: Callable[[], Sequence[IGuestAccess]]
    ) -> None:
        self.current: IGuestAccess | None = None
        self.troubles: dict[str, str] = {}
        self._clock = clock
        self._sandbox_id = sandbox_id
        self._make = make
        self._made: tuple[IGuestAccess, ...] | None = None
        self._look_again_at = 0.0
        self._looking: Flight[None] | None = None  # all who wait for a way share it
        self._closed = False

    @property
    def _ways(self) -> tuple[IGuestAccess, ...]:
        if self._made is None:
            self._made = tuple(self._make())
        return self._made

    @property
    def any(self) -> bool:
        """Whether there may be a way, whether or not it is open."""
        return bool(self._ways)

    @property
    def name(self) -> str:
        """The name of the way that answered last; none: none has."""
        return self.current.name if self.current is not None else NONE

    async def open(self) -> IGuestAccess:
        """Return a way that answers: the one that did before, or the best of those that do now.

        While it is not the best there may be, the better ones are asked again from time to time.

        :raise FailedPrecondition: none does; the message says why, and what can be done without one.
        :raise Unavailable: the ways are closed."""
        if self._closed:
            raise self._closed_error()
        if self.current is None:
            await self._until_looked()
        elif self.current is not self._ways[0] and self._clock.seconds() >= self._look_again_at:
            self._look()
        if self.current is None:
            raise FailedPrecondition(self._why_none())
        return self.current

    def _look(self) -> Flight[None]:
        """Ask all ways, unless they are being asked."""
        if self._looking is None or self._looking.done:
            self._looking = Flight(self._ask_all())
        return self._looking

    async def _until_looked(self) -> None:
        looking = self._look()
        try:
            await looking.join()
        except CancelledError:
            if self._closed and looking.done:
                raise self._closed_error() from None
            raise

    async def _ask_all(self) -> None:
        """Ask all ways at once. The best that answers is found; a better one that is slow is waited for."""
        self._look_again_at = self._clock.seconds() + LOOK_AGAIN_SECONDS
        asked = [(way, start(self._ask(way))) for way in self._ways]
        try:
            for way, answered in asked:
                if await answered:
                    if self.current is not way:
                        _log.info("sandbox {sandbox}: its guest is reached by {way}",
                                  sandbox=self._sandbox_id, way=way.name)  # fmt: skip
                    self.current = way
                    return
        finally:
            for _, answered in asked:
                answered.cancel()
                answered.addErrback(lambda failure: failure.trap(CancelledError))
        self.current = None

    async def _ask(self, way: IGuestAccess) -> bool:
        answer = start(way.answers(PROBE_SECONDS))
        try:
            await within(self._clock, PROBE_SECONDS, answer, f"the guest's answer by {way.name}")
        except InfranetesError as error:
            self.troubles[way.name] = str(error)
            return False
        self.troubles.pop(way.name, None)
        return True

    def lost(self, way: IGuestAccess, error: InfranetesError) -> None:
        """Note that a call by `way` has failed: if the guest was not reached, the next call looks anew."""
        if isinstance(error, Unavailable) and self.current is way:
            self.current = None
            self.troubles[way.name] = str(error)

    def _why_none(self) -> str:
        tried = "; ".join(f"{name}: {trouble}" for name, trouble in self.troubles.items())
        return (
            f"the guest of sandbox {self._sandbox_id} can't run commands for the node"
            f"{f' ({tried})' if tried else ''}: use its serial console by `kubectl attach -it`, or an image "
            "with an SSH server and cloud-init, or with qemu-guest-agent"
        )

    def _closed_error(self) -> Unavailable:
        return Unavailable(f"the node's connections to the guest of sandbox {self._sandbox_id} are closed")

    async def close(self) -> None:
        """Close all connections. Never fails. Idempotent."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self.current = None
        await settled([start(way.close()) for way in self._made or ()])
