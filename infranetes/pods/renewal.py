"""VMs' certificates: short-lived, and replaced over the channel long before they expire.

The first one comes with the identity, by a way that others may read (user-data), so it is good for
little more than a launch; it is replaced as soon as the VM is a pod. From then on the VM makes its keys
itself and the node signs. What the node remembers of each is when it expires and which key it is for: a
VM whose certificate expired while no daemon ran is still known by that key, and gets a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.logger import Logger

from infranetes.pods.inventory import Sandbox
from infranetes.pods.node import Node
from infranetes.pods.states import SandboxState
from infranetes.pods.waits import go, settle, sleep
from infranetes_common.errors import InfranetesError, Unavailable

AT_A_TIME = 8
SPREAD = 0.1  # of a lifetime: those that were made together are not all replaced together
SOON_SECONDS = 3.0  # after a launch: others that began with it come first
LONGEST_PAUSE = 60.0  # seconds between two looks at what is due
_NANOS = 1e9

_log = Logger()


async def renew(node: Node, one: Any, save: Callable[[Any], Any]) -> None:
    """Have the VM of `one` (a sandbox, or a VM of the pool) take a new key and certificate.

    :param save: keeps its record, changed.
    :raise InfranetesError: its agent can't be asked or refuses; the old one is in force still."""
    client = one.client
    if client is None:
        raise Unavailable(f"the agent of {one.id} is no longer asked")
    signed = node.authority.sign(one.id, await client.new_key(), node.times.certificate)
    await client.rekey(signed.certificate_pem)
    save(remember(one.record, signed))


def remember(record: Any, signed: Any) -> Any:
    """The record with what there is to be known of the certificate that its VM has."""
    until = int(signed.until * _NANOS)
    return attrs.evolve(record, certificate_until=until, certificate_key=signed.key_id)


def is_due(record: Any, now: float, lifetime: float) -> bool:
    """Whether half of the certificate's life is over; also where nothing is known of it.

    :param now: seconds since 1970 UTC."""
    spread = SPREAD * lifetime * int(record.id[:4], 16) / 0xFFFF
    return bool(record.certificate_until / _NANOS - now < lifetime / 2 + spread)


class Renewal:
    """Sees to it that no VM's certificate expires while its agent can be reached."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._gate = DeferredSemaphore(AT_A_TIME)
        self._under_way: set[str] = set()
        self._passes: Deferred[None] | None = None
        self._later: set[Deferred[Any]] = set()

    def start(self) -> None:
        """Begin to look."""
        self._passes = go(self._go_on())
        self._passes.addErrback(lambda _: None)

    def stop(self) -> None:
        """Look no more. Twice is once."""
        for under_way in (self._passes, *self._later):
            if under_way is not None:
                under_way.cancel()

    def soon(self, sandbox: Sandbox) -> None:
        """It is a pod now: replace the certificate that it was launched with. Nobody waits for that."""
        later = go(self._soon(sandbox))
        self._later.add(later)
        later.addErrback(_unexpected).addBoth(lambda _: self._later.discard(later))

    async def _soon(self, sandbox: Sandbox) -> None:
        await sleep(self._node.clock, SOON_SECONDS)
        if sandbox.state is SandboxState.READY:
            await self._one(sandbox, partial(self._save, sandbox))

    async def once(self) -> None:
        """Replace all that are due, some at a time; fires when each is done or has failed."""
        works = [
            go(self._one(sandbox, partial(self._save, sandbox)))
            for sandbox in self._node.inventory
            if sandbox.state is SandboxState.READY
            and sandbox.view is not None
            and sandbox.view.live
            and self._due(sandbox.record)
        ]
        works += [
            go(self._one(member, partial(self._node.pool.save, member)))
            for member in self._node.pool.idle()
            if member.client is not None and self._due(member.record)
        ]
        await settle(works)

    async def _go_on(self) -> None:
        pause = min(LONGEST_PAUSE, max(0.5, self._node.times.certificate / 20))
        while True:
            await sleep(self._node.clock, pause)
            await self.once()

    def _due(self, record: Any) -> bool:
        return is_due(record, self._node.clock.seconds(), self._node.times.certificate)

    def _save(self, sandbox: Sandbox, record: Any) -> None:
        if sandbox.state is SandboxState.READY:
            self._node.note(self._node.save(sandbox, record), f"the certificate of sandbox {sandbox.id}")

    async def _one(self, one: Any, save: Callable[[Any], Any]) -> None:
        if one.id in self._under_way:
            return
        self._under_way.add(one.id)
        try:
            await self._gate.run(lambda: go(renew(self._node, one, save)))
        except (InfranetesError, CancelledError) as error:  # it is due still, and the next look tries again
            _log.info("sandbox {sandbox} keeps its certificate for now: {error}", sandbox=one.id, error=error)
        finally:
            self._under_way.discard(one.id)


def _unexpected(failure: Any) -> None:
    if not failure.check(CancelledError):
        _log.failure("a certificate could not be replaced", failure=failure)
