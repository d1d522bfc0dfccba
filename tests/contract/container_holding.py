# SPDX-License-Identifier: Apache-2.0
"""What the agent relies on in a provider whose containers can be held still (`IHoldsContainers`)."""

from __future__ import annotations

import secrets
import signal
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater
from zope.interface.verify import verifyObject

from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.contract.container_provider_case import ContainerProviderCase
from tests.harness.durations import slow
from vmserver.containers.hooks import Hook
from vmserver.containers.interface import ExecResult, IHoldsContainers, Streams

reactor = installed()

COUNTER = ("sh", "-c", "n=0; while :; do n=$((n+1)); echo $n >>/count; sleep 0.01; done")


class HoldingCase(ContainerProviderCase):
    """Helpers: containers that count while they run."""

    async def counter(self, *command: str, **fields: Any) -> str:
        """Run a container that counts in its file /count."""
        id = await self.run_container(*(command or COUNTER), **fields)
        await self.counts(id)
        return id

    async def read(self, id: str, path: str = "/count") -> str:
        """Return the last line of a container's file."""
        ran: ExecResult = await self.provider.exec_sync(id, ["tail", "-n", "1", path], 30.0, 1000)
        return ran.stdout.decode()

    async def counts(self, id: str) -> None:
        """Wait until a container counts on."""
        first = await self.read(id)

        async def more() -> bool:
            return await self.read(id) not in ("", first)

        await self.until(more, f"container {id} runs")

    def ticks(self, pid: int) -> tuple[str, ...]:
        """Return what a process has used of the processor."""
        with open(f"/proc/{pid}/stat") as file:
            return tuple(file.read().rpartition(")")[2].split()[11:15])

    async def rests(self, id: str) -> None:
        """Check that nothing of a container runs for a while."""
        pids = self.provider.thd_pids()[id]
        self.assertTrue(pids)
        before = {pid: self.ticks(pid) for pid in pids}
        await deferLater(reactor, 0.3, lambda: None)
        self.assertEqual({pid: self.ticks(pid) for pid in self.provider.thd_pids()[id]}, before)


class HoldContract(HoldingCase):
    """The pod that is kept."""

    def test_it_holds_containers(self) -> None:
        verifyObject(IHoldsContainers, self.provider)
        self.assertFalse(self.provider.held)

    async def test_no_process_runs_until_they_are_let_go(self) -> None:
        ids = {await self.counter(), await self.counter()}
        idle = await self.create("sleep", "600")
        for _ in range(2):
            self.assertEqual(set(await self.provider.hold()), ids)
            self.assertTrue(self.provider.held)
            for id in ids:
                await self.rests(id)
        for _ in range(2):
            await self.provider.thaw()
            self.assertFalse(self.provider.held)
        for id in ids:
            await self.counts(id)
        self.assertEqual((await self.state(idle)).state, cri.CONTAINER_CREATED)

    async def test_nobody_is_told_of_it(self) -> None:
        id = await self.counter()
        await self.provider.hold()
        self.assertEqual((await self.state(id)).state, cri.CONTAINER_RUNNING)
        await self.provider.thaw()
        self.assertEqual(self.states_told(id), [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING])

    async def test_commands_and_starts_are_refused_meanwhile(self) -> None:
        id, idle = await self.counter(), await self.create("true")
        await self.provider.hold()
        for work in (
            self.provider.exec_sync(id, ["true"], 5.0, 100),
            self.provider.exec_session(id, ["true"], Streams(stdout=True)),
            self.provider.start_container(idle),
        ):
            self.assertIn("held still", await self.refused(FailedPrecondition, work))
        self.assertEqual((await self.provider.start_container(id)).state, cri.CONTAINER_RUNNING)
        await self.provider.thaw()
        await self.provider.start_container(idle)
        self.assertEqual((await self.provider.exec_sync(id, ["true"], 5.0, 100)).exit_code, 0)

    @slow(6, "a command that takes longer than is waited for")
    async def test_a_command_that_goes_on_is_held_with_its_container(self) -> None:
        id = await self.counter()
        running = self.provider.exec_sync(id, ["sh", "-c", "sleep 4; echo done"], 60.0, 100)
        await self.until(lambda: len(self.provider.thd_pids()[id]) > 2, "the command runs")
        await self.provider.hold()
        await self.rests(id)
        self.assertFalse(running.called)
        await self.provider.thaw()
        self.assertEqual((await running).stdout, b"done\n")

    async def test_a_short_command_ends_first(self) -> None:
        id = await self.counter()
        running = self.provider.exec_sync(id, ["sh", "-c", "sleep 0.5; echo done"], 60.0, 100)
        await self.until(lambda: len(self.provider.thd_pids()[id]) > 2, "the command runs")
        await self.provider.hold()
        self.assertTrue(running.called)
        self.assertEqual((await running).stdout, b"done\n")
        await self.provider.thaw()

    async def test_held_containers_are_stopped_and_removed(self) -> None:
        command = ("sh", "-c", "trap 'exit 7' TERM; while :; do date >>/count; sleep 0.01; done")
        stopped, killed, removed = [await self.counter(*command) for _ in range(3)]
        other = await self.counter()
        await self.provider.hold()
        self.assertEqual((await self.provider.stop_container(stopped, 20)).exit_code, 7)
        self.assertEqual((await self.provider.stop_container(killed, 0)).exit_code, 137)
        await self.provider.remove(removed)
        self.assertIsNone(await self.state(removed))
        await self.rests(other)
        self.assertEqual(await self.provider.hold(), [other])
        await self.provider.thaw()
        await self.counts(other)

    async def test_it_can_be_cancelled_at_any_moment(self) -> None:
        id = await self.counter()
        for turns in range(12):
            holding = self.provider.hold()
            for _ in range(turns):
                await deferLater(reactor, 0, lambda: None)
            holding.addErrback(lambda failure: failure.trap(CancelledError))
            holding.cancel()
            await holding
            if self.provider.held:  # it had ended
                await self.provider.thaw()
            await self.counts(id)

    async def test_another_agent_can_hold_them_on_and_let_them_go(self) -> None:
        id = await self.counter()
        await self.provider.hold()
        await self.restarted()
        await self.rests(id)
        self.assertEqual(await self.provider.hold(), [id])
        await self.rests(id)
        await self.provider.thaw()
        await self.counts(id)

    async def test_hooks(self) -> None:
        command = ("sh", "-c", "trap 'echo told >/told' USR2; while :; do date >>/count; sleep 0.01; done")
        id = await self.counter(*command)
        await self.provider.tell(id, Hook(("sh", "-c", "echo $PPID >/ran"), 0, 30.0))
        self.assertTrue(await self.read(id, "/ran"))
        await self.provider.tell(id, Hook((), signal.SIGUSR2, 0.5))
        self.assertEqual(await self.read(id, "/told"), "told\n")
        failing = self.provider.tell(id, Hook(("sh", "-c", "echo not now >&2; exit 3"), 0, 30.0))
        words = await self.refused(FailedPrecondition, failing)
        self.assertIn("ended with 3: not now", words)
        with self.assertRaises(NotFound):
            await self.provider.tell("0" * 32, Hook(("true",), 0, 1.0))
        idle = await self.create("true")
        await self.refused(FailedPrecondition, self.provider.tell(idle, Hook(("true",), 0, 1.0)))


class AdoptContract(HoldingCase):
    """A clone, in which the pod that was kept is no more."""

    async def kept(self, *command: str, **fields: Any) -> str:
        """Run a container, and make the VM another pod's."""
        id = await self.counter(*command, **fields)
        await self.provider.hold()
        await self.provider.keep()
        return id

    async def adopted(self, old: str, *command: str, hook: Hook | None = None, **fields: Any) -> str:
        """Give a kept container to the pod; return its new id."""
        new = secrets.token_hex(16)
        config = cri.ContainerConfig(command=command or COUNTER, **fields)
        sandbox = cri.PodSandboxConfig(hostname="clone")
        for _ in range(2):
            state = await self.provider.adopt(old, new, config, sandbox, hook)
            self.assertEqual((state.id, state.state, state.started_at), (new, cri.CONTAINER_CREATED, 0))
        return new

    async def test_kept_containers_are_not_listed_and_do_not_run(self) -> None:
        ended, idle = await self.run_container("true"), await self.create("true")
        await self.ended(ended)
        id = await self.kept()
        told = len(self.told)
        for _ in range(2):
            self.assertEqual(await self.provider.containers(), [])
            self.assertEqual(self.provider.kept(), [id])
            self.assertEqual(await self.provider.usage(), [])
            await self.provider.keep()
        for gone in (id, ended, idle):
            for work in (
                self.provider.start_container(gone),
                self.provider.stop_container(gone, 1),
                self.provider.exec_sync(gone, ["true"], 5.0, 100),
                self.provider.update(gone, cri.LinuxContainerResources()),
            ):
                await self.refused(NotFound, work)
        self.assertEqual(len(self.told), told)

    async def test_one_goes_on_under_a_new_id_once_it_is_started(self) -> None:
        old = await self.kept()
        new = await self.adopted(old)
        self.assertEqual([one.id for one in await self.provider.containers()], [new])
        self.assertEqual(self.provider.kept(), [new])
        running = await self.provider.start_container(new)
        self.assertEqual((running.id, running.state), (new, cri.CONTAINER_RUNNING))
        self.assertGreaterEqual(running.started_at, running.created_at)
        self.assertEqual(self.provider.kept(), [])
        await self.counts(new)
        self.assertEqual(self.states_told(new), [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING])
        self.assertEqual(self.states_told(old), [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING])
        self.assertEqual((await self.provider.stop_container(new, 0)).exit_code, 137)
        await self.provider.remove(new)
        self.assertEqual(await self.provider.containers(), [])

    async def test_it_is_the_one_that_was_kept(self) -> None:
        old = await self.counter()
        await self.counts(old)
        reached = int(await self.read(old))
        await self.provider.hold()
        await self.provider.keep()
        new = await self.adopted(old)
        await self.provider.start_container(new)
        await self.counts(new)
        self.assertGreater(int(await self.read(new)), reached)

    async def test_an_adoption_that_is_cancelled_goes_on_and_the_same_one_joins_it(self) -> None:
        old, new = await self.kept(), secrets.token_hex(16)
        config, sandbox = cri.ContainerConfig(command=COUNTER), cri.PodSandboxConfig(hostname="clone")
        first = self.provider.adopt(old, new, config, sandbox, None)
        first.cancel()
        state = await self.provider.adopt(old, new, config, sandbox, None)
        self.assertEqual((state.id, state.state), (new, cri.CONTAINER_CREATED))
        await self.assertFailure(first, CancelledError)

    async def test_its_log_begins_anew(self) -> None:
        command = (
            "sh",
            "-c",
            "echo before; while [ ! -e /go ]; do date >>/count; sleep 0.01; done; echo after",
        )
        old = await self.counter(*command)
        await self.until(lambda: self.logged(old, b"before"), "it has logged")
        await self.provider.hold()
        await self.provider.keep()
        hook = Hook(("touch", "/go"), 0, 30.0)
        new = await self.adopted(old, *command, hook=hook)
        await self.provider.start_container(new)
        await self.ended(new)
        self.assertEqual([record.line for record in await self.lines(new)], [b"after"])

    async def logged(self, id: str, line: bytes) -> bool:
        """Return whether a container has logged a line."""
        return any(record.line == line for record in await self.lines(id))

    async def test_commands_have_the_new_pods_environment(self) -> None:
        envs = [cri.KeyValue(key="POD", value=b"old"), cri.KeyValue(key="OLD", value=b"1")]
        old = await self.kept(envs=envs)
        new = await self.adopted(old, envs=[cri.KeyValue(key="POD", value=b"new")])
        await self.provider.start_container(new)
        said = await self.provider.exec_sync(
            new, ["sh", "-c", "echo $POD $OLD $HOSTNAME; echo $PATH"], 30.0, 100
        )
        first, path = said.stdout.decode().splitlines()
        self.assertEqual(first, "new clone")
        self.assertIn("/bin", path)

    async def test_its_hook_has_run_once_it_is_started(self) -> None:
        old = await self.kept()
        new = await self.adopted(old, hook=Hook(("sh", "-c", "echo $HOSTNAME >/cloned"), 0, 30.0))
        await self.provider.start_container(new)
        self.assertEqual(await self.read(new, "/cloned"), "clone\n")

    async def test_it_ends_if_its_hook_fails(self) -> None:
        old = await self.kept()
        new = await self.adopted(old, hook=Hook(("sh", "-c", "echo no entropy; exit 9"), 0, 30.0))
        words = await self.refused(FailedPrecondition, self.provider.start_container(new))
        self.assertIn("ended with 9: no entropy", words)
        state = await self.state(new)
        self.assertEqual((state.state, state.reason), (cri.CONTAINER_EXITED, "StartError"))
        self.assertEqual(self.provider.kept(), [])

    async def test_others_are_ended_by_their_old_id(self) -> None:
        one, two = await self.counter(), await self.counter()
        await self.provider.hold()
        await self.provider.keep()
        new = await self.adopted(one)
        for _ in range(2):
            await self.provider.remove(two)
        self.assertEqual(self.provider.kept(), [new])
        await self.provider.start_container(new)
        await self.counts(new)
        self.assertEqual(self.states_told(two), [cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING])

    async def test_one_that_was_given_and_not_started_is_removed(self) -> None:
        new = await self.adopted(await self.kept())
        self.assertEqual((await self.provider.stop_container(new, 1)).state, cri.CONTAINER_CREATED)
        await self.provider.remove(new)
        self.assertEqual((await self.provider.containers(), self.provider.kept()), ([], []))

    async def test_other_containers_run_beside_it(self) -> None:
        old = await self.kept()
        cold = await self.counter()
        self.assertEqual([one.id for one in await self.provider.containers()], [cold])
        new = await self.adopted(old)
        await self.provider.start_container(new)
        await self.counts(new)
        await self.counts(cold)

    @slow(7, "three agents follow one another")
    async def test_another_agent_finds_all_as_it_was(self) -> None:
        old, other = await self.counter(), await self.counter()
        await self.provider.hold()
        await self.provider.keep()
        await self.restarted()
        self.assertEqual((await self.provider.containers(), set(self.provider.kept())), ([], {old, other}))
        new = await self.adopted(old, hook=Hook(("touch", "/cloned"), 0, 30.0))
        await self.restarted()
        self.assertEqual((await self.state(new)).state, cri.CONTAINER_CREATED)
        self.assertEqual(set(self.provider.kept()), {new, other})
        await self.provider.start_container(new)
        await self.restarted()
        self.assertEqual((await self.state(new)).state, cri.CONTAINER_RUNNING)
        self.assertEqual(await self.read(new, "/cloned"), "")
        await self.counts(new)
        await self.provider.remove(other)
        await self.restarted()
        self.assertEqual(self.provider.kept(), [])
        await self.provider.stop_container(new, 0)
        self.assertEqual((await self.state(new)).exit_code, 137)

    async def test_what_cant_be_changed_has_to_be_the_same(self) -> None:
        old = await self.kept(working_dir="/tmp")
        context = cri.LinuxContainerSecurityContext(privileged=True)
        for field, wrong in (
            ("command", {"command": ["sleep", "1"]}),
            ("working_dir", {"working_dir": "/"}),
            ("tty", {"tty": True}),
            ("mounts", {"mounts": [cri.Mount(container_path="/x", host_path="/tmp")]}),
            ("security_context", {"linux": cri.LinuxContainerConfig(security_context=context)}),
        ):
            fields: dict[str, Any] = {"command": COUNTER, "working_dir": "/tmp", **wrong}
            adopting = self.provider.adopt(
                old, "f" * 32, cri.ContainerConfig(**fields), cri.PodSandboxConfig(), None
            )
            self.assertIn(field, await self.refused(InvalidArgument, adopting))
        await self.adopted(old, working_dir="/tmp", log_path="0.log", labels={"a": "b"})

    async def test_its_limits_become_the_new_pods(self) -> None:
        old = await self.kept()
        limits = cri.LinuxContainerResources(cpu_shares=512)
        new = await self.adopted(old, linux=cri.LinuxContainerConfig(resources=limits))
        self.assertEqual((await self.state(new)).resources.cpu_shares, 512)
        self.assertEqual((await self.provider.start_container(new)).resources.cpu_shares, 512)

    async def test_of_what_was_not_kept_nothing_is_adopted(self) -> None:
        config = cri.ContainerConfig(command=COUNTER)
        own = await self.counter()
        for old in (own, "0" * 32):
            adopting = self.provider.adopt(old, "f" * 32, config, cri.PodSandboxConfig(), None)
            await self.refused(NotFound, adopting)
        self.assertEqual(len(await self.provider.containers()), 1)
        old = await self.kept()
        cold = await self.counter()
        adopting = self.provider.adopt(old, cold, config, cri.PodSandboxConfig(), None)
        await self.refused(FailedPrecondition, adopting)

    async def test_one_that_dies_while_it_is_held(self) -> None:
        kept, given = await self.counter(), await self.counter()
        pids = self.provider.thd_pids()
        await self.provider.hold()
        await self.provider.keep()
        new = await self.adopted(given)
        await self.die(pids[kept] + pids[given])
        self.assertEqual((await self.ended(new)).exit_code, 137)
        await self.until(lambda: not self.provider.kept(), "the other one is gone")
        await self.refused(NotFound, self.provider.adopt(
            kept, "f" * 32, cri.ContainerConfig(command=COUNTER), cri.PodSandboxConfig(), None
        ))  # fmt: skip

    async def die(self, pids: list[int]) -> None:
        """Have held processes end, as if memory had run out."""
        raise NotImplementedError
