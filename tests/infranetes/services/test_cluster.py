# SPDX-License-Identifier: Apache-2.0
"""The table of the cluster's Services, while the API server fails in all usual ways."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes.kubernetes import api_server, watch
from infranetes.kubernetes.api_server import ApiServer
from infranetes.services.cluster import ClusterServices
from infranetes_common.concurrency import deferred
from infranetes_common.reactors import installed
from tests.infranetes.kubernetes.api_server import Json, SimulatedApiServer
from tests.infranetes.services import objects as written
from tests.support.waiting import until

reactor = installed()
SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
NODES = "/api/v1/nodes"
RANGES = "/apis/networking.k8s.io/v1/servicecidrs"


class ClusterCase(TestCase):
    def setUp(self) -> None:
        self.patch(watch, "FIRST_PAUSE", 0.01)
        self.patch(watch, "LONGEST_PAUSE", 0.05)
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        self.server.put(NODES, {"metadata": {"name": "here", "labels": {}}})
        self.server.put(SERVICES, written.service())
        self.server.put(SLICES, written.endpoint_slice(written.endpoint("10.1.0.1")))
        directory = Path(self.mktemp())
        directory.mkdir()
        self.token = directory / "token"
        self.token.write_text("secret\n")
        self.server.token = "secret"
        self.kubeconfig = directory / "kubeconfig"
        self.server.kubeconfig(self.kubeconfig, tokenFile="token")
        self.cluster = ClusterServices(reactor, ApiServer(reactor, self.kubeconfig), "here")
        self.addCleanup(self.cluster.stopService)

    def served(self) -> dict[str, list[str]]:
        """Return the addresses of Services, with their endpoints."""
        return {
            str(key.address): [str(target) for target, _ in rule.endpoints]
            for key, rule in self.cluster.table.rules.items()
        }

    async def see(self, **expected: list[str]) -> None:
        """Wait until these Services have these endpoints. `_10=` means 10.96.0.10."""
        wanted = {f"10.96.0{name.replace('_', '.')}": its for name, its in expected.items()}
        await until(lambda: self.served() == wanted, f"{wanted} is served")

    async def begin(self) -> None:
        self.cluster.startService()
        await self.see(_10=["10.1.0.1"])
        await until(lambda: self.cluster.table.complete, "all has been listed")

    def put_endpoints(self, *addresses: str) -> None:
        self.server.put(SLICES, written.endpoint_slice(*map(written.endpoint, addresses)))

    def watches(self, path: str = SLICES) -> list[Json]:
        return [each for each in self.server.asked if each["path"] == path]


class ClusterTests(ClusterCase):
    @deferred
    async def test_all_that_there_is_and_each_change(self) -> None:
        self.assertFalse(self.cluster.table.complete)
        await self.begin()
        self.put_endpoints("10.1.0.2", "10.1.0.3")
        await self.see(_10=["10.1.0.2", "10.1.0.3"])
        other = written.service("other", ("10.96.0.11",))
        self.server.put(SERVICES, other)
        await self.see(_10=["10.1.0.2", "10.1.0.3"], _11=[])
        self.server.remove(SERVICES, other)
        await self.see(_10=["10.1.0.2", "10.1.0.3"])

    @deferred
    async def test_when_changes_were_heard_of(self) -> None:
        await self.begin()
        number, began = self.cluster.table.number, reactor.seconds()
        self.assertIsNone(self.cluster.table.news.after(number))
        self.put_endpoints("10.1.0.2")
        await self.see(_10=["10.1.0.2"])
        heard_at = self.cluster.table.news.after(number)
        assert heard_at is not None
        self.assertTrue(began <= heard_at <= reactor.seconds())

    @deferred
    async def test_only_what_a_proxy_serves_is_asked_for(self) -> None:
        await self.begin()
        (services,), (slices,), (nodes,) = (self.watches(path) for path in (SERVICES, SLICES, NODES))
        self.assertEqual(services["fieldSelector"], "spec.clusterIP!=None")
        self.assertEqual(services["labelSelector"], "!service.kubernetes.io/service-proxy-name")
        self.assertEqual(slices["labelSelector"], "!service.kubernetes.io/headless")
        self.assertEqual(nodes["fieldSelector"], "metadata.name=here")

    @deferred
    async def test_the_addresses_that_services_may_have(self) -> None:
        cidr = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12", "fd00::/108"]}}
        self.server.put(RANGES, cidr)
        await self.begin()
        ranges = (ip_network("10.96.0.0/12"), ip_network("fd00::/108"))
        await until(lambda: self.cluster.table.ranges == ranges, "they are known")
        self.server.put(RANGES, {**cidr, "spec": {"cidrs": ["10.96.0.0/33"]}})  # invalid, and thus ignored
        await until(lambda: self.cluster.table.ranges == (), "they are known no more")
        self.server.put(RANGES, cidr)
        await until(lambda: self.cluster.table.ranges == ranges, "they are known")
        self.server.remove(RANGES, cidr)
        await until(lambda: self.cluster.table.ranges == (), "they are gone")

    @deferred
    async def test_an_api_server_that_knows_no_such_addresses(self) -> None:
        self.server.absent.add(RANGES)
        await self.begin()
        await until(lambda: len(self.watches(RANGES)) > 3, "it is asked now and then")
        self.assertEqual((self.cluster.trouble, self.cluster.table.ranges), ("", ()))
        self.put_endpoints("10.1.0.2")
        await self.see(_10=["10.1.0.2"])

    @deferred
    async def test_without_streaming_lists(self) -> None:
        self.server.streaming = False
        await self.begin()
        self.put_endpoints("10.1.0.2")
        await self.see(_10=["10.1.0.2"])

    @deferred
    async def test_a_watch_that_ends_goes_on_where_it_was(self) -> None:
        await self.begin()
        self.server.close_watches()
        self.put_endpoints("10.1.0.2")
        await self.see(_10=["10.1.0.2"])
        self.assertEqual([each.get("sendInitialEvents") for each in self.watches()], ["true", None])

    @deferred
    async def test_a_version_that_is_gone(self) -> None:
        await self.begin()
        for lose in (self.server.compact, self.server.expire):
            lose()
            self.put_endpoints("10.1.0.2")
            self.server.close_watches()
            await self.see(_10=["10.1.0.2"])
            self.put_endpoints("10.1.0.1")
            await self.see(_10=["10.1.0.1"])

    @deferred
    async def test_another_history(self) -> None:
        await self.begin()
        for number in range(5):
            self.put_endpoints(f"10.1.0.{number}")
        await self.see(_10=["10.1.0.4"])
        self.server.forget()
        self.server.put(SERVICES, written.service("new", ("10.96.0.12",)))
        await self.see(_12=[])

    @deferred
    async def test_while_it_is_away_all_stays_as_it_was(self) -> None:
        await self.begin()
        port = int(self.server.url.rpartition(":")[2])
        await self.server.stop()
        await until(lambda: all(each.trouble for each in self.cluster.followers), "it is missed")
        self.assertEqual(self.served(), {"10.96.0.10": ["10.1.0.1"]})
        self.put_endpoints("10.1.0.2")
        self.server.start(port)
        await self.see(_10=["10.1.0.2"])
        await until(lambda: not any(each.trouble for each in self.cluster.followers), "all is well")

    @deferred
    async def test_a_server_that_refuses_is_asked_again(self) -> None:
        await self.begin()
        for status in (401, 403, 404, 410, 422, 429, 500, 503):
            self.server.status = status
            self.server.close_watches()
            asked = len(self.server.asked)
            await until(lambda: len(self.server.asked) > asked + 3, "it is asked again")  # noqa: B023
            self.assertEqual(self.served(), {"10.96.0.10": ["10.1.0.1"]})
        self.server.status = 0
        self.put_endpoints("10.1.0.2")
        await self.see(_10=["10.1.0.2"])

    @deferred
    async def test_a_token_that_rotates_is_read_again(self) -> None:
        await self.begin()
        self.server.token = "other"
        self.server.close_watches()
        await until(lambda: any(each.trouble for each in self.cluster.followers), "it is refused")
        self.token.write_text("other")
        self.put_endpoints("10.1.0.2")
        await self.see(_10=["10.1.0.2"])

    @deferred
    async def test_an_object_that_can_not_be_used_is_left_out(self) -> None:
        await self.begin()
        self.server.put(SERVICES, written.service(clusterIPs=["what"]))
        await self.see()
        self.server.put(SERVICES, written.service())
        await self.see(_10=["10.1.0.1"])

    @deferred
    async def test_the_node_s_zone_decides_which_endpoints_are_near(self) -> None:
        await self.begin()
        near = [written.endpoint(f"10.1.0.{each}", zones=[f"zone-{each}"]) for each in (1, 2)]
        self.server.put(SLICES, written.endpoint_slice(*near))
        await self.see(_10=["10.1.0.1", "10.1.0.2"])
        self.server.put(
            NODES, {"metadata": {"name": "here", "labels": {"topology.kubernetes.io/zone": "zone-2"}}}
        )
        await self.see(_10=["10.1.0.2"])

    @deferred
    async def test_a_silent_server_is_asked_again(self) -> None:
        self.patch(api_server, "IDLE_SECONDS", 0.2)
        await self.begin()
        asked = len(self.server.asked)
        await until(lambda: len(self.server.asked) > asked + 3, "it is asked again")
        self.put_endpoints("10.1.0.2")
        await self.see(_10=["10.1.0.2"])
