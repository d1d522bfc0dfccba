# SPDX-License-Identifier: Apache-2.0
"""The upkeep while VMs run: what their keeping has left, the sizes of their consoles, the tables of the
bridge, and what these refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from infranetes.providers.interface import RefusedPackets, Share
from infranetes.providers.qemu.network import refusals
from infranetes.providers.qemu.network.pod_network import PodNetwork
from infranetes.providers.qemu.vm import consoles
from infranetes.providers.qemu.vm.vm import Vm, on_bridge
from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

_SECONDS = 30.0  # between rounds
_log = Logger()


class Maintenance:
    """Makes a round from time to time.

    :param vms: the provider's, by token, as they are at each round.
    :param tidy: removes what the keeping of VMs has left.
    :ivar refused: what was refused to the VM with an address, as of the last round.
    """

    def __init__(
        self,
        reactor: IReactor,
        pod_network: PodNetwork,
        vms: Mapping[str, Vm],
        console_size: int,
        tidy: Callable[[], Awaitable[None]],
    ) -> None:
        self._reactor = reactor
        self._pod_network = pod_network
        self._vms = vms
        self._console_size = console_size
        self._tidy = tidy
        self.refused: Mapping[str, Mapping[Share, RefusedPackets]] = {}
        self._counts: refusals.Counts | None = None
        self._rounds = LoopingCall(deferred(self.round))
        self._rounds.clock = reactor

    def begin(self) -> None:
        """Make rounds from now on."""
        self._rounds.start(_SECONDS, now=False)

    def end(self) -> None:
        """Make no more rounds. Idempotent."""
        if self._rounds.running:
            self._rounds.stop()

    async def round(self) -> None:
        """Tidy, trim the consoles, repair the tables, and look at what they refused."""
        try:
            await self._tidy()
            alive = [vm for vm in self._vms.values() if vm.alive]
            paths = [vm.paths.output for vm in alive]
            # Of a VM that boots an image, the console's bytes are numbered: see `vm.console_file`.
            paths += [vm.paths.console for vm in alive if vm.record.guest is None]
            await run_in_thread(self._reactor, consoles.trim_all, paths, self._console_size)
            async with self._pod_network.lock:
                ports = [vm.record.bridge_port for vm in on_bridge(self._vms.values())]
                await self._pod_network.restore_tables(ports)
            await self._look()
        except InfranetesError as error:
            _log.error("the pods' network could not be checked: {error}", error=error)
        except Exception:  # the next round is made all the same
            _log.failure("the check of consoles and network failed")

    async def _look(self) -> None:
        counts = await self._pod_network.bridge.refusals()
        before = counts if self._counts is None else self._counts
        self.refused = refusals.since(before, counts)
        for vm in on_bridge(self._vms.values()):
            address = vm.record.bridge_port.address
            shares = refusals.used_up(self.refused.get(address, {}))
            if shares and address not in before:  # later ones are in the metrics
                _log.warn("sandbox {id}, the pod at {address}, has used up a share: {shares}",
                          id=vm.record.sandbox_id, address=address, shares=", ".join(shares))  # fmt: skip
        self._counts = counts
