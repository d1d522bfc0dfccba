# SPDX-License-Identifier: Apache-2.0
"""The steps from a QEMU that waits for the template's state to a VM that executes."""

from __future__ import annotations

import gc
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.launch import clone
from infranetes.providers.qemu.launch.clone import StepTimer
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor


class Connections(VmConnections):
    """Those of a QEMU that loads when the test says so. :ivar done: what was asked of it, in order."""

    def __init__(self) -> None:
        super().__init__(cast(IReactor, Clock()))
        self.loading: Deferred[None] = Deferred()
        self.done: list[str] = []

    async def load_state(self, seconds: float) -> None:
        self.done.append("load")
        await self.loading

    async def resume(self) -> None:
        self.done.append("resume")


class ExecuteTests(SynchronousTestCase):
    """A clone executes once its state is loaded and its tap is a port of the bridge."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.steps = StepTimer(self.clock)
        self.connections = Connections()
        self.joining: Deferred[None] = Deferred()
        self.showing: Deferred[None] = Deferred()

    def begin(self) -> Deferred[None]:
        return start(clone.execute(self.connections, self.joining, self.loaded, 5.0, self.steps))

    async def loaded(self) -> None:
        self.connections.done.append("loaded")
        await self.showing

    def test_it_has_its_state_its_link_and_its_images(self) -> None:
        executing = self.begin()
        self.clock.advance(0.5)
        self.connections.loading.callback(None)
        self.assertEqual(self.connections.done, ["load"])
        self.joining.callback(None)
        self.assertEqual(self.connections.done, ["load", "loaded"])
        self.clock.advance(0.25)
        self.showing.callback(None)
        self.assertEqual(self.connections.done, ["load", "loaded", "resume"])
        self.successResultOf(executing)
        self.assertEqual(str(self.steps), "state 0.500, execute 0.250")
        self.assertEqual(self.steps.seconds, 0.75)

    def test_of_one_whose_link_fails_no_other_failure_is_reported(self) -> None:
        executing = self.begin()
        self.joining.errback(Unavailable("no bridge today"))
        self.assertIn("no bridge today", str(self.failureResultOf(executing, Unavailable).value))
        self.connections.loading.errback(Unavailable("QEMU ended, as it was killed"))
        del self.connections
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_one_whose_state_can_not_be_loaded_does_not_execute(self) -> None:
        executing = self.begin()
        self.joining.callback(None)
        self.connections.loading.errback(Unavailable("QEMU could not load the VM's state"))
        self.failureResultOf(executing, Unavailable)
        self.assertEqual(self.connections.done, ["load"])
