# SPDX-License-Identifier: Apache-2.0
"""Choosing the size of VM for a pod."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from infranetes.providers.annotations import PREFIX, Wishes
from infranetes.providers.cloud.interface import Offer
from infranetes.providers.interface import Size
from infranetes_common.errors import InvalidArgument

_NO_PRICE = float("inf")


def choose(
    offers: Sequence[Offer],
    size: Size,
    wishes: Wishes,
    *,
    allowed: Sequence[str],
    guest_memory: int,
    min_memory: int = 0,
    architecture: str,
) -> list[Offer]:
    """Return the offers that fit, cheapest first.

    :param allowed: the names that the configuration allows, with * and ?; empty: all. It also applies to
        a pod's own choice.
    :param guest_memory: bytes that the guest itself needs, unless the pod's overhead is more.
    :param min_memory: bytes that a VM has at least. It is not for a pod that names its size.
    :raise InvalidArgument: none fits; says what was wanted.
    """
    permitted = [
        offer for offer in offers if not allowed or any(fnmatchcase(offer.name, each) for each in allowed)
    ]
    if wishes.instance_type:
        named = [offer for offer in permitted if offer.name == wishes.instance_type]
        if not named:
            raise InvalidArgument(_refusal(offers, wishes.instance_type))
        return named
    if min(size.cpu_millis, size.memory_bytes, size.huge_bytes) < 0:
        raise InvalidArgument(f"{size.cpu_millis} millicores and {size.all_bytes} bytes are no size")
    memory = max(size.all_bytes + max(guest_memory, size.overhead_bytes), min_memory)
    fitting = [
        offer
        for offer in permitted
        if offer.cpu_millis >= size.cpu_millis
        and offer.memory_bytes >= memory
        and offer.architecture == architecture
        and (offer.gpus >= wishes.gpus if wishes.gpus else not offer.gpus)
    ]
    if not fitting:
        gpus = f", {wishes.gpus} GPUs" if wishes.gpus else ""
        raise InvalidArgument(
            f"no size has {size.cpu_millis} millicores, {memory >> 20} MiB of memory (with the guest's own)"
            f"{gpus} for {architecture} among the {len(permitted)} that the configuration allows; "
            "ask for less, or allow more sizes"
        )
    prices = estimated_prices(offers)
    return sorted(
        fitting, key=lambda offer: (prices[offer.name], offer.memory_bytes, offer.cpu_millis, offer.name)
    )


def estimated_prices(offers: Sequence[Offer]) -> dict[str, float]:
    """Return a price for each offer: price lists have gaps, which must not make a size the last choice.
    A size without a price is priced like the nearest offer of its family, in proportion to its memory; where
    its family has no prices, it is the most expensive."""
    families: dict[str, list[Offer]] = {}
    for offer in offers:
        if offer.price is not None:
            families.setdefault(_family(offer), []).append(offer)
    return {offer.name: _price(offer, families.get(_family(offer), [])) for offer in offers}


def _price(offer: Offer, family: Sequence[Offer]) -> float:
    if offer.price is not None:
        return offer.price
    if not family:
        return _NO_PRICE
    nearest = min(family, key=lambda each: (abs(each.memory_bytes - offer.memory_bytes), each.name))
    assert nearest.price is not None
    return nearest.price * offer.memory_bytes / max(nearest.memory_bytes, 1)


def _family(offer: Offer) -> str:
    return offer.name.rpartition(".")[0] or offer.name.rpartition("-")[0]


def _refusal(offers: Sequence[Offer], name: str) -> str:
    where = f"annotation {PREFIX}instance-type: {name!r}"
    if any(offer.name == name for offer in offers):
        return f"{where}: the configuration's sizes do not allow it"
    return f"{where}: the cloud's list has no such type"
