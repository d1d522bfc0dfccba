"""The ground of tests of the clouds' providers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from infranetes.providers.cloud.aws.cloud import offers
from infranetes.providers.cloud.gcp.sizes import prices
from infranetes.providers.interface import Instance
from tests.contract.pod_provider_case import ProviderCase, reactor
from tests.support.clouds.aws import AwsWorld
from tests.support.clouds.faults import Kind
from tests.support.clouds.gce import GceWorld
from tests.support.clouds.gce_resources import ZONES
from tests.support.clouds.moto import REGION

offers(REGION)  # large files, which the daemon reads before its reactor runs
prices()

Call = Mapping[str, str]


class CloudCase(ProviderCase):
    """A world for each test, and what tests of any cloud have to know of one."""

    boot_timeout: ClassVar[float] = 30.0
    agent_timeout: ClassVar[float] = 60.0
    interrupt_after = (0.05, 0.5)
    launch_action: ClassVar[str]  # as in a world's `requests`
    destroy_action: ClassVar[str]
    list_action: ClassVar[str]
    cheapest: ClassVar[tuple[str, str]]  # the first two sizes that are tried for a pod without wishes
    large: ClassVar[str]  # one that is tried for 4 CPUs
    quota: ClassVar[str]  # of a quota's words

    def make_world(self) -> Any:
        """A cloud, not yet started."""
        raise NotImplementedError

    def is_list(self, call: Call) -> bool:
        """Whether a call asks for the VMs."""
        return call["Action"] == self.list_action

    def places(self) -> Sequence[str]:
        """Where VMs are tried to be made, in this order."""
        raise NotImplementedError

    def asked(self, launch: Call) -> tuple[str, str]:
        """The size and the place that a launch asks for."""
        raise NotImplementedError

    def key(self, launch: Call) -> str:
        """The idempotency key of a launch."""
        raise NotImplementedError

    def setUp(self) -> Any:
        self.cluster = f"contract-{secrets.token_hex(4)}"  # type: ignore[misc]
        result = super().setUp()
        self.world = self.make_world()
        self.world.start()
        self.settings: dict[str, Any] = self.world.table()
        return result

    def table(self) -> Mapping[str, Any]:
        return self.settings

    async def end_from_outside(self, instance: Instance) -> None:
        self.world.end(instance.id)

    def break_launches(self) -> Callable[[], None]:
        """The instance is made, and the answer is an error, each time."""
        self.world.faults.add(Kind.ACTED, self.launch_action)
        self.settings["retry_seconds"] = 0.3

        def mend() -> None:
            self.world.faults.clear()
            self.settings["retry_seconds"] = 5.0

        return mend

    def leftovers(self) -> list[str]:
        found: list[str] = self.world.holdings()
        return found

    async def finish(self) -> None:
        await self.world.stop()


class AwsCase(CloudCase):
    """On EC2."""

    provider_name = "aws"
    launch_action, destroy_action, list_action = "RunInstances", "TerminateInstances", "DescribeInstances"
    cheapest, large, quota = ("t3.nano", "t3.micro"), "t3.xlarge", "VcpuLimitExceeded"
    world: AwsWorld

    def make_world(self) -> AwsWorld:
        return AwsWorld(reactor, self.run_dir / "machines")

    def is_list(self, call: Call) -> bool:
        return super().is_list(call) and "InstanceId.1" not in call

    def places(self) -> Sequence[str]:
        return self.world.subnets

    def asked(self, launch: Call) -> tuple[str, str]:
        return launch["InstanceType"], launch["SubnetId"]

    def key(self, launch: Call) -> str:
        return launch["ClientToken"]


class GcpCase(CloudCase):
    """On Compute Engine."""

    provider_name = "gcp"
    launch_action, destroy_action, list_action = "launch", "destroy", "list instances"
    cheapest, large, quota = ("e2-micro", "e2-small"), "e2-standard-4", "quotaExceeded"
    world: GceWorld

    def make_world(self) -> GceWorld:
        return GceWorld(reactor, self.run_dir / "machines")

    def places(self) -> Sequence[str]:
        return ZONES

    def asked(self, launch: Call) -> tuple[str, str]:
        return launch["size"], launch["zone"]

    def key(self, launch: Call) -> str:
        return launch["name"]
