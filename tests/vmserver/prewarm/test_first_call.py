# SPDX-License-Identifier: Apache-2.0
"""The first call is made by the way that the node's are, and gets an answer."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.support.waiting import until
from txgrpc import Call, Server, Service
from vmserver.prewarm.first_call import make_first_call

reactor = installed()


class Agent:
    """Answers Info."""

    def __init__(self) -> None:
        self.asked = 0

    async def Info(self, request: vmserver.InfoRequest, call: Call) -> vmserver.InfoResponse:
        self.asked += 1
        return vmserver.InfoResponse()


class FirstCallTests(TestCase):
    async def test_the_agent_answers_it(self) -> None:
        for by_tls in (True, False):
            agent = Agent()
            server = Server(reactor, [Service(vmserver.Agent, agent)])
            await make_first_call(reactor, server.factory, by_tls=by_tls)
            self.assertEqual(agent.asked, 1)
            await until(lambda: not server.connections, "the connection's end")  # noqa: B023
