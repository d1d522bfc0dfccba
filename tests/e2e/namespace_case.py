# SPDX-License-Identifier: Apache-2.0
"""Real VMs in network namespaces as a CNI makes them, and the contract of every provider with these VMs.

The contract takes minutes, so this module has a name that the runner does not find. Run it with ``trial
tests.e2e.namespace_case`` when the code that connects VMs changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Attachment, InstanceSpec, ProviderContext
from tests.contract.pod_provider import PodProviderContract
from tests.e2e.qemu_case import QemuCase, said
from tests.support.spaces import Space

ROUTER, ROUTER6 = "10.229.0.1", "fd00:229::1"
MTU, ROUTE_MTU = 1450, 1400


class Pod:
    """A namespace as the CNI plug-in ptp makes it, whose link ends in the node's namespace."""

    def __init__(self, number: int) -> None:
        self.space = Space("pod")
        self.link = f"inx{os.urandom(4).hex()}"
        self.address, self.address6 = f"10.229.0.{number}", f"fd00:229::{number:x}"
        self.space.ip(
            f"link add eth0 mtu {MTU} type veth peer name {self.link} mtu {MTU} netns {os.getpid()}",
            f"address add {self.address}/24 dev eth0 noprefixroute",
            f"address add {self.address6}/64 dev eth0 nodad noprefixroute",
            "link set eth0 up",
            f"route add {ROUTER} dev eth0 src {self.address}",
            f"route add 10.229.0.0/24 via {ROUTER} src {self.address}",
            f"route add default via {ROUTER} mtu {ROUTE_MTU}",
            f"-6 route add {ROUTER6} dev eth0",
            f"-6 route add default via {ROUTER6}",
        )
        for words in (
            f"address add {ROUTER}/32 dev {self.link}",
            f"address add {ROUTER6}/128 dev {self.link} nodad",
            f"link set {self.link} up",
            f"route add {self.address}/32 dev {self.link} src {ROUTER}",
            f"-6 route add {self.address6}/128 dev {self.link}",
        ):
            said("ip", *words.split())

    @property
    def attachment(self) -> Attachment:
        return Attachment(Path("/run/netns") / self.space.name)

    def taps(self) -> list[str]:
        """The VMs' interfaces in this namespace."""
        return [line for line in self.space.said("ip", "-o", "link").splitlines() if ": inf" in line]


class NamespaceCase(QemuCase):
    """A test case in which each VM has a pod's namespace of its own."""

    def setUp(self) -> Any:
        self.pods: list[Pod] = []
        return super().setUp()

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return attrs.evolve(super().context(cluster, node), joins_namespaces=True)

    def spec(self, **asked: Any) -> InstanceSpec:
        pod = Pod(len(self.pods) + 7)
        self.pods.append(pod)
        return super().spec(attachment=pod.attachment, **asked)

    def leftovers(self) -> list[str]:
        return super().leftovers() + [tap for pod in self.pods for tap in pod.taps()]

    async def finish(self) -> None:
        for pod in self.pods:
            pod.space.end()  # its link ends with it
        await super().finish()


class NamespaceContractTests(NamespaceCase, PodProviderContract, TestCase):
    """The contract of every provider."""
