# SPDX-License-Identifier: Apache-2.0
"""A node with two providers, whose pods may be of two kinds."""

from __future__ import annotations

from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred

from infranetes.machines.pool import Pool
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pooled import Purpose
from infranetes.pods.node.handler_config import DOCKER
from infranetes.pods.node.handlers import AnnotationRule, Handler
from infranetes.pods.node.node_providers import NodeProvider
from infranetes.providers.interface import Instance, IPodProvider, Size
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_images import FakeImages, image
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, pod

MACHINE_IMAGE = "sha256:" + "2" * 64


class East(FakeProvider):
    """The other provider. :ivar hanging: its lists never arrive."""

    name = "east"
    hanging = False

    def list(self) -> Deferred[list[Instance]]:
        return Deferred() if self.hanging else super().list()


class TwoKindsOfImages(FakeImages):
    """busybox is a container image, and appliance is a machine image."""

    async def find(self, name_or_id: str) -> Any:
        if name_or_id == "appliance":
            return attrs.evolve(image(machine="ami-7"), id=MACHINE_IMAGE)
        return await super().find(name_or_id)

    @staticmethod
    def source(image_id: str) -> str:
        return "east" if image_id == MACHINE_IMAGE else DOCKER


class MixedNode(FakeNode):
    """A node with two providers; the handler of the second one is `east`.

    :ivar pooled: how many VMs the pool of that handler has."""

    east_kind = DOCKER
    east_rule = AnnotationRule("east")
    east_provider = "east"
    pooled = 0

    def __init__(self, **times: Any) -> None:
        self.east = East(self)
        super().__init__(**times)

    def made(self) -> None:
        node_provider = self.node.providers.add(cast(IPodProvider, self.east))
        given = Handler(
            "east",
            self.node.providers.by_name[self.east_provider],
            self.east_kind,
            size=Size(cpu_millis=500, memory_bytes=2**29),
            annotations=self.east_rule,
        )
        if self.pooled:
            config = PoolConfig(sizes=(PoolSize(count=self.pooled, cpu_millis=500),))
            pool = Pool(node_provider, config, Purpose("east", self.east_rule.set))
            self.node.pools.others, given = [pool], attrs.evolve(given, pool=pool)
            contents = self.store.contents()
            pool.load([each for each in contents.pool if each.handler == "east"], contents.settings)
        self.node.handlers.by_name["east"] = given
        self.node.handlers.by_name["infranetes"] = Handler("infranetes", self.node_provider)

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        agent = super().make_agent(sandbox_id)
        agent.loaded.add(MACHINE_IMAGE)  # in case it is the machine
        return agent

    def make_images(self) -> FakeImages:
        return TwoKindsOfImages()

    @property
    def east_side(self) -> NodeProvider:
        return self.node.providers.by_name["east"]

    def east_ready(self) -> None:
        """The other provider has started."""
        node_provider = self.east_side
        self.east.ended = lambda instance: self.sandboxes.ended(node_provider, instance)
        node_provider.trouble = ""
        node_provider.ready.succeed(None)
        for pool in self.node.pools.of(node_provider):
            pool.provider_ready()
        self.reconciler.provider_ready(node_provider)


class MixedCase(PodsTestCase):
    world: MixedNode

    def make_world(self) -> MixedNode:
        return MixedNode()

    def setUp(self) -> None:
        super().setUp()
        self.world.east_ready()

    def east_pod(self, config: Any = None) -> str:
        id: str = self.successResultOf(self.start(config or pod("east", "u2"), "east"))
        return id
