# SPDX-License-Identifier: Apache-2.0
"""Removing images from VMs, once no container has used them for a while.

Nothing is recorded: the agent and the provider are asked what the VM has and is shown, so what an earlier
daemon left is found too. Removal is never urgent: failures are logged, and it is tried again later.
"""

from __future__ import annotations

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.images.layer_loads import disk_name, layer_of, shown_layers
from infranetes.pods.node.images import Images
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import IShowsDisks
from infranetes_common.concurrency import Event, Flight
from infranetes_common.errors import FailedPrecondition, InfranetesError

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class UnusedImages:
    """Removes images from VMs.

    :param patience: the seconds for which a VM keeps an image that no container uses.
    :param stopping: happens when the daemon stops."""

    _clock: IReactorTime
    _images: Images
    _providers: Providers
    _patience: float
    _stopping: Event[None]

    def remove_later(self, sandbox: Sandbox) -> None:
        """Remove unused images after a while, not now: the next container may well have the same image."""
        loads = sandbox.loads
        if loads.removal_due is None and sandbox.state is SandboxState.READY and not self._stopping.happened:
            loads.removal_due = self._clock.callLater(self._patience, self._begin, sandbox)

    def _begin(self, sandbox: Sandbox) -> None:
        loads = sandbox.loads
        loads.removal_due = None
        if self._stopping.happened or sandbox.state is not SandboxState.READY:
            return
        if loads.busy or any(container.being_created for container in sandbox.containers.values()):
            self.remove_later(sandbox)
        else:
            loads.removal = Flight(self._logged(sandbox))

    async def _logged(self, sandbox: Sandbox) -> None:
        try:
            await self._remove(sandbox)
        except InfranetesError as error:
            _log.info("unused images of sandbox {sandbox} stay for now: {error}",
                      sandbox=sandbox.id, error=error)  # fmt: skip
        except CancelledError:  # the sandbox or the daemon is stopping
            raise
        except Exception:
            _log.failure("removing unused images of sandbox {sandbox}", sandbox=sandbox.id)

    async def _remove(self, sandbox: Sandbox) -> None:
        """Remove the images and layers that no container uses.
        No load and no creation is under way, and a load that begins waits for the end of this."""
        containers = sandbox.containers.values()
        if any(mount.HasField("image") for container in containers for mount in container.config.mounts):
            return  # an image mount's name may mean another image by now
        if not await sandbox.machine.takes_layers():
            return
        agent = sandbox.agent()
        used = {container.record.image_id for container in containers}
        diff_ids = await shown_layers(self._providers, sandbox) or set()
        for image_id in sorted(await agent.images() - used):
            image = self._images.cached(image_id)
            if image is not None and image.pinned:
                continue
            try:
                await agent.remove_image(image_id)
            except FailedPrecondition as error:
                _log.info("image {image} stays in sandbox {sandbox}: {error}",
                          image=image_id, sandbox=sandbox.id, error=error)  # fmt: skip
                continue
            diff_ids.update(image.diff_ids if image is not None else ())
            _log.info("image {image}, which no container uses, is removed from sandbox {sandbox}",
                      image=image_id, sandbox=sandbox.id)  # fmt: skip
        await agent.remove_layers(sorted(diff_ids))  # also those that failed loads have left
        await self._hide(sandbox)

    async def _hide(self, sandbox: Sandbox) -> None:
        """Unplug the layers' disks that the VM has not mounted."""
        provider = self._providers.of(sandbox.record).provider
        if not IShowsDisks.providedBy(provider):
            return
        instance_id = sandbox.record.instance_id
        shown = sorted(map(layer_of, await provider.shown_disks(instance_id)))
        states = await sandbox.agent().layers(shown)
        free = [disk_name(diff_id) for diff_id, state in zip(shown, states, strict=True) if not state.mounted]
        if free:
            await provider.hide_disks(instance_id, free)
