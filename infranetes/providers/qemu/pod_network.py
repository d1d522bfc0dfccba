# SPDX-License-Identifier: Apache-2.0
"""The pods' subnet, which outlives the daemon, on the bridge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from twisted.internet.defer import DeferredLock

from infranetes.providers.qemu.bridge import Bridge, BridgePort
from infranetes.providers.qemu.subnet import subnet
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.reactors import IReactor


class PodNetwork:
    """The subnet that pods get addresses from, and the bridge that carries it.

    Callers hold `lock` over each method and over what depends on its result: while addresses are
    given out, the subnet does not change.

    :param configured: the subnet until UpdateRuntimeConfig sets another.
    :param path: the file that remembers the other one.
    """

    def __init__(self, reactor: IReactor, bridge: Bridge, configured: str, path: Path) -> None:
        self.bridge = bridge
        self.lock = DeferredLock()
        self._reactor = reactor
        self._configured = configured
        self._path = path
        self._subnet: IPv4Network | None = None

    def __str__(self) -> str:
        return str(self._subnet or self._configured)

    async def subnet(self) -> IPv4Network:
        """The subnet in use."""
        if self._subnet is None:
            self._subnet = await run_in_thread(self._reactor, load_subnet, self._path, self._configured)
        return self._subnet

    async def set_up(self, ports: Sequence[BridgePort]) -> None:
        """Make or repair the bridge. :param ports: those of running VMs."""
        await self.bridge.set_up(await self.subnet(), ports)

    async def restore_tables(self, ports: Sequence[BridgePort]) -> None:
        """Make the bridge's tables again if somebody has removed them."""
        await self.bridge.restore_tables(await self.subnet(), ports)

    async def change(
        self, new: IPv4Network, in_use: Sequence[IPv4Address], ports: Sequence[BridgePort] | None
    ) -> None:
        """Use another subnet, now and after a restart.

        :param in_use: the addresses of running VMs, which keep them.
        :param ports: the ports of running VMs; None: the bridge is not set up yet.
        :raise FailedPrecondition: an address in use is not in the new subnet.
        """
        others = [address for address in in_use if address not in new]
        if others:
            raise FailedPrecondition(
                f"pod CIDR {new} can't replace {self._subnet}: {len(others)} running VMs have other "
                f"addresses ({others[0]}); remove those pods first"
            )
        if ports is not None:
            await self.bridge.set_up(new, ports)
        await run_in_thread(self._reactor, save_subnet, self._path, self._configured, new)
        self._subnet = new


def load_subnet(path: Path, configured: str) -> IPv4Network:
    """Load what UpdateRuntimeConfig set, unless the configuration has changed since. Blocks."""
    try:
        saved = json.loads(path.read_bytes())
        if saved["configured"] == configured:
            return subnet(saved["pod_cidr"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InfranetesError):
        pass
    return subnet(configured)


def save_subnet(path: Path, configured: str, network: IPv4Network) -> None:
    """Save the subnet for the next daemon. Blocks."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, json.dumps({"configured": configured, "pod_cidr": str(network)}) + "\n")
