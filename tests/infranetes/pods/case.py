# SPDX-License-Identifier: Apache-2.0
"""Test cases over a `FakeNode`."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial import unittest

from infranetes_common.concurrency import start
from tests.infranetes.pods.fakes import FakeNode, box, pod


class PodsTestCase(unittest.SynchronousTestCase):
    """A node whose provider has started."""

    def setUp(self) -> None:
        self.world = self.make_world()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def make_world(self) -> FakeNode:
        """The node, over which daemons come and go."""
        return FakeNode()

    def start(self, config: Any = None, handler: str = "") -> Deferred[str]:
        return start(self.world.sandboxes.run(config or pod(), handler))

    def run_pod(self, config: Any = None) -> str:
        return self.successResultOf(self.start(config))

    def record(self, id: str) -> Any:
        return next(one for one in self.world.store.contents().sandboxes if one.id == id)

    def do(self, work: Any) -> Any:
        return self.successResultOf(start(work))

    def watch(self, id: str) -> Any:
        return self.world.node.inventory.sandboxes[id].watch

    def assertNothingLeft(self) -> None:
        self.assertEqual(self.world.provider.instances, {})
        self.assertEqual(self.world.store.contents().sandboxes, ())
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertEqual(list(self.world.node.inventory), [])


class ContainersTestCase(PodsTestCase):
    """The same with one sandbox that runs."""

    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.run_pod()
        self.agent = self.world.agents[self.sandbox]

    def start_create(self, config: Any = None) -> Deferred[str]:
        config = config or box()
        return start(self.world.containers.create(self.sandbox, config))

    def create(self, config: Any = None) -> str:
        return self.successResultOf(self.start_create(config))

    def run_container(self, config: Any = None) -> str:
        made = self.create(config)
        self.do(self.world.containers.start(made))
        return made

    def kept(self, container: str) -> Any:
        return next(one for one in self.world.store.contents().containers if one.id == container)
