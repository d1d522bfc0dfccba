# SPDX-License-Identifier: Apache-2.0
"""The calls of `Control` about NetworkPolicies."""

from __future__ import annotations

from typing import Protocol

from infranetes.control.chosen import chosen, followed
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.policies.cluster import ClusterPolicies
from infranetes_common.pod_firewall import Allowed, PodFirewall, Ports
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlPolicyRpcs
from txgrpc import Call

MOST_SHOWN = 1024  # the most networks


class FirewallsInForce(Protocol):
    """The source of the firewalls that are in force for sandboxes."""

    def in_force(self, id: str) -> PodFirewall | None:
        """Return a sandbox's firewall; None: it is not known."""

    def trouble(self, id: str) -> str:
        """Return why the last attempt to put another one in force failed; empty: it did not."""


class PolicyCalls(ControlPolicyRpcs):
    """One method per RPC.

    :param policies: None: NetworkPolicies don't hold on this node.
    """

    def __init__(
        self, inventory: Inventory, policies: ClusterPolicies | None, firewalls: FirewallsInForce | None
    ) -> None:
        self._inventory = inventory
        self._policies = policies
        self._firewalls = firewalls

    async def GetPolicies(
        self, request: control.GetPoliciesRequest, call: Call
    ) -> control.GetPoliciesResponse:
        sandboxes = chosen(self._inventory, request.pod)
        policies, firewalls = self._policies, self._firewalls
        if policies is None or firewalls is None:
            return control.GetPoliciesResponse()
        return control.GetPoliciesResponse(
            enabled=True,
            followed=followed(policies),
            complete=policies.complete,
            pods=[_pod(sandbox, policies, firewalls) for sandbox in sandboxes],
        )


def _pod(sandbox: Sandbox, policies: ClusterPolicies, firewalls: FirewallsInForce) -> control.PodPolicies:
    metadata = sandbox.config.metadata
    pod = control.PodPolicies(
        sandbox_id=sandbox.id,
        namespace=metadata.namespace,
        name=metadata.name,
        address=sandbox.record.address,
        policies=[
            control.Policy(
                name=str(policy.name), ingress=policy.ingress is not None, egress=policy.egress is not None
            )
            for policy in policies.selecting(sandbox.id)
        ],
        trouble=firewalls.trouble(sandbox.id),
    )
    in_force = firewalls.in_force(sandbox.id)
    if in_force is not None:
        pod.known, pod.current = True, in_force == policies.firewall(sandbox.id)
        if in_force.ingress is not None:
            pod.ingress.CopyFrom(_direction(in_force.ingress))
        if in_force.egress is not None:
            pod.egress.CopyFrom(_direction(in_force.egress))
    return pod


def _direction(allowed: tuple[Allowed, ...]) -> control.Direction:
    return control.Direction(
        allowed=[
            control.Allowed(
                networks=map(str, rule.networks[:MOST_SHOWN]),
                network_count=len(rule.networks),
                ports=map(_ports, rule.ports or ()),
            )
            for rule in allowed
        ]
    )


def _ports(ports: Ports) -> str:
    numbers = str(ports.first) if ports.first == ports.last else f"{ports.first}-{ports.last}"
    return f"{ports.protocol.lower()} {numbers}"
