# SPDX-License-Identifier: Apache-2.0
"""The calls of `Control` about the sizes of VMs that pods get."""

from __future__ import annotations

from typing import cast

from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.providers.interface import Size
from infranetes.providers.size_choices import IChoosesSizes, SizeOnOffer
from infranetes_common.errors import FailedPrecondition, NotFound
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlSizeRpcs
from txgrpc import Call

_LIMIT = 5
_NANOS = 10**9


class SizeCalls(ControlSizeRpcs):
    """One method per RPC."""

    def __init__(self, providers: Providers) -> None:
        self._providers = providers

    async def ChooseSize(self, request: control.ChooseSizeRequest, call: Call) -> control.ChooseSizeResponse:
        node_provider = self._node_provider(request.provider)
        size = Size(request.cpu_millis, request.memory_bytes, request.overhead_bytes)
        provider = cast(IChoosesSizes, node_provider.provider)
        choice = provider.choose_size(size, request.gpus, request.limit or _LIMIT)
        return control.ChooseSizeResponse(
            provider=node_provider.name,
            cpu_millis=choice.needed.cpu_millis,
            memory_bytes=choice.needed.memory_bytes,
            architecture=choice.architecture,
            guest_memory=choice.guest_memory,
            min_memory=choice.min_memory,
            fitting=[_shown(one) for one in choice.fitting],
            fitting_count=choice.fitting_count,
            cheaper=[_shown(one) for one in choice.cheaper],
            cheaper_count=choice.cheaper_count,
            offers_from=choice.offers_from,
            offers_at=int(choice.offers_at * _NANOS),
            prices_from=choice.prices_from,
            prices_at=int(choice.prices_at * _NANOS),
            currency=choice.currency,
        )

    def _node_provider(self, name: str) -> NodeProvider:
        """Return the provider that is meant. :raise NotFound, FailedPrecondition: there is none."""
        node_providers = self._providers.by_name
        if name and name not in node_providers:
            raise NotFound(f"the node has no provider {name[:64]!r}: it has {', '.join(node_providers)}")
        wanted = [node_providers[name]] if name else list(node_providers.values())
        found = [
            node_provider for node_provider in wanted if IChoosesSizes.providedBy(node_provider.provider)
        ]
        if not found:
            raise FailedPrecondition(
                f"VMs of {', '.join(each.name for each in wanted)} are as large as their pods ask: there are "
                "no sizes to choose from"
            )
        return found[0]


def _shown(one: SizeOnOffer) -> control.SizeOnOffer:
    shown = control.SizeOnOffer(
        name=one.name,
        cpu_millis=one.cpu_millis,
        shared_cpus=one.shared_cpus,
        memory_bytes=one.memory_bytes,
        gpus=one.gpus,
        architecture=one.architecture,
        priced_by=one.priced_by,
        why_not=one.why_not,
    )
    if one.price is not None:
        shown.price = one.price
    return shown
