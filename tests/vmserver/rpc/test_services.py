# SPDX-License-Identifier: Apache-2.0
"""ServiceRules: from the node's table, over the agent's TLS, into a kernel's tables and real connections."""

from __future__ import annotations

from typing import Any

from infranetes.machines.agent.client import AgentClient
from infranetes.services.messages import Batches
from infranetes.services.objects import OwnNode, endpoint_slice, service
from infranetes.services.pace import Pace
from infranetes.services.sender import RuleSender
from infranetes.services.table import RuleTable
from infranetes_common.concurrency import Notifier
from infranetes_common.reactors import installed
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.proxy import ServiceProxy
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_netns, needs_programs
from tests.infranetes.services import objects as written
from tests.infranetes_common.service_proxy.namespace import Namespace
from tests.support.waiting import until
from tests.vmserver.harness import SANDBOX
from tests.vmserver.rpc.test_agent import AgentCase
from txgrpc import Code

reactor = installed()


class ServiceRulesCase(AgentCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.space = Namespace()
        self.addCleanup(self.space.end)
        self.space.serve("10.1.0.1", 8080)
        self.use_a_new_proxy()
        self.begin_daemon()

    def use_a_new_proxy(self) -> None:
        """Restart the agent's work on the namespace with a new proxy, which has no state."""
        assert self.agent.service is not None
        self.agent.service._agent.services._proxy = ServiceProxy(Kernel(reactor, self.space.name))

    def begin_daemon(self) -> None:
        self.table = RuleTable(OwnNode("here"))
        self.table.complete = True
        self.changed = Notifier()
        client = AgentClient(SANDBOX, self.agent.channel())
        self.sender = RuleSender(
            reactor, client, self.table, self.changed, Batches(self.table), Pace(reactor)
        )
        self.sender.start()
        self.addCleanup(self.sender.stop)

    async def put(self, number: int, endpoint: str = "10.1.0.1") -> None:
        """Put the Service 10.96.0.NUMBER, and wait until the VM has it."""
        name = f"s{number}"
        read = service(written.service(name, (f"10.96.0.{number}",)))
        slices = endpoint_slice(written.endpoint_slice(written.endpoint(endpoint), service=name))
        assert read is not None and slices is not None
        self.table.put_service(read)
        self.table.put_slice(slices)
        self.changed.notify()
        await until(lambda: self.sender.number == self.table.number, "the VM has it")

    def reached(self, number: int) -> set[str]:
        return set(self.space.reached(f"10.96.0.{number}", 80))


@needs_netns
@needs_programs("busybox")
class ServiceRulesTests(ServiceRulesCase):
    async def test_what_changes_is_in_force_when_the_vm_says_so(self) -> None:
        await self.put(1)
        self.assertEqual(self.reached(1), {"10.1.0.1:8080"})
        self.space.serve("10.1.0.2", 8080)
        await self.put(1, "10.1.0.2")
        self.assertEqual(self.reached(1), {"10.1.0.2:8080"})

    async def test_another_daemon_takes_over(self) -> None:
        await self.put(1)
        self.sender.stop()
        self.begin_daemon()
        await self.put(2)
        self.assertEqual(self.reached(1), {"dropped"})  # the new proxy does not know this Service
        self.assertEqual(self.reached(2), {"10.1.0.1:8080"})

    async def test_another_agent_is_told_all(self) -> None:
        await self.put(1)
        self.use_a_new_proxy()
        for channel in self.agent.channels:
            await channel.close()
        self.sender.stop()
        self.begin_daemon()
        await self.put(1)
        self.assertEqual(self.reached(1), {"10.1.0.1:8080"})

    async def refused_update(self, code: Code, update: messages.ServiceRulesUpdate) -> str:
        async def answers() -> None:
            call = self.stub.ServiceRules(timeout=20.0)
            await call.send(update)
            async for _ in call:
                pass

        return await self.refused(code, answers())

    async def test_what_is_no_rule_is_refused(self) -> None:
        def update(**fields: Any) -> messages.ServiceRulesUpdate:  # Any: each field's
            fields.setdefault("key", messages.ServiceKey(address=b"1234", protocol=6, port=80))
            return messages.ServiceRulesUpdate(table="t", changed=[messages.ServiceRule(**fields)])

        key, endpoint = messages.ServiceKey, messages.ServiceEndpoint
        for wrong, why in (
            (update(key=key(address=b"123", protocol=6, port=80)), "4 or 16 bytes"),
            (update(key=key(address=b"1234", protocol=1, port=80)), "IP protocol 1"),
            (update(key=key(address=b"1234", protocol=6, port=65536)), "port 65536"),
            (update(endpoints=[endpoint(address=b"1" * 16, port=1)]), "family"),
            (update(endpoints=[endpoint(address=b"1234", port=0)]), "family"),
            (update(affinity_seconds=90_000), "affinity"),
            (update(source_ranges=["10.0.0.0/8 } ; flush ruleset"]), "range of addresses"),
            (update(source_ranges=["fe80::%x }\nflush ruleset"]), "range of addresses"),
            (messages.ServiceRulesUpdate(), "name its table"),
        ):
            self.assertIn(why, await self.refused_update(Code.INVALID_ARGUMENT, wrong))

    async def report(self, **fields: Any) -> messages.ServiceReportResponse:  # Any: each field's
        found: messages.ServiceReportResponse = await self.stub.ServiceReport(
            messages.ServiceReportRequest(**fields), timeout=20.0
        )
        return found

    async def test_it_says_what_is_in_force_and_what_becomes_of_an_address(self) -> None:
        self.assertEqual((await self.report()).table, "")
        await self.put(1)
        found = await self.report(key=messages.ServiceKey(address=b"\x0a\x60\0\x01", protocol=6, port=80))
        self.assertEqual((found.table, found.number, found.rules), (self.table.id, self.table.number, 1))
        self.assertEqual(found.verdict.outcome, messages.ServiceVerdict.TRANSLATED)
        (endpoint,) = found.verdict.endpoints
        self.assertEqual((endpoint.address, endpoint.port), (b"\x0a\x01\0\x01", 8080))
        self.reached(1)
        self.space.reached("10.96.0.1", 81)
        found = await self.report()
        self.assertFalse(found.HasField("verdict"))
        self.assertEqual((found.refused_packets, found.dropped_packets), (1, 0))

    async def test_a_machine_that_is_not_one_pod_s_alone_has_none(self) -> None:
        assert self.agent.service is not None
        self.agent.service._agent.services._proxy = None
        self.begin_daemon()
        await self.sender.when_told()
        self.assertIn("no service proxy", self.sender.trouble)
