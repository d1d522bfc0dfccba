# SPDX-License-Identifier: Apache-2.0
"""Choosing the size of VM for a pod, and saying why."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import attrs

from infranetes.providers.annotations import PREFIX, Wishes
from infranetes.providers.cloud.interface import Offer
from infranetes.providers.confidential import Confidential
from infranetes.providers.interface import Size
from infranetes_common.errors import InvalidArgument

_NO_PRICE = float("inf")


@attrs.frozen
class Need:
    """The requirements of a pod on its VM.

    :ivar allowed: the names that the configuration allows, with * and ?; empty: all.
    :ivar name: the size that the pod itself has chosen; then only `allowed` is checked. "": none."""

    cpu_millis: int
    memory_bytes: int
    gpus: int
    architecture: str
    allowed: tuple[str, ...] = ()
    name: str = ""
    confidential: Confidential | None = None


def need_of(
    size: Size,
    wishes: Wishes,
    *,
    allowed: Sequence[str],
    guest_memory: int,
    min_memory: int = 0,
    architecture: str,
) -> Need:
    """Return what a pod's VM must have.

    :param guest_memory: bytes that the guest itself needs, unless the pod's overhead is more.
    :param min_memory: bytes that a VM has at least.
    :raise InvalidArgument: the pod's requests are not a valid size.
    """
    if min(size.cpu_millis, size.memory_bytes, size.huge_bytes) < 0:
        raise InvalidArgument(f"{size.cpu_millis} millicores and {size.all_bytes} bytes are no size")
    memory = size.all_bytes + max(guest_memory, size.overhead_bytes)
    return Need(
        cpu_millis=size.cpu_millis,
        memory_bytes=max(memory, min_memory),
        gpus=wishes.gpus,
        architecture=architecture,
        allowed=tuple(allowed),
        name=wishes.instance_type,
        confidential=wishes.confidential,
    )


def why_not(offer: Offer, need: Need) -> str:
    """Return why this size of VM can't be the pod's, for people; "": it can."""
    if not _is_allowed(offer, need):
        return "the configuration's sizes do not allow it"
    if need.name and offer.name != need.name:
        return "the pod names another one"
    if need.confidential is not None and need.confidential not in offer.confidential:
        return f"its VMs can't be confidential by {need.confidential.value}"
    if offer.always_confidential and need.confidential is None:
        return "its VMs are confidential, which is not asked for"
    if need.name:
        return ""
    if offer.architecture != need.architecture:
        return f"it is {offer.architecture}, and the image {need.architecture}"
    if need.gpus and offer.gpus < need.gpus:
        return f"{offer.gpus} GPUs" if offer.gpus else "no GPUs"
    if offer.gpus and not need.gpus:
        return "it has GPUs, which are not asked for"
    if offer.cpu_millis < need.cpu_millis:
        has = f"{offer.cpu_millis / 1000:g} CPUs"
        return f"{has}: the baseline of its {offer.shared_cpus}" if offer.shared_cpus else has
    if offer.memory_bytes < need.memory_bytes:
        return f"{offer.memory_bytes >> 20} MiB"
    return ""


def choose(offers: Sequence[Offer], need: Need) -> list[Offer]:
    """Return the offers that fit, cheapest first.

    :raise InvalidArgument: none fits; says what was wanted.
    """
    fitting = [offer for offer in offers if not why_not(offer, need)]
    if not fitting and need.name:
        raise InvalidArgument(_refusal(offers, need))
    if not fitting:
        gpus = f", {need.gpus} GPUs" if need.gpus else ""
        confidential = f", confidential by {need.confidential.value}," if need.confidential else ""
        permitted = sum(_is_allowed(offer, need) for offer in offers)
        raise InvalidArgument(
            f"no size has {need.cpu_millis} millicores, {need.memory_bytes >> 20} MiB of memory (with the "
            f"guest's own){gpus}{confidential} for {need.architecture} among the {permitted} that the "
            "configuration allows; ask for less, or allow more sizes"
        )
    return cheapest_first(fitting, offers)


def cheapest_first(some: Sequence[Offer], offers: Sequence[Offer]) -> list[Offer]:
    """Return some of these offers, the cheapest first."""
    prices = estimated_prices(offers)
    return sorted(
        some, key=lambda offer: (prices[offer.name], offer.memory_bytes, offer.cpu_millis, offer.name)
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


def _is_allowed(offer: Offer, need: Need) -> bool:
    return not need.allowed or any(fnmatchcase(offer.name, each) for each in need.allowed)


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


def _refusal(offers: Sequence[Offer], need: Need) -> str:
    where = f"annotation {PREFIX}instance-type: {need.name!r}"
    named = next((offer for offer in offers if offer.name == need.name), None)
    return f"{where}: {why_not(named, need) if named else 'the cloud has no such type'}"
