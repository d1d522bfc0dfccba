# SPDX-License-Identifier: Apache-2.0
"""The location's sizes of VMs, by their capabilities (source: Azure REST API, "Resource Skus - List").

Azure gives no prices there: see `prices`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs

from infranetes.providers.cloud.azure.resources import Sku
from infranetes.providers.cloud.interface import Offer
from infranetes.providers.confidential import Confidential

# The share of each vCPU that burstable sizes may use for good (source: Virtual Machines, "B family sizes").
# Azure's API tells only how many vCPUs a size has.
_BASELINES = {
    "Standard_B1ls": 0.05,
    "Standard_B1s": 0.1,
    "Standard_B1ms": 0.2,
    "Standard_B2s": 0.2,
    "Standard_B2ms": 0.3,
    "Standard_B4ms": 0.225,
    "Standard_B8ms": 0.16875,
    "Standard_B12ms": 0.16875,
    "Standard_B16ms": 0.16875,
    "Standard_B20ms": 0.16875,
}
# Shares of B…ts_v2, B…ls_v2 and all others of the second version.
_SMALL_V2, _NEXT_V2, _LARGE_V2 = 0.2, 0.3, 0.4
_CONFIDENTIAL = {"SNP": Confidential.SEV_SNP, "TDX": Confidential.TDX}
_GIB = 1 << 30


@attrs.frozen
class Requirements:
    """The requirements on sizes.

    :ivar generation: of the image's boot, `V1` or `V2`. :ivar zonal: whether VMs are put into zones.
    :ivar confidential: whether the image can be that of a confidential VM."""

    location: str
    generation: str
    premium: bool
    zonal: bool
    confidential: bool = False


def zone_name(location: str, number: str) -> str:
    """Return a zone's name, as Kubernetes' nodes at Azure have it."""
    return f"{location}-{number}"


def offers(skus: Iterable[Sku], requirements: Requirements) -> list[Offer]:
    """Return the sizes that can be used."""
    found = (_offer(sku, requirements) for sku in skus if sku.get("resourceType") == "virtualMachines")
    return [each for each in found if each is not None]


def _offer(sku: Sku, requirements: Requirements) -> Offer | None:
    """Return a size; None: it can't be used."""
    has = {each["name"]: each["value"] for each in sku.get("capabilities") or ()}
    if not _is_usable(has, requirements):
        return None
    zones = {
        zone
        for info in sku.get("locationInfo") or ()
        if info.get("location", "").lower() == requirements.location
        for zone in info.get("zones") or ()
    }
    for restriction in sku.get("restrictions") or ():
        if restriction.get("type") == "Location":
            return None
        zones -= set((restriction.get("restrictionInfo") or {}).get("zones") or ())
    if requirements.zonal and not zones:
        return None
    name, cpus = sku["name"], int(has.get("vCPUsAvailable") or has["vCPUs"])
    share = _baseline(name)
    return Offer(
        name=name,
        cpu_millis=round(cpus * 1000 * share),
        memory_bytes=int(float(has["MemoryGB"]) * _GIB),
        gpus=int(has.get("GPUs") or 0),
        architecture="arm64" if has.get("CpuArchitectureType") == "Arm64" else "x86_64",
        shared_cpus=cpus if share < 1 else 0,
        zones=tuple(zone_name(requirements.location, zone) for zone in sorted(zones))
        if requirements.zonal
        else (),
        quota=sku.get("family") or "",
        confidential=tuple(each for name, each in _CONFIDENTIAL.items() if name == _technology(has)),
        always_confidential=bool(_technology(has)),
    )


def _technology(has: Mapping[str, str]) -> str:
    """Return what all VMs of a size have; "": none."""
    return has.get("ConfidentialComputingType") or ""


def _is_usable(has: Mapping[str, str], requirements: Requirements) -> bool:
    """Return whether VMs of a size boot the image as it is, with the disk that they get."""
    return (
        "vCPUs" in has
        and "MemoryGB" in has
        and requirements.generation in _several(has.get("HyperVGenerations") or "V1")
        and "SCSI" in _several(has.get("DiskControllerTypes") or "SCSI")
        and (requirements.confidential or not _technology(has))
        and (not requirements.premium or has.get("PremiumIO") == "True")
    )


def _several(value: str) -> Collection[str]:
    return [each.strip() for each in value.split(",")]


def _baseline(name: str) -> float:
    """Return the share of each vCPU that a size may use for good."""
    if name in _BASELINES:
        return _BASELINES[name]
    if not name.startswith("Standard_B"):
        return 1.0
    kind = name.removesuffix("_v2").rstrip("0123456789").lower()
    if kind.endswith("ts"):
        return _SMALL_V2
    return _NEXT_V2 if kind.endswith("ls") else _LARGE_V2
