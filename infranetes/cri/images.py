"""The CRI's ImageService: its words for what the image store does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs

from infranetes.cri.pieces import pieces
from infranetes.cri.translate import framed
from infranetes.images import Image, ImageStore, credentials
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.reference import parse
from infranetes_common import cri
from infranetes_common.errors import InvalidArgument, NotFound


def to_cri(image: Image) -> Any:
    """An `Image` message."""
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
class ImageService:
    """One method per RPC. An image's `image_ref` is its id, here and in container statuses alike."""

    store: ImageStore | CatalogueStore

    async def ListImages(self, request: Any, call: Any) -> Any:
        """All images, or the one that the filter names."""
        return cri.ListImagesResponse(images=[to_cri(image) for image in self._selected(request.filter)])

    async def StreamImages(self, request: Any, call: Any) -> AsyncIterator[bytes]:
        """The same in pieces."""
        for piece in pieces(framed(to_cri(image)) for image in self._selected(request.filter)):
            yield piece

    def _selected(self, wanted: Any) -> Sequence[Image]:
        if not wanted.image.image:
            return self.store.list()
        try:
            return [self.store.resolve(wanted.image.image)]
        except NotFound:
            return []

    async def ImageStatus(self, request: Any, call: Any) -> Any:
        """Not on the node: an empty response, as the CRI has it. Verbose: `info`, JSON with imageSpec."""
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

    async def PullImage(self, request: Any, call: Any) -> Any:
        """Answers with the image's id."""
        name, auth = _name(request), request.auth
        if isinstance(self.store, CatalogueStore):
            found = await self.store.find(name, dict(request.sandbox_config.annotations))
            return cri.PullImageResponse(image_ref=found.id)
        given = credentials(
            parse(name).registry,
            username=auth.username,
            password=auth.password,
            auth=auth.auth,
            server_address=auth.server_address,
            identity_token=auth.identity_token,
            registry_token=auth.registry_token,
        )
        image = await self.store.pull(name, given)
        return cri.PullImageResponse(image_ref=image.id)

    async def RemoveImage(self, request: Any, call: Any) -> Any:
        """The image with all of its names; not on the node: nothing to do."""
        await self.store.remove(_name(request))
        return cri.RemoveImageResponse()

    async def ImageFsInfo(self, request: Any, call: Any) -> Any:
        """The image store's own use. What containers write is on their VMs' disks and takes nothing here;
        the store is named for them too, since kubelet takes two different filesystems, or none, for a split
        disk (and reads the first entry unseen)."""
        usage = await self.store.fs_usage()
        response = cri.ImageFsInfoResponse()
        entry = response.image_filesystems.add(timestamp=usage.timestamp_nanos)
        entry.fs_id.mountpoint = usage.path
        entry.used_bytes.value = usage.used_bytes
        entry.inodes_used.value = usage.inodes_used
        response.container_filesystems.add().CopyFrom(entry)
        return response


def _name(request: Any) -> str:
    name: str = request.image.image
    if not name:
        raise InvalidArgument("image.image is empty; give a reference or an id")
    return name
