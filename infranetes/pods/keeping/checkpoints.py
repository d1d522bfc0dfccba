# SPDX-License-Identifier: Apache-2.0
"""CheckpointContainer: the pod's VM is kept as it runs, and becomes an archive on the node.

The archive has what kubelet, and tools for checkpoints, look for:

config.dump               the container, and its image; not if the pod was asked for
spec.dump                 its command, and its pod; likewise
checkpoint/inventory.img  the manifest
checkpoint/...            the VM's files
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event

import attrs
from twisted.logger import Logger

from infranetes.pods.containers.containers import Containers
from infranetes.pods.keeping import archive
from infranetes.pods.keeping.archive import Archive, check_free, checked_location
from infranetes.pods.keeping.manifest import config_dump, manifest, spec_dump
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.keeping import IKeepsVms, KeptVm
from infranetes_common.concurrency import KEEPING, deferred, run_in_thread, shielded, within
from infranetes_common.errors import FailedPrecondition, Unimplemented
from infranetes_common.reactors import IReactor

INVENTORY = "checkpoint/inventory.img"
_log = Logger()


@attrs.frozen
class Checkpoint:
    """A checkpoint that was made. :ivar size: of the archive, in bytes."""

    size: int
    pause_seconds: float  # for which the VM did not execute
    seconds: float  # in all


class Checkpoints:
    """Makes checkpoints. :param directory: for a VM's files until they are in the archive."""

    def __init__(
        self, reactor: IReactor, directory: Path, providers: Providers, containers: Containers
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._providers = providers
        self._containers = containers

    @deferred
    async def start(self) -> None:
        """Remove what a killed daemon has left."""
        await run_in_thread(self._reactor, shutil.rmtree, self._directory, True)

    async def checkpoint(self, id: str, location: str, seconds: float) -> None:
        """Write the archive of a running container's pod to `location`. The pod goes on.

        Cancelling ends the work: nothing of it is left.

        :raise InvalidArgument: `location` can be no file's path. :raise NotFound: there is no such container.
        :raise Unimplemented: the pod's provider keeps no VMs.
        :raise FailedPrecondition: the container does not run, or its pod is one that can't be kept.
        :raise AlreadyExists: something is at `location`. :raise ResourceExhausted: there is no room.
        :raise DeadlineExceeded: it took longer than that. :raise Unavailable: try again."""
        container = self._containers.lookup(id)
        if container.state is not ContainerState.RUNNING:
            raise FailedPrecondition(
                f"container {container.id} is not running: only one that runs can be checkpointed"
            )
        await self._checkpoint(container.sandbox, container, checked_location(location), seconds)

    async def checkpoint_pod(self, sandbox: Sandbox, location: str, seconds: float) -> Checkpoint:
        """Write the archive of a pod to `location`. Fails as `checkpoint` does."""
        return await self._checkpoint(sandbox, None, checked_location(location), seconds)

    async def _checkpoint(
        self, sandbox: Sandbox, container: Container | None, path: Path, seconds: float
    ) -> Checkpoint:
        provider = self._provider(sandbox)
        if sandbox.state is not SandboxState.READY:
            raise FailedPrecondition(
                f"sandbox {sandbox.id} is {sandbox.state.value}: only one that is ready can be checkpointed"
            )
        name = container.name if container is not None else ""
        with sandbox.timeline.step("a checkpoint is made", str(path), container=name):
            made = await within(
                self._reactor,
                seconds,
                self._make(provider, sandbox, container, path, seconds),
                f"the checkpoint of sandbox {sandbox.id}",
            )
        _log.info(
            "sandbox {sandbox}: its checkpoint is {path}, of {size} MiB",
            sandbox=sandbox.id,
            path=str(path),
            size=made.size >> 20,
        )
        return made

    async def _make(
        self, provider: IKeepsVms, sandbox: Sandbox, container: Container | None, path: Path, seconds: float
    ) -> Checkpoint:
        began = self._reactor.seconds()
        await run_in_thread(self._reactor, check_free, path, 0)
        async with self._files() as directory:
            kept = await provider.keep(sandbox.record.instance_id, directory, seconds)
            unwanted = Event()
            write = partial(_thd_write, sandbox, container, path, directory, kept, unwanted)
            size = await run_in_thread(self._reactor, write, on_cancel=unwanted.set, purpose=KEEPING)
        return Checkpoint(size, kept.pause_seconds, self._reactor.seconds() - began)

    def _provider(self, sandbox: Sandbox) -> IKeepsVms:
        provider = self._providers.of(sandbox.record).provider
        if not IKeepsVms.providedBy(provider):
            raise Unimplemented(
                f"sandbox {sandbox.id} can't be checkpointed: provider {provider.name} can't keep VMs as "
                "they run; see docs/checkpoints.md"
            )
        keeps: IKeepsVms = provider
        return keeps

    @asynccontextmanager
    async def _files(self) -> AsyncIterator[Path]:
        """Give an empty directory, which is removed at the end of the block."""
        directory = self._directory / secrets.token_hex(8)
        await run_in_thread(self._reactor, partial(directory.mkdir, mode=0o700, parents=True))
        try:
            yield directory
        finally:
            await shielded(run_in_thread(self._reactor, shutil.rmtree, directory, True, purpose=KEEPING))


def _thd_write(
    sandbox: Sandbox,
    container: Container | None,
    path: Path,
    directory: Path,
    kept: KeptVm,
    unwanted: Event,
) -> int:
    check_free(path, sum(kept.files.values()))

    def fill(tar: Archive) -> None:
        if container is not None:
            tar.add_bytes("config.dump", config_dump(container, kept.taken_at), kept.taken_at)
            tar.add_bytes("spec.dump", spec_dump(container), kept.taken_at)
        for name in kept.files:
            tar.add(f"checkpoint/{name}", directory / name, kept.taken_at)
        tar.add_bytes(INVENTORY, manifest(sandbox, container, kept, tar.files), kept.taken_at)

    return archive.thd_write(path, unwanted, fill)
