"""What an image catalogue is: where pods' images are found that are no container images."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface


@attrs.frozen
class Found:
    """An image as a catalogue knows it."""

    id: str  # sha256:... and 64 hex digits: of the image itself, or of what never changes about it
    names: tuple[str, ...] = ()  # NAME:VERSION, as references name it
    digests: tuple[str, ...] = ()  # NAME@sha256:...
    size: int = 0  # bytes, 0: not known
    url: str = ""  # where each VM fetches it itself
    machine: str = ""  # the catalogue's own name of it, as `InstanceSpec.image`: VMs are booted from it


class IImageCatalogue(Interface):
    """Finds images. It brings nothing to the node: what is found is recorded there by name."""

    name = Attribute("The value of `imgprovider` that means it (str)")
    boots = Attribute(
        "Whether its images are whole machines, so that pods have no VM before they name one (bool)"
    )

    def find(reference: str, annotations: Mapping[str, str]) -> Deferred[Found]:
        """The image that a pod with these annotations means by `reference`.

        :raise InvalidArgument: not a reference of this catalogue's; says how one is written.
        :raise NotFound: no such image. :raise Unavailable: the catalogue can't be asked now."""

    def canonical(reference: str) -> str:
        """The reference as `Found.names` has it; itself, where it is none of this catalogue's."""

    def present(found: Found) -> Deferred[bool]:
        """Whether an image that was found before is still there.

        :raise InfranetesError: it can't be told now."""
