# SPDX-License-Identifier: Apache-2.0
"""What the daemon answers about Services, and how infranetes-ctl prints it."""

from __future__ import annotations

import argparse
import json
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.control import services as module
from infranetes.control.services import ServiceCalls
from infranetes.ctl.arguments import destination
from infranetes.ctl.cli import parser
from infranetes.ctl.render import as_json, as_text
from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.fields import Name
from infranetes.services.cluster import ClusterServices
from infranetes.services.objects import endpoint_slice, service
from infranetes.services.sender import IAgent, RuleSender
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control, vmserver
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import pod
from tests.infranetes.pods.features.test_guests import GuestCase
from tests.infranetes.services import objects as written
from tests.infranetes.services.test_sender import VM

Outcome = vmserver.ServiceVerdict


class Cluster(ClusterServices):
    """Services with the VMs of `test_sender`. :ivar vms: one for each."""

    def __init__(self, reactor: IReactor) -> None:
        super().__init__(reactor, ApiServer(reactor, Path("none")), "n")
        self.vms: list[VM] = []
        self._senders: list[RuleSender] = []
        self.table.complete = True

    def sender(self, agent: IAgent) -> RuleSender:
        self.vms.append(VM())
        self._senders.append(super().sender(self.vms[-1]))
        return self._senders[-1]

    def end(self) -> None:
        """Stop sending to the VMs."""
        for each in self._senders:
            each.stop()

    def serve(self, name: str, address: str, *endpoints: str, **spec: Any) -> None:  # Any: JSON
        """Add or change a Service."""
        read = service(written.service(name, (address,), **spec))
        slices = endpoint_slice(written.endpoint_slice(*map(written.endpoint, endpoints), service=name))
        assert read is not None and slices is not None
        self.table.put_service(read)
        self.table.put_slice(slices)
        self.changed.notify()


class AskingCase(PodsTestCase):
    """A daemon that has one Service. :ivar sandbox: the pod that is asked about."""

    sandbox: str

    def setUp(self) -> None:
        super().setUp()
        self.cluster = Cluster(cast(IReactor, self.world.clock))
        self.world.services = self.world.node_provider.services = self.cluster
        self.addCleanup(self.cluster.end)
        self.calls = ServiceCalls(self.world.clock, self.world.node.inventory, self.cluster)
        self.cluster.serve("web", "10.96.0.1", "10.1.0.1", "10.1.0.2")

    def begin_services(self, **fields: Any) -> Deferred[control.GetServicesResponse]:
        async def merged() -> control.GetServicesResponse:
            answer = control.GetServicesResponse()
            async for part in self.calls.GetServices(control.GetServicesRequest(**fields), NO_CALL):
                answer.MergeFrom(part)
            return answer

        return start(merged())

    def services(self, **fields: Any) -> control.GetServicesResponse:
        asking = self.begin_services(**fields)
        self.world.clock.pump([0.0] * 10)
        return self.successResultOf(asking)

    def trace(self, address: str, port: int = 80, **fields: Any) -> control.TraceServiceResponse:
        request = control.TraceServiceRequest(address=address, port=port, **{"pod": self.sandbox, **fields})
        answer: control.TraceServiceResponse = self.do(self.calls.TraceService(request, NO_CALL))
        return answer

    def shown(self, answer: Any, **options: Any) -> str:
        return as_text("services", answer, argparse.Namespace(**options))

    def document(self, answer: Any) -> Any:
        return json.loads(json.dumps(as_json("services", answer, argparse.Namespace())))


class ServicesTests(AskingCase):
    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.run_pod(pod("client"))
        self.answers(vmserver.ServiceReportResponse(rules=1))

    def answers(self, given: vmserver.ServiceReportResponse | Exception) -> None:
        """Set what the pod's VM answers about its Services."""
        self.asked: list[vmserver.ServiceKey | None] = []

        async def service_report(
            key: vmserver.ServiceKey | None, within: float
        ) -> vmserver.ServiceReportResponse:
            self.asked.append(key)
            if isinstance(given, Exception):
                raise given
            return given

        agent: Any = self.world.agents[self.sandbox]  # Any: stands in for AgentClient
        agent.service_report = service_report

    def test_all_rules_and_which_vms_have_them(self) -> None:
        other = self.run_pod(pod("other"))
        self.cluster.vms[1].deaf = True
        self.cluster.serve("api", "10.96.0.2", sessionAffinity="ClientIP")
        answer = self.services()
        found = {vm.sandbox_id: vm.current for vm in answer.vms}
        self.assertEqual(found, {self.sandbox: True, other: False})
        document = self.document(answer)
        self.assertEqual([rule["address"] for rule in document["rules"]], ["10.96.0.1", "10.96.0.2"])
        self.assertEqual(document["rules"][0]["endpoints"], ["10.1.0.1:8080", "10.1.0.2:8080"])
        self.assertEqual((document["rule_count"], document["vms"][1]["behind"]), (2, 1))
        self.assertEqual(self.asked, [], "VMs are asked when they are named")
        text = self.shown(answer)
        self.assertIn("default/client   current", text)
        self.assertIn("default/other    1 behind", text)
        self.assertIn("10.96.0.1:80/tcp   10.1.0.1:8080, 10.1.0.2:8080", text)
        self.assertIn("none: refused", text)
        self.assertIn("affinity 10800 s", text)

    def test_one_pod_and_one_service(self) -> None:
        self.run_pod(pod("other"))
        self.cluster.serve("api", "10.96.0.2")
        for given in (self.sandbox, self.sandbox[:10], "default/client", "client"):
            answer = self.services(pod=given, service="ns/api")
            self.assertEqual([vm.sandbox_id for vm in answer.vms], [self.sandbox])
            self.assertEqual([rule.address for rule in answer.rules], ["10.96.0.2"])

    def test_what_a_vm_says_of_itself(self) -> None:
        self.answers(vmserver.ServiceReportResponse(rules=7, refused_packets=3, flows=5, max_flows=100))
        answer = self.services(pod=self.sandbox)
        self.assertEqual(self.document(answer)["vms"][0]["counts"]["refused_packets"], 3)
        self.assertIn("7 rules; packets refused: 3, dropped: 0; 5 of 100", self.shown(answer))
        self.answers(Unavailable("it sleeps"))
        self.assertIn(
            "the VM does not say what it has: it sleeps", self.shown(self.services(pod=self.sandbox))
        )

    def test_pods_that_are_not_there(self) -> None:
        self.failureResultOf(self.begin_services(pod="default/none"), NotFound)
        sandboxes = self.world.node.inventory.sandboxes
        while len({id[0] for id in sandboxes}) == len(sandboxes):
            self.run_pod(pod(f"other-{len(sandboxes)}"))
        first = [id[0] for id in sandboxes]
        (twice, *_) = [letter for letter in first if first.count(letter) > 1]
        self.failureResultOf(self.begin_services(pod=twice), InvalidArgument)

    def test_where_no_vm_is_told_of_services(self) -> None:
        self.calls = ServiceCalls(self.world.clock, self.world.node.inventory, None)
        answer = self.services()
        self.assertFalse(answer.enabled)
        self.assertIn("no VM is told of Services", self.shown(answer))
        request = control.TraceServiceRequest(address="10.96.0.1", port=80, pod=self.sandbox)
        self.failureResultOf(start(self.calls.TraceService(request, NO_CALL)), FailedPrecondition)

    def test_many_rules_come_in_parts(self) -> None:
        self.patch(module, "PART", 3)
        for number in range(2, 9):
            self.cluster.serve(f"s{number}", f"10.96.0.{number}")
        asking = self.begin_services()
        self.assertNoResult(asking)
        self.world.clock.pump([0.0] * 10)
        self.assertEqual(len(self.successResultOf(asking).rules), 8)

    # What happens to connections to an address

    def says(self, outcome: int, *endpoints: str, affinity: int = 0) -> None:
        """Have the VM report this outcome for every address."""
        its = [vmserver.ServiceEndpoint(address=ip_address(each).packed, port=8080) for each in endpoints]
        verdict = vmserver.ServiceVerdict(
            outcome=cast(Any, outcome),  # Any: the enum's type has only a name for mypy
            endpoints=its,
            endpoint_count=len(its),
            affinity_seconds=affinity,
        )
        self.answers(vmserver.ServiceReportResponse(verdict=verdict))

    def test_a_service_s_address(self) -> None:
        self.says(Outcome.TRANSLATED, "10.1.0.2", "10.1.0.1")
        answer = self.trace("10.96.0.1")
        (asked,) = self.asked
        assert asked is not None
        self.assertEqual((asked.address, asked.protocol, asked.port), (b"\x0a\x60\0\x01", 6, 80))
        self.assertEqual((list(answer.services), answer.node.outcome), (["ns/web"], "translated"))
        self.assertTrue(self.document(answer)["same"])
        text = self.shown(answer, trace=destination("10.96.0.1:80"))
        self.assertIn("10.96.0.1:80/tcp is ns/web's", text)
        self.assertIn("spread evenly: 10.1.0.1:8080, 10.1.0.2:8080", text)
        self.assertIn("the same is in force", text)

    def test_a_vm_that_has_something_else(self) -> None:
        self.cluster.vms[0].deaf = True
        self.cluster.serve("web", "10.96.0.1", "10.1.0.3")
        self.says(Outcome.TRANSLATED, "10.1.0.1", affinity=9)
        answer = self.trace("10.96.0.1")
        self.assertFalse(self.document(answer)["same"])
        text = self.shown(answer, trace=destination("10.96.0.1:80"))
        self.assertIn("spread evenly: 10.1.0.3:8080", text)
        self.assertIn("in the VM: sent to one of these, for 9 s the same: 10.1.0.1:8080", text)
        self.assertIn("the VM's rules: 1 behind", text)

    def test_a_vm_that_says_nothing(self) -> None:
        self.answers(Unavailable("it sleeps"))
        answer = self.trace("10.96.0.1")
        self.assertIsNone(self.document(answer)["in_vm"])
        self.assertIn("not known: it sleeps", self.shown(answer, trace=destination("10.96.0.1:80")))

    def test_what_else_may_become_of_connections(self) -> None:
        self.cluster.serve("none", "10.96.0.2")
        self.cluster.serve("local", "10.96.0.3", "10.1.0.1", internalTrafficPolicy="Local")
        self.cluster.serve("outside", "10.96.0.4", "10.1.0.1", loadBalancerSourceRanges=["192.0.2.0/24"])
        item = written.service("outside", ("10.96.0.4",), loadBalancerSourceRanges=["192.0.2.0/24"])
        item["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.5"}]}}
        read = service(item)
        assert read is not None
        self.cluster.table.put_service(read)
        self.cluster.table.put_ranges(Name("", "kubernetes"), (ip_network("10.96.0.0/12"),))
        for address, port, outcome, why in (
            ("10.96.0.2", 80, "refused", "no endpoint"),
            ("10.96.0.3", 80, "dropped", "internalTrafficPolicy"),
            ("203.0.113.5", 80, "dropped", "192.0.2.0/24"),
            ("10.96.0.1", 81, "other port", "80/tcp"),
            ("10.96.0.9", 80, "unallocated", "10.96.0.0/12"),
            ("192.0.2.1", 80, "untouched", "no Service's"),
        ):
            answer = self.trace(address, port)
            self.assertEqual(answer.node.outcome, outcome)
            self.assertIn(why, self.shown(answer, trace=destination(f"{address}:{port}")))

    def test_a_vm_may_say_anything(self) -> None:
        verdict = vmserver.ServiceVerdict(endpoints=[vmserver.ServiceEndpoint(address=b"12345")])
        verdict.MergeFromString(b"\x08\x63")  # an outcome of a later release
        self.answers(vmserver.ServiceReportResponse(verdict=verdict))
        answer = self.trace("10.96.0.1")
        self.assertEqual((answer.in_vm.outcome, list(answer.in_vm.endpoints)), ("unknown", []))

    def test_what_can_not_be_traced(self) -> None:
        for address, port, protocol, which in (
            ("web", 80, "tcp", self.sandbox),
            ("10.96.0.1", 0, "tcp", self.sandbox),
            ("10.96.0.1", 70000, "tcp", self.sandbox),
            ("10.96.0.1", 80, "icmp", self.sandbox),
            ("10.96.0.1", 80, "tcp", ""),
        ):
            request = control.TraceServiceRequest(pod=which, address=address, port=port, protocol=protocol)
            self.failureResultOf(start(self.calls.TraceService(request, NO_CALL)), InvalidArgument)


class NodeTables:
    """The node's own service proxy. :ivar answer: its report."""

    def __init__(self, rules: RuleSender) -> None:
        self.rules = rules
        self.answer = vmserver.ServiceReportResponse(rules=4, refused_packets=3)

    async def service_report(
        self, key: vmserver.ServiceKey | None, seconds: float
    ) -> vmserver.ServiceReportResponse:
        return self.answer


class GuestTests(AskingCase, GuestCase):
    """A guest without our agent, for which the node translates."""

    def setUp(self) -> None:
        super().setUp()
        rules = self.cluster.sender(cast(IAgent, None))
        rules.start()
        self.tables = self.world.node_provider.node_services = NodeTables(rules)
        self.sandbox, _ = self.running()

    def test_what_the_node_translates_for_it_is_shown_in_its_place(self) -> None:
        answer = self.services(pod=self.sandbox)
        (vm,) = self.document(answer)["vms"]
        self.assertEqual((vm["told"], vm["by_node"], vm["current"]), (True, True, True))
        self.assertEqual((vm["trouble"], vm["counts"]["rules"]), ("", 4))
        text = self.shown(answer)
        self.assertIn("current on the node", text)
        self.assertIn("on the node, for all VMs on its bridge: 4 rules; packets refused: 3", text)

    def test_the_node_has_no_sender_for_each(self) -> None:
        self.run_pod(pod("other"))
        self.assertEqual(len(self.cluster.vms), 1)

    def test_an_address_is_traced_on_the_node(self) -> None:
        its = [vmserver.ServiceEndpoint(address=ip_address("10.1.0.2").packed, port=8080)]
        self.tables.answer.verdict.CopyFrom(
            vmserver.ServiceVerdict(outcome=Outcome.TRANSLATED, endpoints=its, endpoint_count=1)
        )
        text = self.shown(self.trace("10.96.0.1"), trace=destination("10.96.0.1:80"))
        self.assertIn("spread evenly: 10.1.0.1:8080, 10.1.0.2:8080", text)
        self.assertIn("on the node, for all VMs on its bridge: spread evenly: 10.1.0.2:8080", text)

    def test_the_node_knows_no_pod_s_address_when_it_compares_source_ranges(self) -> None:
        item = written.service("web", ("10.96.0.1",), loadBalancerSourceRanges=["10.0.0.0/8"])
        item["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.5"}]}}
        read = service(item)
        assert read is not None
        self.cluster.table.put_service(read)
        self.tables.answer.verdict.outcome = Outcome.DROPPED
        answer = self.trace("203.0.113.5")
        self.assertEqual(answer.node.outcome, "dropped")
        self.assertTrue(self.document(answer)["same"])

    def test_without_that_it_is_said_that_it_has_none(self) -> None:
        self.world.node_provider.node_services = None
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.sandbox = self.run_pod(pod("other"))
        self.successResultOf(self.create(self.sandbox))
        (vm,) = self.services(pod=self.sandbox).vms
        self.assertEqual((vm.told, vm.by_node), (False, False))
        self.assertIn("no agent of ours", vm.trouble)
        request = control.TraceServiceRequest(address="10.96.0.1", port=80, pod=self.sandbox)
        self.failureResultOf(start(self.calls.TraceService(request, NO_CALL)), FailedPrecondition)


class CommandLineTests(SynchronousTestCase):
    def test_destinations(self) -> None:
        for text, address, port, protocol in (
            ("10.96.0.10:53/udp", "10.96.0.10", 53, "udp"),
            ("10.96.0.1:443", "10.96.0.1", 443, "tcp"),
            ("[FD00::0a]:80/sctp", "fd00::a", 80, "sctp"),
        ):
            found = destination(text)
            self.assertEqual((found.address, found.port, found.protocol), (address, port, protocol))
        for text in (
            "10.96.0.1",
            "10.96.0.1:0",
            "10.96.0.1:99999",
            "10.96:1",
            "fd00::a:80",
            "[fd00::x]:1",
            "web:80",
        ):
            self.assertRaises(argparse.ArgumentTypeError, destination, text)

    def test_the_pod_may_be_left_out(self) -> None:
        options = parser().parse_args(["services", "--service", "kube-system/kube-dns"])
        self.assertEqual((options.pod, options.service, options.trace), ("", "kube-system/kube-dns", None))
