# SPDX-License-Identifier: Apache-2.0
"""AWS' own model detects faulty requests to EC2."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds import ec2_model
from tests.support.clouds.ec2_endings import Ec2Endings

LAUNCH = {
    "Action": "RunInstances",
    "Version": "2016-11-15",
    "MinCount": "1",
    "MaxCount": "1",
    "NetworkInterface.1.DeviceIndex": "0",
    "NetworkInterface.1.AssociatePublicIpAddress": "false",
    "NetworkInterface.1.SecurityGroupId.1": "sg-1",
    "BlockDeviceMapping.1.Ebs.VolumeSize": "8",
    "TagSpecification.1.ResourceType": "instance",
    "TagSpecification.1.Tag.1.Key": "k",
    "TagSpecification.1.Tag.1.Value": "",
}


class ModelTests(SynchronousTestCase):
    """Single requests."""

    def test_a_well_formed_request(self) -> None:
        self.assertEqual(ec2_model.wrong(LAUNCH), [])
        self.assertEqual(ec2_model.wrong({"Action": "DescribeRegions", "Version": "2016-11-15"}), [])

    def test_what_is_wrong_is_named(self) -> None:
        for name, value in (
            ("Instancetype", "t3.nano"),
            ("InstanceType", "t3.tiny"),
            ("MinCount", "one"),
            ("MinCount.1", "1"),
            ("NetworkInterface.1.AssociatePublicIpAddress", "no"),
            ("NetworkInterface.1.Subnet", "subnet-1"),
            ("NetworkInterface.3.DeviceIndex", "2"),
            ("NetworkInterface.DeviceIndex", "0"),
            ("TagSpecification.1.ResourceType", "vm"),
        ):
            [words] = ec2_model.wrong({**LAUNCH, name: value})
            self.assertIn(name.split(".")[0], words)

    def test_what_is_missing_is_named(self) -> None:
        [words] = ec2_model.wrong({"Action": "TerminateInstances"})
        self.assertIn("InstanceIds", words)

    def test_an_action_that_there_is_not(self) -> None:
        [words] = ec2_model.wrong({"Action": "EndInstances"})
        self.assertIn("EndInstances", words)


class SimulatedTests(AwsCase, TestCase):
    """The simulated EC2."""

    async def test_a_malformed_request_is_refused_and_remembered(self) -> None:
        status, body = await self.world.call({"Action": "DescribeInstances", "Instances.1": "i-1"})
        self.assertEqual(status, 400)
        self.assertIn(b"Instances", body)
        self.assertEqual(len(self.world.malformed), 1)
        self.world.malformed.clear()

    async def test_an_instance_shuts_down_for_a_while_and_can_be_terminated_again(self) -> None:
        clock = Clock()
        self.world.endings = Ec2Endings(clock.seconds, 45.0)
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        ending = {"Action": "TerminateInstances", "InstanceId.1": launched.id}
        described = {"Action": "DescribeInstances", "InstanceId.1": launched.id}
        for state in (b"shutting-down", b"terminated"):
            for _ in range(2):
                for call in (ending, described):
                    status, body = await self.world.call(call)
                    self.assertEqual((status, state in body), (200, True))
            clock.advance(45.0)
