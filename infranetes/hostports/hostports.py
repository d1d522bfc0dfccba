"""The host ports of every sandbox.

A sandbox's host ports are its own from its record on, which has them in its configuration, until it is
stopped: no other sandbox is begun that asks for one of them. They lead to its VM from the moment at which
that is ready until just before it is destroyed, when its address may become another one's. There is no
other record: what is to be in the kernel follows from the sandboxes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.hostports.mappings import Mapping, check_unused, wanted
from infranetes.hostports.table import elements
from infranetes.pods.inventory import Sandbox
from infranetes.pods.states import SandboxState
from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, InfranetesError

_IN_FORCE = (SandboxState.READY, SandboxState.LOST)

_log = Logger()


def table_name(state_dir: Path) -> str:
    """The table of the daemon that has this state directory."""
    return "infranetes_hostports_" + hashlib.sha256(str(state_dir).encode()).hexdigest()[:8]


class HostPorts:
    """:param table: where they are put, `table.Table`. :param unused: raises where a process has a port."""

    def __init__(self, table: Any, unused: Any = check_unused) -> None:
        self._table = table
        self._unused = unused
        self._ports: dict[str, dict[Mapping, str]] = {}  # by sandbox: what leads to which address
        self._lock = DeferredLock()

    def check(self, config: cri.PodSandboxConfig, sandboxes: Iterable[Sandbox]) -> None:
        """A pod with this configuration may be begun.

        :raise FailedPrecondition: a host port is another sandbox's, or used by the node; says which."""
        mappings = wanted(config)
        if not mappings:
            return
        for sandbox in sandboxes:
            if sandbox.state is SandboxState.STOPPED:
                continue
            for other in wanted(sandbox.config):
                for mapping in mappings:
                    if mapping.clashes(other):
                        metadata = sandbox.config.metadata
                        raise FailedPrecondition(
                            f"host port {mapping} is taken by sandbox {sandbox.id} (pod {metadata.namespace}/"
                            f"{metadata.name}): stop that one, or give the pod another port"
                        )
        for mapping in mappings:
            self._unused(mapping)

    async def put(self, sandbox: Sandbox) -> None:
        """Have the sandbox's ports lead to its VM. Again: no change. :raise InfranetesError: they can't."""
        mappings = wanted(sandbox.config)
        if not mappings:
            return
        before = self._ports.get(sandbox.id)
        self._ports[sandbox.id] = dict.fromkeys(mappings, sandbox.record.address)
        try:
            await self._apply()
        except BaseException:
            if before is None:
                self._ports.pop(sandbox.id, None)
            raise
        await self._table.forget_flows(mappings)

    async def take(self, sandbox_id: str) -> None:
        """Nothing leads to its VM any more. Unknown: nothing to do. :raise InfranetesError: try again."""
        ports = self._ports.pop(sandbox_id, None)
        if ports is None:
            return
        try:
            await self._apply()
        except BaseException:
            self._ports[sandbox_id] = ports
            raise
        await self._table.forget_flows(list(ports))

    async def restore(self, sandboxes: Iterable[Sandbox]) -> None:
        """After a start: what the sandboxes have, and nothing else. What can't be had now is a sweep's."""
        for sandbox in sandboxes:
            mappings = wanted(sandbox.config)
            if mappings and sandbox.state in _IN_FORCE and sandbox.record.address:
                self._ports[sandbox.id] = dict.fromkeys(mappings, sandbox.record.address)
        try:
            await self._apply()
        except InfranetesError as error:
            if self._ports:
                _log.error("host ports lead nowhere for now: {error}", error=error)

    async def sweep(self) -> None:
        """Put right what somebody else has changed."""
        if not self._ports:
            return
        try:
            if await self._table.there() != {one for each in elements(self._all()) for one in each}:
                _log.warn("the host ports' rules were not as they have to be: they are put there again")
                await self._apply()
        except InfranetesError as error:
            _log.error("host ports could not be looked at: {error}", error=error)

    def _all(self) -> dict[Mapping, str]:
        return {mapping: address for ports in self._ports.values() for mapping, address in ports.items()}

    async def _apply(self) -> None:
        await self._lock.acquire()
        try:
            await self._table.put(self._all())
        finally:
            self._lock.release()


class NoHostPorts:
    """In the place of `HostPorts`, where there are none."""

    def check(self, config: cri.PodSandboxConfig, sandboxes: Iterable[Sandbox]) -> None:
        """:raise FailedPrecondition: it has host ports."""
        if wanted(config):
            raise FailedPrecondition("config.port_mappings: host ports are not offered here")

    async def put(self, sandbox: Sandbox) -> None:
        """Nothing to do."""

    async def take(self, sandbox_id: str) -> None:
        """Nothing to do."""

    async def sweep(self) -> None:
        """Nothing to do."""
