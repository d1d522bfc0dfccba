# SPDX-License-Identifier: Apache-2.0
"""The zones' machine types, and libcloud's prices of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from libcloud.pricing import get_pricing

from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.libcloud_types import MachineType
from infranetes.providers.cloud.interface import Offer
from infranetes.providers.confidential import Confidential

# The share of a CPU that types that claim two CPUs can sustain (source: Compute Engine, "E2 shared-core
# machine types"). libcloud prices them as if they had two.
_SHARED = {"e2-micro": 0.25, "e2-small": 0.5, "e2-medium": 1.0, "f1-micro": 0.2, "g1-small": 0.5}
# The families whose CPUs the quota CPUS counts; every other family has a quota of its own, such as N2_CPUS
# (source: Compute Engine, "Allocation quotas").
_FIRST_FAMILIES = ("e2", "f1", "g1", "n1")
# Compute Engine does not tell which types can be confidential (source: Confidential VM, "Supported
# configurations").
_CONFIDENTIAL = {"n2d": Confidential.SEV_SNP, "c3-standard": Confidential.TDX}
_ARM = ("t2a-", "c4a-", "n4a-", "a4x-")


@lru_cache
def prices() -> Mapping[str, Any]:  # Any: libcloud's price list, whose depth differs
    """Return libcloud's price list, by family. The first call takes long."""
    found: Mapping[str, Any] = get_pricing(  # Any: as above
        driver_type="compute", driver_name="gce_instances"
    )
    return found


def _thd_types(driver: Driver, zone: str) -> dict[str, Offer]:
    """Return a zone's machine types by name."""
    return {
        each["name"]: offer(each)
        for each in driver.machine_types(zone)
        if (each.get("deprecated") or {}).get("state") not in ("OBSOLETE", "DELETED")
    }


def offer(machine_type: MachineType) -> Offer:
    """Return a machine type as an offer, without a price."""
    name, shown = str(machine_type["name"]), float(machine_type.get("guestCpus") or 0)
    arm = machine_type.get("architecture") == "ARM64" or name.startswith(_ARM)
    accelerators = machine_type.get("accelerators") or []
    return Offer(
        name=name,
        cpu_millis=int(_SHARED.get(name, shown) * 1000),
        memory_bytes=int(machine_type.get("memoryMb") or 0) << 20,
        gpus=sum(int(each.get("guestAcceleratorCount") or 0) for each in accelerators),
        architecture="arm64" if arm else "x86_64",
        shared_cpus=int(shown) if name in _SHARED else 0,
        quota=_quota(name),
        confidential=_confidential(name),
    )


def _confidential(name: str) -> tuple[Confidential, ...]:
    """Return what VMs of a machine type can have. Local SSDs rule it out."""
    if name.endswith("-lssd"):
        return ()
    return tuple(each for prefix, each in _CONFIDENTIAL.items() if name.startswith(f"{prefix}-"))


def _quota(name: str) -> str:
    """Return the name of the limit that a machine type's CPUs count for."""
    family = name.partition("-")[0]
    return "CPUS" if family in _FIRST_FAMILIES else f"{family.upper()}_CPUS"


def bundled_price(offer: Offer, region: str) -> float | None:
    """Return libcloud's price of an hour, computed as libcloud does, except that n2d is not taken for n2.
    None: it has none, or the type comes with GPUs."""
    name = offer.name
    family = prices().get(name.partition("-")[0], {})
    try:
        cpu = float(family["cpu"]["on_demand"][region]["price"])
        if offer.gpus:
            return None
        if name in ("f1-micro", "g1-small"):
            return cpu  # the price of the whole machine
        ram = float(family["ram"]["on_demand"][region]["price"])
        return offer.cpu_millis / 1000 * cpu + offer.memory_bytes / (1 << 30) * ram
    except KeyError:
        return None
