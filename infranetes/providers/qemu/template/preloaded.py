# SPDX-License-Identifier: Apache-2.0
"""The images that every VM has from the start: loaded into the template's engine, or shown as disks.

Docker takes images as archives: all of them are one file, which the template reads when it is made. Where
containers are made of layers, a clone is shown their disks before it executes, and the template has nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from twisted.logger import Logger

from infranetes.guest.image import GuestImage
from infranetes.images.preload import Preload
from infranetes.providers.interface import Progress, ProviderContext, ReadOnlyDisk
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.errors import InfranetesError

_TAKE_LAYERS = ("oci",)
Show = Callable[[Vm, Sequence[ReadOnlyDisk]], Awaitable[object]]

_log = Logger()


class PreloadedImages:
    """The images of the configuration, as the guest image takes them.

    :param show: shows a VM disks that it has not seen yet.
    :ivar archive: the file for the template; None: it needs none.
    """

    def __init__(self, context: ProviderContext, show: Show) -> None:
        self.archive: Preload | None = None
        self._context = context
        self._show = show
        self._disks: Sequence[ReadOnlyDisk] = ()

    async def gather(self, image: GuestImage, progress: Progress) -> None:
        """Get the images onto the node. A failure is logged: pods are only slower without them."""
        context = self._context
        if image.providers[:1] == _TAKE_LAYERS:
            self._disks = await context.preload_disks(progress) if context.preload_disks else ()
        elif context.preload:
            self.archive = await context.preload(progress)

    async def show(self, vm: Vm) -> None:
        """Show their layers to a VM that does not execute yet. A failure is logged: containers bring them."""
        if not self._disks:
            return
        try:
            await self._show(vm, self._disks)
        except InfranetesError as error:
            _log.warn("VM {vm} starts without preloaded images: {error}", vm=vm.record.id, error=str(error))
