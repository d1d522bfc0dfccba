# SPDX-License-Identifier: Apache-2.0
"""What the node relies on in every `IAgent`, for a pod whose one container is its machine.

A test case with this suite makes `agent` in its `setUp`. Calls that are idempotent are made twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from infranetes.machines.interface import IAgent
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, NotOffered
from infranetes_common.filesync.manifest import DIRECTORY, FILE, Bounds, Change, Entry
from infranetes_common.wire import cri, vmserver
from tests.support.waiting import until

BOUNDS = Bounds(100, 1 << 20)
IMAGE = "sha256:" + "e" * 64

E = TypeVar("E", bound=InfranetesError)


class AgentContract(TestCase):
    """The suite.

    :ivar agent: of a machine without a container. :ivar container: the id of the container that it will have.
    :ivar sandbox: the id that it answers for. :ivar commands: whether it can run commands.
    :ivar holds: whether its containers can be held still.
    """

    agent: IAgent
    sandbox = "s1"
    container = "c0" * 32
    commands = True
    holds = False

    # ---- what the tests use

    async def created(self) -> vmserver.ContainerState:
        """Create the container."""
        return await self.agent.create(
            self.container, IMAGE, cri.ContainerConfig(), cri.PodSandboxConfig(hostname="web-0")
        )

    async def running(self) -> vmserver.ContainerState:
        """Create and start the container."""
        await self.created()
        return await self.agent.start(self.container)

    def watched(self) -> list[vmserver.WatchEvent]:
        """Watch from now on; return the list to which events are added."""
        events: list[vmserver.WatchEvent] = []
        stream = self.agent.watch()

        async def watch() -> None:
            async for event in stream:
                events.append(event)

        start(watch()).addErrback(lambda _: None)
        self.addCleanup(stream.cancel)
        return events

    async def fails(self, kind: type[E], work: object) -> E:
        """Return the error of this kind with which a call fails."""
        try:
            await work  # type: ignore[misc]  # whatever the call returns
        except kind as error:
            return error
        self.fail(f"it does not fail with {kind.__name__}")

    # ---- the suite

    def test_it_is_an_agent(self) -> None:
        verifyObject(IAgent, self.agent)

    async def test_it_answers_for_its_sandbox(self) -> None:
        for _ in range(2):
            self.assertEqual((await self.agent.info()).sandbox_id, self.sandbox)

    async def test_a_container_is_created_runs_and_ends(self) -> None:
        self.assertEqual((await self.created()).state, cri.CONTAINER_CREATED)
        for _ in range(2):
            state = await self.agent.start(self.container)
            self.assertEqual((state.id, state.state), (self.container, cri.CONTAINER_RUNNING))
            self.assertGreater(state.started_at, 0)
        for _ in range(2):
            state = await self.agent.stop(self.container, 10)
            self.assertEqual((state.state, state.exit_code), (cri.CONTAINER_EXITED, 0))
            self.assertGreaterEqual(state.finished_at, state.started_at)
        for _ in range(2):
            await self.agent.remove(self.container)

    async def test_without_a_grace_period_it_is_killed(self) -> None:
        await self.running()
        self.assertEqual((await self.agent.stop(self.container, 0)).exit_code, 137)

    async def test_one_that_has_ended_is_not_started_again(self) -> None:
        await self.running()
        await self.agent.stop(self.container, 10)
        await self.fails(FailedPrecondition, self.agent.start(self.container))

    async def test_one_that_was_never_started_is_not_stopped(self) -> None:
        await self.created()
        self.assertEqual((await self.agent.stop(self.container, 10)).state, cri.CONTAINER_CREATED)

    async def test_a_running_one_is_removed(self) -> None:
        await self.running()
        await self.agent.remove(self.container)

    async def test_of_an_unknown_container_there_is_nothing_but_to_remove(self) -> None:
        await self.running()
        other = "d1" * 32
        await self.fails(NotFound, self.agent.start(other))
        await self.fails(NotFound, self.agent.stop(other, 1))
        await self.fails(NotFound, self.agent.update(other, cri.LinuxContainerResources()))
        await self.agent.remove(other)
        self.assertEqual((await self.agent.start(self.container)).state, cri.CONTAINER_RUNNING)

    async def test_a_watch_begins_with_all_there_is_and_goes_on(self) -> None:
        await self.created()
        events = self.watched()
        await until(lambda: any(one.HasField("synced") for one in events), "the snapshot is complete")
        self.assertEqual([one.WhichOneof("event") for one in events], ["container", "synced"])
        self.assertEqual(events[0].container.id, self.container)
        await self.agent.start(self.container)
        await self.agent.stop(self.container, 10)

        def ended() -> bool:
            states = [one.container.state for one in events if one.HasField("container")]
            return states[-1] == cri.CONTAINER_EXITED and cri.CONTAINER_RUNNING in states

        await until(ended, "both changes are told")

    async def test_several_may_watch(self) -> None:
        await self.created()
        both = self.watched(), self.watched()
        await until(lambda: all(len(events) == 2 for events in both), "both have the snapshot")

    async def test_limits_that_are_changed_are_told(self) -> None:
        await self.running()
        limits = cri.LinuxContainerResources(cpu_shares=7)
        self.assertEqual((await self.agent.update(self.container, limits)).resources.cpu_shares, 7)

    async def test_its_use_is_counted(self) -> None:
        await self.running()
        stats = await self.agent.stats()
        self.assertGreater(stats.machine.time_nanos, 0)
        self.assertEqual([one.id for one in stats.containers], [self.container])

    async def test_a_command_runs_or_is_refused_with_what_can_be_done(self) -> None:
        await self.running()
        command = ["sh", "-c", "echo out; echo err >&2; exit 4"]
        run = self.agent.exec_sync(self.container, command, 10, 20.0, 1000)
        if not self.commands:
            self.assertIn("kubectl attach", str(await self.fails(FailedPrecondition, run)))
            return
        ran = await run
        self.assertEqual((ran.stdout, ran.stderr, ran.exit_code), (b"out\n", b"err\n", 4))

    async def test_no_command_runs_in_what_does_not(self) -> None:
        await self.created()
        run = self.agent.exec_sync(self.container, ["true"], 10, 20.0, 1000)
        await self.fails(FailedPrecondition, run)

    async def test_a_volume_is_put_listed_and_removed(self) -> None:
        async def changes() -> AsyncIterator[Change]:
            yield Entry(b"", DIRECTORY, 0o755, 0, 0)
            yield Entry(b"key", FILE, 0o600, 0, 0, 6, 1)
            yield b"secret"

        for _ in range(2):
            await self.agent.put_volume("v1", file=False, in_memory=True, bounds=BOUNDS, changes=changes())
        listed = await self.agent.list_volume("v1", BOUNDS)
        self.assertEqual((set(listed), listed[b"key"].size), ({b"", b"key"}, 6))
        read = [each async for each in self.agent.read_volume("v1", [listed[b"key"]])]
        self.assertEqual(read[1:], [b"secret"])
        for _ in range(2):
            await self.agent.remove_volume("v1")
        await self.fails(NotFound, self.agent.list_volume("v1", BOUNDS))

    async def test_what_it_runs_is_held_or_it_says_that_it_cant_be(self) -> None:
        await self.running()
        if not self.holds:
            await self.fails(NotOffered, self.agent.hold({}, [], seconds=10.0))
            await self.fails(NotOffered, self.agent.release())
            await self.fails(NotOffered, self.agent.adopt([], {}, cri.PodSandboxConfig()))
            return
        for _ in range(2):
            self.assertEqual(await self.agent.hold({}, [], seconds=10.0), [self.container])
        for _ in range(2):
            await self.agent.release()
        await self.fails(FailedPrecondition, self.agent.adopt([], {}, cri.PodSandboxConfig()))

    async def test_closing_it_twice_is_as_closing_it_once(self) -> None:
        for _ in range(2):
            await self.agent.close()
