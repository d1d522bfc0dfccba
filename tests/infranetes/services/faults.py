# SPDX-License-Identifier: Apache-2.0
"""Everything between the API server and a VM's kernel; each part of it can be made to fail."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import TypeAlias, cast

from twisted.internet.defer import DeferredQueue

from infranetes.kubernetes.api_server import ApiServer
from infranetes.services.cluster import ClusterServices
from infranetes.services.objects import OwnNode, endpoint_slice, service
from infranetes.services.rules import Rule
from infranetes.services.table import RuleTable
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.listing import Listing
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.wire import vmserver as messages
from tests.infranetes.kubernetes.api_server import Json
from tests.infranetes.kubernetes.faults import Bed, reactor
from tests.infranetes.services import objects as written
from tests.infranetes_common.service_proxy.namespace import Namespace
from txgrpc import Call
from vmserver.rpc.services import ServiceCalls

SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
NODES = "/api/v1/nodes"
RANGES = "/apis/networking.k8s.io/v1/servicecidrs"
NODE = {"metadata": {"name": "here", "labels": {}}}
Arriving: TypeAlias = "DeferredQueue[messages.ServiceRulesUpdate | InfranetesError]"


class FaultyKernel(Kernel):
    """A namespace's tables.

    :ivar refused: how many of the next changes fail. :ivar cut_off: how many are made but reported as failed.
    :ivar unread: how many of the next listings fail.
    """

    refused = cut_off = unread = 0

    async def change(self, text: str) -> None:
        if self.refused:
            self.refused -= 1
            raise Unavailable("nft: Could not process rule: Cannot allocate memory")
        await super().change(text)
        if self.cut_off:
            self.cut_off -= 1
            raise Unavailable("nft took too long")

    async def read(self, version: int) -> Listing | None:
        if not self.unread:
            return await super().read(version)
        self.unread -= 1
        failing = Kernel(reactor)
        failing._inside = ["false"]
        return await failing.read(version)


class FaultyAgent:
    """An agent, called in this process. :ivar deaf: how many of its next answers are lost, with the call."""

    def __init__(self, proxy: ServiceProxy) -> None:
        self.use(proxy)
        self._arriving: Arriving = DeferredQueue()
        self.deaf = 0

    def use(self, proxy: ServiceProxy) -> None:
        """Use another proxy from the next call on."""
        self.proxy = proxy
        self._calls = ServiceCalls(proxy)

    def break_off(self) -> None:
        """Lose the connection."""
        self._arriving.put(Unavailable("the connection is lost"))

    async def service_rules(
        self, updates: AsyncIterator[messages.ServiceRulesUpdate]
    ) -> AsyncGenerator[messages.ServiceRulesState, None]:
        self._arriving = DeferredQueue()
        reading = start(self._read(updates, self._arriving))
        reading.addErrback(lambda _: None)
        call = cast(Call, object())  # only its identity is used
        try:
            async for state in self._calls.ServiceRules(self._given(self._arriving), call):
                if self.deaf:
                    self.deaf -= 1
                    raise Unavailable("the connection is lost")
                yield state
        finally:
            reading.cancel()

    async def _read(self, updates: AsyncIterator[messages.ServiceRulesUpdate], into: Arriving) -> None:
        async for update in updates:
            into.put(update)

    async def _given(self, arriving: Arriving) -> AsyncIterator[messages.ServiceRulesUpdate]:
        while True:
            update = await arriving.get()
            if isinstance(update, InfranetesError):
                raise update
            yield update


class VmBed(Bed):
    """The API server, a daemon, an agent and a namespace.

    :ivar services: the Services, by name. :ivar slices: their slices, by name.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.services: dict[str, Json] = {}
        self.slices: dict[str, Json] = {}
        self.server.put(NODES, NODE)

    def thd_make_network(self) -> None:
        self.space = Namespace()
        self.kernel = FaultyKernel(reactor, self.space.name)

    def thd_remove_network(self) -> None:
        self.space.end()

    def start(self) -> None:
        """Start the agent and the daemon."""
        self.agent = FaultyAgent(ServiceProxy(self.kernel))
        self._start_daemon()

    def _start_daemon(self) -> None:
        self.cluster = ClusterServices(reactor, ApiServer(reactor, self.kubeconfig), "here")
        self.cluster.startService()
        self.sender = self.cluster.sender(self.agent)
        self.sender.start()

    def stop(self) -> None:
        self.sender.stop()
        self.cluster.stopService()

    def restart_daemon(self) -> None:
        self.stop()
        self._start_daemon()

    def restart_agent(self) -> None:
        self.agent.break_off()
        self.agent.use(ServiceProxy(self.kernel))

    # What users do in the cluster

    def put(self, name: str, number: int, endpoints: tuple[int, ...], **spec: object) -> None:
        """Create or change the Service 10.96.0.NUMBER, with the endpoints 10.1.0.EACH."""
        self.services[name] = written.service(name, (f"10.96.0.{number}",), **spec)
        given = [written.endpoint(f"10.1.0.{each}") for each in endpoints]
        self.slices[name] = written.endpoint_slice(*given, service=name)
        self.server.put(SERVICES, self.services[name])
        self.server.put(SLICES, self.slices[name])

    def remove(self, name: str) -> None:
        if name in self.services:
            self.server.remove(SERVICES, self.services.pop(name))
            self.server.remove(SLICES, self.slices.pop(name))

    def restore(self, lost: frozenset[str]) -> None:
        """Give the cluster another history without these Services, as after a restore from a backup."""
        self.server.forget(bumped=True)
        for name in lost & self.services.keys():
            del self.services[name], self.slices[name]
        self.server.put(NODES, NODE)
        for name, item in self.services.items():
            self.server.put(SERVICES, item)
            self.server.put(SLICES, self.slices[name])

    # What the result should be

    def expected(self) -> dict[str, set[str]]:
        """Return the endpoints by address and port."""
        table = RuleTable(OwnNode("here"))
        services = [found for each in self.services.values() if (found := service(each))]
        slices = [its for each in self.slices.values() if (its := endpoint_slice(each))]
        table.replace(services, slices)
        return {f"{key.address}:{key.port}": _endpoints(rule) for key, rule in table.rules.items()}

    async def in_kernel(self) -> dict[str, set[str]]:
        """Return the endpoints that are in the kernel."""
        try:
            found = await Kernel(reactor, self.space.name).read(4)
        except Unavailable:  # the table has only just been made
            found = None
        if found is None:
            return {}
        return {
            f"{key.address}:{key.port}": {f"{address}:{port}" for address, port in its.numbered.values()}
            for key, its in found.placements.items()
        }

    def told(self) -> bool:
        """Return whether the VM has confirmed that it has everything."""
        return self.cluster.table.complete and self.sender.number == self.cluster.table.number


def _endpoints(rule: Rule) -> set[str]:
    return {f"{address}:{port}" for address, port in rule.endpoints}


class Lasting:
    """A connection through a Service that must not be cut. Its methods block."""

    def __init__(self, space: Namespace, address: str, endpoint: str) -> None:
        listening = space.inside(lambda: socket.create_server((endpoint, 8080)))
        with listening:
            self._client = space.inside(lambda: socket.create_connection((address, 80), 20))
            self._server, _ = listening.accept()
        self._server.settimeout(20)

    def thd_check(self) -> None:
        """:raise OSError: the connection does not work any more."""
        for one, other in ((self._client, self._server), (self._server, self._client)):
            one.sendall(b"?")
            if other.recv(1) != b"?":
                raise OSError("the connection was closed")

    def end(self) -> None:
        self._client.close()
        self._server.close()
