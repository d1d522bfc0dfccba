# SPDX-License-Identifier: Apache-2.0
"""The sizes that a cloud sells and their prices, as it tells them itself, kept in a file.

Sizes and prices are asked for separately, for either may be refused. What is used of each:

state      left when                         next
none       the file has what was told before told
none       the cloud tells                   told
none       the cloud can't be asked          bundled   once in the log
bundled    the cloud tells                   told
told       the cloud tells again             told      daily; meanwhile, and if it fails, the old is used

A launch never waits for it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import attrs
import cattrs

from infranetes.providers.cloud.interface import CloudError, D, ErrorKind, Offer
from infranetes_common.concurrency import replace_file

MAX_OFFERS = 10_000
_MAX_BYTES = 16 << 20
_FORMAT = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_CPUS, _MOST_MEMORY, _MOST_PRICE = 100_000, 1 << 50, 1e6

OWN = "prices_file"

D_contra = TypeVar("D_contra", contravariant=True)
S = TypeVar("S", bound=Sized)


@attrs.frozen
class Sources:
    """The sources of sizes and prices, for people.

    :ivar location: the cloud's location that they are for; a file of another one is not used.
    :ivar offers: the source of sizes. :ivar prices: the source of prices. :ivar bundled: what came with the
        software.
    """

    location: str
    offers: str
    prices: str
    bundled: str
    currency: str = "USD"


class OfferSource(Protocol[D_contra]):
    """A cloud's own source of its sizes and prices."""

    sources: Sources

    def _thd_types(self, driver: D_contra) -> Sequence[Offer]:
        """Ask for the sizes. :raise Exception: as a cloud's calls."""

    def _thd_prices(self, driver: D_contra, offers: Sequence[Offer]) -> Mapping[str, float]:
        """Ask for the prices of an hour of these sizes, by name. :raise Exception: as a cloud's calls."""

    def _thd_bundled(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """Return the sizes and prices that came with the software, or at least prices of these sizes. The
        first call takes long."""


@attrs.frozen
class LastAnswer:
    """A cloud's last answer, and its time in seconds since 1970; 0: it has never answered."""

    location: str
    offers: tuple[Offer, ...] = ()
    offers_at: float = 0.0
    prices: Mapping[str, float] = attrs.field(factory=dict)
    prices_at: float = 0.0
    format: int = _FORMAT


class OfferBook(Generic[D]):
    """The book of offers that the module describes.

    :param path: the file's. :param own: the administrator's own prices, which win. :param now: seconds since
        1970.
    :ivar everything: all sizes, with the best price that is known of each.
    :ivar offers: those of them that the zones in use offer.
    :ivar answer: what the cloud has told. :ivar bundled: what is used where it has not.
    """

    def __init__(
        self,
        path: Path,
        source: OfferSource[D],
        own: Mapping[str, float],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._own = own
        self.now = now
        self.source = source
        self.answer = LastAnswer(source.sources.location)
        self.bundled: tuple[Offer, ...] = ()
        self.everything: tuple[Offer, ...] = ()
        self.offers: tuple[Offer, ...] = ()
        self._zones: frozenset[str] = frozenset()
        self._prices: dict[str, float] = {}

    def _thd_load(self) -> str:
        """Read the file. Returns why it can't be used; "": it is, or there is none."""
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self._path} can't be read: {error.strerror}"
        if len(content) > _MAX_BYTES:
            return f"{self._path} is too large"
        try:
            answer = cattrs.structure(json.loads(content), LastAnswer)
            checked = attrs.evolve(answer, offers=valid(answer.offers), prices=valid_prices(answer.prices))
        except Exception as error:  # a file that is not ours may contain anything
            return f"{self._path} was not written by this program: {type(error).__name__}"
        if (answer.location, answer.format) == (self.answer.location, _FORMAT):
            self.answer = checked
            self._merge()
        return ""

    def _thd_keep(
        self, *, offers: Sequence[Offer] | None = None, prices: Mapping[str, float] | None = None
    ) -> str:
        """Use what the cloud has told, and write it down. Returns why that failed; "": it did not.

        :raise CloudError: the answer can't be right; what was told before is kept."""
        now = self.now()
        if offers is not None:
            self.answer = attrs.evolve(self.answer, offers=_some(valid(offers), "sizes"), offers_at=now)
        if prices is not None:
            self.answer = attrs.evolve(
                self.answer, prices=_some(valid_prices(prices), "prices"), prices_at=now
            )
        self._merge()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(cattrs.unstructure(self.answer)))
        except OSError as error:
            return f"{self._path} can't be written: {error.strerror}"
        return ""

    def use_zones(self, zones: Iterable[str]) -> None:
        """Offer the sizes that one of these zones has; without zones, those that any has."""
        self._zones = frozenset(zones)
        self._merge()

    def use_own(self, prices: Mapping[str, float]) -> None:
        """Prefer these prices to all others."""
        self._own = prices
        self._merge()

    def dollars(self, size: str) -> float | None:
        """Return the US dollars of an hour of this size; None: not known."""
        return self._prices.get(size) if self.source.sources.currency == "USD" else None

    def use_bundled(self, offers: Sequence[Offer]) -> None:
        """Use these where the cloud has told nothing."""
        self.bundled = tuple(offers)
        self._merge()

    def _merge(self) -> None:
        bundled = {offer.name: offer.price for offer in self.bundled}
        self.everything = tuple(
            self._priced(offer, bundled.get(offer.name)) for offer in self.answer.offers or self.bundled
        )
        self.offers = tuple(each for each in self.everything if self.is_offered(each))
        self._prices = {each.name: each.price for each in self.everything if each.price is not None}

    def is_offered(self, offer: Offer) -> bool:
        """Return whether one of the zones in use has this size, as far as is known."""
        return not (self._zones and offer.zones) or not self._zones.isdisjoint(offer.zones)

    def _priced(self, offer: Offer, bundled: float | None) -> Offer:
        own, told = self._own.get(offer.name), self.answer.prices.get(offer.name)
        if own is not None:
            return attrs.evolve(offer, price=own, priced_by=OWN)
        if told is not None:
            return attrs.evolve(offer, price=told, priced_by=self.source.sources.prices)
        return attrs.evolve(
            offer, price=bundled, priced_by=self.source.sources.bundled if bundled is not None else ""
        )


def valid(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Return those of these offers that are plausible, without prices."""
    found = {
        offer.name: attrs.evolve(offer, price=None, priced_by="")
        for offer in offers[:MAX_OFFERS]
        if _NAME.fullmatch(offer.name)
        and 0 < offer.cpu_millis <= _MOST_CPUS * 1000
        and 0 < offer.memory_bytes <= _MOST_MEMORY
        and 0 <= offer.gpus <= _MOST_CPUS
    }
    return tuple(found.values())


def _some(found: S, what: str) -> S:
    if not found:
        raise CloudError(ErrorKind.INVALID, f"the answer has no {what}")
    return found


def valid_prices(prices: Mapping[str, float]) -> dict[str, float]:
    """Return those of these prices that are plausible."""
    found = list(prices.items())[:MAX_OFFERS]
    return {
        name: price
        for name, price in found
        if _NAME.fullmatch(name) and math.isfinite(price) and 0 < price < _MOST_PRICE
    }
