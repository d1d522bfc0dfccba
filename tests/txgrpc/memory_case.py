# SPDX-License-Identifier: Apache-2.0
"""What tests share that have server and client in memory, time in their hands."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial import unittest

from tests.txgrpc.memory import InMemoryPair
from txgrpc import Code, GrpcError


def start(coroutine: Any) -> Deferred[Any]:
    """Run a coroutine on its own."""
    return Deferred.fromCoroutine(coroutine)


class MemoryCase(unittest.SynchronousTestCase):
    """Server and client in memory."""

    def world(self, **arguments: Any) -> InMemoryPair:
        """Both ends, cut off after the test."""
        world = InMemoryPair(**arguments)
        self.addCleanup(world.end)
        return world

    def settled(self, world: InMemoryPair, deferred: Deferred[Any]) -> Deferred[Any]:
        """`deferred` after all has moved that can."""
        world.settle()
        return deferred

    def code_of(self, deferred: Deferred[Any]) -> Code:
        """The status with which a call has failed by now."""
        failure = self.failureResultOf(deferred, GrpcError)
        error: GrpcError = failure.value
        return error.code
