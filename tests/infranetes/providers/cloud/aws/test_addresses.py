# SPDX-License-Identifier: Apache-2.0
"""What the AWS provider creates in EC2 that could outlive an instance: elastic IP addresses and disks."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds.moto_answers import tag_of


class AddressTests(AwsCase, TestCase):
    """Elastic IP addresses and disks, which could outlive a VM."""

    def setUp(self) -> object:
        begun = super().setUp()
        self.settings["allowed_elastic_addresses"] = ["new", "eipalloc-*"]
        return begun

    async def test_a_new_elastic_address_is_released_with_the_vm(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec(annotations={"infranetes.aws.elasticip": "new"}))
        [address] = self.world.ec2.describe_addresses()["Addresses"]
        self.assertEqual(address["InstanceId"], instance.id)
        self.assertEqual(tag_of(address, "infranetes-token"), instance.token)
        again = await self.within(provider.wait_running(instance.id, self.boot_timeout))
        self.assertEqual(again.id, instance.id)
        self.assertEqual(len(self.world.ec2.describe_addresses()["Addresses"]), 1)
        begun = len(self.world.requests)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])
        calls = [one["Action"] for one in self.world.requests[begun:]]
        ours = [action for action in calls if action != "DescribeInstances"]  # which is for all
        self.assertEqual(ours, ["TerminateInstances", "DisassociateAddress", "ReleaseAddress"])

    async def test_a_new_elastic_address_is_released_by_a_daemon_that_did_not_give_it(self) -> None:
        provider = await self.started()
        instance = await self.running(
            provider, self.spec(annotations={"infranetes.io/elastic-address": "new"})
        )
        await self.within(provider.stop())
        provider = await self.started()
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_given_elastic_address_is_used_and_kept(self) -> None:
        self.world.granted.add("AssociateAddress")  # as the manual says
        owned = self.world.ec2.allocate_address(Domain="vpc")["AllocationId"]
        provider = await self.started()
        wanted = {"infranetes.io/elastic-address": owned}
        instance = await self.running(provider, self.spec(annotations=wanted))
        [address] = self.world.ec2.describe_addresses()["Addresses"]
        self.assertEqual(address["InstanceId"], instance.id)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [f"address {owned}"])
        self.world.ec2.release_address(AllocationId=owned)

    async def test_unused_resources_of_ours_are_swept_and_no_others(self) -> None:
        self.settings["sweep_seconds"] = 0.2
        mine = {
            "infranetes-cluster": self.cluster,
            "infranetes-node": self.node,
            "infranetes-token": "f" * 32,
        }
        others = {**mine, "infranetes-node": "other"}
        kept = self.allocate(others)
        self.allocate(mine)
        self.disk(mine)
        kept_disk = self.disk(others)
        await self.started()
        await self.until(lambda: len(self.world.holdings()) == 2, "ours are released")
        self.assertEqual(sorted(self.world.holdings()), sorted([f"address {kept}", f"disk {kept_disk}"]))
        self.world.ec2.release_address(AllocationId=kept)
        self.world.ec2.delete_volume(VolumeId=kept_disk)

    async def test_the_address_of_a_vm_is_not_swept(self) -> None:
        self.settings["sweep_seconds"] = 0.1
        provider = await self.started()
        await self.running(provider, self.spec(annotations={"infranetes.io/elastic-address": "new"}))
        await self.until_asked(3, "DescribeAddresses")
        self.assertEqual(len(self.world.ec2.describe_addresses()["Addresses"]), 1)

    def allocate(self, tags: dict[str, str]) -> str:
        answer = self.world.ec2.allocate_address(
            Domain="vpc", TagSpecifications=[_specification("elastic-ip", tags)]
        )
        return str(answer["AllocationId"])

    def disk(self, tags: dict[str, str]) -> str:
        answer = self.world.ec2.create_volume(
            AvailabilityZone="eu-west-1a", Size=1, TagSpecifications=[_specification("volume", tags)]
        )
        return str(answer["VolumeId"])


def _specification(kind: str, tags: dict[str, str]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
