# SPDX-License-Identifier: Apache-2.0
"""`IChoosesSizes`: which size of VM a pod would get, and why."""

from __future__ import annotations

import attrs
from zope.interface import Interface

from infranetes.providers.interface import Size


@attrs.frozen
class SizeOnOffer:
    """A size of VM on offer.

    :ivar cpu_millis: what it can sustain. :ivar shared_cpus: the CPUs that this is a share of; 0: its CPUs
        are its own.
    :ivar price: of an hour; None: not known. :ivar priced_by: its source.
    :ivar why_not: why it does not fit; "": it does.
    """

    name: str
    cpu_millis: int
    shared_cpus: int
    memory_bytes: int
    gpus: int
    architecture: str
    price: float | None
    priced_by: str
    why_not: str = ""


@attrs.frozen
class SizeChoice:
    """The sizes of VM that a pod would get.

    :ivar needed: what its VM must have, with all that is added to what the pod asks for.
    :ivar guest_memory: what is added for the guest. :ivar min_memory: the least memory of any VM.
    :ivar fitting: sizes in the order in which they are tried. :ivar fitting_count: how many there are.
    :ivar cheaper: those that cost no more than the first of `fitting` and do not fit, the dearest first;
        where none fits, they are chosen from all. :ivar cheaper_count: how many there are.
    :ivar offers_from: who tells of sizes. :ivar offers_at: when, in seconds since 1970; 0: not known.
    :ivar prices_from: who tells prices. :ivar prices_at: likewise.
    :ivar currency: of all prices.
    """

    needed: Size
    architecture: str
    guest_memory: int
    min_memory: int
    fitting: tuple[SizeOnOffer, ...]
    fitting_count: int
    cheaper: tuple[SizeOnOffer, ...]
    cheaper_count: int
    offers_from: str = ""
    offers_at: float = 0.0
    prices_from: str = ""
    prices_at: float = 0.0
    currency: str = "USD"


class IChoosesSizes(Interface):
    """Also provided by an IPodProvider whose VMs have one of the sizes that an IaaS sells."""

    def choose_size(size: Size, gpus: int, limit: int) -> SizeChoice:
        """Return what a pod would get now. Nothing is asked of the IaaS.

        :param limit: the most entries of `fitting`, and of `cheaper`.
        :raise Unavailable: the provider has not started. :raise InvalidArgument: it is not a size."""
