# SPDX-License-Identifier: Apache-2.0
"""What moto has, and its answers as EC2's would be: their XML namespace ends with a slash, and errors have
none."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tests.support.clouds import moto

NETWORK = "127.77.0.0/16"
SUBNETS = (("127.77.0.0/20", "a"), ("127.77.16.0/20", "b"))
_NAMESPACE = re.compile(rb'xmlns="http://ec2\.amazonaws\.com/doc/[0-9-]+/?"')
_EC2 = b'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
INSTANCE_ID = re.compile(rb"<instanceId>(i-[0-9a-f]+)</instanceId>")
_RUNNING = re.compile(rb"<instanceState><code>16</code><name>running</name></instanceState>")
_STOPPING = b"<instanceState><code>64</code><name>stopping</name></instanceState>"
_PENDING = b"<instanceState><code>0</code><name>pending</name></instanceState>"

EMPTY_LIST = (
    b"<DescribeInstancesResponse " + _EC2 + b"><reservationSet/></DescribeInstancesResponse>"
)  # a list from before anything was launched

CHANGED_ATTRIBUTE = (
    b"<ModifyInstanceAttributeResponse " + _EC2 + b"><return>true</return></ModifyInstanceAttributeResponse>"
)

EMPTY_VOLUMES = b"<DescribeVolumesResponse " + _EC2 + b"><volumeSet/></DescribeVolumesResponse>"


def as_ec2(status: int, body: bytes) -> bytes:
    """Return an answer of moto's with EC2's namespace, which errors do not have."""
    return _NAMESPACE.sub(_EC2 if status == 200 else b"", body)


def each_instance(body: bytes) -> list[bytes]:
    """Split a list of instances before each of them."""
    return re.split(rb"(?=<item><architecture>)", body)


def as_pending(instance: bytes) -> bytes:
    """Return an instance that moto shows as running as one that has not booted."""
    return _RUNNING.sub(_PENDING, instance)


def as_stopping(instance: bytes) -> bytes:
    """Return an instance that moto shows as running as one that is being stopped."""
    return _RUNNING.sub(_STOPPING, instance)


def tag_of(resource: dict[str, Any], key: str) -> str:
    """Return a tag's value; "": there is none."""
    return next((str(tag["Value"]) for tag in resource.get("Tags", []) if tag["Key"] == key), "")


@lru_cache
def make_network(
    ec2: Any, network: str = NETWORK, parts: tuple[tuple[str, str], ...] = SUBNETS
) -> tuple[tuple[str, ...], str]:
    """Create subnets and a security group, once; return their ids. :param parts: subnets, and their zones."""
    vpc = ec2.create_vpc(CidrBlock=network)["Vpc"]["VpcId"]
    subnets = [
        ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, AvailabilityZone=f"{moto.REGION}{zone}")["Subnet"]
        for cidr, zone in parts
    ]
    group = ec2.create_security_group(GroupName="pods", Description="pods", VpcId=vpc)["GroupId"]
    return tuple(each["SubnetId"] for each in subnets), group


def tags_of(ec2: Any, ids: Sequence[str]) -> dict[str, dict[str, str]]:  # Any: boto3's client
    """Return the tags of resources; an association has those of its address. Blocks."""
    addresses: dict[str, str] = {}  # of associations
    if any(each.startswith("eipassoc-") for each in ids):
        described = ec2.describe_addresses()["Addresses"]
        addresses = {each.get("AssociationId", ""): each["AllocationId"] for each in described}
    tagged = {id: addresses.get(id, id) for id in ids}
    found: dict[str, dict[str, str]] = {}
    only = [{"Name": "resource-id", "Values": sorted(set(tagged.values()))}]  # moto has those of all tests
    for each in ec2.describe_tags(Filters=only)["Tags"]:
        found.setdefault(each["ResourceId"], {})[each["Key"]] = each["Value"]
    return {id: found.get(has, {}) for id, has in tagged.items()}


def console(output: str) -> bytes:
    """Return EC2's answer with the output of a console."""
    return (
        '<GetConsoleOutputResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
        f"<output>{base64.b64encode(output.encode()).decode()}</output></GetConsoleOutputResponse>"
    ).encode()
