# SPDX-License-Identifier: Apache-2.0
"""Probes by connections, of pods with the annotation sleep-probes: by HTTP, and by TCP.

While such a pod sleeps, this daemon takes the connections of the node's programs to those of its ports to
which they connected before, and which were open when it fell asleep: see `stand_in`. All other packets wake
it as ever. When the daemon is killed, this ends by itself: see `probe_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import AddressValueError, IPv4Address
from typing import cast

from twisted.internet.address import IPv4Address as IPv4
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IListeningPort
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.sleeping.answers import Answers
from infranetes.pods.sleeping.probe_table import ANSWERED_SECONDS, ProbeTable
from infranetes.pods.sleeping.stand_in import StandIn
from infranetes.pods.store.states import SandboxState
from infranetes_common.concurrency import Coro, Flight, settled, sleep, start, within
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.identity import AGENT_PORT
from infranetes_common.reactors import IReactor
from infranetes_common.transports import StreamTransport

MOST_PORTS = 16  # of a pod
OPEN_SECONDS = 2  # for a port to be found open
WAKE_SECONDS = 60.0
COUNT_SECONDS = 1.0  # for which a count of packets serves all pods that are looked at

_log = Logger()


class ConnectionProbes(PodFeature):
    """Answers in the place of pods that sleep.

    :param seconds: returns for how long a pod's answers are repeated; 0: they are not.
    :param awake: wakes the VM of a sandbox if it sleeps, and waits until it is awake."""

    name = "probes by connections"

    def __init__(
        self,
        reactor: IReactor,
        table: ProbeTable,
        seconds: Callable[[Sandbox], float],
        awake: Callable[[str], Coro[None]],
    ) -> None:
        self._reactor = reactor
        self._table = table
        self._seconds = seconds
        self._awake = awake
        self._stand_in = StandIn(reactor, self)
        self._listening: IListeningPort | None = None
        self._pods: dict[IPv4Address, Sandbox] = {}
        self._open: dict[IPv4Address, Sequence[int]] = {}  # ports, while the pod falls asleep
        self._taken: dict[IPv4Address, Sequence[int]] = {}  # ports, while the pod sleeps
        self._counting: Flight[Mapping[str, int]] | None = None
        self._counted_at = 0.0
        self._answers = Answers[int]()
        self._renewal: Deferred[None] | None = None

    # ---- in the pods' lives

    async def answered(self, sandbox: Sandbox) -> None:
        await self._follow(sandbox)

    async def resume(self, inventory: Inventory) -> None:
        with suppress(InfranetesError):  # what a daemon that was killed has left, of pods that are gone
            await self._table.remove()
        for sandbox in inventory:
            if sandbox.state is SandboxState.READY:
                await self._follow(sandbox)

    async def _follow(self, sandbox: Sandbox) -> None:
        """Follow a pod that asks for it. One that can't be followed is woken by its probes, as others are."""
        address = _address(sandbox)
        if address is None or not self._seconds(sandbox):
            return
        await self.awakes(sandbox)  # or else a pod that slept here, and is gone unnoticed, would be meant
        first = not self._pods
        self._pods[address] = sandbox
        try:
            if first:
                await self._begin()
            else:
                await self._table.put(address)
        except InfranetesError as error:
            _log.warn("probes will wake sandbox {sandbox}: {error}", sandbox=sandbox.id, error=error)

    async def _begin(self) -> None:
        if self._listening is None:
            endpoint = TCP4ServerEndpoint(self._reactor, 0, interface="127.0.0.1")
            self._listening = await endpoint.listen(self._stand_in)
        await self._make_table()
        if self._renewal is None:
            self._renewal = start(self._renew())
            self._renewal.addErrback(lambda failure: failure.trap(CancelledError) and None)

    async def _make_table(self) -> None:
        assert self._listening is not None
        await self._table.make(self._pods.keys(), cast(IPv4, self._listening.getHost()).port)

    def lost(self, sandbox: Sandbox) -> None:
        start(self.address_released(sandbox.id)).addErrback(
            lambda failure: _log.error(
                "connections of this node to sandbox {sandbox}, which is lost, may still be taken: {error}",
                sandbox=sandbox.id,
                error=failure.value,
            )
        )

    async def address_released(self, id: str) -> None:
        for address, sandbox in list(self._pods.items()):
            if sandbox.id == id:
                self._open.pop(address, None)
                try:
                    await self._table.refrain(address, self._taken.get(address, ()))
                    await self._table.drop(address)
                except InfranetesError:
                    if await self._table.is_there():
                        raise
                self._taken.pop(address, None)
                self._pods.pop(address, None)

    def disconnected(self, sandbox: Sandbox) -> None:
        self._answers.forget(sandbox.id)

    async def sweep(self) -> None:
        if self._pods and not await self._table.is_there():
            await self._make_table()
            await self._answer_all()

    async def stop(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.cancel()
        self._stand_in.close()
        listening, self._listening = self._listening, None
        if listening is not None:
            await maybeDeferred(listening.stopListening)
            try:
                await self._table.remove()
            except InfranetesError as error:  # the next daemon does it
                _log.warn("the tables of pods' probes stay: {error}", error=error)

    async def _renew(self) -> None:
        while True:
            await sleep(self._reactor, ANSWERED_SECONDS / 3)
            try:
                await self._answer_all()
            except InfranetesError as error:
                _log.warn("probes wake pods that sleep: {error}", error=error)

    async def _answer_all(self) -> None:
        for address, ports in list(self._taken.items()):
            await self._table.answer(address, ports)

    async def sent(self, sandbox: Sandbox) -> int | None:
        """Return how many packets a pod has sent to others than its node; None: that is not counted."""
        address = _address(sandbox)
        if address not in self._pods:
            return None
        now = self._reactor.seconds()
        if self._counting is None or now - self._counted_at >= COUNT_SECONDS:
            self._counting, self._counted_at = Flight(self._table.sent()), now
        try:
            return (await self._counting.join()).get(str(address))
        except InfranetesError:
            return None

    # ---- for `PodSleep`

    async def falls_asleep(self, sandbox: Sandbox) -> None:
        """Find out which connections are to be taken once the pod sleeps: it is still awake."""
        address = _address(sandbox)
        if address is None or address not in self._pods:
            return
        try:
            agents = {AGENT_PORT, sandbox.record.agent_port}  # which are this daemon's alone
            asked = sorted(await self._table.asked(address) - agents)[:MOST_PORTS]
        except InfranetesError as error:
            _log.info("probes will wake sandbox {sandbox}: {error}", sandbox=sandbox.id, error=error)
            return
        opened = await settled(self._is_open(address, port) for port in asked)
        self._open[address] = [port for port, is_open in zip(asked, opened, strict=True) if is_open is True]

    async def _is_open(self, address: IPv4Address, port: int) -> bool:
        endpoint = TCP4ClientEndpoint(self._reactor, str(address), port, timeout=OPEN_SECONDS)
        try:
            connected = await endpoint.connect(Factory.forProtocol(Protocol))
        except ConnectError:
            return False
        cast(StreamTransport, cast(Protocol, connected).transport).abortConnection()
        return True

    async def sleeps(self, sandbox: Sandbox) -> None:
        """Take these connections: the pod sleeps."""
        address = _address(sandbox)
        if address is not None and (ports := self._open.pop(address, ())):
            self._taken[address] = ports
            try:
                await self._table.answer(address, ports)
            except InfranetesError as error:
                _log.info("probes wake sandbox {sandbox}: {error}", sandbox=sandbox.id, error=error)

    async def awakes(self, sandbox: Sandbox) -> None:
        """Take no connections any more: the pod is awake. Idempotent."""
        address = _address(sandbox)
        if address is None:
            return
        self._open.pop(address, None)
        if ports := self._taken.pop(address, ()):
            try:
                await self._table.refrain(address, ports)
            except InfranetesError as error:  # they end by themselves
                _log.warn(
                    "connections of this node to sandbox {sandbox} are still taken for a minute: {error}",
                    sandbox=sandbox.id,
                    error=error,
                )

    # ---- for the stand-in

    def has(self, pod: IPv4Address) -> bool:
        """See `ProbedPods`."""
        return pod in self._pods

    def answer(self, pod: IPv4Address, port: int, request: bytes) -> int | None:
        """See `ProbedPods`."""
        sandbox = self._pods.get(pod)
        if sandbox is None:
            return None
        since = self._reactor.seconds() - self._seconds(sandbox)
        return self._answers.get(sandbox.id, (port, request), since)

    def answered_probe(self, pod: IPv4Address, port: int, request: bytes, status: int) -> None:
        """See `ProbedPods`."""
        if (sandbox := self._pods.get(pod)) is not None:
            self._answers.put(sandbox.id, (port, request), status, self._reactor.seconds())

    async def wake(self, pod: IPv4Address) -> None:
        """See `ProbedPods`."""
        sandbox = self._pods.get(pod)
        if sandbox is None:
            raise Unavailable(f"no pod has the address {pod} any more")
        await within(self._reactor, WAKE_SECONDS, start(self._awake(sandbox.id)), "the pod")


def _address(sandbox: Sandbox) -> IPv4Address | None:
    try:
        return IPv4Address(sandbox.record.address)
    except AddressValueError:
        return None
