# SPDX-License-Identifier: Apache-2.0
"""A load balancer of AWS sends to VM pods' own addresses, by the Service in docs/load-balancers.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds import moto
from tests.support.clouds.load_balancer_controller import NoInterface, Target, targets

PAGE = Path(__file__).parents[5] / "docs" / "load-balancers.md"
PORT = 8080


def service() -> dict[str, Any]:
    """Return the Service that the page shows."""
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    shown: dict[str, object] = yaml.safe_load(text)
    return shown


def slices(instances: Sequence[Instance], unready: Sequence[Instance] = ()) -> list[dict[str, Any]]:
    """Return the EndpointSlices of pods that are these VMs."""
    endpoints = [
        {
            "addresses": [instance.address],
            "conditions": {"ready": instance not in unready},
            "targetRef": {"kind": "Pod", "name": f"web-{number}", "namespace": "default"},
        }
        for number, instance in enumerate(instances)
    ]
    return [{"ports": [{"port": PORT, "protocol": "TCP"}], "endpoints": endpoints}]


class LoadBalancerTests(AwsCase, TestCase):
    """Two pods of a Service, and an instance that is their node."""

    async def begun(self) -> list[Instance]:
        provider = await self.started()
        subnet = self.world.ec2.describe_subnets(SubnetIds=[self.world.subnets[0]])["Subnets"][0]
        self.vpc = subnet["VpcId"]
        self.subnets = [
            IPv4Network(each["CidrBlock"])
            for each in self.world.ec2.describe_subnets(SubnetIds=list(self.world.subnets))["Subnets"]
        ]
        [node] = self.world.ec2.run_instances(
            ImageId="ami-785db401", MinCount=1, MaxCount=1, SubnetId=self.world.subnets[0]
        )["Instances"]
        self.node_instance = node["InstanceId"]
        self.addCleanup(self.world.ec2.terminate_instances, InstanceIds=[self.node_instance])
        return [await self.running(provider, self.spec()) for _ in range(2)]

    def registered(self, chosen: Sequence[Target]) -> set[tuple[str, int]]:
        """Register targets with a group of type `ip` in the pods' VPC; return those that it has."""
        balancing = moto.shared().client("elbv2")
        [group] = balancing.create_target_group(
            Name="web", Protocol="TCP", Port=PORT, VpcId=self.vpc, TargetType="ip"
        )["TargetGroups"]
        arn = group["TargetGroupArn"]
        self.addCleanup(balancing.delete_target_group, TargetGroupArn=arn)
        balancing.register_targets(TargetGroupArn=arn, Targets=[each.described() for each in chosen])
        health = balancing.describe_target_health(TargetGroupArn=arn)["TargetHealthDescriptions"]
        return {(each["Target"]["Id"], each["Target"]["Port"]) for each in health}

    async def test_ready_pods_are_targets_by_their_own_addresses(self) -> None:
        instances = await self.begun()
        chosen = targets(service(), slices(instances), self.world.ec2, self.node_instance)
        self.assertEqual(self.registered(chosen), {(each.address, PORT) for each in instances})
        for instance in instances:  # AWS takes only addresses of the VPC's own interfaces there
            [interface] = self.world.ec2.describe_network_interfaces(
                Filters=[{"Name": "addresses.private-ip-address", "Values": [instance.address]}]
            )["NetworkInterfaces"]
            self.assertEqual(interface["Attachment"]["InstanceId"], instance.id)
            self.assertEqual([each["GroupId"] for each in interface["Groups"]], [self.world.group])
            address = IPv4Address(instance.address)
            self.assertTrue(any(address in subnet for subnet in self.subnets), instance)

    async def test_a_pod_that_is_not_ready_is_none(self) -> None:
        instances = await self.begun()
        chosen = targets(
            service(), slices(instances, unready=instances[:1]), self.world.ec2, self.node_instance
        )
        self.assertEqual([each.address for each in chosen], [instances[1].address])

    async def test_rules_of_security_groups_have_to_be_left_to_people(self) -> None:
        """The controller would look for the pods' interfaces among their node's."""
        instances = await self.begun()
        for change in ({"security-groups": ""}, {"manage-backend-security-group-rules": "true"}):
            with self.subTest(change=change):
                changed = service()
                prefix = "service.beta.kubernetes.io/aws-load-balancer-"
                changed["metadata"]["annotations"] |= {prefix + name: value for name, value in change.items()}
                with self.assertRaisesRegex(NoInterface, re.escape(instances[0].address)):
                    targets(changed, slices(instances), self.world.ec2, self.node_instance)
