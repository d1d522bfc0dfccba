# SPDX-License-Identifier: Apache-2.0
"""MountNfs and UnmountNfs: from the node's client, over the agent's TLS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from infranetes.machines.agent.client import AgentClient
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, NotOffered
from infranetes_common.nfs import NfsMount, checked
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_programs
from tests.vmserver.harness import SANDBOX
from tests.vmserver.rpc.test_agent import ID, AgentCase
from txgrpc import Code

T = TypeVar("T")
WANTED = checked("files:/my data", ("vers=4.2", "addr=192.0.2.7", "noexec"))


class Noted:
    """Mount nothing. :ivar trouble: the error of each call."""

    def __init__(self) -> None:
        self.mounted: dict[str, set[NfsMount]] = {}
        self.seconds: list[float] = []
        self.trouble: Exception | None = None

    async def mount(self, container: str, wanted: NfsMount) -> str:
        if self.trouble is not None:
            raise self.trouble
        self.mounted.setdefault(container, set()).add(wanted)
        return wanted.id

    async def place(self, host_path: str, work: Callable[[], T]) -> T:
        return await run_in_thread(installed(), work)

    async def release(self, container: str) -> None:
        self.mounted.pop(container, None)

    async def unmount_all(self, seconds: float) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.seconds.append(seconds)


@needs_programs("busybox")
class NfsTests(AgentCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.nfs = Noted()
        self.use(self.nfs)
        self.client = AgentClient(SANDBOX, self.agent.channel())

    def use(self, nfs: Any) -> None:  # Any: None, or what mounts
        assert self.agent.service is not None
        self.agent.service._agent.nfs._nfs = self.agent.service._agent.containers._nfs = nfs

    async def test_what_the_node_says_is_mounted_until_the_container_is_removed(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.client.mount_nfs(ID, WANTED), WANTED.id)
        self.assertEqual(self.nfs.mounted, {ID: {WANTED}})
        for _ in range(2):
            await self.client.remove(ID)
            self.assertEqual(self.nfs.mounted, {})
        await self.client.unmount_nfs(20)
        self.assertEqual(self.nfs.seconds, [20])

    async def test_a_container_that_can_not_be_made_keeps_nothing(self) -> None:
        await self.client.mount_nfs(ID, WANTED)
        request = messages.CreateContainerRequest(id=ID, image_id="sha256:" + "0" * 64)
        await self.refused(Code.FAILED_PRECONDITION, self.stub.CreateContainer(request, timeout=10.0))
        self.assertEqual(self.nfs.mounted, {})

    async def test_what_fails_is_said(self) -> None:
        self.nfs.trouble = DeadlineExceeded("the server is away")
        for work in (self.client.mount_nfs(ID, WANTED), self.client.unmount_nfs(1)):
            with self.assertRaises(DeadlineExceeded) as caught:
                await work
            self.assertIn("the server is away", str(caught.exception))

    async def test_what_no_honest_node_sends_is_refused(self) -> None:
        with self.assertRaises(FailedPrecondition):
            await self.client.mount_nfs(ID, NfsMount("files:/x", (*WANTED.options, "sec=krb5")))
        for container, source, options in (
            ("../x", WANTED.source, WANTED.options),
            (ID, "/dev/vda", WANTED.options),
            (ID, WANTED.source, ("vers=4.2",)),
            (ID, WANTED.source, (*WANTED.options, "addr=192.0.2.8")),
        ):
            wanted = messages.MountNfsRequest(container_id=container, source=source, options=options)
            await self.refused(Code.INVALID_ARGUMENT, self.stub.MountNfs(wanted, timeout=5.0))
        for seconds in (0, 10**6):
            request = messages.UnmountNfsRequest(seconds=seconds)
            await self.refused(Code.INVALID_ARGUMENT, self.stub.UnmountNfs(request, timeout=5.0))
        self.assertEqual((self.nfs.mounted, self.nfs.seconds), ({}, []))

    async def test_a_machine_that_is_not_the_pods_alone_mounts_nothing(self) -> None:
        self.use(None)
        for work in (self.client.mount_nfs(ID, WANTED), self.client.unmount_nfs(1)):
            with self.assertRaises(NotOffered):
                await work
