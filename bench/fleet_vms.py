# SPDX-License-Identifier: Apache-2.0
"""The other side of the bench `fleet`: the API server and the VMs of one node, in a process of their own.

The first connections are VMs with a service proxy and a network namespace each: a change counts once nft has
put it in force there. The others take what they are sent, and acknowledge it. The process reads which
Services to change from lines of its standard input, and answers with lines of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.ssl import (
    Certificate,
    CertificateOptions,
    PrivateCertificate,
    TLSVersion,
    trustRootFromCertificates,
)
from twisted.internet.stdio import StandardIO
from twisted.internet.task import react
from twisted.protocols.basic import LineReceiver

from bench.figures import percentile
from infranetes.identity.authority import Authority
from infranetes_common.concurrency import sleep, start
from infranetes_common.reactors import IReactor
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.messages import as_update
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.wire import vmserver
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.services import objects as written
from tests.infranetes_common.service_proxy.namespace import Namespace
from txgrpc import Call, Server, Service

SANDBOX = "fleet"
ENDPOINTS = 5
SERVICES, SLICES = "/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"
PATIENCE = 60.0  # seconds after which changes that have not arrived are given up


class Fleet:
    """The VMs' agents.

    :ivar changed: when each Service was changed, by its address.
    :ivar real, simulated: for each VM, the seconds from a change until it was in force there.
    """

    def __init__(self, reactor: IReactor, spaces: list[Namespace]) -> None:
        self._proxies = [ServiceProxy(Kernel(reactor, space.name)) for space in spaces]
        self.vms = 0
        self.changed: dict[bytes, float] = {}
        self.real: list[float] = []
        self.simulated: list[float] = []

    async def ServiceRules(
        self, requests: AsyncIterator[vmserver.ServiceRulesUpdate], call: Call
    ) -> AsyncIterator[vmserver.ServiceRulesState]:
        proxy = self._proxies[self.vms] if self.vms < len(self._proxies) else None
        self.vms += 1
        yield vmserver.ServiceRulesState()
        async for request in requests:
            if proxy is not None:
                await proxy.apply(as_update(request))
            if not request.all:
                self._note(request, self.simulated if proxy is None else self.real)
            if not request.more:
                yield vmserver.ServiceRulesState(table=request.table, number=request.number)

    def _note(self, update: vmserver.ServiceRulesUpdate, seconds: list[float]) -> None:
        now = time.monotonic()
        seconds += [now - at for rule in update.changed if (at := self.changed.get(rule.key.address))]


class Cluster:
    """What changes in the cluster."""

    def __init__(self, reactor: IReactor, services: int) -> None:
        self._reactor = reactor
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.server.put("/api/v1/nodes", {"metadata": {"name": "here", "labels": {}}})
        for number in range(services):
            its = written.service(f"s{number}", (str(address(number)),), ipFamilies=["IPv4"])
            self.server.put(SERVICES, its)
            self._put_slice(number, 0)

    def _put_slice(self, number: int, shift: int) -> None:
        first = IPv4Address("10.2.0.0") + number * 16 + shift
        endpoints = [written.endpoint(str(first + each)) for each in range(ENDPOINTS)]
        self.server.put(SLICES, written.endpoint_slice(*endpoints, service=f"s{number}"))

    async def change(self, fleet: Fleet, first: int, count: int, every: float) -> dict[str, int]:
        """Change Services and wait until all VMs have that. Return percentiles in ms, and the number lost."""
        fleet.changed, fleet.real, fleet.simulated = {}, [], []
        began = self._reactor.seconds()
        for number in range(first, first + count):
            fleet.changed[address(number).packed] = time.monotonic()
            self._put_slice(number, 1)
            await sleep(
                self._reactor, max(0.0, began + (number + 1 - first) * every - self._reactor.seconds())
            )
        until = self._reactor.seconds() + PATIENCE
        while len(fleet.real) + len(fleet.simulated) < count * fleet.vms and self._reactor.seconds() < until:
            await sleep(self._reactor, 0.05)
        lost = count * fleet.vms - len(fleet.real) - len(fleet.simulated)
        figures = {"lost": lost}
        for name, seconds in (("real", fleet.real), ("all", fleet.real + fleet.simulated)):
            for percent in (50, 99):
                figures[f"{name} {percent}"] = round(percentile(seconds, percent) * 1000) if seconds else 0
        return figures


def address(number: int) -> IPv4Address:
    """Return the address of a Service."""
    return IPv4Address("10.96.0.1") + number


class Orders(LineReceiver):
    """Orders, one a line: the first Service's number, how many to change, and the seconds between two."""

    delimiter = b"\n"

    def __init__(self, cluster: Cluster, fleet: Fleet, over: Deferred[None]) -> None:
        self._cluster, self._fleet, self._over = cluster, fleet, over

    def lineReceived(self, line: bytes) -> None:
        first, count, every = line.split()
        changing = start(self._cluster.change(self._fleet, int(first), int(count), float(every)))
        changing.addCallback(say)

    def connectionLost(self, reason: object = None) -> None:
        self._over.callback(None)


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def run(reactor: Any, directory: Path, services: int, real: int) -> None:
    # Any: reactors have no interface for TLS of which the types are right
    """:param directory: where the node's CA is. :param real: how many VMs have a network namespace."""
    certificate, key = Authority(directory).issue_vm(SANDBOX, 86_400)
    own = PrivateCertificate.loadPEM(key + certificate)
    options = CertificateOptions(
        privateKey=own.privateKey.original,
        certificate=own.original,
        trustRoot=trustRootFromCertificates([Certificate.loadPEM(Authority(directory).ca_pem.encode())]),
        raiseMinimumTo=TLSVersion.TLSv1_3,
        acceptableProtocols=[b"h2"],
    )
    spaces = [Namespace() for _ in range(real)]
    try:
        cluster, fleet = Cluster(reactor, services), Fleet(reactor, spaces)
        gc.collect()  # as an agent does; an API server does not have such pauses
        gc.freeze()
        server = Server(reactor, [Service(vmserver.Agent, fleet)])
        port = reactor.listenSSL(0, server.factory, options, backlog=2000, interface="127.0.0.1")
        say({"api": cluster.server.url, "port": port.getHost().port})
        over: Deferred[None] = Deferred()
        StandardIO(Orders(cluster, fleet, over))
        await over
    finally:
        for space in spaces:
            space.end()


if __name__ == "__main__":
    path, how_many, with_kernel = sys.argv[1:]
    react(lambda reactor: start(run(reactor, Path(path), int(how_many), int(with_kernel))))
