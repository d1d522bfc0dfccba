# SPDX-License-Identifier: Apache-2.0
"""The delegate's sandboxes that hold the network of those of our pods that are in the node's CNI network.

Shadow   what is true                                     in the record             goes to
WANTED   our sandbox is LAUNCHING; there may be one       network                   UP, or ENDING
UP       there is one, and its namespace is known         + shadow_id, netns        JOINED ENDING
JOINED   the VM has the namespace's link                  + instance_id             LOST ENDING
LOST     the delegate no longer has it, or it has ended   sandbox LOST              ENDING
ENDING   the VM is destroyed; the shadow is being ended   STOPPING or ABANDONED     GONE, or ENDING again
                                                                                    if that fails
GONE     there is none at the delegate                    shadow_id empty

A shadow has a label, by which one that was made but not recorded is found again: when the launch continues,
when the sandbox ends, or else by the sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs
from twisted.logger import Logger

from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import Attachment
from infranetes_common.concurrency import Flight
from infranetes_common.errors import InfranetesError, NotFound, Unavailable
from infranetes_common.wire import cri

_ENDING = (SandboxState.STOPPING, SandboxState.ABANDONED)
_NO_DELEGATE = (
    "sandbox {sandbox}: the pod's network belongs to the delegate's CNI, and no delegate is configured any "
    "more; set "
    "delegate.socket again"
)

_log = Logger()


class ListedShadow(Protocol):
    """A shadow in the delegate's list."""

    @property
    def id(self) -> str: ...
    @property
    def owner(self) -> str:
        """The id of our sandbox."""

    @property
    def ours(self) -> bool:
        """Whether this daemon, or an earlier one of this node, has made the shadow."""

    @property
    def ready(self) -> bool: ...


class ShadowRuntime(Protocol):
    """The runtime that makes, finds and ends shadows: `infranetes.delegate.shadow.ShadowSandboxes`."""

    async def run(self, config: cri.PodSandboxConfig, owner: str) -> str: ...
    async def namespace(self, id: str) -> str: ...
    async def end(self, id: str) -> None: ...
    async def list(self, owner: str = "") -> Sequence[ListedShadow]: ...


class NoShadows(PodFeature):
    """The shadows of a node that has no delegate any more, or never had one."""

    name = "the delegate's sandboxes"

    async def attachment(self, sandbox: Sandbox) -> Attachment | None:
        """Return None. :raise Unavailable: the VM is to join the network of a delegate."""
        if sandbox.record.network == CNI:
            raise Unavailable(_NO_DELEGATE.format(sandbox=sandbox.id))
        return None

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        """Do nothing. :raise Unavailable: the sandbox has a shadow, which can't be ended."""
        if sandbox.record.shadow_id and sandbox.state in _ENDING:
            raise Unavailable(_NO_DELEGATE.format(sandbox=sandbox.id))


class Shadows(PodFeature):
    """The shadows of this node's sandboxes. See the table above.

    :param lost: called with a READY sandbox that has lost its network, and why.
    :param end_abandoned: ends what is left of a launch that failed: its VM, then its shadow.
    """

    name = "the delegate's sandboxes"

    def __init__(
        self,
        inventory: Inventory,
        runtime: ShadowRuntime,
        lost: Callable[[Sandbox, str], None],
        end_abandoned: Callable[[Sandbox], Flight[None]],
    ) -> None:
        self._inventory = inventory
        self._runtime = runtime
        self._lost = lost
        self._end_abandoned = end_abandoned
        self._orphans: set[str] = set()  # ids of shadows that had no sandbox in the last pass
        self._missing: set[str] = set()  # ids of sandboxes that had no shadow in the last pass

    async def attachment(self, sandbox: Sandbox) -> Attachment | None:
        """Return the namespace that the VM of a LAUNCHING sandbox joins; make a shadow if needed.

        :raise InfranetesError: there is no namespace to join; there may be a shadow."""
        if sandbox.record.network != CNI:
            return None
        shadow, path = sandbox.record.shadow_id, ""
        if shadow:
            try:
                path = await self._runtime.namespace(shadow)
            except NotFound:  # for example after a reboot of the node
                await self._runtime.end(shadow)
                shadow = ""
        if not shadow:
            await self._end_earlier(sandbox.record)
            shadow = await self._runtime.run(sandbox.config, sandbox.id)
            path = await self._runtime.namespace(shadow)
        if shadow != sandbox.record.shadow_id:
            await self._inventory.save(sandbox, attrs.evolve(sandbox.record, shadow_id=shadow))
        return Attachment(Path(path))

    async def _end_earlier(self, record: SandboxRecord) -> None:
        """End the shadows that failed launches of the same pod have left, since these still have its name.

        :raise InfranetesError: one can't be ended now."""
        for each in list(self._inventory):
            left = each.state is SandboxState.ABANDONED and each.record.network == CNI
            if left and each.record.name == record.name:
                await self._end_abandoned(each).join()

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        """End the shadow, recorded or not, of a sandbox that ends. One that becomes VACANT keeps its own.

        :raise InfranetesError: it is not known whether the shadow has ended; try again."""
        if sandbox.record.network != CNI or sandbox.state not in _ENDING:
            return
        recorded = sandbox.record.shadow_id
        there = {each.id for each in await self._runtime.list(sandbox.id)}
        for shadow in sorted(there | ({recorded} if recorded else set())):
            await self._runtime.end(shadow)
        if recorded and sandbox.state is not SandboxState.ABANDONED:  # an ABANDONED record is deleted next
            await self._inventory.save(sandbox, attrs.evolve(sandbox.record, shadow_id=""))

    async def sweep(self) -> None:
        """Compare the delegate's shadows with the sandboxes.

        In the second of two successive passes an orphaned shadow is ended, and a sandbox without its shadow
        is LOST. Orphans that another daemon made are left.

        :raise InfranetesError: the delegate does not answer; nothing has changed."""
        shadows = await self._runtime.list()
        await self._end_orphans(shadows)
        self._find_missing(shadows)

    async def _end_orphans(self, shadows: Sequence[ListedShadow]) -> None:
        orphans = {each.id: each.owner for each in shadows if self._is_orphan(each)}
        again = self._orphans & orphans.keys()
        self._orphans = set(orphans)
        for id in sorted(again):
            _log.warn(
                "the delegate's sandbox {shadow} is ended: it is for sandbox {sandbox}, which no longer "
                "exists",
                shadow=id,
                sandbox=orphans[id],
            )
            try:
                await self._runtime.end(id)
                self._orphans.discard(id)
            except InfranetesError as error:
                _log.error("the delegate's sandbox {shadow} is not ended: {error}", shadow=id, error=error)

    def _is_orphan(self, shadow: ListedShadow) -> bool:
        sandbox = self._inventory.sandboxes.get(shadow.owner)
        if sandbox is None:
            return shadow.ours  # another daemon ends its own shadows
        if sandbox.state is SandboxState.STOPPED or sandbox.record.network != CNI:
            return True
        recorded = sandbox.record.shadow_id
        return sandbox.state is SandboxState.READY and recorded not in ("", shadow.id)

    def _find_missing(self, shadows: Sequence[ListedShadow]) -> None:
        ready = {each.id for each in shadows if each.ready}
        missing = {
            each.id: each
            for each in self._inventory
            if each.state is SandboxState.READY and each.record.network == CNI
            and each.record.shadow_id not in ready
        }  # fmt: skip
        again = self._missing & missing.keys()
        self._missing = missing.keys() - again
        for id in sorted(again):
            shadow = missing[id].record.shadow_id
            self._lost(missing[id], f"its network is gone: the delegate's sandbox {shadow} has ended")
