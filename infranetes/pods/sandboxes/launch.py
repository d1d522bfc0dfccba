# SPDX-License-Identifier: Apache-2.0
"""The launch of a sandbox: the steps from a recorded one to a READY one, and how they are undone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.machines.renewal import Renewal
from infranetes.machines.timeline import bounded
from infranetes.observer import Launch, LaunchKind, LaunchStep, Observer, reason_of
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm import node_names
from infranetes.pods.vm.agent_events import AgentConnections
from infranetes.pods.vm.container_providers import container_provider
from infranetes.pods.vm.vm_request import vm_request
from infranetes.providers.interface import InstanceState
from infranetes.providers.machine_images import GuestBoot, ImageBoot
from infranetes.tracing.spans import step
from infranetes_common.concurrency import Coro, Event, shielded, within
from infranetes_common.errors import Unavailable
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri

IDLE_SECONDS = 3.0  # without the start of a container, until a VM counts as idle

_log = Logger()


Undo = Callable[[Sandbox], Coro[None]]
"""Takes a sandbox out of LAUNCHING or BOOTING and destroys its VM, if there is one; logs failures."""
Prepare = Callable[[], Awaitable[ImageBoot | GuestBoot | None]]
"""Makes ready what a BOOTING sandbox's VM boots, unless its cloud has that and needs to be told
nothing. Fails with InfranetesError."""
Dns = Callable[[], Awaitable[cri.DNSConfig]]
"""Returns the node's own DNS settings, for pods that have none."""


def _kind(sandbox: Sandbox) -> LaunchKind:
    if sandbox.record.agent_host:
        return LaunchKind.CLAIMED
    instance = sandbox.instance
    stopped = instance is not None and instance.state is InstanceState.STOPPED
    return LaunchKind.STARTED if stopped else LaunchKind.NEW


@attrs.frozen
class _Began:
    """The beginning of a launch. :ivar at: nanoseconds since 1970 UTC."""

    at: int
    kind: LaunchKind


@attrs.frozen(eq=False, repr=False)
class Launches:
    """Brings sandboxes to READY.

    :param limit: the seconds that a launch may take once its provider has started.
    :param stopping: happens when the daemon stops: it leaves launches to the next one."""

    _clock: IReactorTime
    _inventory: Inventory
    _handlers: Handlers
    _features: Features
    _observer: Observer
    _connections: AgentConnections
    _renewal: Renewal
    _dns: Dns
    _limit: float
    _stopping: Event[None]

    async def launch(self, sandbox: Sandbox, undo: Undo, prepare: Prepare | None = None) -> None:
        """Bring a LAUNCHING or BOOTING sandbox to READY, from wherever an earlier daemon left it.

        A launch that fails or is cancelled is undone, unless the daemon is stopping: the next one continues
        it.

        :param prepare: for a BOOTING sandbox.
        :raise InfranetesError: a step failed."""
        what = "boot" if sandbox.state is SandboxState.BOOTING else "launch"
        began = _Began(nanoseconds(self._clock), _kind(sandbox))
        try:
            with step(what):
                await self._make_ready(sandbox, prepare)
        except BaseException as error:
            if self._stopping.happened:
                raise
            reason = sandbox.aborted or f"the {what} was ended"
            if not isinstance(error, CancelledError):
                reason = str(error) or type(error).__name__
            _log.warn("sandbox {sandbox} failed to {what}: {reason}",
                      sandbox=sandbox.id, pod=sandbox.pod, what=what, reason=reason)  # fmt: skip
            sandbox.failure = bounded(reason)
            sandbox.timeline.note(f"the {what} has failed", error=reason)
            self._tell(sandbox, began, error, reason)
            await shielded(undo(sandbox))
            if isinstance(error, CancelledError):
                raise Unavailable(f"sandbox {sandbox.id}: {reason}") from None
            raise
        sandbox.failure = ""
        self._tell(sandbox, began)

    def _tell(
        self,
        sandbox: Sandbox,
        began: _Began,
        error: BaseException | None = None,
        message: str = "",
    ) -> None:
        """Report an ended launch to the observer.

        :param error: the reason why the launch failed; None: it succeeded."""
        steps = sandbox.timeline.launch_steps(began.at)
        provider = self._handlers.of(sandbox.record).node_provider.name
        reason = "" if error is None else reason_of(error)
        self._observer.launched(
            Launch(sandbox.id, sandbox.pod, provider, began.kind, began.at / 1e9, steps, reason, message)
        )

    async def _make_ready(self, sandbox: Sandbox, prepare: Prepare | None) -> None:
        timeline = sandbox.timeline
        handler = self._handlers.of(sandbox.record)
        with timeline.step("the provider is waited for, until it has started", launch=LaunchStep.PREPARE):
            await handler.node_provider.ready.wait()
        await self._features.before_launch(sandbox)
        boot = None
        if prepare is not None:
            with timeline.step("the image's disk is made ready", launch=LaunchStep.PREPARE):
                boot = await prepare()
        clock = self._clock
        began = clock.seconds()
        deadline = began + self._limit
        has_vm = bool(sandbox.record.agent_host)  # claimed from the pool, or launched by an earlier daemon
        request = await vm_request(handler, self._features, sandbox, has_vm=has_vm, boot=boot)
        kept_state = None if has_vm else await self._features.start_from(sandbox)
        up = await sandbox.machine.bring_up(
            request, deadline, partial(self._connections.connect, sandbox), kept_state
        )
        watch = sandbox.watch
        assert sandbox.client is not None and watch is not None
        with timeline.step("the VM is made the pod's", launch=LaunchStep.CONFIGURE):
            if has_vm:
                await sandbox.machine.place(request.cgroup_parent, request.size)
                await sandbox.machine.replace_first_certificate()
            config = node_names.with_host_name(sandbox.config)
            provider = container_provider(self._handlers.contprovider, config, handler)
            await sandbox.machine.configure(config, await self._dns(), provider)
        with timeline.step(
            "the VM joins the pods' network, host ports are opened", launch=LaunchStep.NETWORK
        ):
            await self._features.answered(sandbox)
        watch.start()
        left = deadline - clock.seconds()
        with timeline.step("the agent's stream of events begins", launch=LaunchStep.EVENTS):
            await within(clock, left, watch.when_live(), f"the agent's stream of sandbox {sandbox.id}")
        if not watch.live:
            raise Unavailable(f"the agent of sandbox {sandbox.id} ended the connection")
        with timeline.step("it is recorded as ready", launch=LaunchStep.RECORD):
            more = " ".join(up.instance.more_addresses)
            await self._inventory.commit(sandbox, sandbox.record.to(SandboxState.READY, more_addresses=more))
        timeline.note("the pod is ready", f"{clock.seconds() - began:.2f} s after its launch began")
        _log.info(
            "sandbox {sandbox} is ready: vm {vm} at {address}, {seconds:.2f} s "
            "({vm_seconds:.2f} s for the VM)",
            sandbox=sandbox.id,
            pod=sandbox.pod,
            vm=up.instance.id,
            address=sandbox.record.address,
            seconds=clock.seconds() - began,
            vm_seconds=up.vm_seconds,
        )
        self._features.ready(sandbox)
        if not has_vm:
            self._renewal.soon(sandbox.machine, partial(self._is_starting_containers, sandbox))

    def _is_starting_containers(self, sandbox: Sandbox) -> bool:
        """Return whether containers are being created or started, or were a moment ago: more may follow."""
        just_now = nanoseconds(self._clock) - int(IDLE_SECONDS * 1e9)
        return sandbox.loads.busy or any(
            container.state in (ContainerState.CREATING, ContainerState.CREATED, ContainerState.STARTING)
            or max(container.record.created_at, container.record.started_at) > just_now
            for container in sandbox.containers.values()
        )
