# SPDX-License-Identifier: Apache-2.0
"""The disks that VMs boot copies of, from images of registries and of the node's own catalogue."""

from __future__ import annotations

from infranetes.config import Config
from infranetes.images import Image
from infranetes.images.machine.catalogue import MachineCatalogue
from infranetes.images.machine.disk import BaseDisk
from infranetes.images.machine.registry_disks import RegistryDisks
from infranetes_common.errors import FailedPrecondition


class NodeDisks:
    """The `MachineDisks` of a node.

    :param registries: takes disks out of images of registries; None: another runtime has those.
    :param catalogue: the node's own."""

    def __init__(self, registries: RegistryDisks | None, catalogue: MachineCatalogue) -> None:
        self._registries = registries
        self._catalogue = catalogue

    async def start(self) -> None:
        """Find what is there, once the stores have started. :raise ConfigError: nothing can be kept."""
        if self._registries is not None:
            await self._registries.start()

    async def stop(self) -> None:
        """End what is under way. Idempotent."""
        if self._registries is not None:
            await self._registries.stop()

    def reconfigure(self, config: Config) -> None:
        """Find images by this configuration from now on."""
        self._catalogue.reconfigure(config.machine_images, config.images)

    async def base(self, image: Image) -> BaseDisk:
        """See `MachineDisks`."""
        if image.machine:
            return await self._catalogue.base(image.id)
        if self._registries is None:
            raise FailedPrecondition(
                f"image {image.id} is another runtime's on this node, which does not lend its disk: name an "
                "image of the node's own catalogue (machine_images)"
            )
        return await self._registries.base(image)
