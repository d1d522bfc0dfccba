# SPDX-License-Identifier: Apache-2.0
"""The contract of every ContainerProvider: one suite that each of them passes.

The test module of a provider has, for instance::

    class FakeTests(LifecycleContract, LogContract, ImageContract, TestCase):
        def make_provider(self): ...

Every call is also made twice. The commands are run by `sh` of busybox or of the machine.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from zope.interface.verify import verifyObject

from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from infranetes_common.wire import cri
from tests.contract.container_provider_case import ContainerProviderCase, reactor
from vmserver.containers.interface import IContainerProvider, Streams


class LifecycleContract(ContainerProviderCase):
    """Create, start, stop, remove, update, list."""

    async def test_it_provides_the_whole_interface(self) -> None:
        verifyObject(IContainerProvider, self.provider)
        self.assertIsInstance(self.provider.name, str)

    async def test_what_is_too_long_for_the_kernel_fails_the_start(self) -> None:
        long = cri.KeyValue(key="BIG", value=b"x" * (32 * resource.getpagesize() - 4))
        id = await self.create("sleep", "600", envs=[long])
        words = await self.refused(InvalidArgument, self.provider.start_container(id))
        self.assertIn("argument list too long", words.lower())
        self.assertEqual((await self.state(id)).state, cri.CONTAINER_EXITED)

    async def test_stopping_twice_is_once(self) -> None:
        await self.provider.stop()
        await self.provider.stop()

    async def test_a_configured_sandbox_may_be_configured_again(self) -> None:
        config = cri.PodSandboxConfig(hostname="pod")
        for _ in range(2):
            await self.provider.configure(config)

    async def test_creating_twice_is_once(self) -> None:
        id = await self.create("sleep", "600")
        again = await self.provider.create(
            id, self.image_id, cri.ContainerConfig(command=["sleep", "600"]), cri.PodSandboxConfig()
        )
        self.assertEqual(again, await self.state(id))
        self.assertEqual(again.image_id, self.image_id)
        self.assertEqual((again.started_at, again.finished_at, again.pid), (0, 0, 0))
        self.assertLess(abs(again.created_at - time.time_ns()), 60 * 10**9)
        self.assertEqual(self.states_told(id), [cri.CONTAINER_CREATED])

    async def test_creating_side_by_side_is_once(self) -> None:
        id = secrets.token_hex(16)
        config = cri.ContainerConfig(command=["sleep", "600"])
        makings = [self.provider.create(id, self.image_id, config, cri.PodSandboxConfig()) for _ in range(3)]
        states = [await making for making in makings]
        self.assertEqual({state.created_at for state in states}, {states[0].created_at})
        self.assertEqual(len(await self.provider.containers()), 1)

    async def test_an_image_that_is_not_loaded_is_a_precondition(self) -> None:
        config = cri.ContainerConfig(command=["true"])
        for _ in range(2):
            making = self.provider.create("a" * 32, "sha256:" + "0" * 64, config, cri.PodSandboxConfig())
            self.assertIn("0" * 64, await self.refused(FailedPrecondition, making))
        self.assertEqual(await self.provider.containers(), [])

    async def test_starting_twice_is_once(self) -> None:
        id = await self.create("sleep", "600")
        first = await self.provider.start_container(id)
        again = await self.provider.start_container(id)
        self.assertEqual(first, again)
        self.assertEqual(again.state, cri.CONTAINER_RUNNING)
        self.assertGreater(again.pid, 0)
        self.assertGreaterEqual(again.started_at, again.created_at)
        self.assertEqual(self.states_told(id), [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING])

    async def test_changes_are_told_before_the_call_answers(self) -> None:
        id = await self.create("sleep", "600")
        await self.provider.start_container(id)
        self.assertEqual(self.states_told(id)[-1], cri.CONTAINER_RUNNING)
        await self.provider.stop_container(id, 0)
        self.assertEqual(self.states_told(id)[-1], cri.CONTAINER_EXITED)
        await self.provider.remove(id)
        self.assertEqual(
            self.states_told(id),
            [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED, None],
        )

    async def test_one_that_ends_well_is_completed(self) -> None:
        id = await self.run_container("true")
        state = await self.ended(id)
        self.assertEqual((state.exit_code, state.reason, state.pid), (0, "Completed", 0))
        self.assertGreaterEqual(state.finished_at, state.started_at)
        await self.until(lambda: self.states_told(id)[-1] == cri.CONTAINER_EXITED, "the end is told")

    async def test_one_that_fails_says_how(self) -> None:
        state = await self.ended(await self.run_container("sh", "-c", "exit 3"))
        self.assertEqual((state.exit_code, state.reason), (3, "Error"))

    async def test_one_that_a_signal_ends_has_128_and_its_number(self) -> None:
        state = await self.ended(await self.run_container("sh", "-c", "kill -9 $$"))
        self.assertEqual((state.exit_code, state.reason), (137, "Error"))

    async def test_one_that_has_ended_is_not_started_again(self) -> None:
        id = await self.run_container("true")
        await self.ended(id)
        for _ in range(2):
            await self.refused(FailedPrecondition, self.provider.start_container(id))

    async def test_a_command_that_is_not_there_can_not_run(self) -> None:
        id = await self.create("/no/such/program")
        await self.refused(InvalidArgument, self.provider.start_container(id))
        state = await self.state(id)
        self.assertEqual(
            (state.state, state.exit_code, state.reason), (cri.CONTAINER_EXITED, 127, "ContainerCannotRun")
        )
        self.assertTrue(state.message)
        self.assertGreater(state.finished_at, 0)
        await self.refused(FailedPrecondition, self.provider.start_container(id))

    async def test_a_command_that_is_no_program_can_not_run(self) -> None:
        id = await self.create("/etc/passwd")
        await self.refused(InvalidArgument, self.provider.start_container(id))
        state = await self.state(id)
        self.assertEqual((state.exit_code, state.reason), (126, "ContainerCannotRun"))

    async def test_stopping_lets_it_end_by_itself(self) -> None:
        script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done"
        id = await self.run_container("sh", "-c", script)
        await self.until(lambda: self.lines(id), "it is ready")
        first = await self.provider.stop_container(id, 30)
        again = await self.provider.stop_container(id, 30)
        self.assertEqual((first.state, first.exit_code), (cri.CONTAINER_EXITED, 7))
        self.assertEqual(first, again)

    async def test_one_that_does_not_heed_is_killed_after_the_grace(self) -> None:
        id = await self.run_container("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
        await self.until(lambda: self.lines(id), "it is ready")
        began = reactor.seconds()
        state = await self.provider.stop_container(id, 1)
        self.assertEqual((state.state, state.exit_code), (cri.CONTAINER_EXITED, 137))
        self.assertGreaterEqual(reactor.seconds() - began, 0.9)

    async def test_without_grace_it_is_killed_at_once(self) -> None:
        id = await self.run_container("sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.05; done")
        self.assertEqual((await self.provider.stop_container(id, 0)).exit_code, 137)

    async def test_a_second_stop_with_less_grace_ends_it_sooner(self) -> None:
        id = await self.run_container("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
        await self.until(lambda: self.lines(id), "it is ready")
        began = reactor.seconds()
        patient = self.provider.stop_container(id, 120)
        await self.provider.stop_container(id, 0)
        self.assertEqual((await patient).state, cri.CONTAINER_EXITED)
        self.assertLess(reactor.seconds() - began, 60)

    async def test_one_never_started_is_stopped_already(self) -> None:
        id = await self.create("sleep", "600")
        for _ in range(2):
            self.assertEqual((await self.provider.stop_container(id, 1)).state, cri.CONTAINER_CREATED)

    async def test_its_own_stop_signal_is_used(self) -> None:
        script = "trap 'exit 9' USR1; trap 'exit 8' TERM; echo ready; while :; do sleep 0.05; done"
        id = await self.run_container("sh", "-c", script, stop_signal=cri.SIGUSR1)
        await self.until(lambda: self.lines(id), "it is ready")
        self.assertEqual((await self.provider.stop_container(id, 30)).exit_code, 9)

    async def test_removing_ends_a_running_one_and_twice_is_once(self) -> None:
        id = await self.run_container("sleep", "600")
        await self.provider.remove(id)
        await self.provider.remove(id)
        self.assertIsNone(await self.state(id))
        self.assertEqual(self.states_told(id)[-1], None)

    async def test_removing_side_by_side_is_once(self) -> None:
        id = await self.run_container("sleep", "600")
        for removing in [self.provider.remove(id) for _ in range(3)]:
            await removing
        self.assertIsNone(await self.state(id))

    async def test_an_unknown_one_is_not_found(self) -> None:
        for work in (
            self.provider.start_container("b" * 32),
            self.provider.stop_container("b" * 32, 1),
            self.provider.update("b" * 32, cri.LinuxContainerResources(cpu_shares=512)),
            self.provider.exec_sync("b" * 32, ["true"], 5.0, 1024),
        ):
            self.assertIn("b" * 32, await self.refused(NotFound, work))
        with self.assertRaises(NotFound):
            await self.lines("b" * 32)
        await self.provider.remove("b" * 32)

    async def test_resources_are_updated_and_the_rest_stays(self) -> None:
        resources = cri.LinuxContainerResources(cpu_shares=256, memory_limit_in_bytes=64 << 20)
        id = await self.run_container("sleep", "600", linux=cri.LinuxContainerConfig(resources=resources))
        self.assertEqual((await self.state(id)).resources.cpu_shares, 256)
        for _ in range(2):
            state = await self.provider.update(id, cri.LinuxContainerResources(cpu_shares=512))
            self.assertEqual(state.resources.cpu_shares, 512)
            self.assertEqual(state.resources.memory_limit_in_bytes, 64 << 20)
        self.assertEqual(await self.state(id), state)

    async def test_limits_of_huge_pages_are_told_as_they_were_set_last_by_another_agent_too(self) -> None:
        def limits(bytes_of: dict[str, int]) -> Any:
            pages = [cri.HugepageLimit(page_size=size, limit=limit) for size, limit in bytes_of.items()]
            return cri.LinuxContainerResources(hugepage_limits=pages)

        most = self.huge_pages
        first = cri.LinuxContainerConfig(resources=limits({"2MB": most, "1GB": 0}))
        id = await self.run_container("sleep", "600", linux=first)
        for _ in range(2):
            await self.provider.update(id, limits({"2MB": most // 2}))
        await self.restarted()
        found = {one.page_size: one.limit for one in (await self.state(id)).resources.hugepage_limits}
        self.assertEqual(found, {"1GB": 0, "2MB": most // 2})
        self.assertEqual(len((await self.state(id)).resources.hugepage_limits), 2)

    async def test_resources_that_can_not_be_had_are_named(self) -> None:
        id = await self.run_container("sleep", "600")
        for _ in range(2):
            updating = self.provider.update(id, cri.LinuxContainerResources(cpu_shares=-1))
            self.assertIn("cpu_shares", await self.refused(InvalidArgument, updating))

    async def test_environment_directory_and_arguments(self) -> None:
        id = await self.run_container(
            "sh", "-c", 'echo "$0 $1 $GREETING"; pwd',
            args=["zero", "one"], working_dir="/tmp", envs=[cri.KeyValue(key="GREETING", value=b"a b")],
        )  # fmt: skip
        await self.ended(id)
        self.assertEqual([record.line for record in await self.lines(id)], [b"zero one a b", b"/tmp"])

    # A restart of the agent alone

    async def test_another_agent_finds_every_container_as_it_was(self) -> None:
        made = await self.create("sleep", "600")
        running = await self.run_container("sleep", "600")
        over = await self.run_container("sh", "-c", "sleep 0.3; exit 4")
        await self.ended(over)
        before = {state.id: state for state in await self.provider.containers()}
        self.assertEqual(before.keys(), {made, running, over})
        provider = await self.restarted()
        self.maxDiff = None
        self.assertEqual({state.id: state for state in await provider.containers()}, before)
        again = await provider.create(
            made, self.image_id, cri.ContainerConfig(command=["sleep", "600"]), cri.PodSandboxConfig()
        )
        self.assertEqual(again, before[made])
        self.assertEqual((await provider.start_container(made)).state, cri.CONTAINER_RUNNING)
        self.assertEqual((await provider.stop_container(running, 0)).exit_code, 137)

    async def test_an_end_while_no_agent_was_there_is_seen(self) -> None:
        id = await self.run_container("sh", "-c", "echo before; sleep 1; echo after; exit 5")
        await self.provider.stop()
        await deferLater(reactor, 1.5, lambda: None)
        self.provider = await self.started()
        state = await self.ended(id)
        self.assertEqual((state.exit_code, state.reason), (5, "Error"))
        self.assertEqual([record.line for record in await self.lines(id)], [b"before", b"after"])

    async def test_another_agent_is_told_of_an_end(self) -> None:
        id = await self.run_container("sh", "-c", "sleep 1; exit 6")
        await self.restarted()
        await self.until(lambda: cri.CONTAINER_EXITED in self.states_told(id), "the end is told")
        self.assertEqual((await self.state(id)).exit_code, 6)


class ExecContract(ContainerProviderCase):
    """ExecSync."""

    async def exec(self, id: str, *command: str, seconds: float = 0.0, limit: int = 1 << 20) -> Any:
        """Run a command in a container, and return the result."""
        return await self.provider.exec_sync(id, list(command), seconds, limit)

    async def test_output_and_exit_code(self) -> None:
        id = await self.run_container("sleep", "600")
        for _ in range(2):
            result = await self.exec(id, "sh", "-c", "echo out; echo err >&2; exit 3")
            self.assertEqual((result.stdout, result.stderr, result.exit_code), (b"out\n", b"err\n", 3))

    async def test_much_output_is_kept_whole_and_bytes_stay_bytes(self) -> None:
        id = await self.run_container("sleep", "600")
        result = await self.exec(id, "sh", "-c", r"printf '\0\377'; head -c 1000000 /dev/zero")
        self.assertEqual(result.stdout, b"\0\377" + bytes(1000000))

    async def test_output_beyond_the_bound_is_dropped_and_the_command_runs_on(self) -> None:
        id = await self.run_container("sleep", "600")
        result = await self.exec(id, "sh", "-c", "head -c 500000 /dev/zero; exit 2", limit=1000)
        self.assertEqual((result.stdout, result.exit_code), (bytes(1000), 2))

    async def test_one_that_is_too_long_for_the_kernel_says_so(self) -> None:
        id = await self.run_container("sleep", "600")
        long = "x" * (32 * resource.getpagesize() - 1)
        self.assertEqual((await self.exec(id, "sh", "-c", "echo ${#1}", "sh", long)).exit_code, 0)
        streams = Streams(stdout=True, stderr=True, stdin=False, tty=False)
        for command in (["true", long + "x"], ["true", *([long] * 60)]):
            words = await self.refused(InvalidArgument, self.exec(id, *command))
            self.assertIn("argument list too long", words)
            words = await self.refused(InvalidArgument, self.provider.exec_session(id, command, streams))
            self.assertIn("argument list too long", words)

    async def test_a_command_that_is_not_there(self) -> None:
        id = await self.run_container("sleep", "600")
        for _ in range(2):
            self.assertIn((await self.exec(id, "/no/such/program")).exit_code, (126, 127))

    async def test_one_out_of_time_is_killed_with_its_children(self) -> None:
        id = await self.run_container("sleep", "600")
        marker = f"3{secrets.randbelow(10**8):08d}"
        script = f"sleep {marker} & sleep {marker}"
        from infranetes_common.errors import DeadlineExceeded

        await self.refused(DeadlineExceeded, self.exec(id, "sh", "-c", script, seconds=0.7))
        await self.until(lambda: not _processes(marker), "its processes are gone")
        self.assertEqual((await self.state(id)).state, cri.CONTAINER_RUNNING)

    async def test_one_that_is_cancelled_is_killed(self) -> None:
        id = await self.run_container("sleep", "600")
        marker = f"3{secrets.randbelow(10**8):08d}"
        running: Deferred[Any] = self.provider.exec_sync(id, ["sleep", marker], 0.0, 1024)
        await self.until(lambda: _processes(marker), "it runs")
        running.cancel()
        with self.assertRaises(CancelledError):
            await running
        await self.until(lambda: not _processes(marker), "its process is gone")

    async def test_many_at_once(self) -> None:
        id = await self.run_container("sleep", "600")
        running = [self.exec(id, "sh", "-c", f"echo {number}") for number in range(8)]
        results = [await Deferred.fromCoroutine(each) for each in running]
        self.assertEqual([result.stdout for result in results], [b"%d\n" % number for number in range(8)])

    async def test_a_command_is_as_easily_killed_for_memory_as_its_container(self) -> None:
        own = Path("/proc/self/oom_score_adj")
        before = own.read_text()
        own.write_text("50")  # the agent's score, which must not reach a container
        self.addCleanup(own.write_text, before)
        for asked in (0, 300):
            resources = cri.LinuxContainerResources(oom_score_adj=asked)
            id = await self.run_container("sleep", "600", linux=cri.LinuxContainerConfig(resources=resources))
            marker = f"3{secrets.randbelow(10**8):08d}"
            running: Deferred[Any] = self.provider.exec_sync(id, ["sleep", marker], 0.0, 1024)
            self.assertEqual(await self.score_of("sleep", marker), asked)
            running.cancel()
            with self.assertRaises(CancelledError):
                await running
            await self.until(lambda: not _processes(marker), "its process is gone")  # noqa: B023
            session = await self.provider.exec_session(id, ["sleep", marker], Streams(stdout=True))
            self.assertEqual(await self.score_of("sleep", marker), asked)
            session.close()
            await session.ended()
            self.assertEqual((await self.state(id)).resources.oom_score_adj, asked)
            await self.provider.remove(id)

    async def score_of(self, *command: str) -> int:
        """Return the oom_score_adj of this command's process as soon as the process can be seen."""
        line = "\0".join([*command, ""]).encode()
        found: list[int] = []

        def look() -> bool:
            for pid in _processes(command[-1]):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/cmdline").read_bytes() == line:
                        found.append(int(Path(f"/proc/{pid}/oom_score_adj").read_text()))
            return bool(found)

        await self.until(look, f"{command} runs")
        return found[0]

    async def test_only_a_running_container_runs_commands(self) -> None:
        id = await self.create("true")
        await self.refused(FailedPrecondition, self.exec(id, "true"))
        await self.provider.start_container(id)
        await self.ended(id)
        await self.refused(FailedPrecondition, self.exec(id, "true"))


def _processes(marker: str) -> Sequence[int]:
    """Return the processes with this word in their command line."""
    from pathlib import Path

    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
