# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of AWS."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

import attrs

from infranetes.providers.cloud.aws.images import are_owners
from infranetes.providers.cloud.aws.regions import is_region
from infranetes.providers.cloud.settings import ENDPOINT, CloudSettings, matching
from infranetes_common import config_outside as outside
from infranetes_common.config import secret

_PROVISIONED = ("io1", "io2")  # disk types that are sold with a number of operations per second
_not_negative = attrs.validators.ge(0)
_is_endpoint = matching(ENDPOINT, "https://HOST or https://HOST:PORT")


def _is_region(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not is_region(value):
        raise ValueError("a region is expected, such as eu-west-1")


def _is_image(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not re.fullmatch(r"ami-[0-9a-f]{8,17}", value):
        raise ValueError("a machine image's id is expected: ami-…")


def _have_subnets(instance: Settings, attribute: attrs.Attribute[tuple[str, ...]], value: object) -> None:
    if value and not instance.subnets:
        raise ValueError("they need subnets: without these EC2 would take the default group in their place")


def _pair(instance: Settings, attribute: attrs.Attribute[str], value: str) -> None:
    if bool(value) != bool(instance.access_key):
        raise ValueError("access_key and secret_key go together")


def _iops(instance: Settings, attribute: attrs.Attribute[int], value: int) -> None:
    if value and instance.disk_type not in ("gp3", *_PROVISIONED):
        raise ValueError("they need disk_type gp3, io1 or io2")
    if not value and instance.disk_type in _PROVISIONED:
        raise ValueError(f"disk_type {instance.disk_type} needs them")


def _throughput(instance: Settings, attribute: attrs.Attribute[int], value: int) -> None:
    if value and instance.disk_type != "gp3":
        raise ValueError("it needs disk_type gp3")


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.aws`."""

    TENANT_KEYS: ClassVar[tuple[str, ...]] = (
        "profile",
        "image",
        "image_owners",
        "subnets",
        "security_groups",
        "key_name",
        "instance_profile",
        "public_address",
        "volume_zone",
        "volume_key",
        "disk_key",
    )

    region: str = attrs.field(validator=_is_region)
    image: str = attrs.field(validator=_is_image)  # the image of a guest with our agent
    # The owners of the catalogue's images: self, account ids, amazon, aws-marketplace.
    image_owners: tuple[str, ...] = attrs.field(default=("self",), validator=are_owners)
    subnets: tuple[str, ...] = ()  # tried in this order; empty: the default VPC's choice
    security_groups: tuple[str, ...] = attrs.field(default=(), validator=_have_subnets)  # ids
    key_name: str = ""  # the name of an SSH key pair, for looking into a VM
    instance_profile: str = ""  # gives pods their rights at AWS, unless an annotation names another
    public_address: bool = False  # for pods without an annotation
    volume_type: Literal["gp3", "gp2", "st1", "sc1", "standard"] = "gp3"  # the type of new volumes
    volume_zone: str = ""  # the zone where volumes are made; empty: that of the first subnet
    encrypt_volumes: bool = False  # true: always; false: as the account's default says
    volume_key: str = ""  # the KMS key that encrypts new volumes; empty: the account's default
    # The root disks of VMs. Empty or 0: as the image, or EC2, has it.
    disk_gib: int = attrs.field(default=0, validator=_not_negative)
    disk_type: Literal["", "gp3", "gp2", "io1", "io2", "standard"] = ""
    disk_iops: int = attrs.field(default=0, validator=[_not_negative, _iops])
    disk_throughput: int = attrs.field(default=0, validator=[_not_negative, _throughput])  # MiB a second
    encrypt_disk: bool = False  # true: always; false: as the image and the account's default say
    disk_key: str = ""  # the KMS key; empty: the account's default
    # What burstable instances get once their CPU credits are used up: the baseline, or more for money.
    burst: Literal["standard", "unlimited"] = "standard"
    sizes: tuple[str, ...] = ("t3.*", "m5.*", "c5.*", "r5.*", "m6i.*", "c6i.*", "r6i.*", "g4dn.*", "g5.*")
    access_key: str = ""
    secret_key: str = secret(default="", validator=_pair)
    profile: str = ""  # a profile in AWS' configuration files, used when no keys are given here
    endpoint: str = attrs.field(default="", validator=_is_endpoint)  # in place of the region's own
    # In place of the endpoint of AWS' price list.
    price_endpoint: str = attrs.field(default="", validator=_is_endpoint)
    # A file with one's own prices, see `own_prices`.
    prices_file: str = attrs.field(default="", metadata=outside.names(outside.file))

    def __attrs_post_init__(self) -> None:
        for name, its in self.tenants.items():
            if "profile" in its and self.access_key:
                raise ValueError(
                    f"tenants.{name}.profile: access_key would go before it: give the provider a profile, too"
                )
