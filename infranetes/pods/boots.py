"""VMs of pods whose image is the VM: booted when the container names its image, ended when that fails."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.pods.follow import disconnect
from infranetes.pods.inventory import Sandbox
from infranetes.pods.launch import launch
from infranetes.pods.node import Node
from infranetes.pods.records import new_id
from infranetes.pods.states import SandboxState
from infranetes.pods.waits import Flight, go, settle, uncut, within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, Unavailable

_log = Logger()


class Boots:
    """Makes VACANT sandboxes READY, and the other way round."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def boot(self, sandbox: Sandbox, image: Any) -> None:
        """Have the sandbox's VM run, from `image` and from no other. Runs already: nothing to do.

        :raise FailedPrecondition: it runs from another image, or the sandbox is on its way out.
        :raise InfranetesError: some step failed; the VM is destroyed."""
        if sandbox.state is SandboxState.BOOTING:  # what an earlier daemon began, or what could not be undone
            await self.vacate(sandbox).join()
        if sandbox.state is SandboxState.READY and sandbox.record.image == image.machine:
            return
        if sandbox.state is not SandboxState.VACANT:
            has = f" from image {sandbox.record.image}" if sandbox.record.image else ""
            raise FailedPrecondition(
                f"sandbox {sandbox.id} can't be booted: it is {sandbox.state.value}{has}; make another pod"
            )
        self._node.check_ready()
        sandbox.aborted = ""
        await self._node.save(sandbox, sandbox.record.to(SandboxState.BOOTING, image=image.machine))
        sandbox.launching = Flight(go(self._launch(sandbox, image.id)))
        await sandbox.launching.join()

    async def _launch(self, sandbox: Sandbox, image_id: str) -> None:
        try:
            await launch(self._node, sandbox)
        except BaseException as error:
            if self._node.stopping:
                raise
            reason = sandbox.aborted or "the boot was ended"
            if not isinstance(error, CancelledError):
                reason = str(error) or type(error).__name__
            _log.warn("sandbox {sandbox} failed to boot: {reason}", sandbox=sandbox.id, reason=reason)
            await uncut(go(self._undo(sandbox)))
            if isinstance(error, CancelledError):
                raise Unavailable(f"sandbox {sandbox.id}: {reason}") from None
            # It may be that the image was removed from the catalogue: then it has to be pulled anew.
            self._node.note(go(self._node.images.check(image_id)), f"whether image {image_id} is still there")
            raise

    async def _undo(self, sandbox: Sandbox) -> None:
        try:
            await self.vacate(sandbox).join()
        except InfranetesError as error:
            _log.error(
                "the VM of sandbox {sandbox}, whose boot failed, is not destroyed yet: {error}; the next "
                "pass tries again",
                sandbox=sandbox.id,
                error=error,
            )

    async def give_up(self, sandbox: Sandbox) -> None:
        """The container that the VM was booted for can't be made: end the boot, and the VM."""
        flight = sandbox.launching
        if flight is not None and not flight.done:
            sandbox.aborted = sandbox.aborted or "its container was given up"
            flight.cancel()
            await settle([flight.join()])
        if sandbox.state in (SandboxState.BOOTING, SandboxState.READY):
            await self._undo(sandbox)

    def vacate(self, sandbox: Sandbox) -> Flight[None]:
        """Destroy the VM; then the sandbox is VACANT, unless it is on its way out.

        :raise InfranetesError: it is not destroyed; try again."""
        if sandbox.ending is None or sandbox.ending.done:
            sandbox.ending = Flight(go(self._vacate(sandbox)))
        return sandbox.ending

    async def _vacate(self, sandbox: Sandbox) -> None:
        node = self._node
        disconnect(sandbox)
        await answered(node, sandbox)
        await node.destroy_vm(sandbox)
        if sandbox.state not in (SandboxState.BOOTING, SandboxState.READY):
            return
        record = sandbox.record.to(
            SandboxState.VACANT, token=new_id(), image="", instance_id="", address="", agent_host="",
            agent_port=0, certificate_until=0, certificate_key="",
        )  # fmt: skip
        await node.store.put_sandbox(record)
        if sandbox.state in (SandboxState.BOOTING, SandboxState.READY):
            sandbox.asked = sandbox.instance = sandbox.client = sandbox.view = None
            node.inventory.become(sandbox, record)


async def answered(node: Node, sandbox: Sandbox) -> None:
    """Wait for the provider's answer to a launch that is to be undone: only then it is known what there is.

    :raise DeadlineExceeded: there is none yet."""
    if sandbox.asked is None:
        return
    try:
        instance = await within(
            node.clock,
            node.times.destroy,
            sandbox.asked.join(),
            "the provider's answer to a launch that is to be undone",
        )
        if not sandbox.record.instance_id:
            sandbox.record = attrs.evolve(sandbox.record, instance_id=instance.id)
    except DeadlineExceeded:
        raise
    except Exception as error:  # nothing remains of a launch that fails
        _log.debug("launch of {sandbox} failed: {error}", sandbox=sandbox.id, error=error)
