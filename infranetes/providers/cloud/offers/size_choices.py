# SPDX-License-Identifier: Apache-2.0
"""Explaining the choice of a pod's size."""

from __future__ import annotations

from collections.abc import Sequence

from infranetes.providers.cloud.interface import D, Offer
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.offers.sizes import Need, cheapest_first, estimated_prices, why_not
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.interface import Size
from infranetes.providers.size_choices import SizeChoice, SizeOnOffer

_ESTIMATED = "estimated by its family"
_MOST = 1000


def explain(
    offers: Sequence[Offer],
    need: Need,
    size: Size,
    settings: CloudSettings,
    book: OfferBook[D] | None,
    limit: int,
) -> SizeChoice:
    """Return what a pod would get, as `IChoosesSizes.choose_size`.

    :param offers: those of the zones in use. :param book: has all offers; None: `offers` are all.
    """
    everything = book.everything if book is not None else offers
    prices = estimated_prices(everything)
    elsewhere = {offer.name for offer in everything} - {offer.name for offer in offers}
    refusals = {
        offer.name: why_not(offer, need)
        or ("none of the zones in use offers it" if offer.name in elsewhere else "")
        for offer in everything
    }
    fitting = cheapest_first([one for one in everything if not refusals[one.name]], everything)
    bound = prices[fitting[0].name] if fitting else float("inf")
    cheaper = [one for one in everything if refusals[one.name] and prices[one.name] <= bound]
    cheaper = cheapest_first(cheaper, everything)[::-1]
    limit = max(0, min(limit, _MOST))
    answer = book.answer if book is not None else None
    sources = book.source.sources if book is not None else None
    bundled = sources.bundled if sources is not None else "the cloud"
    return SizeChoice(
        needed=Size(cpu_millis=need.cpu_millis, memory_bytes=need.memory_bytes),
        architecture=need.architecture,
        guest_memory=max(settings.guest_memory, size.overhead_bytes),
        min_memory=settings.min_memory,
        fitting=tuple(_shown(one, prices, "") for one in fitting[:limit]),
        fitting_count=len(fitting),
        cheaper=tuple(_shown(one, prices, refusals[one.name]) for one in cheaper[:limit]),
        cheaper_count=len(cheaper),
        offers_from=sources.offers if sources is not None and answer and answer.offers_at else bundled,
        offers_at=answer.offers_at if answer is not None else 0.0,
        prices_from=sources.prices if sources is not None and answer and answer.prices_at else bundled,
        prices_at=answer.prices_at if answer is not None else 0.0,
        currency=sources.currency if sources is not None else "USD",
    )


def _shown(offer: Offer, prices: dict[str, float], refusal: str) -> SizeOnOffer:
    price = prices[offer.name]
    return SizeOnOffer(
        name=offer.name,
        cpu_millis=offer.cpu_millis,
        shared_cpus=offer.shared_cpus,
        memory_bytes=offer.memory_bytes,
        gpus=offer.gpus,
        architecture=offer.architecture,
        price=price if price < float("inf") else None,
        priced_by=offer.priced_by if offer.price is not None else _ESTIMATED if price < float("inf") else "",
        why_not=refusal,
    )
