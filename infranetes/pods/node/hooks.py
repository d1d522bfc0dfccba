# SPDX-License-Identifier: Apache-2.0
"""Hooks by which features, such as volumes or host ports, join in the lives of pods.

A feature derives from `PodFeature` and implements the hooks that concern it; the daemon's assembly lists the
features in order. What later features rely on comes first: they are called in that order while a pod comes to
life, and backwards while it ends. In the order of a pod's life:

    RunPodSandbox      check  start_from  zone  before_launch  attachment  connected  live  answered  ready
    CreateContainer    before_create  prepare  adopted, and release if it fails
    StartContainer     before_start
    ExecSync           execute  caught_up
    a pod is kept      volumes_of  hold_still  go_on
    a container ends   collect, or unwritten if its agent can't be asked
    RemoveContainer    release
    the VM             needed  interrupted  lost  live (again, perhaps after a reboot)
    StopPodSandbox     stopping  disconnected  address_released  vm_destroyed
    a launch fails               disconnected  address_released  vm_destroyed
    the daemon         load  resume  sweep  stop

A hook that fails fails the call that it is part of, unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.store.records import Contents
from infranetes.providers.interface import Attachment
from infranetes_common.concurrency import Coro, Work, settled
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import cri, vmserver

if TYPE_CHECKING:
    from infranetes.pods.node.handlers import Handler
    from infranetes.pods.node.inventory import Container, Inventory, Sandbox

#: Runs a command to its end.
Run: TypeAlias = Callable[[], Awaitable[vmserver.ExecSyncResponse]]

_log = Logger()


class PodFeature:
    """One feature of the node's pods. Each hook does nothing unless it is overridden.

    A daemon may be killed after any of them: the next one calls it again, so each of them is idempotent.

    :ivar name: a plural noun for messages, such as "host ports"."""

    name: str

    # ---- a sandbox begins

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        """Check that a pod can have what it asks for. There is no record of it yet.

        :raise InfranetesError: it can't; the message says what to do."""

    async def start_from(self, sandbox: Sandbox) -> Path | None:
        """Return the directory of the kept state that the VM starts from; None: it starts from none.

        Asked again, also by the next daemon, it is the same as long as there is a VM or one is asked for.

        :raise InfranetesError: the pod can't start from what it asks for."""
        return None

    async def zone(self, sandbox: Sandbox) -> str:
        """Return the zone that the VM has to be in; "": any.

        :raise InfranetesError: it can be in none, or this can't be determined now."""
        return ""

    async def before_launch(self, sandbox: Sandbox) -> None:
        """Wait until the sandbox's launch may begin, or go on: its provider has started."""

    async def attachment(self, sandbox: Sandbox) -> Attachment | None:
        """Return the network namespace that the VM joins; None: it is in its provider's network."""
        return None

    def connected(self, sandbox: Sandbox) -> None:
        """Called when the VM runs and the node has a client of its agent, which may not answer yet.

        The sandbox is LAUNCHING or BOOTING, or what an earlier daemon has left."""

    async def answered(self, sandbox: Sandbox) -> None:
        """Give the VM what the pod needs before it is READY. The agent answers, and has the pod's names."""

    def ready(self, sandbox: Sandbox) -> None:
        """Called when the sandbox is READY, and recorded so."""

    # ---- a sandbox lives

    async def live(self, sandbox: Sandbox) -> None:
        """Restore what a VM loses when it reboots. Called whenever the agent's events begin to be received.

        The features are called beside each other. Failures are logged. Cancelled when it happens again."""

    async def needed(self, sandbox: Sandbox) -> None:
        """Wait until the VM executes: something of it is to be changed, or kept.

        :raise InfranetesError: it does not."""

    def interrupted(self, sandbox: Sandbox, reason: str) -> None:
        """Called when the cloud has announced that it will take the VM away."""

    def lost(self, sandbox: Sandbox) -> None:
        """Called when the VM of a READY sandbox is gone."""

    # ---- a sandbox is kept: see `infranetes.pods.keeping`

    async def volumes_of(self, container: Container) -> Mapping[str, str]:
        """Return the ids of a container's volumes in the VM, by where they are mounted in the container.

        The volumes of one that is still to be created may not be there yet.

        :raise FailedPrecondition: pods with such a volume can't be kept."""
        return {}

    async def hold_still(self, sandbox: Sandbox) -> Collection[str]:
        """Change nothing in the VM until `go_on`.

        Return the ids of volumes in its memory that `go_on` brings again, so that they may be emptied."""
        return ()

    async def go_on(self, sandbox: Sandbox) -> None:
        """Bring again what may have been emptied.

        Called after `hold_still`, also when that has failed, or by the daemon after one that was killed."""

    # ---- a sandbox ends

    async def stopping(self, sandbox: Sandbox) -> None:
        """Detach from the VM: the containers have ended, and it is about to be destroyed. Must not raise."""

    def disconnected(self, sandbox: Sandbox) -> None:
        """Called when the node no longer speaks to the VM's agent: it is gone, or about to be destroyed."""

    async def address_released(self, id: str) -> None:
        """Remove what leads to a VM's address, which may become another VM's.

        :param id: the sandbox's, or that of a VM of a pool.
        :raise InfranetesError: something still leads to the address; the VM is not destroyed yet."""

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        """Free what only the VM had. The sandbox is STOPPING or ABANDONED, or may become VACANT.

        :raise InfranetesError: something remains; this is called again."""

    # ---- containers

    async def before_create(self, container: Container) -> None:
        """Wait until the VM may be given what the container needs. The container is recorded."""

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """Return the configuration of a container that is being created as its agent is to have it.

        `release` undoes this, also when it has failed."""
        return config

    async def adopted(
        self, container: Container, config: cri.ContainerConfig
    ) -> vmserver.ContainerState | None:
        """Have the container be one that the VM has already; None: it is to be created.

        :param config: as all features have prepared it."""
        return None

    async def before_start(self, container: Container) -> None:
        """Wait until the container may be started."""

    async def execute(
        self, container: Container, command: Sequence[str], run: Run
    ) -> vmserver.ExecSyncResponse:
        """Return what a command in the container comes to.

        :param run: runs it in the VM, and returns that."""
        return await run()

    async def caught_up(self, container: Container) -> None:
        """Bring to the node what a command in the container, which has ended, has written."""

    async def collect(self, container: Container) -> str:
        """Bring what a container that has ended left in its VM to the node.

        Return what did not reach it, as a message; "": nothing is missing."""
        return ""

    def unwritten(self, container: Container) -> str:
        """Return what of a container whose VM is gone may lack on the node, as a message; "": nothing."""
        return ""

    def ended(self, container: Container) -> None:
        """Called when a container's end is recorded."""

    async def release(self, container: Container) -> None:
        """Undo `prepare`: the container is removed, or its creation has failed."""

    # ---- the daemon

    async def load(self, contents: Contents) -> None:
        """Take up what an earlier daemon has recorded, before its sandboxes are loaded."""

    async def resume(self, inventory: Inventory) -> None:
        """Restore what the sandboxes that are loaded now have on the node."""

    async def sweep(self) -> None:
        """Compare what the feature has on the node, or elsewhere, with the records. Called in each pass.

        Failures are logged."""

    async def stop(self) -> None:
        """Leave everything to the next daemon: this one stops."""


class Features:
    """The features of the node's pods: calls their hooks, in order or backwards.

    They may need anything of the pods, so they are added when all of that is made."""

    def __init__(self) -> None:
        self._features: list[PodFeature] = []

    def add(self, *features: PodFeature) -> None:
        """Have features join in the pods' lives, after the others."""
        self._features += features

    def __iter__(self) -> Iterator[PodFeature]:
        return iter(self._features)

    def __reversed__(self) -> Iterator[PodFeature]:
        return reversed(self._features)

    # ---- a sandbox begins

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        for feature in self:
            feature.check(handler, config)

    async def start_from(self, sandbox: Sandbox) -> Path | None:
        """Return the first state that a feature names; None: none does."""
        for feature in self:
            if (kept := await feature.start_from(sandbox)) is not None:
                return kept
        return None

    async def zone(self, sandbox: Sandbox) -> str:
        """Return the first zone that a feature names; "": none does."""
        for feature in self:
            if zone := await feature.zone(sandbox):
                return zone
        return ""

    async def before_launch(self, sandbox: Sandbox) -> None:
        for feature in self:
            await feature.before_launch(sandbox)

    async def attachment(self, sandbox: Sandbox) -> Attachment | None:
        """Return the first attachment that a feature has; None: none has one."""
        for feature in self:
            if (attachment := await feature.attachment(sandbox)) is not None:
                return attachment
        return None

    def connected(self, sandbox: Sandbox) -> None:
        for feature in self:
            feature.connected(sandbox)

    async def answered(self, sandbox: Sandbox) -> None:
        for feature in self:
            await feature.answered(sandbox)

    def ready(self, sandbox: Sandbox) -> None:
        for feature in self:
            feature.ready(sandbox)

    # ---- a sandbox lives

    async def live(self, sandbox: Sandbox) -> None:
        """Call every feature, beside each other, and log what fails."""
        for feature, failure in await self._failed(feature.live(sandbox) for feature in self):
            if sandbox.watch is not None:  # otherwise the VM has been given up
                words = "if the VM of sandbox {sandbox} has rebooted, it may lack {feature}"
                _log_failure(words, failure, feature=feature.name, sandbox=sandbox.id)

    async def needed(self, sandbox: Sandbox) -> None:
        for feature in self:
            await feature.needed(sandbox)

    def interrupted(self, sandbox: Sandbox, reason: str) -> None:
        for feature in self:
            feature.interrupted(sandbox, reason)

    def lost(self, sandbox: Sandbox) -> None:
        for feature in reversed(self):
            feature.lost(sandbox)

    # ---- a sandbox is kept

    async def volumes_of(self, container: Container) -> dict[str, str]:
        return {path: id for feature in self for path, id in (await feature.volumes_of(container)).items()}

    async def hold_still(self, sandbox: Sandbox) -> set[str]:
        return {id for feature in self for id in await feature.hold_still(sandbox)}

    async def go_on(self, sandbox: Sandbox) -> None:
        """Call every feature, also after one has failed. :raise InfranetesError: the first one's failure."""
        await _all(feature.go_on(sandbox) for feature in reversed(self))

    # ---- a sandbox ends

    async def stopping(self, sandbox: Sandbox) -> None:
        for feature in reversed(self):
            await feature.stopping(sandbox)

    def disconnected(self, sandbox: Sandbox) -> None:
        for feature in reversed(self):
            feature.disconnected(sandbox)

    async def address_released(self, id: str) -> None:
        for feature in reversed(self):
            await feature.address_released(id)

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        """Call every feature, also after one has failed.

        :raise InfranetesError: the first one's failure."""
        await _all(feature.vm_destroyed(sandbox) for feature in reversed(self))

    # ---- containers

    async def before_create(self, container: Container) -> None:
        for feature in self:
            await feature.before_create(container)

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        for feature in self:
            config = await feature.prepare(container, config)
        return config

    async def adopted(
        self, container: Container, config: cri.ContainerConfig
    ) -> vmserver.ContainerState | None:
        """Return the first state that a feature has; None: none has one."""
        for feature in self:
            if (state := await feature.adopted(container, config)) is not None:
                return state
        return None

    async def before_start(self, container: Container) -> None:
        for feature in self:
            await feature.before_start(container)

    async def execute(
        self, container: Container, command: Sequence[str], run: Run
    ) -> vmserver.ExecSyncResponse:
        """Have the first feature call what the later ones do, and the last one run the command."""
        for feature in reversed(self):
            run = partial(feature.execute, container, command, run)
        return await run()

    async def caught_up(self, container: Container) -> None:
        for feature in self:
            await feature.caught_up(container)

    async def collect(self, container: Container) -> str:
        return "; ".join([words for feature in self if (words := await feature.collect(container))])

    def unwritten(self, container: Container) -> str:
        return "; ".join(filter(None, (feature.unwritten(container) for feature in self)))

    def ended(self, container: Container) -> None:
        for feature in self:
            feature.ended(container)

    async def release(self, container: Container) -> None:
        for feature in reversed(self):
            await feature.release(container)

    # ---- the daemon

    async def load(self, contents: Contents) -> None:
        for feature in self:
            await feature.load(contents)

    async def resume(self, inventory: Inventory) -> None:
        for feature in self:
            await feature.resume(inventory)

    async def sweep(self) -> None:
        """Call every feature, beside each other, and log what fails."""
        for feature, failure in await self._failed(feature.sweep() for feature in self):
            words = "{feature} could not be compared with the records"
            _log_failure(words, failure, feature=feature.name)

    async def stop(self) -> None:
        for feature in reversed(self):
            await feature.stop()

    async def _failed(self, hooks: Iterable[Work[None]]) -> list[tuple[PodFeature, Failure]]:
        """Wait until the hooks of all features have ended; return the features whose hook has failed."""
        outcomes: list[Failure | None] = await settled(hooks)
        return [(feature, outcome) for feature, outcome in zip(self, outcomes, strict=True) if outcome]


async def _all(hooks: Iterable[Coro[None]]) -> None:
    """Do all, one after the other. :raise InfranetesError: the first one's failure, at the end."""
    errors: list[InfranetesError] = []
    for hook in hooks:
        try:
            await hook
        except InfranetesError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _log_failure(words: str, failure: Failure, feature: str, sandbox: str = "") -> None:
    if failure.check(InfranetesError):
        _log.warn(f"{words}: {{error}}", error=failure.value, feature=feature, sandbox=sandbox)
    else:
        _log.failure(words, failure, feature=feature, sandbox=sandbox)
