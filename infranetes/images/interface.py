# SPDX-License-Identifier: Apache-2.0
"""Image catalogues: where images are found that are not container images."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface


@attrs.frozen
class CatalogueImage:
    """An image as a catalogue lists it.

    :ivar id: sha256: and 64 hex digits, of the image itself or of what never changes about it.
    :ivar names: NAME:VERSION, as references have it.
    :ivar digests: NAME@sha256:...
    :ivar size: in bytes; 0 if it is not known.
    :ivar url: where each VM fetches it; "" if VMs don't.
    :ivar machine: the IaaS's own name of it (`VmRequest.image`); VMs are booted from it.
    """

    id: str
    names: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    size: int = 0
    url: str = ""
    machine: str = ""


class IImageCatalogue(Interface):
    """Finds images by reference. Nothing is brought to the node, which only records what was found.

    For those that do bring something there is `IKeepsImages`."""

    name: str = Attribute("The value of `imgprovider` that selects it.")
    machine_images: bool = Attribute(
        "Whether its images are whole machines: a pod has no VM before a container names its image."
    )

    def find(reference: str, annotations: Mapping[str, str]) -> Deferred[CatalogueImage]:
        """Return the image that a pod with these annotations means by `reference`.

        :raise InvalidArgument: it is not a reference for this catalogue; the message says how one is written.
        :raise NotFound: there is no such image.
        :raise Unavailable: the catalogue can't be asked now.
        """

    def canonical(reference: str) -> str:
        """Return a reference as `CatalogueImage.names` has it, or unchanged if it does not refer to one."""

    def present(image: CatalogueImage) -> Deferred[bool]:
        """Return whether an image that was found before is still there.

        :raise InfranetesError: that can't be told now.
        """


class IKeepsImages(IImageCatalogue):
    """A catalogue that downloads an image to the node when `find` is called."""

    def start() -> Deferred[None]:
        """Find what is there. :raise ConfigError: nothing can be kept."""

    def stop() -> Deferred[None]:
        """End what is under way. Idempotent."""

    def keep(ids: Collection[str]) -> Deferred[None]:
        """Remove what is kept of other images than these, and those just found. It does not fail."""
