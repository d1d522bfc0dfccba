# SPDX-License-Identifier: Apache-2.0
"""Processes put into the node's control groups by systemd, as transient scopes.

systemd moves the process, so the daemon needs no right to write control groups. Sources:
org.freedesktop.systemd1(5), systemd.scope(5), systemd.slice(5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.interfaces import IStreamClientEndpoint

from infranetes.providers.cgroup_parents import group_path
from infranetes.providers.qemu.cgroups.cgroupfs import UNIFIED, memberships
from infranetes_common.concurrency import Notifier, within
from infranetes_common.errors import DeadlineExceeded, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.systemd_bus import Body, Bus, BusError

SOCKET = "/run/systemd/private"
SCOPE = ".scope"
_SYSTEMDS = "name=systemd"  # the hierarchy where systemd keeps units, unless it uses only the unified one
_ATTEMPTS = 2  # if systemd is reloaded between the call and the scope's start, it forgets the process
_JOB_SECONDS = 10.0

Properties = Mapping[str, tuple[str, object]]
"""A unit's properties by name: each one's D-Bus type, and its value."""


class SystemdScopes:
    """Scopes below the slices of pods.

    :param endpoint: systemd's own socket.
    :param cgroups_of: tells in which groups a process is.
    """

    def __init__(
        self,
        reactor: IReactor,
        endpoint: IStreamClientEndpoint | None = None,
        cgroups_of: Callable[[int], Mapping[str, str]] = memberships,
    ) -> None:
        self._reactor = reactor
        self._endpoint = endpoint or UNIXClientEndpoint(reactor, SOCKET)
        self._cgroups_of = cgroups_of

    async def place(
        self, pid: int, parent: str, name: str, description: str = "", limits: Properties | None = None
    ) -> None:
        """Put a process into the scope `name` below the slice that `parent` ends with. Idempotent.

        systemd makes a slice that is not there.

        :param limits: more properties of the scope, each with its D-Bus type.
        :raise InvalidArgument: `parent` can't be a slice.
        :raise Unavailable: it is not there, for systemd refuses or the process has ended.
        """
        slice_unit = group_path(parent).name
        problem = ""
        for _ in range(_ATTEMPTS):
            if self._is_there(pid, slice_unit, name):
                return
            properties = _properties(pid, slice_unit, description or name, limits or {})
            problem = await self._start(name, properties)
        if not self._is_there(pid, slice_unit, name):
            reason = problem or "it is elsewhere"
            raise Unavailable(f"systemd has not put process {pid} below {slice_unit}: {reason}")

    def _is_there(self, pid: int, slice_unit: str, name: str) -> bool:
        try:
            where = self._cgroups_of(pid)
        except ProcessLookupError:
            raise Unavailable(f"process {pid} has ended before it was in its pod's control group") from None
        units = where.get(_SYSTEMDS, where.get(UNIFIED, ""))
        counted = where.get("memory", units)
        return units.endswith(f"/{slice_unit}/{name}{SCOPE}") and f"/{slice_unit}/" in f"{counted}/"

    async def set(self, name: str, limits: Properties) -> None:
        """Change properties of a scope, for as long as it exists. :raise Unavailable: systemd refuses."""
        bus = await Bus.connect(self._reactor, self._endpoint, lambda *_: None, lambda: None)
        try:
            await bus.manager("SetUnitProperties", "sba(sv)", (f"{name}{SCOPE}", True, list(limits.items())))
        except BusError as error:
            raise Unavailable(f"systemd does not change {name}{SCOPE}: {error}") from None
        finally:
            bus.close()

    async def _start(self, name: str, properties: Sequence[tuple[str, tuple[str, object]]]) -> str:
        """Make systemd start the scope; return what went wrong."""
        results: dict[str, str] = {}  # by job
        changed = Notifier()

        def signalled(path: str, member: str, body: Body) -> None:
            if member == "JobRemoved":
                _number, job, _unit, result = body
                results[str(job)] = str(result)
                changed.notify()

        async def result_of(job: str) -> str:
            while job not in results:
                await changed.wait()
            return results[job]

        bus = await Bus.connect(self._reactor, self._endpoint, signalled, lambda: None)
        auxiliary: list[object] = []
        try:
            call = (f"{name}{SCOPE}", "fail", properties, auxiliary)
            (job,) = await bus.manager("StartTransientUnit", "ssa(sv)a(sa(sv))", call)
            result = await within(self._reactor, _JOB_SECONDS, result_of(str(job)), "the start of its scope")
        except (BusError, DeadlineExceeded) as error:
            return str(error)
        finally:
            bus.close()
        return "" if result == "done" else f"the start of its scope ended as {result}"

    async def forget(self, parent: str, name: str) -> None:
        """Do nothing: systemd removes a scope without processes by itself."""


def _properties(
    pid: int, slice_unit: str, description: str, limits: Properties
) -> list[tuple[str, tuple[str, object]]]:
    return [
        ("Description", ("s", description)),
        ("PIDs", ("au", [pid])),
        ("Slice", ("s", slice_unit)),
        # Otherwise systemd would end it with the node's other units at a shutdown, before kubelet has ended
        # its pods.
        ("DefaultDependencies", ("b", False)),
        ("CollectMode", ("s", "inactive-or-failed")),
        ("CPUAccounting", ("b", True)),
        ("MemoryAccounting", ("b", True)),
        ("TasksAccounting", ("b", True)),
        *limits.items(),
    ]
