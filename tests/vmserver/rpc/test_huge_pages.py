# SPDX-License-Identifier: Apache-2.0
"""Huge pages are reserved by the agent's RPCs about containers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from infranetes_common.errors import ResourceExhausted
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_programs
from tests.vmserver.rpc.test_agent import ID, AgentCase
from txgrpc import Code
from vmserver.containers.interface import IContainerProvider


class Noted:
    """Reserve nothing, and record the containers. :ivar trouble: why there are no pages."""

    def __init__(self, provider: IContainerProvider) -> None:
        self._provider = provider
        self.noted: list[object] = []
        self.trouble: Exception | None = None

    async def note(self, *words: object) -> None:
        states = await self._provider.containers()
        limits = [one.limit for state in states for one in state.resources.hugepage_limits]
        self.noted.append((*words, limits))

    @asynccontextmanager
    async def reserved(self, id: str, limits: cri.LinuxContainerResources) -> AsyncIterator[None]:
        if self.trouble is not None:
            raise self.trouble
        await self.note("before", id, [one.limit for one in limits.hugepage_limits])
        try:
            yield
        finally:
            await self.note("after")

    async def settle(self) -> None:
        await self.note("settled")


@needs_programs("busybox")
class HugePageTests(AgentCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.pages = Noted(self.agent.provider)
        assert self.agent.service is not None
        calls: Any = self.agent.service._agent.containers
        calls._huge_pages = self.pages

    def limits(self, limit: int) -> cri.LinuxContainerResources:
        return cri.LinuxContainerResources(hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=limit)])

    def creating(self, limit: int) -> Any:
        config = cri.ContainerConfig(
            command=["sleep", "600"], linux=cri.LinuxContainerConfig(resources=self.limits(limit))
        )
        request = messages.CreateContainerRequest(id=ID, image_id=self.image.id, config=config)
        return self.stub.CreateContainer(request, timeout=10.0)

    def updating(self, limit: int) -> Any:
        request = messages.UpdateContainerRequest(id=ID, resources=self.limits(limit))
        return self.stub.UpdateContainer(request, timeout=10.0)

    async def test_they_are_there_before_a_container_has_its_limits_and_until_it_is_gone(self) -> None:
        await self.load()
        await self.creating(4 << 20)
        await self.updating(2 << 20)
        await self.stub.RemoveContainer(messages.RemoveContainerRequest(id=ID), timeout=10.0)
        self.assertEqual(
            self.pages.noted,
            [
                ("before", ID, [4 << 20], []),
                ("after", [4 << 20]),
                ("before", ID, [2 << 20], [4 << 20]),
                ("after", [2 << 20]),
                ("settled", []),
            ],
        )

    async def test_a_container_that_can_not_be_made_has_none_left(self) -> None:
        await self.refused(Code.FAILED_PRECONDITION, self.creating(4 << 20))  # the image is missing
        self.assertEqual(self.pages.noted, [("before", ID, [4 << 20], []), ("after", [])])

    async def test_what_can_not_be_had_changes_nothing(self) -> None:
        await self.load()
        await self.creating(4 << 20)
        self.pages.trouble = ResourceExhausted("this VM has no memory")
        await self.refused(Code.RESOURCE_EXHAUSTED, self.updating(8 << 20))
        found = (await self.agent.provider.containers())[0].resources.hugepage_limits
        self.assertEqual([one.limit for one in found], [4 << 20])
        self.pages.trouble = None
        await self.stub.RemoveContainer(messages.RemoveContainerRequest(id=ID), timeout=10.0)
        self.pages.trouble = ResourceExhausted("this VM has no memory")
        await self.refused(Code.RESOURCE_EXHAUSTED, self.creating(4 << 20))
        self.assertEqual(await self.agent.provider.containers(), [])

    async def test_a_machine_of_several_pods_has_none(self) -> None:
        info = await self.stub.Info(messages.InfoRequest(), timeout=5.0)
        self.assertEqual(list(info.huge_page_sizes), [])
