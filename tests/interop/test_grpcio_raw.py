# SPDX-License-Identifier: Apache-2.0
"""grpcio's client calls grpcio's server through a proxy of ours that parses nothing."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet import reactor
from twisted.trial import unittest

from tests.txgrpc.proxy import Proxy
from tests.txgrpc.support import Child, socket_path
from txgrpc import Code

PEER = "tests.interop.grpcio_peer"


class GrpcioRawTests(unittest.TestCase):
    """What grpcio sees of grpcio behind ours is what it sees without."""

    async def setUp(self) -> None:
        path = socket_path(self)
        self.assertEqual(await Child.start(self, reactor, PEER, "server", path).line(), "ready")
        self.proxy = Proxy(self, path)
        await self.proxy.start(self)

    async def run_scenario(self, name: str) -> Any:
        return json.loads(await Child.start(self, reactor, PEER, name, self.proxy.path).line())

    async def test_calls_statuses_and_metadata(self) -> None:
        seen = await self.run_scenario("kinds")
        self.assertEqual((seen["unary"], seen["down"]), ("hello", list(range(50))))
        self.assertEqual((seen["up"], seen["chat"]), (sum(range(50)), ["ONE", "TWO", "THREE"]))
        self.assertEqual((seen["end"], seen["code"]), (True, "OK"))
        for code, status in zip(list(Code)[1:], await self.run_scenario("statuses"), strict=True):
            self.assertEqual((status["code"], status["message"]), (code.name, "grün 100% \n\x7f"))
            self.assertEqual(status["trailing"]["x-why-bin"], "00ff")

    async def test_deadlines_and_cancellation(self) -> None:
        self.assertEqual(await self.run_scenario("deadlines"), ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", 10])
        seen = await self.run_scenario("cancellation")
        self.assertEqual(seen, {"codes": ["CANCELLED"] * 3, "after": "on"})
