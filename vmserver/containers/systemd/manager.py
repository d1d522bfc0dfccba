# SPDX-License-Identifier: Apache-2.0
"""systemd's manager as the provider uses it: it reconnects, and a missing unit is not an error."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.logger import Logger

from infranetes_common.concurrency import backoff, sleep, start
from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable
from infranetes_common.systemd_bus import Body, Bus, BusError, Signalled
from vmserver.containers.systemd import units
from vmserver.containers.systemd.state import Service, Unit

RETRY_SECONDS = (0.1, 2.0)

_log = Logger()
_MISSING = ("org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.systemd1.NoSuchProcess",
         "org.freedesktop.DBus.Error.UnknownObject", "org.freedesktop.systemd1.UnitNotLoaded")  # fmt: skip


class Manager:
    """The systemd of this VM.

    :param signalled: called with each signal.
    :param connected: awaited after each new connection, to query what signals may have been missed.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        signalled: Signalled,
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
        """Connect. :raise Unavailable: systemd can't be reached."""
        self.bus = await Bus.connect(self._reactor, self._endpoint, self._signalled, self._lost)
        await self._connected()

    def stop(self) -> None:
        """Close the connection. Idempotent."""
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
            self._reconnecting = start(self._reconnect())

    async def _reconnect(self) -> None:
        pauses = backoff(*RETRY_SECONDS)
        with contextlib.suppress(CancelledError):
            while self.bus is None:
                await sleep(self._reactor, next(pauses))
                try:
                    await self.start()
                except (InfranetesError, BusError) as error:
                    _log.error("systemd can't be reached yet: {error}", error=error)
        self._reconnecting = None

    def connection(self) -> Bus:
        """Return the connection. :raise Unavailable: there is none."""
        if self.bus is None:
            raise Unavailable("there is no connection to systemd; try again in a moment")
        return self.bus

    async def call(self, method: str, signature: str, body: Sequence[object]) -> Body:
        """Call a method of the manager; return () if the unit does not exist.

        :raise Unavailable: systemd can't be reached, or refuses."""
        try:
            return await self.connection().manager(method, signature, body)
        except BusError as error:
            if error.name in _MISSING:
                return ()
            raise Unavailable(f"systemd refuses {method}: {error}") from error

    async def properties(self, unit: str) -> tuple[Unit, Service] | None:
        """Return the unit's properties; None if there is no such unit.

        :raise Unavailable: systemd can't be reached, or refuses."""
        bus = self.connection()
        if not await self.call("GetUnit", "s", (unit,)):
            return None
        path = units.object_path(unit)
        try:
            as_unit, as_service = await bus.properties(path, "Unit"), await bus.properties(path, "Service")
            return Unit.of(as_unit), Service.of(as_service)
        except BusError as error:
            if error.name in _MISSING:
                return None
            raise Unavailable(f"systemd refuses the properties of {unit}: {error}") from error

    async def discard(self, unit: str) -> None:
        """Stop a unit and have systemd forget it; errors are only logged."""
        for method, signature, body in (
            ("StopUnit", "ss", (unit, "replace")),
            ("ResetFailedUnit", "s", (unit,)),
        ):
            try:
                await self.call(method, signature, body)
            except InfranetesError as error:
                _log.debug("the unit {unit} could not be discarded: {error}", unit=unit, error=error)

    async def set_limits(self, unit: str, limits: Sequence[units.Property]) -> None:
        """Change the limits of a running unit. Does nothing if there is no such unit.

        :raise InvalidArgument: systemd refuses a limit."""
        try:
            await self.connection().manager("SetUnitProperties", "sba(sv)", (unit, True, limits))
        except BusError as error:
            if error.name not in _MISSING:
                raise InvalidArgument(f"resources: systemd refuses: {error}") from error

    async def start_transient(self, unit: str, properties: Sequence[units.Property]) -> None:
        """Start a transient unit. Does nothing if it exists.

        :raise InvalidArgument: systemd refuses a property."""
        auxiliary_units: list[object] = []
        body = (unit, "fail", properties, auxiliary_units)
        try:
            await Bus.manager_with_descriptors(
                self._reactor, self._endpoint, "StartTransientUnit", "ssa(sv)a(sa(sv))", body
            )
        except BusError as error:
            if error.name == "org.freedesktop.systemd1.UnitExists":
                return
            wrong = "Invalid" in error.name or "PropertyReadOnly" in error.name
            kind = InvalidArgument if wrong else Unavailable
            raise kind(f"systemd refuses {unit}: {error}") from error
