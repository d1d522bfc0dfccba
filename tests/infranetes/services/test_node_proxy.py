# SPDX-License-Identifier: Apache-2.0
"""The node's own tables for VMs that know nothing of Kubernetes follow the rules, over daemons."""

from __future__ import annotations

import secrets
import subprocess

from twisted.trial.unittest import TestCase

from infranetes.services.messages import Batches
from infranetes.services.node_proxy import NodeProxy
from infranetes.services.objects import OwnNode, endpoint_slice, service
from infranetes.services.pace import Pace
from infranetes.services.sender import IAgent, RuleSender
from infranetes.services.table import RuleTable
from infranetes_common import nftables
from infranetes_common.concurrency import Notifier, run_in_thread
from infranetes_common.reactors import installed
from infranetes_common.wire.vmserver import ServiceKey
from tests.harness.needs import needs_netns
from tests.infranetes.services import objects as written
from tests.support.waiting import until

reactor = installed()


class Rules:
    """Rules that are changed by hand."""

    def __init__(self) -> None:
        self.table = RuleTable(OwnNode("here"))
        self._changed = Notifier()
        self._batches, self._pace = Batches(self.table), Pace(reactor)
        self.table.complete = True

    def serve(self, address: str, *endpoints: str) -> None:
        """Have a Service at an address, with these endpoints."""
        found = service(written.service(address, (address,)))
        assert found is not None
        its = endpoint_slice(written.endpoint_slice(*map(written.endpoint, endpoints), service=address))
        assert its is not None
        self.table.put_service(found)
        self.table.put_slice(its)
        self._changed.notify()

    def sender(self, agent: IAgent) -> RuleSender:
        return RuleSender(reactor, agent, self.table, self._changed, self._batches, self._pace)


@needs_netns
class NodeProxyTests(TestCase):
    def setUp(self) -> None:
        self.bridge = f"inf{secrets.token_hex(4)}"
        self.rules = Rules()
        self.addCleanup(lambda: self.proxy(None).start())

    def proxy(self, rules: Rules | None) -> NodeProxy:
        made = NodeProxy(reactor, self.bridge, rules)
        self.addCleanup(made.stop)
        return made

    def listed(self, *more: str) -> str:
        """Return the node's table; "": there is none."""
        command = ["nft", *more, "list", "table", "ip", f"infranetes-services-{self.bridge}"]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout

    async def has(self, *words: str) -> None:
        await until(lambda: all(each in self.listed() for each in words), f"{words} in the table")

    async def test_the_rules_are_in_force_and_follow_changes(self) -> None:
        self.rules.serve("10.96.0.10", "10.1.0.1")
        proxy = self.proxy(self.rules)
        await proxy.start()
        await self.has("10.96.0.10 . tcp . 80", "10.1.0.1 . 8080", f'iifname "{self.bridge}"')
        self.rules.serve("10.96.0.11", "10.1.0.2")
        await self.has("10.96.0.11 . tcp . 80", "10.1.0.2 . 8080", "10.1.0.1 . 8080")

    async def test_the_library_which_others_tables_can_crash_is_not_in_this_process(self) -> None:
        self.patch(nftables.Library, "thd_run", lambda *_: self.fail("by the library"))
        self.rules.serve("10.96.0.10", "10.1.0.1")
        proxy = self.proxy(self.rules)
        await proxy.start()
        await self.has("10.96.0.10 . tcp . 80")
        await proxy.stop()
        await self.proxy(None).start()
        self.assertEqual(self.listed(), "")

    async def test_it_says_what_is_in_force(self) -> None:
        self.rules.serve("10.96.0.10", "10.1.0.1")
        proxy = self.proxy(self.rules)
        assert proxy.rules is not None
        await proxy.start()
        await proxy.rules.when_told()
        self.assertTrue(proxy.rules.progress().current)
        key = ServiceKey(address=b"\x0a\x60\0\x0a", protocol=6, port=80)
        found = await proxy.service_report(key, 20.0)
        self.assertEqual((found.number, found.rules), (self.rules.table.number, 1))
        (endpoint,) = found.verdict.endpoints
        self.assertEqual((endpoint.address, endpoint.port), (b"\x0a\x01\0\x01", 8080))

    async def test_the_next_daemon_changes_only_what_differs(self) -> None:
        self.rules.serve("10.96.0.10", "10.1.0.1")
        first = self.proxy(self.rules)
        await first.start()
        await self.has("10.1.0.1 . 8080")
        await first.stop()
        await first.stop()
        before = self.listed("--terse", "-a")
        self.assertIn("chain translate", before, "it stays in force")
        later = Rules()
        later.serve("10.96.0.10", "10.1.0.3")
        await self.proxy(later).start()
        await self.has("10.1.0.3 . 8080")
        self.assertNotIn("10.1.0.1", self.listed())
        self.assertEqual(self.listed("--terse", "-a"), before)

    async def test_what_another_program_takes_away_comes_back(self) -> None:
        self.rules.serve("10.96.0.10", "10.1.0.1")
        await self.proxy(self.rules).start()
        await self.has("10.1.0.1 . 8080")
        table = f"infranetes-services-{self.bridge}"
        await run_in_thread(reactor, subprocess.check_call, ["nft", "delete", "table", "ip", table])
        await self.has("10.1.0.1 . 8080")

    async def test_without_rules_nothing_is_left(self) -> None:
        self.rules.serve("10.96.0.10", "10.1.0.1")
        first = self.proxy(self.rules)
        await first.start()
        await self.has("10.1.0.1 . 8080")
        await first.stop()
        await self.proxy(None).start()
        self.assertEqual(self.listed(), "")
