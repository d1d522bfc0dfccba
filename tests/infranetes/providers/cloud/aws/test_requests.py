# SPDX-License-Identifier: Apache-2.0
"""The AWS provider's requests to EC2: tags, secrets, disks, annotations."""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.aws.images import Images, RootDisk
from infranetes.providers.interface import InstanceState, Size
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds import aws, aws_policy
from tests.support.clouds.aws import IMAGE
from tests.support.clouds.aws_policy import asked_tags
from tests.support.clouds.ec2_endings import Ec2Endings
from tests.support.clouds.faults import NEVER, FaultKind


def _tags(resource: Any) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", [])}


class SimulatedCloudTests(AwsCase, TestCase):
    """What the simulated EC2 shows to tests."""

    async def test_instances_are_seen_however_many_have_ended_before(self) -> None:
        provider = await self.started()
        ids = {(await self.within(provider.launch(self.spec()))).id for _ in range(7)}
        self.patch(aws, "PAGE", 5)
        self.assertEqual(set(self.world.running()), ids)


class LaunchTests(AwsCase, TestCase):
    """The requests of one launch."""

    async def test_everything_is_tagged_when_it_is_created(self) -> None:
        provider = await self.started()
        spec = self.spec()
        await self.within(provider.launch(spec))
        expected = {
            "infranetes-cluster": self.cluster,
            "infranetes-node": self.node,
            "infranetes-sandbox": spec.sandbox_id,
            "infranetes-token": spec.token,
        }
        [instance] = self.world.instances()
        self.assertEqual({**_tags(instance), **expected}, _tags(instance))
        [disk] = self.world.ec2.describe_volumes()["Volumes"]
        self.assertEqual({**_tags(disk), **expected}, _tags(disk))
        [launch] = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        self.assertEqual(asked_tags(launch, "network-interface"), expected)
        self.assertEqual(asked_tags(launch, "spot-instances-request"), {}, "there is none")
        self.assertEqual(launch["MetadataOptions.HttpTokens"], "required")
        self.assertEqual(launch["InstanceInitiatedShutdownBehavior"], "terminate")
        self.assertEqual(launch["NetworkInterface.1.SecurityGroupId.1"], self.world.group)
        self.assertEqual(launch["BlockDeviceMapping.1.Ebs.DeleteOnTermination"], "true")

    async def test_the_manuals_policy_allows_no_launch_that_leaves_something_untagged(self) -> None:
        provider = await self.started()
        await self.within(provider.launch(self.spec(annotations={"infranetes.io/spot": "true"})))
        [launch] = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        self.assertIsNone(aws_policy.refused(launch, self.cluster, {}))
        kinds = {launch[key]: key for key in launch if key.endswith(".ResourceType")}
        self.assertEqual(set(kinds), {"instance", "volume", "network-interface", "spot-instances-request"})
        for kind, key in kinds.items():
            tags = key.removesuffix("ResourceType")
            without = {name: value for name, value in launch.items() if not name.startswith(tags)}
            self.assertIn(f"for {kind} ", aws_policy.refused(without, self.cluster, {}) or "")

    async def test_the_identity_is_user_data_and_in_no_url(self) -> None:
        provider = await self.started()
        spec = self.spec()
        await self.within(provider.launch(spec))
        [launch] = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        document = json.loads(base64.b64decode(launch["UserData"]))
        self.assertEqual(document["key_pem"], spec.identity.key_pem)
        self.assertEqual(set(self.world.urls), {b"/"})

    async def test_one_pod_costs_few_calls(self) -> None:
        self.settings["watch_seconds"] = 60.0
        provider = await self.started()
        begun = len(self.world.requests)
        launched = await self.within(provider.launch(self.spec()))
        self.assertEqual([one["Action"] for one in self.world.requests[begun:]], ["RunInstances"])
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        begun = len(self.world.requests)
        for _ in range(2):
            await self.within(provider.destroy(launched.id))
        [ending] = self.world.requests[begun:]
        self.assertEqual((ending["Action"], ending["SkipOsShutdown"]), ("TerminateInstances", "true"))

    async def test_an_end_that_takes_long_is_waited_for_by_the_shared_list_alone(self) -> None:
        clock = Clock()
        self.world.endings = Ec2Endings(clock.seconds, 45.0)
        self.settings["settle_seconds"] = 60.0
        provider = await self.started()
        ids = [(await self.within(provider.launch(self.spec()))).id for _ in range(4)]
        for id in ids:
            await self.within(provider.wait_running(id, self.boot_timeout))
        for id in ids:
            await self.within(provider.destroy(id))
        self.assertEqual(await self.within(provider.list()), [])
        begun = len(self.world.requests)
        await self.until(lambda: len(self.world.requests) >= begun + 2, "lists look for their ends")
        clock.advance(45.0)
        await self.sleep(1.0)  # three lists
        settled = len(self.world.requests)
        await self.sleep(1.0)
        self.assertEqual(len(self.world.requests), settled, "nobody looks for what has ended")
        actions = [one["Action"] for one in self.world.requests]
        self.assertEqual(actions.count("TerminateInstances"), len(ids))
        self.assertTrue(all("InstanceId.1" not in one for one in self.world.requests[begun:]))

    async def test_the_cheapest_type_that_fits(self) -> None:
        provider = await self.started()
        for size, name in (
            (Size(), "t3.micro"),
            (Size(memory_bytes=1 << 30), "t3.small"),
            (Size(cpu_millis=400), "t3.small"),  # a baseline of a fifth of each of two
            (Size(cpu_millis=2000), "m5.large"),
        ):
            instance = await self.within(provider.launch(self.spec(size=size)))
            self.assertEqual(instance.size, name)
        self.assertTrue(any(one.cost_per_hour for one in await self.within(provider.list())))

    async def test_a_burstable_instance_gets_no_surplus_that_is_billed(self) -> None:
        provider = await self.started()
        await self.within(provider.launch(self.spec()))
        await self.within(provider.launch(self.spec(size=Size(cpu_millis=2000))))
        await self.within(provider.stop())
        self.settings["burst"] = "unlimited"
        await self.within((await self.started()).launch(self.spec()))
        sent = [
            (one["InstanceType"], one.get("CreditSpecification.CpuCredits"))
            for one in self.world.requests
            if one["Action"] == "RunInstances"
        ]
        self.assertEqual(sent, [("t3.micro", "standard"), ("m5.large", None), ("t3.micro", "unlimited")])

    async def test_the_disk_is_as_the_image_has_it_or_as_the_configuration_says(self) -> None:
        key = "arn:aws:kms:eu-west-1:111122223333:key/0d9bb6c3-6ba4-4b26-9d7b-1d8a3a5d0e0b"
        least = {"DeleteOnTermination": "true", "VolumeSize": "15"}  # the size of the image
        for asked, sent, shown in (
            ({}, {}, (False, None)),
            (
                {"encrypt_disk": True, "disk_type": "gp2"},
                {"Encrypted": "true", "VolumeType": "gp2"},
                (True, None),
            ),
            (
                {"disk_key": key, "disk_type": "gp3", "disk_iops": 4000, "disk_throughput": 250},
                {
                    "Encrypted": "true",
                    "KmsKeyId": key,
                    "VolumeType": "gp3",
                    "Iops": "4000",
                    "Throughput": "250",
                },
                (True, key),
            ),
        ):
            self.settings = {**self.world.table(), **asked}
            provider = await self.started()
            launched = await self.within(provider.launch(self.spec()))
            *_, launch = [one for one in self.world.requests if one["Action"] == "RunInstances"]
            prefix = "BlockDeviceMapping.1.Ebs."
            disk = {key.removeprefix(prefix): launch[key] for key in launch if key.startswith(prefix)}
            self.assertEqual(disk, least | sent)
            [made] = self.world.ec2.describe_volumes(
                Filters=[{"Name": "attachment.instance-id", "Values": [launched.id]}]
            )["Volumes"]
            self.assertEqual(made["Encrypted"], shown[0])
            if shown[1]:
                self.assertEqual(made["KmsKeyId"], shown[1])

    async def test_a_disk_that_could_not_be_encrypted_is_not_made(self) -> None:
        """EC2 does not name the root disk of every image."""
        self.patch(Images, "_thd_root_disk", lambda self, driver, id: RootDisk("", 0))
        self.settings["encrypt_disk"] = True
        provider = await self.started()
        error = await self.refused(InvalidArgument, provider.launch(self.spec()))
        self.assertIn("encrypt_disk", str(error))
        self.assertEqual(self.world.instances(), [])

    async def test_an_instance_that_ends_for_the_key_of_its_disk_says_so(self) -> None:
        self.world.behaviour = NEVER
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        self.assertIs(launched.state, InstanceState.PENDING)
        waiting = provider.wait_running(launched.id, self.boot_timeout)
        self.world.fail(launched.id, "Client.InternalError", "Client error on launch")
        error = await self.refused(Unavailable, waiting)
        for words in ("Client.InternalError: Client error on launch", "KMS key", "disk_key"):
            self.assertIn(words, str(error))
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_where_a_subnet_is_full_the_next_one_is_tried(self) -> None:
        first, second = self.world.subnets
        self.world.faults.add(
            FaultKind.FULL_SUBNET,
            "RunInstances",
            only=lambda asked: asked["NetworkInterface.1.SubnetId"] == first,
        )
        provider = await self.started()
        await self.within(provider.launch(self.spec()))
        asked = [self.asked(one) for one in self.world.requests if one["Action"] == "RunInstances"]
        self.assertEqual(asked, [("t3.micro", first), ("t3.micro", second)])
        self.assertEqual([one["SubnetId"] for one in self.world.instances()], [second])
        self.world.faults.clear()
        self.world.faults.add(FaultKind.FULL_SUBNET, "RunInstances")
        before = len(self.world.requests)
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn("InsufficientFreeAddressesInSubnet", str(error))
        self.assertIn("add a subnet", str(error))
        asked = [self.asked(one) for one in self.world.requests[before:] if one["Action"] == "RunInstances"]
        self.assertEqual(asked, [("t3.micro", first), ("t3.micro", second)], "no other size has room there")

    async def test_annotations_are_served(self) -> None:
        self.settings |= {
            "allowed_images": ["ami-76*"],
            "allowed_subnets": [self.world.subnets[1]],
            "allowed_security_groups": ["*"],
        }
        provider = await self.started()
        wanted = {
            "infranetes.aws.instancetype": "t3.large",
            "infranetes.io/subnet": self.world.subnets[1],
            "infranetes.aws.securtiygroup": self.world.group,
            "infranetes.io/spot": "true",
            "infranetes.io/spot-max-price": "0.05",
            "infranetes.io/image": "ami-760aaa0f",
            "infranetes.sethostname": "false",
        }
        await self.within(provider.launch(self.spec(annotations=wanted)))
        [launch] = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        self.assertEqual(asked_tags(launch, "spot-instances-request"), asked_tags(launch, "volume"))
        self.assertEqual(launch["InstanceType"], "t3.large")
        self.assertEqual(launch["NetworkInterface.1.SubnetId"], self.world.subnets[1])
        self.assertEqual(launch["InstanceMarketOptions.MarketType"], "spot")
        self.assertEqual(launch["InstanceMarketOptions.SpotOptions.MaxPrice"], "0.05")
        self.assertEqual(launch["ImageId"], "ami-760aaa0f")
        self.assertEqual(json.loads(base64.b64decode(launch["UserData"]))["hostname"], "")

    async def test_a_pod_may_have_an_instance_on_demand_where_no_spot_one_is_to_be_had(self) -> None:
        provider = await self.started()
        spot = {"infranetes.io/spot": "true", "infranetes.io/spot-max-price": "0.05"}
        for kind in (FaultKind.CAPACITY, FaultKind.QUOTA):
            self.world.faults.add(
                kind, "RunInstances", only=lambda asked: "InstanceMarketOptions.MarketType" in asked
            )
            refused = provider.launch(self.spec(annotations=spot))
            await self.refused(ResourceExhausted, refused)
            asked = {**spot, "infranetes.io/spot-fallback": "true"}
            await self.within(provider.launch(self.spec(annotations=asked)))
            *_, launch = [one for one in self.world.requests if one["Action"] == "RunInstances"]
            self.assertNotIn("InstanceMarketOptions.MarketType", launch)
            self.world.faults.clear()
        self.assertEqual(len(self.world.instances()), 2)

    async def test_a_confidential_vm_is_of_a_type_that_can_be_one(self) -> None:
        self.settings["sizes"] = ["t3.*", "m6a.*"]
        provider = await self.started()
        asked = {"infranetes.io/confidential": "sev-snp"}
        instance = await self.within(provider.launch(self.spec(annotations=asked)))
        await self.within(provider.launch(self.spec()))
        self.assertEqual(instance.size, "m6a.large")
        launches = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        self.assertEqual([one.get("CpuOptions.AmdSevSnp") for one in launches], ["enabled", None])

    async def test_unsupported_annotations_are_named(self) -> None:
        provider = await self.started()
        for name, value in (
            ("infranetes.io/region", "us-east-1"),
            ("infranetes.aws.region", "us-east-1"),
            ("infranetes.io/instance-type", "c5.large"),  # not among the allowed sizes
            ("infranetes.io/instance-type", "x9.tiny"),
            ("infranetes.io/gpus", "1"),
            ("infranetes.io/elastic-address", "somewhere"),
            ("infranetes.io/confidential", "tdx"),
        ):
            error = await self.refused(InvalidArgument, provider.launch(self.spec(annotations={name: value})))
            if name != "infranetes.io/gpus":
                self.assertIn(name.replace("infranetes.aws.", "infranetes.io/"), str(error))
        self.assertEqual([one for one in self.world.requests if one["Action"] == "RunInstances"], [])

    async def test_pods_ask_for_no_security_groups_but_those_that_are_allowed(self) -> None:
        """They are the cloud's own packet filter, which protects all pods, whatever they request."""
        name = "infranetes.io/security-groups"
        ec2 = self.world.ec2
        [subnet] = ec2.describe_subnets(SubnetIds=[self.world.subnets[0]])["Subnets"]
        web = ec2.create_security_group(
            GroupName=f"web-{self.cluster}", Description="web", VpcId=subnet["VpcId"]
        )["GroupId"]
        self.settings |= {"allowed_security_groups": [web], "allow_public_address": True}
        provider = await self.started()
        for groups in (self.world.group, f"{web},{self.world.group}", "sg-0123456789abcdef0"):
            spec = self.spec(annotations={name: groups})
            error = await self.refused(InvalidArgument, provider.launch(spec))
            self.assertIn("providers.aws.allowed_security_groups", str(error))
        self.assertEqual(self.world.instances(), [])
        for asked, group in (({name: web}, web), ({}, self.world.group)):
            await self.within(provider.launch(self.spec(annotations=asked)))
            self.assertEqual(self.groups(), {"NetworkInterface.1.SecurityGroupId.1": group})
            public = {**asked, "infranetes.io/public-address": "true"}
            await self.within(provider.launch(self.spec(annotations=public)))
            self.assertEqual(self.groups(), {"NetworkInterface.1.SecurityGroupId.1": group})

    def groups(self) -> dict[str, str]:
        """Return the security groups of the last launch."""
        *_, launch = [one for one in self.world.requests if one["Action"] == "RunInstances"]
        return {name: value for name, value in launch.items() if "SecurityGroup" in name}

    async def test_security_groups_that_could_not_be_given_are_refused_at_the_start(self) -> None:
        self.settings["subnets"] = []
        with self.assertRaises(ConfigError) as caught:
            self.make_provider()
        self.assertIn("security_groups", str(caught.exception))
        self.settings["subnets"] = list(self.world.subnets)

    async def test_a_missing_image_is_reported_at_the_start(self) -> None:
        self.settings["image"] = "ami-00000000"
        provider = self.make_provider()
        error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
        self.assertIn("ami-00000000", str(error))
        self.settings["image"] = IMAGE

    async def test_a_public_address_only_for_pods_that_shall_have_one_whatever_the_subnet_says(self) -> None:
        name = "infranetes.io/public-address"
        ec2 = self.world.ec2
        for subnet in self.world.subnets:  # like those of a default VPC
            give = partial(ec2.modify_subnet_attribute, SubnetId=subnet)
            give(MapPublicIpOnLaunch={"Value": True})
            self.addCleanup(give, MapPublicIpOnLaunch={"Value": False})
        self.settings["allow_public_address"] = True
        provider = await self.started()
        for asked, expected in (({name: "true"}, True), ({name: "false"}, False), ({}, False)):
            launched = await self.within(provider.launch(self.spec(annotations=asked)))
            described = ec2.describe_instances(InstanceIds=[launched.id])["Reservations"][0]["Instances"][0]
            self.assertEqual("PublicIpAddress" in described, expected, asked)
        await self.within(provider.stop())
        self.settings["public_address"] = True
        provider = await self.started()
        for asked, said in (({name: "false"}, "false"), ({}, "true")):
            await self.within(provider.launch(self.spec(annotations=asked)))
            *_, launch = [one for one in self.world.requests if one["Action"] == "RunInstances"]
            self.assertEqual(launch["NetworkInterface.1.AssociatePublicIpAddress"], said)
