# SPDX-License-Identifier: Apache-2.0
"""Sizes of nodes as offers, with what drivers tell in `extra`, each by names of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import attrs

from infranetes.providers.cloud.any.libcloud_types import Size
from infranetes.providers.cloud.interface import Offer
from infranetes.providers.cloud.offers.book import OWN

_CPUS = ("vcpus", "vcpu_count", "cpus", "cpu", "cores", "core_number", "core_count", "cpu_count")
_PLACES = ("regions", "locations")
_ARMS = ("arm", "arm64", "aarch64")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def name_of(size: Size) -> str:
    """Return a size's name in the configuration: its id, unless nobody can read that."""
    return str(size.name if _UUID.fullmatch(str(size.id)) else size.id)


def offer(size: Size, hours: float, prices: Mapping[str, float], places: Collection[str]) -> Offer | None:
    """Return a size as an offer; None: its memory is not known, or it is not sold at these places.

    :param hours: of which its price is. :param prices: the administrator's own, by names."""
    extra = size.extra or {}
    where = next((extra[each] for each in _PLACES if isinstance(extra.get(each), list | tuple)), None)
    if not size.ram or (places and isinstance(where, Collection) and not set(where) & set(places)):
        return None
    price = _number(size.price) / hours
    found = Offer(
        name=name_of(size),
        # A driver that does not tell them leaves it at one.
        cpu_millis=int(max((_number(extra.get(each)) for each in _CPUS), default=0) or 1) * 1000,
        memory_bytes=int(size.ram) << 20,
        price=price or None,
        gpus=int(_number(extra.get("gpus"))),
        architecture="arm64" if extra.get("arch") in _ARMS else "x86_64",
    )
    return priced(found, prices)


def priced(offer: Offer, prices: Mapping[str, float]) -> Offer:
    """Return an offer with its price among these, or as it is."""
    price = prices.get(offer.name)
    return offer if price is None else attrs.evolve(offer, price=price, priced_by=OWN)


def _number(value: object) -> float:
    """Return a number that a driver tells; 0: it tells none."""
    try:
        return max(float(value), 0.0) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0
