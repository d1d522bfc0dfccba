"""Running, stopping and removing sandboxes.

A launch belongs to nobody's call. The call that asks for a sandbox waits for the launch; when it is
cancelled or runs out of time the launch goes on, because kubelet gives up after 4 minutes and asks for
the very same attempt again, which then joins it. A launch that nobody has waited for, and a sandbox that
nobody has shown to know, for `Times.desertion` is ended.
"""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from infranetes.agent.view import Reach
from infranetes.pods.boots import answered
from infranetes.pods.follow import disconnect, take, vm_ended
from infranetes.pods.inventory import Container, Sandbox, sandbox_name
from infranetes.pods.launch import launch
from infranetes.pods.node import MACHINE_DRAIN_SECONDS, Node
from infranetes.pods.records import SandboxRecord, new_id
from infranetes.pods.states import SHOWN_READY, ContainerState, SandboxState
from infranetes.pods.waits import Flight, go, settle, uncut, within
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common import cri
from infranetes_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    Unavailable,
)

LOOK_SECONDS = 30.0
AGENT_SECONDS = 5.0  # for an agent that was lost just now, or not asked yet, before its VM is destroyed

_log = Logger()


class Sandboxes:
    """The five sandbox calls, without their wire."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def run(self, config: cri.PodSandboxConfig, runtime_handler: str) -> str:
        """A READY sandbox's id. Cancelling this leaves the launch to whoever asks again.

        :raise AlreadyExists: the name is another sandbox's, or one's that was answered before.
        :raise InfranetesError: the launch failed, and nothing is left of it."""
        name = sandbox_name(config.metadata)
        blob = config.SerializeToString(deterministic=True)
        sandbox = self._node.inventory.named(name)
        if sandbox is None:
            self._node.check_ready()
            self._node.hostports.check(config, self._node.inventory)
            sandbox = self._begin(name, blob, runtime_handler)
        else:
            self._check_same(sandbox, blob, runtime_handler)
        self._keep(sandbox)
        if sandbox.launching is not None:
            await sandbox.launching.join()
        self.claim(sandbox)
        return sandbox.id

    def claim(self, sandbox: Sandbox) -> None:
        """The client knows this sandbox: it is its own to end from now on."""
        self._keep(sandbox)
        if not sandbox.record.claimed and sandbox.state is not SandboxState.LAUNCHING:
            claimed = attrs.evolve(sandbox.record, claimed=True)
            self._node.note(self._node.save(sandbox, claimed), f"sandbox {sandbox.id}")

    def known(self, id: str) -> Sandbox:
        """The sandbox that a client names: one that the CRI shows.

        :raise NotFound: there is none. :raise InvalidArgument: there are several."""
        sandbox = self._node.inventory.sandbox(id)
        if sandbox.state in (SandboxState.LAUNCHING, SandboxState.ABANDONED):
            raise NotFound(f"sandbox {sandbox.id} is not there yet: its VM is being launched")
        self.claim(sandbox)
        return sandbox

    async def stop(self, id: str) -> None:
        """End the containers and the VM; answers when it is so. Unknown or stopped: nothing to do."""
        try:
            sandbox = self._node.inventory.sandbox(id)
        except NotFound:
            return
        self._keep(sandbox)
        await self._end(sandbox)

    async def remove(self, id: str) -> None:
        """End what is left of the sandbox and forget it. Unknown: nothing to do."""
        try:
            sandbox = self._node.inventory.sandbox(id)
        except NotFound:
            return
        self._keep(sandbox)
        await self._forget(sandbox)

    def resume(self, sandbox: Sandbox) -> None:
        """Go on with a launch that an earlier daemon began. Nobody waits for it yet."""
        sandbox.launching = Flight(go(self._launch(sandbox)), lambda: self._deserted(sandbox))
        self._deserted(sandbox)

    def ended(self, instance: Instance) -> None:
        """The provider says that a VM is no longer executing, and nobody asked for that."""
        sandbox = self._node.inventory.by_token(instance.token)
        if sandbox is None:
            return
        sandbox.instance = instance
        starting = sandbox.state in (SandboxState.LAUNCHING, SandboxState.BOOTING)
        if starting and sandbox.launching is not None:
            self._abort(sandbox, f"its VM ended: {instance.detail or 'no reason known'}")
        elif sandbox.state is SandboxState.READY:
            self.lost(sandbox, f"the VM ended by itself: {instance.detail or 'no reason known'}")

    def lost(self, sandbox: Sandbox, message: str) -> None:
        """A READY sandbox's VM is no more."""
        _log.warn("sandbox {sandbox} is lost: {reason}", sandbox=sandbox.id, reason=message)
        record = sandbox.record.to(SandboxState.LOST, message=message)
        self._node.note(self._node.save(sandbox, record), f"sandbox {sandbox.id}")
        vm_ended(self._node, sandbox, message)

    async def look(self, sandbox: Sandbox) -> None:
        """Ask the provider whether a READY sandbox still has its VM; it is LOST if not.

        :raise InfranetesError: the provider can't say."""
        what = f"looking for the VM of sandbox {sandbox.id}"
        work = self._node.provider.get(sandbox.record.instance_id)
        try:
            instance = await within(self._node.clock, LOOK_SECONDS, work, what)
        except NotFound:
            if sandbox.state is SandboxState.READY:
                self.lost(sandbox, "the provider no longer has the VM")
            return
        sandbox.instance = instance
        if instance.state is InstanceState.ENDED:
            self.ended(instance)

    def end_abandoned(self, sandbox: Sandbox) -> Flight[None]:
        """Destroy what is left of a launch that failed, then forget it."""
        if sandbox.ending is None or sandbox.ending.done:
            sandbox.ending = Flight(go(self._end_abandoned(sandbox)))
        return sandbox.ending

    # ---- launching

    def _begin(self, name: str, blob: bytes, runtime_handler: str) -> Sandbox:
        sandbox = Sandbox(
            SandboxRecord(
                id=new_id(),
                token=new_id(),
                state=SandboxState.VACANT if self._node.images.boots else SandboxState.LAUNCHING,
                name=name,
                config=blob,
                runtime_handler=runtime_handler,
                created_at=self._node.now(),
            )
        )
        self._node.inventory.add(sandbox)
        sandbox.launching = Flight(go(self._record_and_launch(sandbox)), lambda: self._deserted(sandbox))
        return sandbox

    def _check_same(self, sandbox: Sandbox, blob: bytes, runtime_handler: str) -> None:
        metadata = sandbox.config.metadata
        named = f"{metadata.namespace}/{metadata.name} (uid {metadata.uid}, attempt {metadata.attempt})"
        if sandbox.record.config != blob or sandbox.record.runtime_handler != runtime_handler:
            raise AlreadyExists(
                f"sandbox {sandbox.id} is pod {named} with another configuration: remove it, or ask for "
                "another attempt"
            )
        ours = sandbox.state is SandboxState.LAUNCHING or (
            sandbox.state in SHOWN_READY and not sandbox.record.claimed
        )
        if not ours:
            raise AlreadyExists(
                f"pod {named} is sandbox {sandbox.id} already: remove it, or ask for another attempt"
            )

    async def _record_and_launch(self, sandbox: Sandbox) -> None:
        recording = Flight(go(self._record(sandbox)))
        try:
            await recording.join()
        except BaseException as error:
            if self._node.stopping:
                raise
            if not isinstance(error, CancelledError) or any(await settle([recording.join()])):
                self._node.inventory.discard(sandbox)
                raise
            if sandbox.state is SandboxState.VACANT:
                await self._node.store.delete_sandbox(sandbox.id)
                self._node.inventory.discard(sandbox)
            else:
                await self._abandon(sandbox)  # there is a record by now, and perhaps a VM from the pool
            raise Unavailable(f"sandbox {sandbox.id}: {sandbox.aborted or 'the launch was ended'}") from None
        if sandbox.state is SandboxState.LAUNCHING:
            await self._launch(sandbox)

    async def _record(self, sandbox: Sandbox) -> None:
        """Have a VM from the pool, with its id; else one will be launched for the id that there is."""
        if sandbox.state is SandboxState.VACANT or not await self._node.pool.claim(sandbox):
            await self._node.store.put_sandbox(sandbox.record)

    async def _launch(self, sandbox: Sandbox) -> None:
        try:
            await launch(self._node, sandbox)
        except BaseException as error:
            if self._node.stopping:
                raise
            reason = sandbox.aborted or "the launch was ended"
            if not isinstance(error, CancelledError):
                reason = str(error) or type(error).__name__
            _log.warn("sandbox {sandbox} failed to launch: {reason}", sandbox=sandbox.id, reason=reason)
            if sandbox.state is SandboxState.LAUNCHING:
                await uncut(go(self._abandon(sandbox)))
            if isinstance(error, CancelledError):
                raise Unavailable(f"sandbox {sandbox.id}: {reason}") from None
            raise

    async def _abandon(self, sandbox: Sandbox) -> None:
        abandoned = sandbox.record.to(SandboxState.ABANDONED)
        try:
            await self._node.save(sandbox, abandoned)
        except InfranetesError as error:
            _log.error(
                "sandbox {sandbox}: its end was not recorded: {error}", sandbox=sandbox.id, error=error
            )
        try:
            await self.end_abandoned(sandbox).join()
        except InfranetesError as error:
            _log.error(
                "the VM of sandbox {sandbox}, whose launch failed, is not destroyed yet: {error}; the next "
                "pass tries again",
                sandbox=sandbox.id,
                error=error,
            )

    async def _end_abandoned(self, sandbox: Sandbox) -> None:
        disconnect(sandbox)
        await answered(self._node, sandbox)
        await self._node.destroy_vm(sandbox)
        await self._node.store.delete_sandbox(sandbox.id)
        self._node.inventory.discard(sandbox)

    def _abort(self, sandbox: Sandbox, reason: str) -> None:
        sandbox.aborted = reason
        if sandbox.launching is not None and not sandbox.launching.done:
            sandbox.launching.cancel()

    # ---- desertion

    def _keep(self, sandbox: Sandbox) -> None:
        if sandbox.deserted is not None and sandbox.deserted.active():
            sandbox.deserted.cancel()
        sandbox.deserted = None

    def _deserted(self, sandbox: Sandbox) -> None:
        self._keep(sandbox)
        if not self._node.stopping:
            sandbox.deserted = self._node.clock.callLater(self._node.times.desertion, self._expire, sandbox)

    def _expire(self, sandbox: Sandbox) -> None:
        if sandbox.id not in self._node.inventory.sandboxes:
            return
        _log.warn("sandbox {sandbox} is ended: nobody asked for it any more", sandbox=sandbox.id)
        forgotten = go(self._forget(sandbox))
        forgotten.addErrback(
            lambda failure: _log.error(
                "sandbox {sandbox}, which nobody asked for any more, is not ended: {error}",
                sandbox=sandbox.id,
                error=failure.value,
            )
        )

    # ---- ending

    async def _end(self, sandbox: Sandbox) -> None:
        if sandbox.state is SandboxState.STOPPED:
            return
        if sandbox.state is SandboxState.LAUNCHING:
            self._abort(sandbox, "it was stopped while its VM was being launched")
            if sandbox.launching is not None:
                await settle([sandbox.launching.join()])
        if sandbox.state is SandboxState.ABANDONED:
            if sandbox.id in self._node.inventory.sandboxes:
                await self.end_abandoned(sandbox).join()
            return
        if sandbox.state is SandboxState.BOOTING:
            self._abort(sandbox, "it was stopped while its VM was being booted")
            if sandbox.launching is not None:
                await settle([sandbox.launching.join()])
        if sandbox.stopping is None or sandbox.stopping.done:
            sandbox.stopping = Flight(go(self._stop(sandbox)))
        await sandbox.stopping.join()

    async def _stop(self, sandbox: Sandbox) -> None:
        began = self._node.clock.seconds()
        if sandbox.state is not SandboxState.STOPPING:
            await self._node.save(
                sandbox, sandbox.record.to(SandboxState.STOPPING, stopped_at=self._node.now())
            )
        await self._end_containers(sandbox)
        vm_ended(self._node, sandbox, sandbox.record.message or "the sandbox was stopped")
        await answered(self._node, sandbox)
        await self._node.destroy_vm(sandbox)
        await self._node.commit(sandbox, sandbox.record.to(SandboxState.STOPPED))
        _log.info(
            "sandbox {sandbox} is stopped, its VM destroyed: {seconds:.2f} s",
            sandbox=sandbox.id,
            seconds=self._node.clock.seconds() - began,
        )

    async def _end_containers(self, sandbox: Sandbox) -> None:
        """Kill what runs and write the rest of the logs, as far as the agent still answers."""
        view = sandbox.view
        making = [one.creating for one in sandbox.containers.values() if one.creating is not None]
        for flight in making:
            if not flight.done:
                flight.cancel()
        if view is None or view.reach is Reach.UNREACHABLE:
            return
        if not view.live:
            if await self._vm_is_gone(sandbox):
                return
            view.start()
            try:
                await within(self._node.clock, AGENT_SECONDS, view.when_live(), "the agent")
            except DeadlineExceeded:
                return
        running = [one for one in sandbox.containers.values() if one.state is ContainerState.RUNNING]
        works = [go(self._kill(sandbox, one)) for one in running]
        await self._bounded(works, self._node.times.stopping, sandbox, "ending its containers")
        drains = [self._node.logs.drain(one) for one in list(sandbox.containers.values())]
        patience = MACHINE_DRAIN_SECONDS if sandbox.record.image else self._node.times.drain
        await self._bounded(drains, patience, sandbox, "writing the rest of its logs")

    async def _vm_is_gone(self, sandbox: Sandbox) -> bool:
        """No agent will answer. Where the provider can't say, one may."""
        work = self._node.provider.get(sandbox.record.instance_id)
        try:
            instance = await within(self._node.clock, AGENT_SECONDS, work, "looking for its VM")
        except NotFound:
            return True
        except InfranetesError:
            return False
        return bool(instance.state is InstanceState.ENDED)

    async def _kill(self, sandbox: Sandbox, container: Container) -> None:
        assert sandbox.client is not None
        state = await sandbox.client.stop(container.id, 0)
        await self._node.volumes.flush(container)
        take(self._node, container, state, at_once=True)

    async def _bounded(self, works: list[Any], seconds: float, sandbox: Sandbox, what: str) -> None:
        try:
            results = await within(self._node.clock, seconds, go(settle(works)), what)
        except DeadlineExceeded as error:
            results = [error]
        for result in results:
            if result is not None:
                _log.warn("sandbox {sandbox} is stopped all the same: {what}: {error}",
                          sandbox=sandbox.id, what=what, error=getattr(result, "value", result))  # fmt: skip

    async def _forget(self, sandbox: Sandbox) -> None:
        if sandbox.removing is None or sandbox.removing.done:
            sandbox.removing = Flight(go(self._remove(sandbox)))
        await sandbox.removing.join()

    async def _remove(self, sandbox: Sandbox) -> None:
        await self._end(sandbox)
        if sandbox.id not in self._node.inventory.sandboxes:
            return
        if sandbox.state is not SandboxState.STOPPED:
            raise FailedPrecondition(f"sandbox {sandbox.id} is {sandbox.state.value}: stop it first")
        await self._node.store.delete_sandbox(sandbox.id)
        self._node.inventory.discard(sandbox)
        _log.info("sandbox {sandbox} is removed", sandbox=sandbox.id)
