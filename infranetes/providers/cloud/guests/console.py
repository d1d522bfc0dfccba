# SPDX-License-Identifier: Apache-2.0
"""The serial console of a cloud's VM, which can be read alone: see `IConsole`.

The cloud is asked while somebody waits for more, soon after something was written and then ever more rarely,
or when somebody has read all that is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from infranetes.providers.cloud.guests.kept import KeptConsole
from infranetes.providers.hypervisor import IConsole
from infranetes_common.concurrency import Flight, Notifier, deferred
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound

FIRST_PAUSE, LAST_PAUSE = 5.0, 60.0  # seconds between two questions to the cloud
_GROWTH = 1.5

_log = Logger()


@implementer(IConsole)
class CloudConsole:
    """The console of one VM.

    :param name: the VM's, for people. :param ask: returns what was written last.
    :param save: keeps what is passed, which `kept` is made of by a later daemon.
    :param stretch: returns by how much pauses are longer, as of `Stretch`."""

    writable = False

    def __init__(
        self,
        clock: IReactorTime,
        name: str,
        kept: KeptConsole,
        ask: Callable[[], Awaitable[bytes]],
        save: Callable[[bytes], Awaitable[None]],
        stretch: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.ended = False
        self._clock = clock
        self._name = name
        self._kept = kept
        self._ask = ask
        self._save = save
        self._stretch = stretch
        self._destroyed = False
        self._changed = Notifier()
        self._asking: Flight[None] | None = None
        self._asked_at: float | None = None
        self._pause = FIRST_PAUSE
        self._next: IDelayedCall | None = None

    @property
    def begin(self) -> int:
        """See `IConsole`."""
        return self._kept.begin

    @property
    def end(self) -> int:
        """See `IConsole`."""
        return self._kept.end

    @deferred
    async def read(self, offset: int, size: int) -> bytes:
        """See `IConsole`."""
        self._check()
        if offset == self.end and not self.ended and self._is_due():
            await self.look()
            self._check()
        if size < 0 or not self.begin <= offset <= self.end:
            raise InvalidArgument(
                f"the console of VM {self._name} is kept from {self.begin} to {self.end}, and has no {size} "
                f"bytes at {offset}"
            )
        at = offset - self.begin
        return self._kept.data[at : at + size]

    def changed(self) -> Deferred[None]:
        """See `IConsole`."""
        waiting = self._changed.wait()
        if self.ended:
            self._clock.callLater(0, self._changed.notify)
        elif self._next is None:
            pause = 0.0 if self._is_due() else self._pause * self._stretch()
            self._next = self._clock.callLater(pause, self._look_again)
        return waiting

    @deferred
    async def write(self, data: bytes) -> None:
        """See `IConsole`."""
        self._check()
        raise FailedPrecondition(
            f"the console of VM {self._name} can only be read: its cloud has no keyboard for it; use "
            "`kubectl exec -it`, which needs SSH in the image"
        )

    def look(self) -> Deferred[None]:
        """Ask the cloud now. Who asks meanwhile waits for the same answer. Never fails."""
        if self._asking is None or self._asking.done:
            self._asking = Flight(self._look())
        return self._asking.join()

    async def _look(self) -> None:
        self._asked_at = self._clock.seconds()
        try:
            answer = await self._ask()
            if not self.ended and self._kept.add(answer):
                self._pause = FIRST_PAUSE
                await self._save(self._kept.content())
                self._changed.notify()
                return
        except NotFound:
            pass  # the VM has ended meanwhile, or is too new
        except InfranetesError as error:
            _log.debug("the console of VM {vm}: {error}", vm=self._name, error=error)
        self._pause = min(self._pause * _GROWTH, LAST_PAUSE)

    def _is_due(self) -> bool:
        return self._asked_at is None or self._clock.seconds() - self._asked_at >= FIRST_PAUSE

    def _look_again(self) -> None:
        self._next = None
        if self._changed.waiters and not self.ended:
            self.look().addCallback(lambda _: self._go_on())

    def _go_on(self) -> None:
        if self._changed.waiters and not self.ended and self._next is None:
            self._next = self._clock.callLater(self._pause * self._stretch(), self._look_again)

    def finish(self) -> None:
        """Have no more bytes come, and tell those who wait. Idempotent."""
        self.ended = True
        self.stop()
        self._changed.notify()

    def destroy(self) -> None:
        """Have nothing to be read any more. Idempotent."""
        self._destroyed = True
        self.finish()

    def stop(self) -> None:
        """Ask no more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _check(self) -> None:
        if self._destroyed:
            raise NotFound(f"there is no VM {self._name} any more")
