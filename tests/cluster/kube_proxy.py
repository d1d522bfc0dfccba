# SPDX-License-Identifier: Apache-2.0
"""A pod behind kube-proxy and a pod in a VM with our rules, both of which follow the same API server."""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.threads import blockingCallFromThread

from infranetes.kubernetes.api_server import ApiServer
from infranetes.services.cluster import ClusterServices
from infranetes.services.sender import RuleSender
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.wire import vmserver as messages
from tests.cluster.paths import PROGRAMS
from tests.cluster.service_worlds import HERE, ZONE, Json, World
from tests.cluster.ways import DROPPED, NODE, NODE6, Destination, Way
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.services import objects as written
from txgrpc import Call
from vmserver.rpc.services import ServiceCalls

SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
NODES = "/api/v1/nodes"
SERVICE_CIDRS = "/apis/networking.k8s.io/v1/servicecidrs"
PAUSE = 0.005
FOLLOW_SECONDS = 60.0  # until a change is in force, on a machine that is busy with other work
RANGES = ("10.96.0.0/16", "fd00::/112")
UNALLOCATED = ("10.96.0.99", "fd00::99")  # in these ranges, but never the address of a Service
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: it, user: me}}]
clusters: [{name: it, cluster: {server: "%s"}}]
users: [{name: me, user: {}}]
"""


class KubeProxy:
    """A kube-proxy in the node of a `Way`. `end` it."""

    def __init__(self, way: Way, server: str, directory: Path) -> None:
        assert way.node is not None
        kubeconfig = directory / "kube-proxy.kubeconfig"
        kubeconfig.write_text(KUBECONFIG % server)
        client = {
            "kubeconfig": str(kubeconfig),
            "contentType": "application/json",
            "acceptContentTypes": "application/json",
        }
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": "10.1.0.0/16,fd01::/16",
            "hostnameOverride": HERE,
            "clientConnection": {**client, "qps": 1000, "burst": 1000},
            "nftables": {"minSyncPeriod": "10ms", "syncPeriod": "30s"},
            "oomScoreAdj": 0,
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        path = directory / "kube-proxy.json"
        path.write_text(json.dumps(config))
        self.log = directory / "kube-proxy.log"
        command = ["ip", "netns", "exec", way.node.name, str(PROGRAMS / "kube-proxy"), f"--config={path}"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def check(self) -> None:
        """Check that it still runs. :raise AssertionError: it has ended."""
        if self._process.poll() is not None:
            raise AssertionError(f"kube-proxy has ended:\n{self.log.read_text(errors='replace')[-3000:]}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Agent:
    """A VM's service proxy, called in this process."""

    def __init__(self, proxy: ServiceProxy) -> None:
        self._calls = ServiceCalls(proxy)

    async def service_rules(
        self, updates: AsyncIterator[messages.ServiceRulesUpdate]
    ) -> AsyncGenerator[messages.ServiceRulesState, None]:
        call = cast(Call, object())  # it only needs to differ from other calls
        async for state in self._calls.ServiceRules(updates, call):
            yield state


class Both:
    """The two ways, and the API server that both proxies follow. Methods that block are called `thd_`."""

    def __init__(self, reactor: IReactor, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._services: dict[str, Json] = {}
        self._slices: dict[str, Json] = {}
        self._number = 0
        self._begun: list[Callable[[], None]] = []  # what to call, in the reactor's thread, to end everything
        self._processes: list[KubeProxy] = []

    async def start(self) -> None:
        """Start everything, with no Services."""
        await self.prepare()
        self.start_kube_proxy()
        self.start_own()

    async def prepare(self) -> None:
        """Start the API server, but no proxy."""
        await run_in_thread(self._reactor, self._thd_make_ways)
        self.server = SimulatedApiServer(self._reactor)
        self.server.start()
        assert self.node_way.node is not None
        self._socket = self.node_way.node.inside(_listening)
        self._port = self.server.listen_on(self._socket)
        self.server.put(NODES, _node())
        ranges = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": list(RANGES)}, "status": {}}
        self.server.put(SERVICE_CIDRS, ranges)

    def start_kube_proxy(self) -> None:
        """Start kube-proxy."""
        port = self._socket.getsockname()[1]
        self.kube_proxy = KubeProxy(self.node_way, f"http://127.0.0.1:{port}", self._directory)
        self._processes.append(self.kube_proxy)

    def start_own(self) -> None:
        """Start the daemon's part that follows Services, and an agent."""
        kubeconfig = self._directory / "kubeconfig"
        self.server.kubeconfig(kubeconfig)
        self.cluster = ClusterServices(self._reactor, ApiServer(self._reactor, kubeconfig), HERE)
        self.cluster.startService()
        self.sender = self._sender()
        self.sender.start()
        self._begun.append(self.stop_own)

    def _thd_make_ways(self) -> None:
        self.node_way, self.own_way = Way(through_node=True), Way(through_node=False)

    def _sender(self) -> RuleSender:
        proxy = ServiceProxy(Kernel(self._reactor, self.own_way.rules.name))
        return self.cluster.sender(Agent(proxy))

    def stop_own(self) -> None:
        """Stop what `start_own` has started. Idempotent."""
        self.sender.stop()
        self.cluster.stopService()

    async def end(self) -> None:
        """End everything."""
        for end in self._begun:
            end()
        closed = self._port.stopListening()
        if isinstance(closed, Deferred):
            await closed
        self._socket.close()
        await self.server.stop()
        await run_in_thread(self._reactor, self._thd_end)

    def _thd_end(self) -> None:
        for process in self._processes:
            process.end()
        self.node_way.end()
        self.own_way.end()

    # In a thread

    def thd_have(self, world: World) -> None:
        """Make these the only Services, and wait until both proxies have followed."""
        self._number += 1
        mark, endpoint = _marks(self._number)
        blockingCallFromThread(self._reactor, self.put, _with(world, mark, endpoint))
        wanted = [Destination(each["spec"]["clusterIPs"][0], "TCP", 80) for each in mark]
        expected = [f"{each['endpoints'][0]['addresses'][0]}:8080" for each in endpoint]
        for way in (self.node_way, self.own_way):
            self.thd_wait(way, wanted, expected)
            way.forget_flows()

    def thd_wait_for_ranges(self) -> None:
        """Wait until both proxies have the ranges of Services' addresses."""
        for way in (self.node_way, self.own_way):
            self.thd_wait(way, [Destination(each, "TCP", 80) for each in UNALLOCATED], [DROPPED] * 2)

    def thd_wait(
        self,
        way: Way,
        wanted: Sequence[Destination],
        expected: Sequence[str],
        seconds: float = FOLLOW_SECONDS,
    ) -> None:
        """Wait until packets end where they are expected. :raise AssertionError: not within `seconds`."""
        until = time.monotonic() + seconds
        while (found := way.reached(wanted)) != expected:
            if way.node is not None:
                self.kube_proxy.check()
            if time.monotonic() > until:
                raise AssertionError(f"{'kube-proxy' if way.node else 'a VM'} does not follow: {found}")
            time.sleep(PAUSE)

    def put(self, world: World) -> None:
        """Change the API server's objects that differ, and the marks after all others."""
        for path, items, had in (
            (SERVICES, world.services, self._services),
            (SLICES, world.slices, self._slices),
        ):
            wanted = {each["metadata"]["name"]: each for each in items}
            for name in had.keys() - wanted.keys():
                self.server.remove(path, had.pop(name))
            for name, item in wanted.items():
                if had.get(name) != item:
                    had[name] = item
                    self.server.put(path, copy.deepcopy(item))

    def thd_endpoints(self) -> Mapping[Destination, frozenset[str]]:
        """Return the endpoints that our own table has for each destination."""
        rules = blockingCallFromThread(self._reactor, lambda: self.cluster.table.rules)
        return {
            Destination(str(key.address), key.protocol, key.port): frozenset(
                f"{address}:{port}" for address, port in rule.endpoints
            )
            for key, rule in rules.items()
        }


def _with(world: World, marks: list[Json], endpoints: list[Json]) -> World:
    return World([*world.services, *marks], [*world.slices, *endpoints])


def _marks(number: int) -> tuple[list[Json], list[Json]]:
    """Return, for each family, a Service and a slice that are unique to `number`. A proxy that has them has
    all earlier changes."""
    high, low = divmod(number, 250)
    services, slices = [], []
    for family, ip, address in (
        (4, f"10.112.{high}.{low + 1}", f"10.113.{high}.{low + 1}"),
        (6, f"fd00:112::{number:x}", f"fd00:113::{number:x}"),
    ):
        name = f"mark-{family}"
        services.append(written.service(name, (ip,), ipFamilies=[f"IPv{family}"]))
        endpoint = written.endpoint(address)
        slices.append(written.endpoint_slice(endpoint, service=name, kind=f"IPv{family}"))
    return services, slices


def _node() -> Json:
    addresses = [{"type": "InternalIP", "address": each} for each in (NODE, NODE6)]
    labels = {"topology.kubernetes.io/zone": ZONE}
    return {"metadata": {"name": HERE, "labels": labels}, "status": {"addresses": addresses}}


def _listening() -> socket.socket:
    made = socket.create_server(("127.0.0.1", 0))
    made.setblocking(False)
    return made
