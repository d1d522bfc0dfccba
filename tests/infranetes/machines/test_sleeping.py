# SPDX-License-Identifier: Apache-2.0
"""The gate before the agents of VMs that sleep, with clients and an agent over a real socket."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.trial.unittest import TestCase

from infranetes.machines import sleeping
from infranetes.machines.agent.client import connector
from infranetes.machines.interface import IAgent
from infranetes_common import errors
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver, vmserver_rpcs
from tests.support.failures import FailureAssertions
from txgrpc import Server, Service

reactor = installed()


class Agent:
    """The part of an agent that these tests call."""

    async def Info(self, request: Any, call: Any) -> Any:  # Any: generated messages
        return vmserver.InfoResponse(sandbox_id="s1")

    async def StartContainer(self, request: Any, call: Any) -> Any:
        raise NotFound(f"no container {request.id}")


def _close(agent: IAgent) -> Deferred[None]:
    return start(agent.close())


class GateTests(FailureAssertions, TestCase):
    async def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = f"{directory.name}/s"
        server = Server(reactor, [Service(vmserver.Agent, Agent())], translate_error=errors.to_grpc)
        port = await UNIXServerEndpoint(reactor, path).listen(server.factory)
        self.addCleanup(port.stopListening)
        self.addCleanup(server.drain, 0.1)
        self.gate = sleeping.SleepGate()
        self.needed: list[str] = []
        self.gate.on_need = self.needed.append
        authority: Any = None
        connect = connector(reactor, authority, gate=self.gate)
        self.agents = [connect(id, "", 0, UNIXClientEndpoint(reactor, path)) for id in ("s1", "s2")]
        for agent in self.agents:
            self.addCleanup(_close, agent)

    @property
    def agent(self) -> IAgent:
        return self.agents[0]

    async def test_calls_pass_until_it_is_closed_and_wait_then(self) -> None:
        await self.agent.info()
        self.gate.close("s1")
        waiting = start(self.agent.info())
        await self.agents[1].info()  # the other VM's pass
        self.assertNoResult(waiting)
        self.assertEqual(self.needed, [])
        self.gate.close("s1")  # again
        self.gate.open("s1")
        self.assertEqual((await waiting).sandbox_id, "s1")

    async def test_calls_that_need_it_want_it_awake_and_are_counted(self) -> None:
        for closed in (False, True):
            if closed:
                self.gate.close("s1")
            starting = start(self.agent.start("c1"))
            self.assertTrue(self.gate.in_use("s1"))
            self.gate.open("s1")
            await self.fails(NotFound, starting)
            self.assertFalse(self.gate.in_use("s1"))
        self.assertEqual(self.needed, ["s1"])
        self.assertEqual((self.gate.uses("s1"), self.gate.uses("s2")), (2, 0))

    async def test_one_that_can_not_be_woken_fails_those_that_wait_and_no_later_ones(self) -> None:
        self.gate.close("s1")
        waiting = start(self.agent.start("c1"))
        self.gate.refuse("s1", Unavailable("no memory for now"))
        self.assertIn("no memory for now", await self.fails(Unavailable, waiting))
        self.assertTrue(self.gate.is_closed("s1"))
        later = start(self.gate.connect("s1", mock.Mock(connect=lambda _: succeed(None)), mock.Mock()))
        self.assertNoResult(later)
        self.gate.open("s1")
        await later
        self.gate.refuse("s1", Unavailable("nobody waits"))

    async def test_a_call_on_its_way_is_lost_when_it_falls_asleep(self) -> None:
        await self.agent.info()
        asking = start(self.agent.info())
        self.gate.close("s1")
        await self.fails(Unavailable, asking)

    async def test_one_that_sleeps_can_be_given_up(self) -> None:
        self.gate.close("s1")
        waiting = start(self.agent.info())
        await self.agent.close()
        await self.fails(Unavailable, waiting)
        self.gate.forget("s1")

    async def test_who_has_connected_while_it_fell_asleep_is_cut_off(self) -> None:
        connected: Deferred[Any] = Deferred()
        endpoint, connection = mock.Mock(connect=lambda _: connected), mock.Mock()
        connecting = start(self.gate.connect("s1", endpoint, mock.Mock()))
        self.gate.close("s1")
        connected.callback(connection)
        await connecting
        self.assertEqual(connection.abort.call_count, 1)

    def test_another_observer_sees_those_calls_too(self) -> None:
        inner = mock.Mock(metadata=[("traceparent", "1")])
        method = mock.Mock()
        method.name = "ExecSync"
        observed = self.gate.observer("s1", lambda _: inner)(method)
        assert observed is not None
        self.assertEqual(list(observed.metadata), [("traceparent", "1")])
        observed.ended(None, ())
        inner.ended.assert_called_once_with(None, ())

    async def test_nothing_of_one_that_is_gone_is_remembered(self) -> None:
        await self.agent.info()
        with self.gate.probe("s1"):
            await self.fails(NotFound, self.agent.start("c1"))
        self.gate.close("s1")
        self.gate.open("s1")
        await self.agent.info()
        self.gate.forget("s1")
        left = [name for name, value in vars(self.gate).items() if isinstance(value, dict) and "s1" in value]
        self.assertEqual(left, [])

    def test_all_calls_that_need_it_are_the_agents(self) -> None:
        self.assertLessEqual(sleeping.NEEDS, set(vmserver_rpcs.AgentStub.__annotations__))
