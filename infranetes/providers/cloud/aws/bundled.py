# SPDX-License-Identifier: Apache-2.0
"""The instance types and prices that came with libcloud: the last resort, for they age."""

from __future__ import annotations

from functools import lru_cache

import libcloud

from infranetes.providers.cloud.aws.burstable import is_burstable, lasting_millis
from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.aws.libcloud_types import InstanceType
from infranetes.providers.cloud.aws.quotas import quota_of
from infranetes.providers.cloud.interface import Offer

NAME = f"libcloud {libcloud.__version__}"


@lru_cache
def offers(region: str) -> tuple[Offer, ...]:
    """Return the region's instance types and prices. The first call takes long.

    Nothing is known of regions that are newer than libcloud's release."""
    return tuple(_offer(each) for each in Driver("-", "-", region).instance_types())


def _offer(instance_type: InstanceType) -> Offer:
    extra = instance_type.extra
    arm = "Graviton" in extra.get("physicalProcessor", "")
    name, vcpus = instance_type.id, int(extra.get("vcpu") or extra.get("cpu") or 0)
    return Offer(
        name=name,
        cpu_millis=lasting_millis(name, vcpus) if is_burstable(name) else vcpus * 1000,
        shared_cpus=vcpus if is_burstable(name) else 0,
        memory_bytes=int(instance_type.ram) << 20,
        price=float(instance_type.price) if instance_type.price else None,
        gpus=int(extra.get("gpu") or 0),
        architecture="arm64" if arm else "x86_64",
        quota=quota_of(name),
    )
