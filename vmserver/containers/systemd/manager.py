"""systemd's manager as the provider calls it: connected again when it was lost, unmoved by what is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.logger import Logger

from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable
from vmserver.containers.systemd import units
from vmserver.containers.systemd.bus import Bus, BusError, Signal

RETRY_SECONDS = (0.1, 2.0)

_log = Logger()
_GONE = ("org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.systemd1.NoSuchProcess",
         "org.freedesktop.DBus.Error.UnknownObject", "org.freedesktop.systemd1.UnitNotLoaded")  # fmt: skip


class Manager:
    """One systemd.

    :param signalled: is told each signal. :param connected: is awaited after each connection was made: what
        happened before is to be looked at then.
    """

    def __init__(
        self,
        reactor: Any,
        endpoint: IStreamClientEndpoint,
        signalled: Signal,
        connected: Callable[[], Awaitable[None]],
    ) -> None:
        self._reactor = reactor
        self._endpoint = endpoint
        self._signalled = signalled
        self._connected = connected
        self._reconnecting: Deferred[None] | None = None
        self._stopped = False
        self.bus: Bus | None = None

    async def start(self) -> None:
        """:raise Unavailable: there is no systemd."""
        self.bus = await Bus.connect(self._reactor, self._endpoint, self._signalled, self._lost)
        await self._connected()

    def stop(self) -> None:
        """Close the connection. Twice is once."""
        self._stopped = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self.bus is not None:
            self.bus.close()
            self.bus = None

    def _lost(self) -> None:
        self.bus = None
        if not self._stopped and self._reconnecting is None:
            _log.error("the connection to systemd was lost")
            self._reconnecting = Deferred.fromCoroutine(self._reconnect())

    async def _reconnect(self) -> None:
        pause, longest = RETRY_SECONDS
        with contextlib.suppress(CancelledError):
            while self.bus is None:
                await deferLater(self._reactor, pause, lambda: None)
                pause = min(2 * pause, longest)
                try:
                    await self.start()
                except (InfranetesError, BusError) as error:
                    _log.error("no systemd yet: {error}", error=error)
        self._reconnecting = None

    def check(self) -> Bus:
        """The connection. :raise Unavailable: there is none."""
        if self.bus is None:
            raise Unavailable("there is no connection to systemd; try again in a moment")
        return self.bus

    async def call(self, method: str, signature: str, body: Sequence[Any]) -> tuple[Any, ...]:
        """A call whose object may be gone: then ().

        :raise Unavailable: systemd can't be reached, or can't do it now."""
        try:
            return await self.check().manager(method, signature, body)
        except BusError as error:
            if error.name in _GONE:
                return ()
            raise Unavailable(f"systemd refuses {method}: {error}") from error

    async def properties(self, unit: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What it has as a unit and as a service; None: there is no such unit.

        :raise Unavailable: systemd can't be reached, or does not say."""
        bus = self.check()
        if not await self.call("GetUnit", "s", (unit,)):
            return None
        path = units.object_path(unit)
        try:
            return await bus.properties(path, "Unit"), await bus.properties(path, "Service")
        except BusError as error:
            if error.name in _GONE:
                return None
            raise Unavailable(f"systemd does not say how {unit} is: {error}") from error

    async def clean(self, unit: str) -> None:
        """Its end is written down: systemd need not know it any longer, and what it left behind ends."""
        for method, signature, body in (
            ("StopUnit", "ss", (unit, "replace")),
            ("ResetFailedUnit", "s", (unit,)),
        ):
            try:
                await self.call(method, signature, body)
            except InfranetesError as error:
                _log.debug("{unit} stays: {error}", unit=unit, error=error)

    async def limit(self, unit: str, wanted: Sequence[units.Property]) -> None:
        """Give a unit that runs other limits; one that is gone needs none.

        :raise InvalidArgument: systemd does not take one."""
        try:
            await self.check().manager("SetUnitProperties", "sba(sv)", (unit, True, wanted))
        except BusError as error:
            if error.name not in _GONE:
                raise InvalidArgument(f"resources: systemd refuses: {error}") from error

    async def start_transient(self, unit: str, properties: Sequence[units.Property]) -> None:
        """Begin a unit that is there for one run; it is begun already: nothing to do.

        :raise InvalidArgument: systemd does not take a property."""
        body: tuple[Any, ...] = (unit, "fail", properties, [])
        try:
            await Bus.manager_with_descriptors(
                self._reactor, self._endpoint, "StartTransientUnit", "ssa(sv)a(sa(sv))", body
            )
        except BusError as error:
            if error.name == "org.freedesktop.systemd1.UnitExists":
                return
            wrong = "Invalid" in error.name or "PropertyReadOnly" in error.name
            kind = InvalidArgument if wrong else Unavailable
            raise kind(f"systemd does not take {unit}: {error}") from error
