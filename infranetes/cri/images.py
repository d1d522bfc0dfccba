# SPDX-License-Identifier: Apache-2.0
"""The CRI's ImageService, backed by the image store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence

import attrs

from infranetes.cri.paging import pages
from infranetes.cri.translate import framed
from infranetes.images import Image, ImageStore, credentials
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.catalogues import CatalogueSet
from infranetes.images.reference import parse
from infranetes.images.several import SeveralStores
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import ImageRpcs
from txgrpc import Call


def to_cri(image: Image) -> cri.Image:
    """Translate an image of the store into the CRI's `Image` message."""
    message = cri.Image(
        id=image.id,
        repo_tags=image.repo_tags,
        repo_digests=image.repo_digests,
        size=image.size,
        username=image.username,
        pinned=image.pinned,
    )
    if image.uid is not None:
        message.uid.value = image.uid
    return message


@attrs.frozen
class ImageService(ImageRpcs):
    """The ImageService, with one method per RPC.

    An image's `image_ref` is its id, as in container statuses.

    :ivar kept_bytes: returns what kept states take, from which pods start as they do from images."""

    store: ImageStore | CatalogueStore | CatalogueSet | SeveralStores
    kept_bytes: Callable[[], int] = lambda: 0

    async def ListImages(self, request: cri.ListImagesRequest, call: Call) -> cri.ListImagesResponse:
        return cri.ListImagesResponse(images=[to_cri(image) for image in self._selected(request.filter)])

    async def StreamImages(self, request: cri.StreamImagesRequest, call: Call) -> AsyncIterator[bytes]:
        for page in pages(framed(to_cri(image)) for image in self._selected(request.filter)):
            yield page

    def _selected(self, filter: cri.ImageFilter) -> Sequence[Image]:
        if not filter.image.image:
            return self.store.list()
        try:
            return [self.store.resolve(filter.image.image)]
        except NotFound:
            return []

    async def ImageStatus(self, request: cri.ImageStatusRequest, call: Call) -> cri.ImageStatusResponse:
        """Return an image's status: empty if the image is not on the node.

        Verbose: `info` with its imageSpec."""
        response = cri.ImageStatusResponse()
        try:
            image = self.store.resolve(_name(request))
            if request.verbose:
                config = json.loads(await self.store.config(image.id))
                response.info["info"] = json.dumps({"imageSpec": config})
        except NotFound:
            return cri.ImageStatusResponse()
        response.image.CopyFrom(to_cri(image))
        return response

    async def PullImage(self, request: cri.PullImageRequest, call: Call) -> cri.PullImageResponse:
        name, auth = _name(request), request.auth
        store = self.store.of_name(name) if isinstance(self.store, SeveralStores) else self.store
        if not isinstance(store, ImageStore):
            image = await store.pull(name, dict(request.sandbox_config.annotations))
            return cri.PullImageResponse(image_ref=image.id)
        registry_auth = credentials(
            parse(name).registry,
            username=auth.username,
            password=auth.password,
            auth=auth.auth,
            server_address=auth.server_address,
            identity_token=auth.identity_token,
            registry_token=auth.registry_token,
        )
        image = await store.pull(name, registry_auth)
        return cri.PullImageResponse(image_ref=image.id)

    async def RemoveImage(self, request: cri.RemoveImageRequest, call: Call) -> cri.RemoveImageResponse:
        """Remove the image under all of its names. Idempotent."""
        await self.store.remove(_name(request))
        return cri.RemoveImageResponse()

    async def ImageFsInfo(self, request: cri.ImageFsInfoRequest, call: Call) -> cri.ImageFsInfoResponse:
        """Return the disk space that the image store and kept states use.

        Containers write to their VMs' disks. The image store is also reported as their filesystem: kubelet
        requires one, and would take another one for a split disk."""
        usage = await self.store.fs_usage()
        response = cri.ImageFsInfoResponse()
        entry = response.image_filesystems.add(timestamp=usage.timestamp_nanos)
        entry.fs_id.mountpoint = usage.path
        entry.used_bytes.value = usage.used_bytes + self.kept_bytes()
        entry.inodes_used.value = usage.inodes_used
        response.container_filesystems.add().CopyFrom(entry)
        return response


def _name(request: cri.ImageStatusRequest | cri.PullImageRequest | cri.RemoveImageRequest) -> str:
    name = request.image.image
    if not name:
        raise InvalidArgument("image.image is empty: give a reference or an id")
    return name
