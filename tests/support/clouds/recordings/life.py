# SPDX-License-Identifier: Apache-2.0
"""One pod VM's life with a volume, made by our own provider on any cloud.

What is created, and how it ends:

state      left when                                        next
nothing    the notes have the node's name                   noted
noted      the life is over, failed, or was interrupted     ending
ending     the cloud shows neither VM nor volume            nothing: the notes are removed

A life that was killed leaves its notes: `Life.end` of the next one, with the same notes, ends what is left.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred

from infranetes.identity.authority import Authority
from infranetes.providers.cloud.calls.translate import to_infranetes_error
from infranetes.providers.cloud.interface import NODE, CloudError, CloudVM
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import Instance, InstanceSpec
from infranetes_common.concurrency import sleep, within
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.identity import Identity
from infranetes_common.reactors import IReactor

T = TypeVar("T")

END_SECONDS = 600.0  # within which everything ends; otherwise a user has to end it
VOLUME_BYTES, GROWN_BYTES = 10 << 30, 11 << 30  # Compute Engine's disks can't be smaller
_RUNNING_SECONDS = 300.0
_CERTIFICATE_SECONDS = 3600
_HEX = re.compile(r"[0-9a-f]{8,}")  # the unique part of an id


@attrs.define
class Notes:
    """What must be known of a life after it was killed; written before anything is created.

    :ivar node: the node in the VM's tags. :ivar volume: the volume's name; "": there is none.
    :ivar found: whether these are the notes of an earlier life.
    """

    path: Path
    node: str
    volume: str = ""
    found: bool = False

    @classmethod
    def of(cls, path: Path) -> Notes:
        """Return the notes of a life that was killed, or new ones."""
        if path.exists():
            found = json.loads(path.read_text())
            return cls(path, found["node"], found["volume"], True)
        return cls(path, f"record-{secrets.token_hex(4)}")

    def write(self) -> None:
        """Store them so that they outlive this process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"node": self.node, "volume": self.volume}))

    def remove(self) -> None:
        """Remove them, as nothing is left."""
        self.path.unlink(missing_ok=True)
        self.found = False


class Life:
    """The life, with a started provider.

    :param cluster: the cluster in the tags of the VM and the volume. :param say: called with each next step.
    """

    def __init__(
        self,
        reactor: IReactor,
        provider: CloudProvider[Any],  # Any: the driver of any cloud
        cluster: str,
        notes: Notes,
        authority: Authority,
        say: Callable[[str], None],
    ) -> None:
        self._reactor = reactor
        self._provider = provider
        self._cluster = cluster
        self._notes = notes
        self._authority = authority
        self._say = say

    async def live(self) -> None:
        """Live; steps that are idempotent are taken twice. Whatever happens, call `end`."""
        self._notes.write()
        vm = await self._launched()
        await self._looked_at(vm)
        await self._with_volume(vm)

    async def end(self) -> None:
        """Destroy everything. Idempotent. :raise InfranetesError: something is left; names the node."""
        try:
            await within(self._reactor, END_SECONDS, self._until_ended(), "destroying everything")
        except InfranetesError as error:
            raise FailedPrecondition(
                f"something may be left, which costs money: {error}. Do the same again, which ends it first, "
                f"or end yourself what is tagged {NODE} = {self._notes.node}"
            ) from error
        self._notes.remove()

    # ---- Living

    async def _launched(self) -> Instance:
        self._say("launching a VM")
        spec = self._spec()
        launched = await self._provider.launch(spec)
        await self._provider.launch(spec)
        return await self._provider.wait_running(launched.id, _RUNNING_SECONDS)

    def _spec(self) -> InstanceSpec:
        sandbox = secrets.token_hex(16)
        certificate, key = self._authority.issue_vm(sandbox, _CERTIFICATE_SECONDS)
        identity = Identity(
            sandbox_id=sandbox,
            certificate_pem=certificate,
            key_pem=key,
            ca_pem=self._authority.ca_pem,
            hostname="recorded",
            machine_id=secrets.token_hex(16),
            entropy=secrets.token_hex(32),
            now_nanos=time.time_ns(),
        )
        return InstanceSpec(secrets.token_hex(16), sandbox, self._cluster, self._notes.node, identity)

    async def _looked_at(self, vm: Instance) -> None:
        self._say(f"looking at VM {vm.id}, and at one that does not exist")
        await self._provider.list()
        await self._provider.get(vm.id)
        await _not_found(self._provider.get(_other(vm.id)))
        console = partial(self._provider._cloud._thd_console_output, id=vm.id)
        await self._called(self._provider._calls.call("read the console", console))

    async def _with_volume(self, vm: Instance) -> None:
        volumes = self._provider.volumes
        self._say("making a volume")
        self._notes.volume = f"{self._notes.node}-data"
        self._notes.write()
        volume = await volumes.create(self._notes.volume, VOLUME_BYTES)
        await volumes.create(self._notes.volume, VOLUME_BYTES)
        await volumes.list()
        await _not_found(volumes.get(_other(volume.id)))
        for step, words in (
            (partial(volumes.attach, vm.id, volume.id, False), "attaching it"),
            (partial(volumes.expand, volume.id, GROWN_BYTES), "enlarging it"),
            (partial(volumes.detach, vm.id, volume.id), "detaching it"),
            (partial(volumes.delete, volume.id), "deleting it"),
        ):
            self._say(f"volume {volume.id}: {words}")
            await step()
            await step()
        await _not_found(volumes.get(volume.id))
        self._notes.volume = ""
        self._notes.write()

    # ---- Ending

    async def _until_ended(self) -> None:
        while True:
            try:
                await self._ended()
                return
            except InfranetesError as error:  # of any kind: it costs money until it is gone
                self._say(f"not yet: {error}")
                await self._pause()

    async def _ended(self) -> None:
        """:raise InfranetesError: not everything has ended yet."""
        if self._notes.found:  # the cloud may not yet show what the killed life requested last
            self._say("waiting until the cloud shows all that was made")
            await sleep(self._reactor, self._provider._settings.settle_seconds)
        for vm in await self._provider.list():
            self._say(f"destroying VM {vm.id}")
            await self._provider.destroy(vm.id)
            await self._provider.destroy(vm.id)
        seen = await self._seen()
        for each in seen:
            await self._until_gone(each)
        if self._notes.volume:
            await self._end_volume(seen)
        for _ in range(2):  # what is unused in both passes is released
            await self._called(self._provider._sweeper.sweep())

    async def _end_volume(self, vms: Sequence[CloudVM]) -> None:
        """Delete the volume, whether or not the cloud lists it: it is looked up by name, or created.

        :param vms: those that may have it, and are gone."""
        volumes = self._provider.volumes
        try:
            volume = await volumes.create(self._notes.volume, VOLUME_BYTES)
        except (ResourceExhausted, InvalidArgument):
            return  # its creation was refused before, too
        self._say(f"deleting volume {volume.id}")
        for vm in vms:
            await volumes.detach(vm.id, volume.id)
        await volumes.delete(volume.id)
        await _not_found(volumes.get(volume.id))
        self._notes.volume = ""

    async def _until_gone(self, vm: CloudVM) -> None:
        look = partial(self._provider._cloud._thd_get, id=vm.id)
        while True:
            found = await self._called(self._provider._calls.call(f"look at VM {vm.id}", look))
            if found is None or found.gone:
                return
            await self._pause()

    async def _seen(self) -> list[CloudVM]:
        """Return what the cloud itself lists of this node, even if the provider considers it destroyed."""
        cloud = self._provider._cloud
        return await self._called(self._provider._calls.call("list VMs", cloud._thd_list))

    async def _called(self, call: Awaitable[T]) -> T:
        """Return the cloud's answer. :raise InfranetesError: the cloud's own error."""
        try:
            return await call
        except CloudError as error:
            raise to_infranetes_error(self._provider._cloud.location, error) from error

    async def _pause(self) -> None:
        await sleep(self._reactor, self._provider._settings.poll_seconds)


async def _not_found(waiting: Deferred[T]) -> None:
    """Wait for a call that has to fail. :raise Unavailable: it succeeded."""
    try:
        found = await waiting
    except NotFound:
        return
    raise Unavailable(f"the cloud still shows what can't be there: {found}")


def _other(id: str) -> str:
    """Return an id like this one that does not exist."""
    return _HEX.sub(lambda found: secrets.token_hex(len(found[0]) // 2 + 1)[: len(found[0])], id, count=1)
