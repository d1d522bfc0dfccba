# SPDX-License-Identifier: Apache-2.0
"""Flavors as sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import attrs

from infranetes.providers.cloud.interface import Offer
from infranetes.providers.cloud.offers.book import OWN
from infranetes.providers.cloud.openstack.libcloud_types import Flavor, Image

# Source: Nova's administrator guide, "Attaching physical PCI devices to guests", "Virtual GPU".
_ALIASES = "pci_passthrough:alias"
_RESOURCES = ("resources:VGPU", "resources:PGPU")


def root_gib(flavor: Flavor, disk_gib: int, diskless_gib: int) -> int:
    """Return the size of the root disk as a volume; 0: it is the flavor's own disk.

    :param disk_gib: the configured size for all flavors, and `diskless_gib` for those without a disk."""
    return disk_gib or (0 if int(flavor.get("disk") or 0) else diskless_gib)


def usable(
    flavors: Iterable[Flavor], image: Image, *, disk_gib: int = 0, diskless_gib: int = 0
) -> list[Flavor]:
    """Return the flavors that take an image; Nova refuses others.

    Flavors without a disk, which most clouds refuse, are left out unless the root disk is a volume: see
    `root_gib`."""
    least, memory = max(int(image.get("min_disk") or 0), 1), int(image.get("min_ram") or 0)
    return [
        each
        for each in flavors
        if (root_gib(each, disk_gib, diskless_gib) or int(each.get("disk") or 0) >= least)
        and int(each["ram"]) >= memory
    ]


def offer(
    flavor: Flavor, architecture: str, gpu_aliases: Sequence[str], prices: Mapping[str, float]
) -> Offer:
    """Return a flavor as an offer.

    :param architecture: of the image, as flavors tell none.
    :param prices: the administrator's own, by flavors' names: OpenStack's API knows none."""
    found = Offer(
        name=flavor["name"],
        cpu_millis=int(flavor["vcpus"]) * 1000,
        memory_bytes=int(flavor["ram"]) << 20,
        gpus=_gpus(flavor.get("extra_specs") or {}, gpu_aliases),
        architecture=architecture,
    )
    return priced(found, prices)


def priced(offer: Offer, prices: Mapping[str, float]) -> Offer:
    """Return an offer with its price among these, or without a price."""
    price = prices.get(offer.name)
    return attrs.evolve(offer, price=price, priced_by="" if price is None else OWN)


def _gpus(specs: Mapping[str, str], aliases: Sequence[str]) -> int:
    count = sum(_number(specs.get(each, "0")) for each in _RESOURCES)
    for part in specs.get(_ALIASES, "").split(","):
        alias, _, number = part.strip().partition(":")
        if alias and any(fnmatchcase(alias, each) for each in aliases):
            count += _number(number or "1")
    return count


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
