# SPDX-License-Identifier: Apache-2.0
"""The firewalls of local pods, while the cluster changes and the API server fails in all usual ways."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.kubernetes import cluster as kubernetes_cluster
from infranetes.kubernetes import watch
from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.kept import KeptObjects
from infranetes.policies import cluster
from infranetes.policies.cluster import ClusterPolicies
from infranetes.policies.interface import LocalPod, PodPolicies
from infranetes_common.concurrency import deferred
from infranetes_common.pod_firewall import OPEN
from infranetes_common.reactors import installed
from tests.infranetes.kubernetes.api_server import Json, SimulatedApiServer
from tests.infranetes.policies.naive import Packet, passes
from tests.infranetes.policies.objects import labelled, namespace, pod, pods, policy
from tests.support.waiting import until

reactor = installed()
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
NAMESPACES = "/api/v1/namespaces"
PODS = "/api/v1/pods"

WEB = LocalPod("sandbox-1", "ns", "web", "web", {"app": "web"})
CLIENTS = policy(selector=labelled(app="web"), ingress=[{"from": [pods(app="client")]}])


class ClusterTests(TestCase):
    def setUp(self) -> None:
        self.patch(watch, "FIRST_PAUSE", 0.01)
        self.patch(watch, "LONGEST_PAUSE", 0.05)
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        self.server.put(NAMESPACES, namespace("ns"))
        self.server.put(PODS, self.client("10.0.0.2"))
        self.server.put(POLICIES, CLIENTS)
        self.kubeconfig = Path(self.mktemp())
        self.server.kubeconfig(self.kubeconfig)
        self.kept = Path(self.mktemp()) / "policies.json"
        self.renew()

    def renew(self) -> None:
        """Begin anew, as a daemon that is started again."""
        kept = KeptObjects(reactor, self.kept)
        self.policies = ClusterPolicies(reactor, ApiServer(reactor, self.kubeconfig), kept)
        self.told: list[frozenset[str]] = []
        self.policies.subscribe(self.told.append)

    def client(self, address: str) -> Json:
        return pod("client", address, labels={"app": "client"})

    def start(self) -> None:
        self.policies.startService()
        self.addCleanup(self.policies.stopService)

    def received(self) -> list[int]:
        """Return the last bytes of the addresses that may connect to the local pod."""
        found = self.policies.firewall(WEB.id)
        if found is None:
            return []
        return [each for each in range(6) if passes(found.ingress, Packet(f"10.0.0.{each}", "TCP", 80))]

    async def see(self, *expected: int) -> None:
        await until(lambda: self.received() == [*expected], f"{expected} may connect")

    @deferred
    async def test_a_local_pod_has_a_firewall_and_each_change_is_told(self) -> None:
        offered: PodPolicies = self.policies
        self.start()
        offered.add(WEB)
        await self.see(2)
        self.assertEqual(self.told, [{WEB.id}])
        self.server.put(PODS, self.client("10.0.0.3"))
        await self.see(3)
        self.server.remove(POLICIES, CLIENTS)
        await until(lambda: offered.firewall(WEB.id) == OPEN, "it is open")
        self.assertEqual(self.told, [{WEB.id}] * 3)
        for _ in range(2):
            offered.remove(WEB.id)
            self.assertIsNone(offered.firewall(WEB.id))
            self.assertEqual(self.policies.selecting(WEB.id), [])
        await until(lambda: not self.policies._model._local, "it is computed no more")
        self.assertEqual(self.policies._present, set())

    @deferred
    async def test_nothing_is_known_until_all_is_listed(self) -> None:
        self.server.status = 403
        self.policies.add(WEB)
        self.start()
        await until(lambda: self.policies.trouble.count("/"), "it is refused")
        self.assertIn("403", self.policies.trouble)
        self.assertIsNone(self.policies.firewall(WEB.id))
        self.server.status = 0
        await self.see(2)
        await until(lambda: not self.policies.trouble, "all is well")

    @deferred
    async def test_without_rights_to_one_kind_nothing_is_known(self) -> None:
        self.server.refused.add(PODS)
        self.policies.add(WEB)
        self.start()
        await until(lambda: self.policies.trouble, "it is refused")
        await until(lambda: len(self.server.asked) > 10, "it is asked again")
        self.assertIsNone(self.policies.firewall(WEB.id))
        self.assertTrue(self.policies.trouble.startswith(f"{PODS}: "))
        self.assertEqual(self.told, [])
        self.server.refused.clear()
        await self.see(2)

    @deferred
    async def test_a_kubeconfig_that_can_not_be_used_is_one_trouble(self) -> None:
        content = self.kubeconfig.read_text()
        self.kubeconfig.write_text(
            content.replace('{"server":', '{"insecure-skip-tls-verify": true, "server":')
        )
        self.renew()
        self.start()
        await until(lambda: self.policies.trouble.count("/") > 2, "it is refused")
        (found,) = kubernetes_cluster.troubles([self.policies])
        self.assertIn("networkpolicies, namespaces, pods of Kubernetes can't be followed: ", found)
        self.assertIn("insecure-skip-tls-verify", found)

    @deferred
    async def test_that_pods_are_closed_is_said_with_the_reason(self) -> None:
        said: list[str] = []
        self.patch(cluster, "PATIENCE_SECONDS", 0.2)
        self.patch(cluster._log, "warn", lambda text, **fields: said.append(text.format(**fields)))
        self.server.refused.add(POLICIES)
        self.start()
        await until(lambda: said, "it is said")
        self.assertIn("no connection of a new pod is allowed", said[0])

    @deferred
    async def test_while_the_server_is_away_all_stays_as_it_was(self) -> None:
        self.policies.add(WEB)
        self.start()
        await self.see(2)
        port = int(self.server.url.rpartition(":")[2])
        await self.server.stop()
        await until(lambda: self.policies.trouble, "it is missed")
        other = LocalPod("sandbox-2", "ns", "other", "other", {})
        self.policies.add(other)
        await until(lambda: self.policies.firewall(other.id) == OPEN, "what is known serves new pods")
        self.assertEqual(self.received(), [2])
        self.server.put(PODS, self.client("10.0.0.4"))
        self.server.start(port)
        await self.see(4)

    async def keep(self) -> int:
        """Have what there is kept, and the server stopped. Return its port."""
        self.patch(kubernetes_cluster, "SAVE_SECONDS", 0.05)
        self.start()
        self.policies.add(WEB)
        await self.see(2)
        await until(self.kept.exists, "it is kept")
        self.policies.stopService()
        port = int(self.server.url.rpartition(":")[2])
        await self.server.stop()
        return port

    @deferred
    async def test_a_daemon_that_starts_while_the_server_is_away_knows_what_was(self) -> None:
        self.patch(kubernetes_cluster, "RECALL_SECONDS", 0.05)
        port = await self.keep()
        self.assertEqual(self.kept.stat().st_mode & 0o077, 0)
        os.utime(self.kept, (0, time.time() - 3600))
        self.renew()
        self.start()
        self.policies.add(WEB)
        await self.see(2)
        for each in self.policies.followed:
            self.assertEqual(round((each.heard_seconds or 0) / 600), 6, each.path)
        await until(lambda: self.policies.trouble, "it is missed")
        content = self.kept.read_bytes()
        self.server.put(PODS, self.client("10.0.0.4"))
        self.server.start(port)
        await self.see(4)
        await until(lambda: self.kept.read_bytes() != content, "the present is kept")

    @deferred
    async def test_a_kubeconfig_that_is_written_after_the_start_is_kept_from_all_the_same(self) -> None:
        self.patch(kubernetes_cluster, "SAVE_SECONDS", 0.05)
        self.patch(kubernetes_cluster, "RECALL_SECONDS", 0.0)
        self.kubeconfig.unlink()
        self.start()
        self.policies.add(WEB)
        await until(lambda: self.policies.trouble, "it is missed")
        self.server.kubeconfig(self.kubeconfig)
        await self.see(2)
        await until(self.kept.exists, "it is kept")

    @deferred
    async def test_a_server_that_answers_is_believed_and_not_what_was(self) -> None:
        self.patch(kubernetes_cluster, "RECALL_SECONDS", 0.05)
        port = await self.keep()
        self.server.put(PODS, self.client("10.0.0.4"))
        self.server.start(port)
        self.patch(kubernetes_cluster, "RECALL_SECONDS", 0.3)
        self.renew()
        seen: list[list[int]] = []
        self.policies.subscribe(lambda _: seen.append(self.received()))
        self.start()
        self.policies.add(WEB)
        await self.see(4)
        before = self.kept.stat().st_mtime_ns
        await until(lambda: self.kept.stat().st_mtime_ns > before, "it is kept, after it could be recalled")
        self.assertEqual(seen, [[4]])

    @deferred
    async def test_what_is_another_clusters_or_damaged_is_not_used(self) -> None:
        self.patch(kubernetes_cluster, "RECALL_SECONDS", 0.0)
        port = await self.keep()
        content = self.kept.read_text()
        damaged = (content.replace('"cluster": "', '"cluster": "0'), content[:-9], "", "[]\n", "\xff{}\n")
        for text in (*damaged, content.replace('"format": 1', '"format": 2')):
            self.kept.write_text(text)
            self.assertIsNone(
                await KeptObjects(reactor, self.kept).load(await self.policies._server.cluster())
            )
        self.renew()
        self.start()
        self.policies.add(WEB)
        await until(lambda: self.policies.trouble, "it is missed")
        self.assertFalse(self.policies.complete)
        self.server.start(port)
        await self.see(2)

    @deferred
    async def test_only_pods_that_run_are_asked_for(self) -> None:
        self.start()
        await until(lambda: self.policies.complete, "all is listed")
        (asked,) = [each for each in self.server.asked if each["path"] == PODS]
        self.assertEqual(asked["fieldSelector"], "status.phase!=Succeeded,status.phase!=Failed")

    @deferred
    async def test_without_streaming_lists_all_comes_in_pages(self) -> None:
        self.patch(watch, "PAGE", 2)
        self.server.streaming = False
        for number in (3, 4, 5):
            self.server.put(PODS, pod(f"c{number}", f"10.0.0.{number}", labels={"app": "client"}))
        self.policies.add(WEB)
        self.start()
        await self.see(2, 3, 4, 5)
        pages = [each for each in self.server.asked if each["path"] == PODS and "limit" in each]
        self.assertEqual(["resourceVersion" in each for each in pages], [True, False])
        self.server.remove(PODS, pod("c3"))
        await self.see(2, 4, 5)

    @deferred
    async def test_without_pages_either_all_comes_at_once(self) -> None:
        self.patch(watch, "PAGE", 1)
        self.server.streaming = self.server.paging = False
        self.server.put(PODS, pod("c3", "10.0.0.3", labels={"app": "client"}))
        self.policies.add(WEB)
        self.start()
        await self.see(2, 3)

    @deferred
    async def test_what_fails_by_a_bug_is_logged_and_the_rest_goes_on(self) -> None:
        self.policies.add(WEB)
        self.start()
        await self.see(2)
        self.patch(self.policies._model, "put_namespace", lambda name, labels: 1 / 0)
        self.server.put(NAMESPACES, namespace("new"))
        self.server.put(PODS, self.client("10.0.0.3"))
        await self.see(3)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class RestTests(SynchronousTestCase):
    """The reactor gets its turns in a large cluster that changes all the time."""

    def setUp(self) -> None:
        self.clock = Clock()
        server: Any = SilentServer()  # Any: of an ApiServer it has what is used
        reactor: Any = self.clock  # Any: of a reactor it has what is used
        self.policies = ClusterPolicies(reactor, server)
        for kind in self.policies._kinds:
            kind.listed = True
        self.settled: list[float] = []
        self.patch(self.policies._model, "settle", self.settle)
        self.policies.startService()
        self.addCleanup(self.policies.stopService)

    def settle(self, changed: set[str]) -> Iterator[None]:
        """Let half a second pass."""
        self.settled.append(self.clock.seconds())
        self.policies._model._marked.clear()
        yield
        self.clock.rightNow += 0.5

    def come(self, id: str) -> None:
        self.policies.add(LocalPod(id, "ns", id, id, {}))

    def test_after_it_was_settled_long_there_is_a_rest(self) -> None:
        self.come("a")
        self.clock.pump([0] * 5)
        for id in "bcd":
            self.come(id)
            self.clock.pump([0] * 5)
        self.clock.pump([0.25] * 12)
        self.assertEqual(self.settled, [0.0, 2.0])

    def test_after_a_pause_it_is_settled_at_once(self) -> None:
        self.come("a")
        self.clock.pump([0] * 5)
        self.clock.advance(10)
        self.come("b")
        self.clock.pump([0] * 5)
        self.assertEqual(self.settled, [0.0, 10.5])


class SilentServer:
    """An API server that never answers."""

    async def lines(self, path: str, query: Mapping[str, str], take: Callable[[bytes], None]) -> None:
        await Deferred()
