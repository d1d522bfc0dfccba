# SPDX-License-Identifier: Apache-2.0
"""Services in a real VM: its kernel's rules, seen by a container's connections, and infranetes-ctl's view."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from typing import Any

from infranetes.control.cli import ask, parser, socket_of
from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.harness.durations import slow
from tests.infranetes.daemon.case import reactor
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.services import objects as written
from tests.infranetes.services.test_cluster import KUBECONFIG, NODES, RANGES, SERVICES, SLICES

# Three servers, each of which answers with its number. Packets to fd00::/64 get a route.
SERVERS = """
ip address add fd01::1/128 dev lo; ip -6 route add fd00::/64 dev lo
for n in 1 2 3; do mkdir -p /w/$n; echo $n >/w/$n/name; httpd -p 808$n -h /w/$n; done
echo ready; exec sleep 10000
"""
# With -T, busybox' wget crashes.
ASK = """
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do wget -q -O - http://{}/name || echo none; done
"""


@slow(100, "its VMs are emulated where there is no KVM")
class ServiceTests(PodCase):
    async def set_up_services(self) -> None:
        """Start a pod with three servers, and an API server without Services."""
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        self.server.put(NODES, {"metadata": {"name": "node", "labels": {}}})
        kubeconfig = self.root / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG % self.server.url)
        (self.root / "token").write_text("secret")
        self.config["kubernetes"] = {"kubeconfig": str(kubeconfig)}
        await self.start()
        self.sandbox = await self.run_pod()
        status = await self.runtime.PodSandboxStatus(
            cri.PodSandboxStatusRequest(pod_sandbox_id=self.sandbox), timeout=30.0
        )
        self.address = status.status.network.ip
        privileged = cri.LinuxContainerConfig(
            security_context=cri.LinuxContainerSecurityContext(privileged=True)
        )
        self.container = await self.run_container(self.sandbox, self.box(script=SERVERS, linux=privileged))
        await self.until(lambda: "ready" in self.lines("main"), "the servers")

    def put(self, name: str, address: str, *servers: int, **spec: Any) -> None:  # Any: JSON
        """Make or change a Service of these servers of the pod."""
        six = ":" in address
        self.server.put(SERVICES, written.service(name, (address,), **spec))
        for number in (1, 2, 3):
            endpoint = written.endpoint("fd01::1" if six else self.address, ready=number in servers)
            item = written.endpoint_slice(
                endpoint,
                service=name,
                name=f"{name}-{number}",
                ports=[written.port(8080 + number)],
                kind="IPv6" if six else "IPv4",
            )
            self.server.put(SLICES, item)

    async def trace(self, destination: str, outcome: str, endpoints: int = 0) -> Any:  # Any: JSON
        """Wait until connections have this outcome, in the VM too; return infranetes-ctl's trace."""
        arguments = ["services", self.sandbox, "--trace", destination, "--json"]
        options = parser().parse_args([*arguments, "--config", str(self.root / "infranetes.toml")])
        deadline = reactor.seconds() + 120
        while True:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                done = await ask(reactor, socket_of(options), options)
            found = json.loads(out.getvalue())
            node = found["node"]
            if done == 0 and (node["outcome"], len(node["endpoints"])) == (outcome, endpoints):
                return found
            self.assertLess(reactor.seconds(), deadline, out.getvalue())
            await self.sleep(0.2)

    async def reached(self, host: str) -> Counter[str]:
        """Return which servers answer twelve connections, and how often."""
        done = await self.execute(self.container, "sh", "-c", ASK.format(host))
        return Counter(done.stdout.decode().split())

    async def test_connections_through_services_and_what_is_said_of_them(self) -> None:
        await self.set_up_services()
        self.put("plain", "10.96.0.10", 1, 2, 3)
        found = await self.trace("10.96.0.10:80", "translated", 3)
        self.assertEqual(found["services"], ["ns/plain"])
        self.assertLess({"1"}, set(await self.reached("10.96.0.10")))

        for name, address, host in (("four", "10.96.0.11", "10.96.0.11"), ("six", "fd00::11", "[fd00::11]")):
            servers = {1, 2, 3}
            while servers:  # when the endpoint of a session goes, the session sticks to another one
                self.put(name, address, *servers, sessionAffinity="ClientIP")
                await self.trace(f"{host}:80", "translated", len(servers))
                (chosen,) = await self.reached(host)
                self.assertIn(int(chosen), servers)
                servers.remove(int(chosen))

        self.server.put(RANGES, {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}})
        await self.trace("10.96.0.99:80", "unallocated")
        await self.trace("10.96.0.10:81", "other port")
        self.assertEqual(await self.reached("10.96.0.10:81"), {"none": 12})
        found = await self.trace("10.96.0.99:80", "unallocated")
        self.assertGreaterEqual(found["vm"]["counts"]["refused_packets"], 12)
        self.assertGreaterEqual(found["vm"]["counts"]["max_flows"], 32_768)
