# SPDX-License-Identifier: Apache-2.0
"""The calls about images."""

from __future__ import annotations

from collections.abc import AsyncIterator

from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentImageRpcs
from txgrpc import Call
from vmserver import validate
from vmserver.containers.interface import IImageFetcher
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.rpc.uploads import data_of


class ImageCalls(AgentImageRpcs):
    """Validates requests and passes them to the provider."""

    def __init__(self, choice: ProviderChoice) -> None:
        self._choice = choice

    async def MissingLayers(
        self, request: messages.MissingLayersRequest, call: Call
    ) -> messages.MissingLayersResponse:
        present = await self._choice.provider.missing_layers(validate.diff_ids(request.diff_ids))
        return messages.MissingLayersResponse(present=present)

    async def LoadImage(
        self, requests: AsyncIterator[messages.LoadImageRequest], call: Call
    ) -> messages.LoadImageResponse:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("LoadImage: the first message has to be the header")
        image_id = validate.image_id(first.header.image_id)
        archive = data_of(requests, "LoadImage")
        try:
            await self._choice.provider.load_image(image_id, archive)
        finally:
            await archive.aclose()
        return messages.LoadImageResponse(image_id=image_id)

    async def FetchImage(
        self, request: messages.FetchImageRequest, call: Call
    ) -> messages.FetchImageResponse:
        provider = self._choice.provider
        if not IImageFetcher.providedBy(provider):
            raise Unimplemented(
                f"the {provider.name} provider of this VM takes images only from its node: an "
                "executable's URL needs a VM with the systemd provider"
            )
        if len(request.url) > validate.MAX_URL:
            raise InvalidArgument(f"url: more than {validate.MAX_URL} characters")
        await provider.fetch_image(validate.image_id(request.image_id), request.url)
        return messages.FetchImageResponse()

    async def ListImages(
        self, request: messages.ListImagesRequest, call: Call
    ) -> messages.ListImagesResponse:
        return messages.ListImagesResponse(image_ids=await self._choice.provider.images())

    async def RemoveImage(
        self, request: messages.RemoveImageRequest, call: Call
    ) -> messages.RemoveImageResponse:
        await self._choice.provider.remove_image(validate.image_id(request.image_id))
        return messages.RemoveImageResponse()
