# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the AWS Load Balancer Controller: which targets it makes of a Service, and what it asks EC2.

Source: kubernetes-sigs/aws-load-balancer-controller, pkg/backend/endpoint_resolver.go (which endpoints are
targets), pkg/service/model_build_target_group.go (when it looks after rules of security groups) and
pkg/networking/pod_eni_info_resolver.go (how it finds a pod's network interface for these).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

_ANNOTATION = "service.beta.kubernetes.io/aws-load-balancer-"
Json = Mapping[str, Any]


class NoInterface(Exception):
    """The controller finds no network interface for a pod, and registers no target at all."""


@attrs.frozen
class Target:
    """A target of a group. :ivar address: the pod's."""

    address: str
    port: int

    def described(self) -> Mapping[str, object]:
        """Return it as in a request."""
        return {"Id": self.address, "Port": self.port}


def looks_after_rules(service: Json) -> bool:
    """Return whether the controller adds rules to the security groups of the Service's pods."""
    annotations = service["metadata"]["annotations"]
    if not annotations.get(f"{_ANNOTATION}security-groups"):
        return True  # it makes groups of its own
    return bool(annotations.get(f"{_ANNOTATION}manage-backend-security-group-rules") == "true")


def targets(service: Json, slices: Sequence[Json], ec2: Any, node_instance: str) -> list[Target]:
    """Return the targets that are registered for a Service of target type `ip`.

    :param ec2: the client. :param node_instance: the id of the instance that is the pods' node.
    :raise NoInterface: there are none."""
    assert service["metadata"]["annotations"][f"{_ANNOTATION}nlb-target-type"] == "ip"
    ready = list(_ready(slices))
    if looks_after_rules(service):
        [reservation] = ec2.describe_instances(InstanceIds=[node_instance])["Reservations"]
        [instance] = reservation["Instances"]
        owned = {
            address["PrivateIpAddress"]
            for interface in instance["NetworkInterfaces"]
            for address in interface["PrivateIpAddresses"]
        }
        if strangers := [target.address for target in ready if target.address not in owned]:
            raise NoInterface(f"cannot resolve pod ENI for pods: {strangers}")
    return ready


def _ready(slices: Sequence[Json]) -> Iterator[Target]:
    for piece in slices:
        for port in piece["ports"]:
            for endpoint in piece["endpoints"]:
                is_pod = endpoint.get("targetRef", {}).get("kind") == "Pod"
                if is_pod and endpoint["conditions"].get("ready"):
                    yield Target(endpoint["addresses"][0], port["port"])
