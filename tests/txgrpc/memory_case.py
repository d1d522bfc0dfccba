"""What tests share that have server and client in memory, time in their hands."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial import unittest

from tests.txgrpc.memory import World
from txgrpc import Code, GrpcError


def start(coroutine: Any) -> Deferred[Any]:
    """Run a coroutine on its own."""
    return Deferred.fromCoroutine(coroutine)


class MemoryCase(unittest.SynchronousTestCase):
    """Server and client in memory."""

    def world(self, **arguments: Any) -> World:
        """Both ends, cut off after the test."""
        world = World(**arguments)
        self.addCleanup(world.end)
        return world

    def settled(self, world: World, deferred: Deferred[Any]) -> Deferred[Any]:
        """`deferred` after all has moved that can."""
        world.settle()
        return deferred

    def code_of(self, deferred: Deferred[Any]) -> Code:
        """The status with which a call has failed by now."""
        failure = self.failureResultOf(deferred, GrpcError)
        error: GrpcError = failure.value
        return error.code
