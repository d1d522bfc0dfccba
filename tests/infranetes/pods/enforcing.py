# SPDX-License-Identifier: Apache-2.0
"""A fake provider that enforces pods' firewalls itself."""

from __future__ import annotations

from ipaddress import ip_address

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from infranetes.providers.interface import IFirewallsPods
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.pod_firewall import CLOSED, PodFirewall
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode


@implementer(IFirewallsPods)
class Enforcing(FakeProvider):
    """A provider that enforces firewalls.

    :ivar said: the firewall in force, by VM. :ivar idle: it does not enforce any. :ivar broken: it fails.
    """

    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self.said: dict[str, list[PodFirewall]] = {}
        self.idle = False
        self.broken = False

    def set_firewall(self, instance_id: str, firewall: PodFirewall) -> Deferred[None]:
        if instance_id not in self.instances:
            return fail(NotFound(f"there is no VM {instance_id}"))
        if self.idle:
            return fail(FailedPrecondition("NetworkPolicies are turned off"))
        if self.broken:
            return fail(Unavailable("the firewall is not in force"))
        self.said.setdefault(instance_id, []).append(firewall)
        return succeed(None)

    def lets_in(self, instance_id: str, address: str, port: int) -> bool:
        """Return whether that address, not the node's, may open a TCP connection to a port of the VM."""
        firewall = self.said.get(instance_id, [CLOSED])[-1]
        if self.idle or firewall.ingress is None:
            return True
        return any(
            any(ip_address(address) in network for network in each.networks)
            and (each.ports is None or any(ports.protocol == "TCP" and ports.first <= port <= ports.last
                                           for ports in each.ports))
            for each in firewall.ingress
        )  # fmt: skip
