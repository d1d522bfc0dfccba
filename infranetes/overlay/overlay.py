# SPDX-License-Identifier: Apache-2.0
"""The leases of addresses of the pods' network to sandboxes, and the tunnels to their VMs.

A sandbox has its address from `lease` until `remove`. Its record has the address before the VM or the kernel
gets it, so the daemon after one that was killed does not give it to another sandbox: `restore` receives all
leases. A returned address is used again last, because other hosts may still send to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.overlay.config import OverlayConfig
from infranetes.overlay.tunnels import Peer, Tunnels
from infranetes.overlay.walls import OverlayFirewalls
from infranetes.providers.subnet import free_address, gateway, subnet
from infranetes_common.concurrency import deferred, settled
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound
from infranetes_common.pod_firewall import PodFirewall

MIN_MTU = 576
SAFE_MTU = 1280  # within a tunnel, while the path's MTU is not known

_log = Logger()


@attrs.frozen
class Invitation:
    """The facts that a VM needs to make its end of the tunnel."""

    address: str  # the pod's address
    gateway: str  # the node's address within the tunnel
    node_host: str  # the node's address in the VPC
    port: int
    mtu: int  # the MTU outside the tunnel
    networks: tuple[str, ...]  # the networks reached through the tunnel


class Overlay:
    """The overlay of one node.

    :param walls: the pods' firewalls. :param networks: the cluster's subnets of pods and Services.
    """

    def __init__(
        self,
        tunnels: Tunnels,
        walls: OverlayFirewalls,
        config: OverlayConfig,
        networks: Sequence[IPv4Network] = (),
    ) -> None:
        self._tunnels = tunnels
        self._walls = walls
        self._config = config
        self._networks = list(networks)
        self._network = config.network
        self._leases: dict[str, IPv4Address] = {}  # by sandbox
        self._last: IPv4Address | None = None
        self._peers: dict[str, Peer] = {}  # by sandbox
        self._lock = DeferredLock()
        self._watch = tunnels.watched(self._mend)

    def check(self) -> IPv4Network:
        """Return the pods' subnet.

        :raise FailedPrecondition: pods can't join yet; the message says what to do."""
        if self._network is None:
            raise FailedPrecondition(
                "the pods' network has no subnet for this node yet: the Node needs a spec.podCIDR "
                "(kube-controller-manager --allocate-node-cidrs), or set overlay.pod_cidr"
            )
        if not self._networks:
            raise FailedPrecondition(
                "it is not known which subnets the pods' network has: set kubernetes.cluster_cidrs"
            )
        return self._network

    def configure(self, pod_cidr: str) -> None:
        """Use UpdateRuntimeConfig's subnet, unless the configuration sets one.

        :raise FailedPrecondition: pods have addresses of another subnet."""
        if self._config.network is not None:
            return
        try:
            network = subnet(pod_cidr)
        except InvalidArgument as error:  # not an error for a node whose pods are all in the VPC
            _log.warn("pods can't join the pods' network: {error}", error=error)
            return
        others = [each for each in self._leases.values() if each not in network]
        if others:
            raise FailedPrecondition(
                f"pod CIDR {network} can't replace {self._network}: {len(others)} pods have other addresses "
                f"({others[0]}); remove those pods first"
            )
        self._network = network

    def knows(self, id: str) -> bool:
        """Return whether a sandbox has an address."""
        return id in self._leases

    @property
    def port(self) -> int:
        """The UDP port of the tunnels."""
        return self._config.port

    def has(self, address: str) -> bool:
        """Return whether an address is in the pods' subnet."""
        return bool(address) and self._network is not None and IPv4Address(address) in self._network

    def lease(self, id: str) -> str:
        """Return a sandbox's address, leasing one at the first call. The caller records it before it is used.

        :raise ResourceExhausted: no address is left. :raise FailedPrecondition: as `check`."""
        network = self.check()
        if id not in self._leases:
            self._last = free_address(network, set(self._leases.values()), self._last)
            self._leases[id] = self._last
        return str(self._leases[id])

    async def invite(self, id: str, host: str) -> Invitation:
        """Return the invitation for the VM at `host`, of a sandbox with a lease.

        :raise FailedPrecondition: a tunnel can't take the route to the VM."""
        network = self.check()
        way = await self._tunnels.way_to(IPv4Address(host))
        return Invitation(
            str(self._leases[id]),
            str(gateway(network)),
            str(way.source),
            self._config.port,
            way.mtu,
            tuple(map(str, dict.fromkeys([*self._networks, network]))),
        )

    async def put(self, id: str, host: str, mtu: int) -> None:
        """Make a tunnel to the VM at `host`, of a sandbox with a lease. Idempotent.

        :param mtu: the MTU within the tunnel, as the VM reports it.
        :raise InfranetesError: the tunnel can't be made."""
        before = self._peers.get(id)
        peer = Peer(self._leases[id], IPv4Address(host), max(mtu, MIN_MTU))
        if peer == before:
            return
        self._peers[id] = peer
        try:
            await self._apply()
        except BaseException:
            if before is None:
                self._peers.pop(id, None)
            raise

    async def remove(self, id: str) -> None:
        """End the tunnel to a sandbox's VM and its lease. Idempotent.

        :raise InfranetesError: it failed; try again."""
        peer = self._peers.pop(id, None)
        if peer is not None:
            try:
                await self._apply()
            except BaseException:
                self._peers[id] = peer
                raise
        if id in self._leases:
            await self._walls.forget(id, str(self._leases[id]))
            del self._leases[id]
            if not self._leases:
                await self._walls.take_down()

    async def set_firewall(self, id: str, firewall: PodFirewall) -> None:
        """Put the firewall of a sandbox with a lease in force, at the node's end of its tunnel. Idempotent.

        :raise Unavailable: the former firewall is in force. :raise NotFound: the sandbox has no address.
        """
        if id not in self._leases:
            raise NotFound(f"sandbox {id} has no address of the pods' network")
        await self._walls.set(id, str(self._leases[id]), firewall)

    async def restore(self, addresses: Mapping[str, tuple[str, str]]) -> None:
        """Restore, after a start of the daemon, exactly these leases and tunnels.

        A sweep retries what fails now.

        :param addresses: by sandbox, its address in the pods' network and its VM's in the VPC; the latter is
            "" if the VM has no tunnel yet."""
        try:
            mtus = await self._tunnels.mtus()
        except InfranetesError as error:
            mtus = {}
            _log.debug("the kernel's tunnels can't be listed: {error}", error=error)
        for id, (address, host) in addresses.items():
            lease = self._leases[id] = IPv4Address(address)
            if host:
                # After a reboot of the node the kernel has no MTUs. The VM is asked again once connected.
                self._peers[id] = Peer(lease, IPv4Address(host), mtus.get(address, SAFE_MTU))
        self._last = max(self._leases.values(), default=None)
        self._walls.watch()
        self._watch.begin()
        try:
            await self._walls.restore({id: str(lease) for id, lease in self._leases.items()})
            if self._peers or mtus:
                await self._apply()
        except InfranetesError as error:
            _log.error("there are no tunnels to VMs for now: {error}", error=error)

    @deferred
    async def stop(self) -> None:
        """Stop repairing tunnels and firewalls, and fire when no repair is under way. Idempotent.

        All of them stay in force."""
        await settled([self._watch.end(), self._walls.stop()])

    async def sweep(self) -> None:
        """Repair tunnels that another program has changed, or that an earlier daemon has left."""
        if self._network is None:
            return
        try:
            async with self._lock:
                peers = list(self._peers.values())
                if peers:
                    await self._walls.put_up()
                if not await self._tunnels.is_right(self._network, peers):
                    _log.warn("the tunnels to VMs are not as they were made: they are made again")
                    await self._tunnels.replace(self._network, peers)
        except InfranetesError as error:
            _log.error("the tunnels to VMs can't be checked: {error}", error=error)

    async def _mend(self, sure: bool) -> None:
        if not sure:
            await self.sweep()
        elif self._peers:
            _log.warn(
                "the rules that hold VMs to their addresses were changed by somebody else; they are made "
                "again"
            )
            await self._apply()

    async def _apply(self) -> None:
        async with self._lock:
            if self._peers:
                await self._walls.put_up()
            await self._tunnels.replace(self.check(), list(self._peers.values()))
