# SPDX-License-Identifier: Apache-2.0
"""The most that a life can cost, which is shown before it begins."""

from __future__ import annotations

import attrs

from infranetes.providers.interface import Size
from infranetes.providers.size_choices import IChoosesSizes, SizeOnOffer
from infranetes_common.errors import FailedPrecondition

_HOUR = 3600.0


@attrs.frozen
class Bill:
    """The bill for one VM.

    :ivar sizes: those that are tried, in this order. :ivar seconds: the longest time for which the VM exists.
    """

    sizes: tuple[SizeOnOffer, ...]
    currency: str
    seconds: float

    @property
    def most(self) -> float:
        """Return the most that the VM can cost. :raise FailedPrecondition: a price is unknown."""
        prices = [size.price for size in self.sizes if size.price is not None]
        if not prices or len(prices) < len(self.sizes):
            unknown = ", ".join(size.name for size in self.sizes if size.price is None) or "any size"
            raise FailedPrecondition(
                f"nobody tells what {unknown} costs: give prices of your own by prices_file, or allow only "
                "sizes whose prices are known"
            )
        return max(prices) * self.seconds / _HOUR

    def check(self, budget: float) -> None:
        """:raise FailedPrecondition: it may cost more than `budget`, or a price is unknown."""
        if self.most > budget:
            raise FailedPrecondition(
                f"it may cost {self.most:.4f} {self.currency}, and the budget is {budget:g}: give a larger "
                "one, fewer minutes, or allow only smaller sizes"
            )

    def words(self, location: str, gib: int) -> str:
        """Describe the bill in a sentence."""
        first, *others = self.sizes
        more = f", or where there is no capacity {', '.join(size.name for size in others)}" if others else ""
        return (
            f"This makes on {location} one VM ({first.name} at {first.price} {self.currency} an hour by "
            f"{first.priced_by}{more}) and a volume of at most {gib} GiB. In the {self.seconds / 60:g} "
            f"minutes that it may take the VM costs at most {self.most:.4f} {self.currency}; its disk, the "
            "volume, and a public address if the configuration gives one, come on top of that. All of it is "
            "destroyed at the end, and when you press Ctrl-C."
        )


def bill(provider: IChoosesSizes, tries: int, seconds: float) -> Bill:
    """Return the bill of a pod without requests. :param tries: how many sizes are tried."""
    choice = provider.choose_size(Size(), 0, tries)
    if not choice.fitting:
        raise FailedPrecondition("no size fits: allow more of them by sizes in the provider's table")
    return Bill(choice.fitting, choice.currency, seconds)
