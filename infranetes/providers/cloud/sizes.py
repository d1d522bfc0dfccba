"""Which of a cloud's sizes a pod gets."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from infranetes.providers.cloud.annotations import PREFIX, Wishes
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
    architecture: str,
) -> list[Offer]:
    """The offers that fit, in the order in which to try them: cheapest first.

    :param allowed: the names that the configuration allows, with * and ?. A pod's own choice of type is
        held against it too; empty: all.
    :param guest_memory: bytes that the guest itself needs.
    :raise InvalidArgument: none fits; says what was wanted.
    """
    permitted = [one for one in offers if not allowed or any(fnmatchcase(one.name, each) for each in allowed)]
    if wishes.instance_type:
        named = [one for one in permitted if one.name == wishes.instance_type]
        if not named:
            raise InvalidArgument(_refusal(offers, wishes.instance_type))
        return named
    if size.cpu_millis < 0 or size.memory_bytes < 0:
        raise InvalidArgument(f"a size of {size.cpu_millis} millicores and {size.memory_bytes} bytes is none")
    memory = size.memory_bytes + guest_memory
    fitting = [
        one
        for one in permitted
        if one.cpu_millis >= size.cpu_millis
        and one.memory_bytes >= memory
        and one.architecture == architecture
        and (one.gpus >= wishes.gpus if wishes.gpus else not one.gpus)
    ]
    if not fitting:
        gpus = f", {wishes.gpus} GPUs" if wishes.gpus else ""
        raise InvalidArgument(
            f"no size has {size.cpu_millis} millicores, {memory >> 20} MiB of memory (with the guest's own)"
            f"{gpus} for {architecture} among the {len(permitted)} that the configuration allows; "
            "ask for less, or allow more sizes"
        )
    prices = estimated_prices(offers)
    return sorted(fitting, key=lambda one: (prices[one.name], one.memory_bytes, one.cpu_millis, one.name))


def estimated_prices(offers: Sequence[Offer]) -> dict[str, float]:
    """What each offer costs, or may: price lists have gaps, and a gap must not make a size last. A size
    without a price costs what the nearest of its family does, by memory; without such, more than all."""
    families: dict[str, list[Offer]] = {}
    for one in offers:
        if one.price is not None:
            families.setdefault(_family(one), []).append(one)
    return {one.name: _price(one, families.get(_family(one), [])) for one in offers}


def _price(offer: Offer, family: Sequence[Offer]) -> float:
    if offer.price is not None:
        return offer.price
    if not family:
        return _NO_PRICE
    nearest = min(family, key=lambda one: (abs(one.memory_bytes - offer.memory_bytes), one.name))
    assert nearest.price is not None
    return nearest.price * offer.memory_bytes / max(nearest.memory_bytes, 1)


def _family(offer: Offer) -> str:
    return offer.name.rpartition(".")[0] or offer.name.rpartition("-")[0]


def _refusal(offers: Sequence[Offer], name: str) -> str:
    where = f"annotation {PREFIX}instance-type: {name!r}"
    if any(one.name == name for one in offers):
        return f"{where}: the configuration's sizes do not allow it"
    return f"{where}: the cloud's list has no such type"
