"""A cloud's machine images as the images of pods whose image is the VM.

kubelet takes nothing for an image's name that is no reference of Docker's. These mean version 1.0 of web::

    web:1.0
    docker.io/library/web:1.0    what some clients make of it
    aws.infranetes.io/web:1.0    what can't be mistaken for an image of a registry

Without a version it is `latest`. With `@sha256:ID` it is that very image, or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.defer import Deferred
from zope.interface import implementer

from infranetes.images import reference as references
from infranetes.images.interface import Found, IImageCatalogue
from infranetes.providers.cloud.interface import CloudError, ICloud, MachineImage, Trouble
from infranetes_common.errors import InvalidArgument, NotFound

DOMAIN = "infranetes.io"
MAX_ID = 256

# Has the cloud asked in a thread: what for, in words, and the work.
Ask = Callable[[str, Callable[[Any], Any]], Deferred[Any]]


@implementer(IImageCatalogue)
class MachineImages:
    """See `IImageCatalogue`."""

    boots = True

    def __init__(self, cloud: ICloud, ask: Ask) -> None:
        self.name: str = cloud.name
        self._cloud = cloud
        self._ask = ask

    def find(self, reference: str, annotations: Mapping[str, str]) -> Deferred[Found]:
        return Deferred.fromCoroutine(self._find(reference))

    def canonical(self, reference: str) -> str:
        try:
            name, version, _ = parse(reference, self.name)
        except InvalidArgument:
            return reference
        return f"{name}:{version}"

    def present(self, found: Found) -> Deferred[bool]:
        cloud, machine = self._cloud, found.machine
        return self._ask(f"look for image {machine}", lambda driver: cloud._thd_has_image(driver, machine))

    async def _find(self, reference: str) -> Found:
        name, version, wanted = parse(reference, self.name)
        lacks = f"{self._cloud.place} has no image {name}:{version}"

        def look(driver: Any) -> MachineImage | str:
            try:
                return self._cloud._thd_find_image(driver, name, version) or lacks
            except CloudError as error:
                if error.trouble is not Trouble.MISSING:
                    raise
                return f"{lacks}: {error}"

        image = await self._ask(f"find image {name}:{version}", look)
        if isinstance(image, str):
            raise NotFound(image)
        if not (image.id.isprintable() and 0 < len(image.id) <= MAX_ID):
            raise NotFound(f"{lacks} that can be booted: its id is {image.id[:80]!r}")
        # What is at this place under this id never changes.
        id = "sha256:" + hashlib.sha256(f"{self._cloud.place}\0{image.id}".encode()).hexdigest()
        if wanted and wanted != id:
            raise NotFound(f"{lacks} with the digest {wanted}: the newest is {image.id}, {id}")
        return Found(
            id=id,
            names=(f"{name}:{version}",),
            digests=(f"{name}@{id}",),
            size=max(image.size, 0),
            machine=image.id,
        )


def parse(reference: str, cloud: str) -> tuple[str, str, str]:
    """Name, version and digest ("": any) of an image of that cloud.

    :raise InvalidArgument: it is none; says how one is written."""
    domain = f"{cloud}.{DOMAIN}"
    tagged, at, digest = reference.partition("@")
    try:
        if at and not references.is_digest(digest):
            raise InvalidArgument("what follows @ has to be sha256: and 64 hex digits in lower case")
        found = references.parse(tagged)
        if found.registry not in (references.DEFAULT_REGISTRY, domain):
            raise InvalidArgument(f"{found.registry} is a registry")
    except InvalidArgument as error:
        raise InvalidArgument(
            f"image {reference[:300]!r} is none of {cloud}'s machine images: {error}; write NAME:VERSION, or "
            f"{domain}/NAME:VERSION"
        ) from None
    name = found.path
    if found.registry == references.DEFAULT_REGISTRY:
        name = name.removeprefix("library/")
    return name, found.tag, digest
