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
            fitting=[_shown(size) for size in choice.fitting],
            fitting_count=choice.fitting_count,
            cheaper=[_shown(size) for size in choice.cheaper],
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
        asked = [node_providers[name]] if name else list(node_providers.values())
        choosing = [
            node_provider for node_provider in asked if IChoosesSizes.providedBy(node_provider.provider)
        ]
        if not choosing:
            raise FailedPrecondition(
                f"VMs of {', '.join(other.name for other in asked)} are as large as their pods ask: there "
                "are no sizes to choose from"
            )
        return choosing[0]


def _shown(size: SizeOnOffer) -> control.SizeOnOffer:
    shown = control.SizeOnOffer(
        name=size.name,
        cpu_millis=size.cpu_millis,
        shared_cpus=size.shared_cpus,
        memory_bytes=size.memory_bytes,
        gpus=size.gpus,
        architecture=size.architecture,
        priced_by=size.priced_by,
        why_not=size.why_not,
    )
    if size.price is not None:
        shown.price = size.price
    return shown
