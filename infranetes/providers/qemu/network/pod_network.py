# SPDX-License-Identifier: Apache-2.0
"""The pods' network: their subnet and their firewalls, which outlive the daemon, on the bridge."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from twisted.internet.defer import Deferred, DeferredLock, succeed
from twisted.logger import Logger

from infranetes.providers.qemu.network.bridge import Bridge, BridgePort
from infranetes.providers.qemu.network.firewalls import BridgeFirewalls
from infranetes.providers.subnet import subnet
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.pod_firewall import CLOSED, PodFirewall, decode, encode
from infranetes_common.reactors import IReactor

_FIREWALL = "firewall.json"  # in the VM's directory
_log = Logger()


class PodNetwork:
    """The subnet that pods get addresses from, the bridge that carries it, and the pods' firewalls.

    Callers hold `lock` over each method that deals with the subnet and over what depends on its result:
    while addresses are given out, the subnet does not change.

    :param configured: the subnet until UpdateRuntimeConfig sets another.
    :param path: the file that remembers the other one.
    :param firewalls: None: there are none, and all is open.
    """

    def __init__(
        self,
        reactor: IReactor,
        bridge: Bridge,
        configured: str,
        path: Path,
        firewalls: BridgeFirewalls | None,
    ) -> None:
        self.bridge = bridge
        self._firewalls = firewalls
        self.lock = DeferredLock()
        self._reactor = reactor
        self._configured = configured
        self._path = path
        self._subnet: IPv4Network | None = None

    def __str__(self) -> str:
        return str(self._subnet or self._configured)

    async def subnet(self) -> IPv4Network:
        """Return the subnet in use."""
        if self._subnet is None:
            self._subnet = await run_in_thread(self._reactor, load_subnet, self._path, self._configured)
        return self._subnet

    async def set_up(self, ports: Mapping[BridgePort, Path]) -> None:
        """Make or repair the bridge. :param ports: those of running VMs, and the VMs' directories."""
        if self._firewalls is None:
            # An earlier daemon may have had them.
            await BridgeFirewalls(self._reactor, self.bridge.name).remove()
        else:
            known = await run_in_thread(self._reactor, load_firewalls, ports)
            await self._firewalls.set_up(known)
        await self.bridge.set_up(await self.subnet(), ports)

    def watch_firewalls(self) -> None:
        """Until `stop`, repair firewalls soon after another program changes them. Idempotent."""
        if self._firewalls is not None:
            self._firewalls.watch.begin()

    def stop(self) -> Deferred[None]:
        """Stop repairing firewalls, and fire when no repair is under way. Idempotent."""
        return self._firewalls.watch.end() if self._firewalls is not None else succeed(None)

    async def restore_tables(self, ports: Sequence[BridgePort]) -> None:
        """Make the bridge's tables again if they were removed."""
        await self.bridge.restore_tables(await self.subnet(), ports)
        if self._firewalls is not None:
            await self._firewalls.restore()

    async def join(self, port: BridgePort) -> None:
        """Let a VM into the network; it is closed until its firewall is set. Idempotent."""
        await self.bridge.allow(port)
        await self.bridge.join(port)

    async def leave(self, port: BridgePort) -> None:
        """Release what belongs to a VM that no longer exists. Idempotent."""
        await self.bridge.forbid(port)
        if self._firewalls is not None:
            await self._firewalls.forget(port)

    async def set_firewall(self, port: BridgePort, directory: Path, firewall: PodFirewall) -> None:
        """Put a VM's firewall in force, now and after a restart.

        :raise FailedPrecondition: there are none here. :raise Unavailable: the one before is in force.
        """
        if self._firewalls is None:
            raise FailedPrecondition("NetworkPolicies are turned off: kubernetes.network_policies is false")
        try:
            await self._firewalls.keep(port, firewall, functools.partial(save_firewall, directory))
        except (InfranetesError, OSError) as error:
            raise Unavailable(f"the firewall of {port.address} is not in force: {error}") from error

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


def load_firewalls(directories: Mapping[BridgePort, Path]) -> dict[BridgePort, PodFirewall]:
    """Load the firewalls of VMs; one without a file has none. Blocks."""
    found = {}
    for port, directory in directories.items():
        try:
            found[port] = decode((directory / _FIREWALL).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            _log.error("{address} is closed: its firewall can't be read: {error}",
                       address=port.address, error=str(error))  # fmt: skip
            found[port] = CLOSED
    return found


def save_firewall(directory: Path, firewall: PodFirewall | None) -> None:
    """Save a VM's firewall for the next daemon; None: it has none. Blocks."""
    if firewall is None:
        (directory / _FIREWALL).unlink(missing_ok=True)
        return
    replace_file(directory / _FIREWALL, encode(firewall), durable=False)  # a loss of power ends the VM, too


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
