# SPDX-License-Identifier: Apache-2.0
"""The attempts of a launch, one after the other: sizes in their zones, as spot VMs and on demand.

Each refusal rules out further attempts:

refused for       ruled out
capacity          the size in this zone
a full zone       all sizes in this zone, on all markets
a family's quota  all sizes that share the quota, in all zones; spot VMs have quotas of their own
another quota     all spot VMs, or all on demand
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from infranetes.providers.cloud.interface import CloudError, ErrorKind, Offer


@attrs.frozen
class Attempt:
    """One attempt at a launch.

    :ivar quota: as in `Offer`. :ivar zone: one of `Cloud.zones`."""

    size: str
    quota: str
    zone: str
    spot: bool


class Attempts:
    """All attempts at one launch, which are iterated over again for each VM that is asked for.

    :param offers: the offers that fit, in the order in which they are tried. :param zones: the zones to try
        each in, likewise in order.
    :param markets: whether a spot VM is asked for, likewise.
    :param max_sizes: how many sizes are tried on each market, not counting those that another's refusal rules
        out.
    """

    def __init__(
        self, offers: Sequence[Offer], zones: Sequence[str], markets: Sequence[bool], max_sizes: int
    ) -> None:
        self._offers = offers
        self._zones = zones
        self._markets = markets
        self._max_sizes = max_sizes
        self._full: set[tuple[str | None, bool]] = set()  # (a full quota, whether of spot VMs); None: all
        self._full_zones: set[str] = set()
        self._refused: list[tuple[Attempt, CloudError]] = []

    def __iter__(self) -> Iterator[Attempt]:
        for spot in self._markets:
            tried = 0
            for offer in self._offers:
                if tried == self._max_sizes:
                    break
                if self._is_full(offer.quota, spot):
                    continue
                tried += 1
                for zone in self._zones:
                    if zone in self._full_zones:
                        continue
                    # A refusal in the zone before may have filled it.
                    if not self._is_full(offer.quota, spot):
                        yield Attempt(offer.name, offer.quota, zone, spot)

    def _is_full(self, quota: str, spot: bool) -> bool:
        return not self._full.isdisjoint({(quota, spot), (None, spot)})

    def refuse(self, attempt: Attempt, error: CloudError) -> None:
        """Rule out what need not be tried any more. :param error: one of `REFUSALS`."""
        self._refused.append((attempt, error))
        if error.kind is ErrorKind.FULL_ZONE:
            self._full_zones.add(attempt.zone)
        elif error.kind is ErrorKind.FAMILY_QUOTA:
            self._full.add((attempt.quota, attempt.spot))
        elif error.kind is ErrorKind.QUOTA:
            self._full.add((None, attempt.spot))

    def failure(self) -> CloudError:
        """Return the error of a launch of which each attempt was refused."""
        limits = [error for _, error in self._refused if error.kind is not ErrorKind.CAPACITY]
        lacking = [(one.size, error) for one, error in self._refused if error.kind is ErrorKind.CAPACITY]
        words = list(dict.fromkeys(str(error) for error in limits))
        if lacking:
            sizes = ", ".join(dict.fromkeys(size for size, _ in lacking))
            words.append(f"none of {sizes} is available; the last answer: {lacking[-1][1]}")
        return CloudError(limits[-1].kind if limits else ErrorKind.CAPACITY, "; ".join(words))
