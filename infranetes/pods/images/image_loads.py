# SPDX-License-Identifier: Apache-2.0
"""Loading images into the VMs of sandboxes: as layers where the agent takes them, else as archives."""

from __future__ import annotations

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.images import Image
from infranetes.pods.images.layer_loads import LayerLoads, shown_layers
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.images import Images
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import ContainerState
from infranetes_common.concurrency import Flight, settled
from infranetes_common.errors import Unavailable

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class ImageLoads:
    """Loads images into the VMs of sandboxes."""

    _clock: IReactorTime
    _images: Images
    _providers: Providers
    _layers: LayerLoads

    async def load(self, sandbox: Sandbox, image: Image) -> None:
        """Load the image into the VM unless it is there.

        Callers that want the same image share its load. It goes on when they are cancelled, until the sandbox
        is stopped: kubelet gives up after two minutes, asks again, and finds what has arrived since.

        :raise Unavailable: the agent can't be reached, or the sandbox is being stopped.
        :raise InfranetesError: the image can't be loaded."""
        loads = sandbox.loads
        flight = loads.images.get(image.id)
        if flight is None or flight.done:
            flight = loads.images[image.id] = Flight(self._load_unless_there(sandbox, image))
        try:
            await flight.join()
        except CancelledError:
            if not flight.done:
                raise
            raise Unavailable(f"sandbox {sandbox.id} is being stopped, or has lost its VM") from None
        finally:
            if flight.done and loads.images.get(image.id) is flight:
                del loads.images[image.id]

    async def _load_unless_there(self, sandbox: Sandbox, image: Image) -> None:
        if sandbox.loads.removal is not None:
            await settled([sandbox.loads.removal.join()])
        if sandbox.record.kind == MACHINE or await self._is_there(sandbox, image):
            return
        with sandbox.timeline.step("an image is brought into the VM", image.id) as step:
            if image.url:
                await sandbox.agent().fetch_image(image.id, image.url)
            elif await sandbox.machine.takes_layers():
                brought = await self._layers.load(sandbox, image)
                step.say(f"{image.id}: {brought}")
            else:
                await self._load_archive(sandbox, image)

    async def _is_there(self, sandbox: Sandbox, image: Image) -> bool:
        """Return whether the VM has the image. Asks the agent only if nothing else answers the question."""
        agent = sandbox.agent()
        if not image.url and await sandbox.machine.takes_layers():
            if any(_runs(container, image) for container in sandbox.containers.values()):
                return True
            shown = await shown_layers(self._providers, sandbox)
            if shown is not None and not shown.issuperset(image.diff_ids):
                return False
        return image.id in await agent.images()

    async def _load_archive(self, sandbox: Sandbox, image: Image) -> None:
        agent = sandbox.agent()
        began = self._clock.seconds()
        present = await agent.missing_layers(image.diff_ids)
        await agent.load_image(image.id, self._images.archive(image.id, present))
        _log.info(
            "image {image} loaded into sandbox {sandbox}, {present} of {layers} layers were there: "
            "{seconds:.2f} s",
            image=image.id,
            sandbox=sandbox.id,
            present=present,
            layers=len(image.diff_ids),
            seconds=self._clock.seconds() - began,
        )


def _runs(container: Container, image: Image) -> bool:
    """Return whether the container runs from the image: then the VM has all of its layers."""
    return container.record.image_id == image.id and container.state is ContainerState.RUNNING
