# SPDX-License-Identifier: Apache-2.0
"""A cloud's machine images as images of VM-image pods.

kubelet accepts only Docker references as image names. These mean version 1.0 of web::

    web:1.0
    docker.io/library/web:1.0    as some clients complete it
    aws.infranetes.io/web:1.0    can't be mistaken for a registry's image

The version defaults to `latest`. With `@sha256:ID` exactly that image is meant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, Protocol, TypeVar

from twisted.internet.defer import Deferred
from zope.interface import implementer

from infranetes.images import reference as references
from infranetes.images.interface import CatalogueImage, IImageCatalogue
from infranetes.providers.cloud.interface import Cloud, CloudError, D, ErrorKind, MachineImage
from infranetes_common.concurrency import deferred
from infranetes_common.errors import InvalidArgument, NotFound

DOMAIN = "infranetes.io"
MAX_ID = 256

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)


class CallCloud(Protocol[D_co]):
    """Calls `work(driver)` in a thread; `what` says for people what it does."""

    def __call__(self, what: str, work: Callable[[D_co], T]) -> Deferred[T]: ...


@implementer(IImageCatalogue)
class MachineImageCatalogue(Generic[D]):
    """See `IImageCatalogue`."""

    machine_images = True

    def __init__(self, cloud: Cloud[D], call: CallCloud[D]) -> None:
        self.name: str = cloud.name
        self._cloud = cloud
        self._call = call

    def canonical(self, reference: str) -> str:
        try:
            name, version, _ = parse(reference, self.name)
        except InvalidArgument:
            return reference
        return f"{name}:{version}"

    def present(self, image: CatalogueImage) -> Deferred[bool]:
        id = image.machine
        return self._call(f"look for image {id}", partial(self._cloud._thd_has_image, id=id))

    @deferred
    async def find(self, reference: str, annotations: Mapping[str, str]) -> CatalogueImage:
        name, version, wanted = parse(reference, self.name)
        missing = f"{self._cloud.location} has no image {name}:{version}"

        def _thd_find(driver: D) -> MachineImage | str:
            try:
                return self._cloud._thd_find_image(driver, name, version)
            except CloudError as error:
                if error.kind is not ErrorKind.NOT_FOUND:
                    raise
                return f"{missing}: {error}"

        image = await self._call(f"find image {name}:{version}", _thd_find)
        if isinstance(image, str):
            raise NotFound(image)
        if not (image.id.isprintable() and 0 < len(image.id) <= MAX_ID):
            raise NotFound(f"{missing} that can be booted: its id is {image.id[:80]!r}")
        # At one location, an id always means the same image.
        id = "sha256:" + hashlib.sha256(f"{self._cloud.location}\0{image.id}".encode()).hexdigest()
        if wanted and wanted != id:
            raise NotFound(f"{missing} with the digest {wanted}: the newest is {image.id}, {id}")
        return CatalogueImage(
            id=id,
            names=(f"{name}:{version}",),
            digests=(f"{name}@{id}",),
            size=max(image.size, 0),
            machine=image.id,
        )


def parse(reference: str, cloud: str) -> tuple[str, str, str]:
    """Return name, version and digest ("": any) of a reference to one of that cloud's images.

    :raise InvalidArgument: it is none; says how to write one."""
    domain = f"{cloud}.{DOMAIN}"
    tagged, at, digest = reference.partition("@")
    try:
        if at and not references.is_digest(digest):
            raise InvalidArgument("the part after @ has to be sha256: and 64 hex digits in lower case")
        found = references.parse(tagged)
        if found.registry not in (references.DEFAULT_REGISTRY, domain):
            raise InvalidArgument(f"{found.registry} is a registry")
    except InvalidArgument as error:
        raise InvalidArgument(
            f"image {reference[:300]!r} is no machine image of {cloud}: {error}; write NAME:VERSION or "
            f"{domain}/NAME:VERSION"
        ) from None
    name = found.path
    if found.registry == references.DEFAULT_REGISTRY:
        name = name.removeprefix("library/")
    return name, found.tag, digest
