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
    return sorted(fitting, key=_order)


def _order(offer: Offer) -> tuple[float, int, int, str]:
    price = _NO_PRICE if offer.price is None else offer.price
    return price, offer.memory_bytes, offer.cpu_millis, offer.name


def _refusal(offers: Sequence[Offer], name: str) -> str:
    where = f"annotation {PREFIX}instance-type: {name!r}"
    if any(one.name == name for one in offers):
        return f"{where}: the configuration's sizes do not allow it"
    return f"{where}: the cloud's list has no such type"
