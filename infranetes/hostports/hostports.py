# SPDX-License-Identifier: Apache-2.0
"""The host ports of every pod.

A pod's host ports are its own from the record of its sandbox on, whose configuration names them, until the
sandbox is stopped: no other one may begin that asks for one of them. They lead to its VM from the moment the
sandbox is ready until the VM is lost or is about to be destroyed, when its address may become another one's.
There is no further record: what belongs in the kernel follows from the sandboxes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.hostports.mappings import HostPort, check_unused
from infranetes.hostports.table import HostPortTable, elements
from infranetes_common.errors import FailedPrecondition, InfranetesError

_log = Logger()


def table_name(state_dir: Path) -> str:
    """Return the nftables table of the daemon that has this state directory."""
    return f"infranetes_hostports_{suffix_of(state_dir)}"


def suffix_of(state_dir: Path) -> str:
    """Return what distinguishes the names of this daemon's tables from those of others on the node."""
    return hashlib.sha256(str(state_dir).encode()).hexdigest()[:8]


@attrs.frozen
class PodPorts:
    """The host ports of one sandbox, and the address of its VM; "": it has none yet."""

    sandbox_id: str
    pod: str  # namespace/name, for messages
    ports: tuple[HostPort, ...]
    address: str = ""


class HostPorts:
    """Forwards ports of the node to pods.

    :param table: where the rules are kept. :param unused: raises if a process of the node has the port.
    """

    def __init__(self, table: HostPortTable, unused: Callable[[HostPort], None] = check_unused) -> None:
        self._table = table
        self._unused = unused
        self._ports: dict[str, dict[HostPort, str]] = {}  # by sandbox: the address that each leads to
        self._lock = DeferredLock()

    def check(self, ports: Sequence[HostPort], taken: Iterable[PodPorts]) -> None:
        """Check that a pod may have these ports, beside those that are taken.

        :raise FailedPrecondition: a port is another sandbox's, or used by the node; says which."""
        if not ports:
            return
        for other in taken:
            for port in ports:
                if any(port.clashes(each) for each in other.ports):
                    raise FailedPrecondition(
                        f"host port {port} is taken by sandbox {other.sandbox_id} (pod {other.pod}): stop "
                        "that one, or give the pod another port"
                    )
        for port in ports:
            self._unused(port)

    async def put(self, pod: PodPorts) -> None:
        """Forward the ports to the pod's VM. Idempotent. :raise InfranetesError: they can't be."""
        if not pod.ports:
            return
        before = self._ports.get(pod.sandbox_id)
        self._ports[pod.sandbox_id] = dict.fromkeys(pod.ports, pod.address)
        try:
            await self._apply()
        except BaseException:
            if before is None:
                self._ports.pop(pod.sandbox_id, None)
            raise
        await self._table.forget_flows(pod.ports)

    async def remove(self, sandbox_id: str) -> None:
        """Forward no ports to the sandbox's VM any more. Idempotent. :raise InfranetesError: try again."""
        ports = self._ports.pop(sandbox_id, None)
        if ports is None:
            return
        try:
            await self._apply()
        except BaseException:
            self._ports[sandbox_id] = ports
            raise
        await self._table.forget_flows(list(ports))

    async def take_over(self, pod: PodPorts) -> None:
        """Forward the ports of no other sandbox to the address of this pod's VM. Idempotent.

        The VM that had it is gone, which the daemon may learn later.

        :raise InfranetesError: something still leads to it."""
        if not pod.address:
            return
        others = [id for id, ports in self._ports.items() if pod.address in ports.values()]
        for other in others:
            if other != pod.sandbox_id:
                _log.warn(
                    "sandbox {sandbox} has lost its VM: sandbox {other} has its address {address} now",
                    sandbox=other,
                    other=pod.sandbox_id,
                    address=pod.address,
                )
                await self.remove(other)

    async def restore(self, pods: Iterable[PodPorts]) -> None:
        """Restore exactly these ports after a start. A sweep retries what fails now."""
        for pod in pods:
            if pod.ports and pod.address:
                self._ports[pod.sandbox_id] = dict.fromkeys(pod.ports, pod.address)
        try:
            await self._apply()
        except InfranetesError as error:
            if self._ports:
                _log.error("host ports are not forwarded for now: {error}", error=error)

    async def sweep(self) -> None:
        """Restore rules that another program has changed."""
        try:
            if not self._ports:
                if self._table.guards:  # its guard may be needless by now
                    await self._apply()
                return
            expected = {one for each in elements(self._all()) for one in each}
            if await self._table.current() != expected or not self._table.loopback_open():
                _log.warn("the rules of the host ports were changed by somebody else: they are restored")
                await self._apply()
        except InfranetesError as error:
            _log.error("the rules of the host ports can't be checked: {error}", error=error)

    def _all(self) -> dict[HostPort, str]:
        return {port: address for ports in self._ports.values() for port, address in ports.items()}

    async def _apply(self) -> None:
        async with self._lock:
            await self._table.replace(self._all())
