# SPDX-License-Identifier: Apache-2.0
"""Running, stopping and removing sandboxes.

A launch outlives the call that asked for it: kubelet gives up after 4 minutes and asks for the same attempt
again, and the second call joins the launch. If no call waits for a launch during `Times.desertion` it is
ended, and so is a sandbox whose id no client has received or used.
"""

from __future__ import annotations

from functools import partial

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.ids import new_id
from infranetes.machines.timeline import bounded
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Inventory, Sandbox, sandbox_name
from infranetes.pods.node.logs import LONGEST_SECONDS
from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.pods.node.times import until
from infranetes.pods.sandboxes.launch import Launches
from infranetes.pods.sandboxes.stop import ContainersEnd
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SHOWN_READY, SandboxState
from infranetes.pods.vm.agent_events import AgentConnections
from infranetes.pods.vm.container_providers import check_container_provider, check_user_namespace
from infranetes.pods.vm.sandbox_vm import adopt, machine_for, zone_for
from infranetes.pods.vm.vm_size import RequestedSizes
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import Coro, Event, Flight, settled, start
from infranetes_common.errors import (
    AlreadyExists,
    InfranetesError,
    NotFound,
    Unavailable,
)
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri

LOOK_SECONDS = 30.0
END_SECONDS = 15.0  # what the end of a VM may take of the time that a stop's caller waits

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class Sandboxes:
    """Runs, stops and removes sandboxes: the sandbox calls of the CRI, without their messages.

    :param desertion: the seconds for which a launch that no call waits for is kept.
    :param stopping: happens when the daemon stops: it leaves what is under way to the next one."""

    _clock: IReactorTime
    _inventory: Inventory
    _providers: Providers
    _handlers: Handlers
    _features: Features
    _sizes: RequestedSizes
    _connections: AgentConnections
    _launches: Launches
    _containers_end: ContainersEnd
    _desertion: float
    _stopping: Event[None]

    async def run(
        self, config: cri.PodSandboxConfig, runtime_handler: str, limit: float | None = None
    ) -> str:
        """Launch a sandbox, or join its launch, and return its id once it is READY, or VACANT where the image
        is the VM. Cancelling does not end the launch.

        :param limit: the seconds until the caller gives up; None: it does not say.
        :raise AlreadyExists: another sandbox has the name, or the client has received the id before.
        :raise InfranetesError: the launch failed and was undone."""
        name, asked_until = sandbox_name(config.metadata), until(self._clock, limit)
        blob = config.SerializeToString(deterministic=True)
        sandbox = self._inventory.named(name)
        if sandbox is None:
            handler = self._handlers.chosen(runtime_handler, config.metadata.namespace, config.annotations)
            handler.node_provider.check_ready()
            handler.check_annotations(config.annotations)
            check_container_provider(config, handler)
            check_user_namespace(self._handlers.contprovider, config, handler)
            self._features.check(handler, config)
            sandbox = self._begin(name, config, blob, handler, runtime_handler, asked_until)
        else:
            self._check_same(sandbox, blob, runtime_handler)
        self._cancel_desertion(sandbox)
        sandbox.asked_until = asked_until
        if sandbox.launching is not None:
            await sandbox.launching.join()
        self.claim(sandbox)
        return sandbox.id

    def claim(self, sandbox: Sandbox) -> None:
        """Record that the client knows this sandbox, and will remove it."""
        self._cancel_desertion(sandbox)
        if not sandbox.record.claimed:
            claimed = attrs.evolve(sandbox.record, claimed=True)
            self._inventory.note(self._inventory.save(sandbox, claimed), f"sandbox {sandbox.id}")

    def lookup(self, id: str) -> Sandbox:
        """Return the sandbox with this id or prefix of one, if the CRI shows it, and record it as claimed.

        :raise NotFound: there is none. :raise InvalidArgument: there are several."""
        sandbox = self._inventory.sandbox(id)
        if sandbox.state in (SandboxState.LAUNCHING, SandboxState.ABANDONED):
            raise NotFound(f"sandbox {sandbox.id} is not there yet: its VM is being launched")
        self.claim(sandbox)
        return sandbox

    async def stop(self, id: str, limit: float | None = None) -> None:
        """End the sandbox's containers and VM. Idempotent. Does nothing if the sandbox is unknown.

        :param limit: the seconds until the caller gives up; None: it does not say. So long the rest of logs
            that advance is waited for, except for the time that the VM's end takes."""
        if (sandbox := self._awaited(id, limit)) is not None:
            await self._end(sandbox)

    def _awaited(self, id: str, limit: float | None) -> Sandbox | None:
        """Note until when a call waits for the end of a sandbox; return that, or None if it is unknown."""
        try:
            sandbox = self._inventory.sandbox(id)
        except NotFound:
            return None
        seconds = LONGEST_SECONDS if limit is None else limit - min(END_SECONDS, limit / 4)
        sandbox.awaited_until = max(sandbox.awaited_until, self._clock.seconds() + seconds)
        self._cancel_desertion(sandbox)
        return sandbox

    async def remove(self, id: str, limit: float | None = None) -> None:
        """End what is left of the sandbox and forget it. Does nothing if the sandbox is unknown.

        :param limit: see `stop`."""
        if (sandbox := self._awaited(id, limit)) is not None:
            await self._forget(sandbox)

    def resume(self, sandbox: Sandbox) -> None:
        """Continue a launch that an earlier daemon began, and that no call waits for yet."""
        sandbox.launching = Flight(self._launch(sandbox), lambda: self._begin_desertion(sandbox))
        self._begin_desertion(sandbox)

    def ended(self, node_provider: NodeProvider, instance: Instance) -> None:
        """Record that this provider reports that a VM has ended by itself."""
        sandbox = self._inventory.by_token(instance.token)
        if sandbox is None or self._providers.of(sandbox.record) is not node_provider:
            return
        sandbox.machine.instance = instance
        starting = sandbox.state in (SandboxState.LAUNCHING, SandboxState.BOOTING)
        if starting and sandbox.launching is not None:
            self._abort(sandbox, f"its VM ended: {instance.detail or 'no reason known'}")
        elif sandbox.state is SandboxState.READY:
            self.lost(sandbox, f"the VM ended by itself: {instance.detail or 'no reason known'}")

    def lost(self, sandbox: Sandbox, message: str) -> None:
        """Record that a READY sandbox's VM is gone."""
        _log.warn("sandbox {sandbox} is lost: {reason}", sandbox=sandbox.id, pod=sandbox.pod, reason=message)
        sandbox.timeline.note("the pod is lost", error=message)
        record = sandbox.record.to(SandboxState.LOST, message=message)
        self._inventory.note(self._inventory.save(sandbox, record), f"sandbox {sandbox.id}")
        self._connections.vm_ended(sandbox, message)
        self._features.lost(sandbox)

    async def look(self, sandbox: Sandbox) -> None:
        """Ask the provider whether a READY sandbox still has its VM, and make it LOST if not.

        :raise InfranetesError: the provider does not answer."""
        instance = await sandbox.machine.look(LOOK_SECONDS)
        if instance is None:
            if sandbox.state is SandboxState.READY:
                self.lost(sandbox, "the provider no longer has the VM")
        elif instance.state is InstanceState.ENDED:
            self.ended(self._providers.of(sandbox.record), instance)

    def end_abandoned(self, sandbox: Sandbox) -> Flight[None]:
        """Destroy what is left of a launch that failed, then forget it."""
        if sandbox.ending is None or sandbox.ending.done:
            sandbox.ending = Flight(self._end_abandoned(sandbox))
        return sandbox.ending

    # ---- launching

    def _begin(
        self,
        name: str,
        config: cri.PodSandboxConfig,
        blob: bytes,
        handler: Handler,
        runtime_handler: str,
        asked_until: float,
    ) -> Sandbox:
        sandbox = Sandbox(
            SandboxRecord(
                id=new_id(),
                token=new_id(),
                state=SandboxState.VACANT if handler.kind == MACHINE else SandboxState.LAUNCHING,
                name=name,
                config=blob,
                runtime_handler=runtime_handler,
                created_at=nanoseconds(self._clock),
                provider=handler.node_provider.name,
                kind=handler.kind,
                network=handler.network_of(config.annotations, self._handlers.network),
            ),
            partial(machine_for, self._providers, self._inventory),
        )
        self._inventory.add(sandbox)
        sandbox.asked_until = asked_until
        words = f"{handler.kind} at {handler.node_provider.name}"
        sandbox.timeline.note("the pod is asked for", f"{words}, handler {runtime_handler or 'none'}")
        sandbox.launching = Flight(self._record_and_launch(sandbox), lambda: self._begin_desertion(sandbox))
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
        recording = Flight(self._record(sandbox))
        try:
            await recording.join()
        except BaseException as error:
            if self._stopping.happened:
                raise
            sandbox.failure = sandbox.aborted or "the launch was ended"
            if not isinstance(error, CancelledError):
                sandbox.failure = bounded(str(error) or type(error).__name__)
            sandbox.timeline.note("the launch has failed", error=sandbox.failure)
            if not isinstance(error, CancelledError) or await _failed(recording):
                self._inventory.discard(sandbox)
                raise
            await self._abandon(sandbox)  # there is a record by now, and perhaps a VM from the pool
            raise Unavailable(f"sandbox {sandbox.id}: {sandbox.failure}") from None
        if sandbox.state is SandboxState.LAUNCHING:
            await self._launch(sandbox)

    async def _record(self, sandbox: Sandbox) -> None:
        """Record the sandbox, with a VM of the pool and its id if there is one.

        The VM's size is recorded with it, so that a continued launch asks for the same size."""
        config, handler = sandbox.config, self._handlers.of(sandbox.record)
        size, _ = await self._sizes.of(sandbox, config.linux.resources, config.linux.overhead)
        sandbox.record = attrs.evolve(
            sandbox.record, cpu_millis=size.cpu_millis, memory_bytes=size.memory_bytes
        )
        if sandbox.state is SandboxState.LAUNCHING and await self._features.start_from(sandbox) is None:
            pool = self._handlers.pool_for(handler)
            size, take_over = handler.sized(size), partial(adopt, self._inventory, sandbox)
            zone = await zone_for(self._features, sandbox)
            if pool and await pool.claim(size, config.annotations, take_over, zone):
                has = sandbox.record.instance_id
                words = "the pod has a VM of the pool" if has else "the pod has a stopped VM of the pool"
                sandbox.timeline.note(words, has)
                return
        await self._inventory.store.put_sandbox(sandbox.record)

    def _launch(self, sandbox: Sandbox) -> Coro[None]:
        return self._launches.launch(sandbox, self._abandon)

    async def _abandon(self, sandbox: Sandbox) -> None:
        if sandbox.state is not SandboxState.LAUNCHING:
            return
        abandoned = sandbox.record.to(SandboxState.ABANDONED, message=sandbox.failure)
        try:
            await self._inventory.save(sandbox, abandoned)
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
        self._connections.disconnect(sandbox)
        await sandbox.machine.tear_down()
        await self._features.vm_destroyed(sandbox)
        await self._inventory.store.delete_sandbox(sandbox.id)
        self._inventory.discard(sandbox)

    def _abort(self, sandbox: Sandbox, reason: str) -> None:
        sandbox.aborted = sandbox.aborted or reason
        sandbox.timeline.note("the launch is ended", sandbox.aborted)
        if sandbox.launching is not None and not sandbox.launching.done:
            sandbox.launching.cancel()

    # ---- desertion

    def _cancel_desertion(self, sandbox: Sandbox) -> None:
        if sandbox.deserted is not None and sandbox.deserted.active():
            sandbox.deserted.cancel()
        sandbox.deserted = None

    def _begin_desertion(self, sandbox: Sandbox) -> None:
        if not self._stopping.happened:
            sandbox.deserted = self._clock.callLater(self._desertion, self._end_deserted, sandbox)

    def _end_deserted(self, sandbox: Sandbox) -> None:
        if sandbox.id not in self._inventory.sandboxes:
            return
        _log.warn("sandbox {sandbox} is ended: nobody asked for it any more",
                  sandbox=sandbox.id, pod=sandbox.pod)  # fmt: skip
        sandbox.aborted = "nobody asked for it any more"
        sandbox.timeline.note("the pod is ended", sandbox.aborted)
        forgotten = start(self._forget(sandbox))
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
                await settled([sandbox.launching.join()])
        if sandbox.state is SandboxState.ABANDONED:
            if sandbox.id in self._inventory.sandboxes:
                await self.end_abandoned(sandbox).join()
            return
        if sandbox.state is SandboxState.BOOTING:
            self._abort(sandbox, "it was stopped while its VM was being booted")
            if sandbox.launching is not None:
                await settled([sandbox.launching.join()])
        if sandbox.stopping is None or sandbox.stopping.done:
            sandbox.stopping = Flight(self._stop(sandbox))
        await sandbox.stopping.join()

    async def _stop(self, sandbox: Sandbox) -> None:
        try:
            with sandbox.timeline.step("the pod is stopped"):
                await self._stop_and_record(sandbox)
        except InfranetesError as error:
            sandbox.failure = bounded(f"it is not stopped yet: {error}")
            raise
        sandbox.failure = ""

    async def _stop_and_record(self, sandbox: Sandbox) -> None:
        began = self._clock.seconds()
        record = sandbox.record
        if sandbox.state is not SandboxState.STOPPING:
            record = record.to(SandboxState.STOPPING)
        await self._inventory.save(sandbox, record)  # also again: an earlier stop may not have got that far
        with sandbox.timeline.step("its containers are ended"):
            await self._containers_end.end(sandbox)
        await self._features.stopping(sandbox)
        self._connections.vm_ended(sandbox, sandbox.record.message or "the sandbox was stopped")
        await sandbox.machine.tear_down()
        await self._features.vm_destroyed(sandbox)
        await self._inventory.commit(sandbox, sandbox.record.to(SandboxState.STOPPED))
        _log.info(
            "sandbox {sandbox} is stopped, its VM destroyed: {seconds:.2f} s",
            sandbox=sandbox.id,
            pod=sandbox.pod,
            seconds=self._clock.seconds() - began,
        )

    async def _forget(self, sandbox: Sandbox) -> None:
        if sandbox.removing is None or sandbox.removing.done:
            sandbox.removing = Flight(self._remove(sandbox))
        await sandbox.removing.join()

    async def _remove(self, sandbox: Sandbox) -> None:
        await self._end(sandbox)
        if sandbox.id not in self._inventory.sandboxes:
            return
        await self._inventory.store.delete_sandbox(sandbox.id)
        sandbox.timeline.note("the pod is removed")
        self._inventory.discard(sandbox)
        _log.info("sandbox {sandbox} is removed", sandbox=sandbox.id, pod=sandbox.pod)


async def _failed(flight: Flight[None]) -> bool:
    """Wait until the flight has ended; return whether it failed."""
    [result] = await settled([flight.join()])
    return isinstance(result, Failure)
