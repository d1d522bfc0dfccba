# SPDX-License-Identifier: Apache-2.0
"""What an agent's stream says while calls to the same agent are under way."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, fail

from infranetes.pods.store.states import ContainerState
from infranetes_common.concurrency import start
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fake_agent import FakeStream
from txgrpc import Code, GrpcError


class SnapshotTests(ContainersTestCase):
    """A snapshot is older than what it does not know of."""

    def reopen_stream(self) -> FakeStream:
        """Have the daemon ask for a snapshot, which the test then completes."""
        self.agent.silent = True
        self.agent.go_away()
        self.agent.away = False
        self.world.wait(0.5)
        (stream,) = self.agent.streams
        return stream

    def hold_create(self) -> Deferred[None]:
        """Have the agent be asked for containers, and make them only when the Deferred fires."""
        hold: Deferred[None] = Deferred()
        real = self.agent.create

        async def create(*arguments: Any) -> Any:
            await hold
            return await real(*arguments)

        self.patch(self.agent, "create", create)
        return hold

    def complete(self, stream: FakeStream, *states: vmserver.ContainerState) -> None:
        for state in states:
            stream.feed(vmserver.WatchEvent(container=state))
        stream.feed(vmserver.WatchEvent(synced=vmserver.Synced()))

    def test_a_container_that_is_created_meanwhile_is_not_lost(self) -> None:
        hold = self.hold_create()
        creating = self.start_create()
        stream = self.reopen_stream()
        self.agent.streams.clear()  # the answer to the call is faster than what the stream says of it
        hold.callback(None)
        made = self.successResultOf(creating)
        self.complete(stream)
        self.assertIs(self.kept(made).state, ContainerState.CREATED)
        self.do(self.world.containers.start(made))
        self.assertIs(self.kept(made).state, ContainerState.RUNNING)

    def test_nor_is_one_whose_creation_is_still_under_way(self) -> None:
        hold = self.hold_create()
        creating = self.start_create()
        self.complete(self.reopen_stream())
        (container,) = self.world.node.inventory.containers.values()
        self.agent.streams[0].feed(vmserver.WatchEvent(removed=container.id))
        self.assertIs(container.state, ContainerState.CREATING)
        hold.callback(None)
        self.assertIs(self.kept(self.successResultOf(creating)).state, ContainerState.CREATED)

    def test_a_container_that_was_there_before_is_lost(self) -> None:
        made = self.run_container()
        self.complete(self.reopen_stream())
        self.assertEqual((self.kept(made).state, self.kept(made).reason),
                         (ContainerState.EXITED, "ContainerLost"))  # fmt: skip
        self.assertEqual(self.world.logs.aborted, [made])

    def test_a_snapshot_that_is_never_complete_costs_no_container(self) -> None:
        made = self.run_container()
        self.reopen_stream()
        self.agent.silent = False
        self.agent.go_away()
        self.agent.away = False
        self.world.wait(3)
        self.assertTrue(self.watch(self.sandbox).live)
        self.assertIs(self.kept(made).state, ContainerState.RUNNING)

    def test_a_container_that_no_record_knows_is_removed_once(self) -> None:
        """Its creation was abandoned while its agent could not be reached."""
        hold: Deferred[None] = Deferred()
        removed: list[str] = []

        async def remove(id: str, within: float = 30.0) -> None:
            removed.append(id)
            await hold

        self.patch(self.agent, "remove", remove)
        for _ in range(2):
            self.agent.become("f" * 32, cri.CONTAINER_CREATED)
        self.assertEqual(removed, ["f" * 32])

    def test_one_that_is_being_created_is_not_taken_for_such(self) -> None:
        real, removed = self.agent.create, list(self.agent.calls)

        async def create(id: str, *arguments: Any) -> Any:
            report = await real(id, *arguments)  # its stream tells of it before the call is answered
            self.assertIs(self.world.node.inventory.containers[id].state, ContainerState.CREATING)
            return report

        self.patch(self.agent, "create", create)
        made = self.create()
        self.assertEqual([call for call in self.agent.calls if call not in removed], [("create", made)])


class UnforeseenTests(ContainersTestCase):
    """Errors that nobody foresaw are told, and the stream goes on."""

    def unforeseen(self, *_: Any) -> Any:
        return fail(ZeroDivisionError("unforeseen"))

    def test_of_a_removal(self) -> None:
        patched = self.patch(self.agent, "remove", self.unforeseen)
        for _ in range(2):
            self.agent.become("f" * 32, cri.CONTAINER_RUNNING)
            self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        patched.restore()
        self.agent.become("f" * 32, cri.CONTAINER_RUNNING)
        self.assertEqual(self.agent.containers, {})

    def test_of_volumes_that_are_mounted_again(self) -> None:
        self.patch(self.world.carried, "live", self.unforeseen)
        for stream in list(self.agent.streams):
            stream.break_(GrpcError(Code.UNAVAILABLE, "connection lost"))
        self.world.wait(1)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertTrue(self.watch(self.sandbox).live)


class DisconnectTests(ContainersTestCase):
    """The end of a VM ends all that was done for it."""

    def test_no_more_is_done_with_its_agent(self) -> None:
        watch = self.watch(self.sandbox)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual(self.agent.streams, [])
        self.assertIsNone(self.watch(self.sandbox))
        self.assertIsNone(self.world.node.inventory.sandboxes[self.sandbox].client)
        self.world.wait(30)
        self.assertEqual(self.agent.streams, [], "nobody tries to open another one")
        self.assertFalse(watch.worth_waiting)

    def test_a_lost_vm_tells_the_logs_and_volumes_once(self) -> None:
        made = self.run_container()
        forgotten: list[str] = []
        self.patch(self.world.carried, "disconnected", lambda sandbox: forgotten.append(sandbox.id))
        (instance,) = self.world.provider.instances
        for _ in range(2):
            self.world.provider.end(instance, "power")
        self.assertEqual((forgotten, self.world.logs.aborted), ([self.sandbox], [made]))
        self.assertIsNone(self.world.node.inventory.sandboxes[self.sandbox].client)
        stopping = start(self.world.sandboxes.stop(self.sandbox))
        self.successResultOf(stopping)
        self.assertEqual(self.kept(made).reason, "VMEnded")
