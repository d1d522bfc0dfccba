"""Machine types as the zones offer them, with libcloud's prices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from libcloud.pricing import get_pricing

from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.names import region_of
from infranetes.providers.cloud.interface import Offer

# The part of a CPU that these have for good, though they show two (source: Compute Engine, "E2 shared-core
# machine types"). libcloud prices them as if they had two.
_SHARED = {"e2-micro": 0.25, "e2-small": 0.5, "e2-medium": 1.0, "f1-micro": 0.2, "g1-small": 0.5}
_ARM = ("t2a-", "c4a-", "n4a-", "a4x-")


@lru_cache
def prices() -> dict[str, Any]:
    """libcloud's list, by family. Takes a moment, once."""
    found: dict[str, Any] = get_pricing(driver_type="compute", driver_name="gce_instances")
    return found


def _thd_types(driver: Driver, zone: str) -> dict[str, Offer]:
    """A zone's machine types by name."""
    return {
        each["name"]: offer(each, region_of(zone))
        for page in driver.pages(f"/zones/{zone}/machineTypes")
        for each in page.get("items") or []
        if (each.get("deprecated") or {}).get("state") not in ("OBSOLETE", "DELETED")
    }


def offer(machine_type: dict[str, Any], region: str) -> Offer:
    """One machine type as the API describes it."""
    name, shown = str(machine_type["name"]), float(machine_type.get("guestCpus") or 0)
    cpus = _SHARED.get(name, shown)
    mib = int(machine_type.get("memoryMb") or 0)
    arm = machine_type.get("architecture") == "ARM64" or name.startswith(_ARM)
    accelerators = machine_type.get("accelerators") or []
    return Offer(
        name=name,
        cpu_millis=int(cpus * 1000),
        memory_bytes=mib << 20,
        price=None if accelerators else _price(name, region, cpus, mib),
        gpus=sum(int(each.get("guestAcceleratorCount") or 0) for each in accelerators),
        architecture="arm64" if arm else "x86_64",
    )


def _price(name: str, region: str, cpus: float, mib: int) -> float | None:
    """Of an hour. As libcloud reckons, which takes the first two letters for the family: n2d is not n2."""
    family = prices().get(name.partition("-")[0], {})
    try:
        cpu = float(family["cpu"]["on_demand"][region]["price"])
        if name in ("f1-micro", "g1-small"):
            return cpu  # of the whole machine
        return cpus * cpu + mib / 1024 * float(family["ram"]["on_demand"][region]["price"])
    except KeyError:
        return None
