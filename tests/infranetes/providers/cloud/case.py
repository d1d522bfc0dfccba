# SPDX-License-Identifier: Apache-2.0
"""Base classes for tests of the providers of AWS, Azure, GCP and OpenStack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from infranetes.providers.cloud.aws.bundled import offers
from infranetes.providers.cloud.gcp.sizes import prices
from tests.contract.pod_provider_case import reactor
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.world_case import WorldCase
from tests.support.clouds import (
    azure_models,
    azure_resources,
    discovery,
    ec2_model,
    nova_resources,
    nova_schemas,
)
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.azure import SimulatedAzure
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.gce_resources import ZONES
from tests.support.clouds.moto import REGION
from tests.support.clouds.openstack import SimulatedOpenStack

Call = Mapping[str, str]


class CloudCase(WorldCase):
    """EC2, Azure, Compute Engine or Nova, and what tests of all of them need to know about each."""

    launch_action: ClassVar[str]  # as in the cloud's `requests`
    destroy_action: ClassVar[str]
    list_action: ClassVar[str]
    cheapest: ClassVar[tuple[str, str]]  # the first two sizes tried for a pod without requests
    large: ClassVar[str]  # a size that is tried for 4 CPUs
    quota: ClassVar[str]  # a part of the message about a full quota
    families: ClassVar[tuple[str, str]]  # the cheapest sizes of two families with separate quotas
    asked_again: ClassVar[int] = 2  # how often a launch is repeated whose answer is lost twice
    looks_alone: ClassVar[bool] = False  # whether a VM that boots is looked at by its id, not by a list

    @classmethod
    def setUpClass(cls) -> None:
        """Read large files, which takes a moment: the daemon's, which it reads before its reactor runs, and
        those of the simulation."""
        raise NotImplementedError

    def is_list(self, call: Call) -> bool:
        """Whether a call lists the VMs."""
        return call["Action"] == self.list_action

    def zones(self) -> Sequence[str]:
        """Return the zones or subnets that are tried, in this order."""
        raise NotImplementedError

    def asked(self, launch: Call) -> tuple[str, str]:
        """Return the size and the zone that a launch asks for."""
        raise NotImplementedError

    def key(self, launch: Call) -> str:
        """Return the idempotency key of a launch."""
        raise NotImplementedError

    def lose_launches(self) -> None:
        """Lose the answers of all launches from now on, though the instances are created."""
        self.world.faults.add(FaultKind.LOST, self.launch_action)

    def break_launches(self) -> Callable[[], None]:
        """Answer each launch with an error though the instance is created."""
        self.world.faults.add(FaultKind.ACTED, self.launch_action)
        self.settings["retry_seconds"] = 0.3

        def mend() -> None:
            self.world.faults.clear()
            self.settings["retry_seconds"] = 5.0

        return mend


class AwsCase(CloudCase):
    """Tests on EC2."""

    provider_name = "aws"
    launch_action, destroy_action, list_action = "RunInstances", "TerminateInstances", "DescribeInstances"
    cheapest, large, quota = ("t3.micro", "t3.small"), "m5.xlarge", "VcpuLimitExceeded"
    families = ("t3.micro", "x1e.xlarge")
    world: SimulatedAws

    @classmethod
    def setUpClass(cls) -> None:
        offers(REGION)
        ec2_model.model()

    def make_world(self) -> SimulatedAws:
        return SimulatedAws(reactor, self.run_dir / "machines", self.cluster)

    async def finish(self) -> None:
        await super().finish()
        self.assertEqual(set(self.world.malformed), set())
        self.assertEqual(self.world.price_list.malformed, [])

    def is_list(self, call: Call) -> bool:
        return super().is_list(call) and "InstanceId.1" not in call

    def zones(self) -> Sequence[str]:
        return self.world.subnets

    def asked(self, launch: Call) -> tuple[str, str]:
        return launch["InstanceType"], launch["NetworkInterface.1.SubnetId"]

    def key(self, launch: Call) -> str:
        return launch["ClientToken"]


@needs_tools("wheels")
class GcpCase(CloudCase):
    """Tests on Compute Engine."""

    provider_name = "gcp"
    launch_action, destroy_action, list_action = "launch", "destroy", "list instances"
    cheapest, large, quota = ("e2-micro", "e2-small"), "e2-standard-4", "quotaExceeded"
    looks_alone = True
    families = ("e2-micro", "n2-standard-2")
    world: SimulatedGce

    @classmethod
    def setUpClass(cls) -> None:
        prices()
        discovery.compute()

    def make_world(self) -> SimulatedGce:
        return SimulatedGce(reactor, self.run_dir / "machines")

    async def finish(self) -> None:
        await super().finish()
        self.assertEqual(set(self.world.malformed), set())
        self.assertEqual(self.world.price_list.malformed, [])

    def zones(self) -> Sequence[str]:
        return ZONES

    def asked(self, launch: Call) -> tuple[str, str]:
        return launch["size"], launch["zone"]

    def key(self, launch: Call) -> str:
        return launch["name"]


@needs_tools("wheels")
class AzureCase(CloudCase):
    """Tests on Azure."""

    provider_name = "azure"
    launch_action, destroy_action, list_action = "launch", "destroy", "list VMs"
    cheapest, large, quota = ("Standard_B1s", "Standard_B2s"), "Standard_D4s_v5", "OperationNotAllowed"
    looks_alone = True
    families = ("Standard_B1s", "Standard_D2s_v5")
    world: SimulatedAzure

    @classmethod
    def setUpClass(cls) -> None:
        azure_models.api()

    def make_world(self) -> SimulatedAzure:
        return SimulatedAzure(reactor, self.run_dir / "machines")

    async def finish(self) -> None:
        await super().finish()
        self.assertEqual(set(self.world.malformed), set())

    def is_list(self, call: Call) -> bool:
        return call["Action"] in ("list VMs", "list states", "list resources")

    def zones(self) -> Sequence[str]:
        return azure_resources.ZONES

    def asked(self, launch: Call) -> tuple[str, str]:
        return launch["size"], launch["zone"]

    def key(self, launch: Call) -> str:
        return launch["name"]


@needs_tools("wheels")
class OpenStackCase(CloudCase):
    """Tests on Nova, where a launch first looks for a server of its name and then creates one."""

    provider_name = "openstack"
    launch_action, destroy_action, list_action = "launch", "destroy", "list servers"
    cheapest, large, quota = ("m1.tiny", "m1.small"), "m1.large", "Quota exceeded"
    asked_again = 0
    world: SimulatedOpenStack

    @classmethod
    def setUpClass(cls) -> None:
        nova_schemas.schemas()

    def make_world(self) -> SimulatedOpenStack:
        return SimulatedOpenStack(reactor, self.run_dir / "machines")

    async def finish(self) -> None:
        await super().finish()
        self.assertEqual(set(self.world.malformed), set())

    def zones(self) -> Sequence[str]:
        return nova_resources.ZONES

    def asked(self, launch: Call) -> tuple[str, str]:
        return launch["size"], launch["zone"]

    def key(self, launch: Call) -> str:
        return launch["name"]

    def lose_launches(self) -> None:
        super().lose_launches()
        self._hide_lost()

    def break_launches(self) -> Callable[[], None]:
        mend = super().break_launches()
        self._hide_lost()
        return mend

    def _hide_lost(self) -> None:
        """Make look-ups of servers fail after a launch, since they would find the server."""
        self.world.faults.add(FaultKind.ERROR, "find servers", only=lambda call: bool(self.world.bodies))
