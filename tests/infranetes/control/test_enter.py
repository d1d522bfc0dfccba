# SPDX-License-Identifier: Apache-2.0
"""What the daemon relays between infranetes-ctl and a VM's agent, both over real sockets."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from infranetes.control import visits as module
from infranetes.control.enter import AHEAD_BYTES, MAX_SHELLS, EnterCalls
from infranetes.machines.agent import limits
from infranetes.machines.agent.client import AgentClient
from infranetes.machines.agent.screen import AgentScreen
from infranetes.machines.interface import IAgent
from infranetes.pods.store.states import ContainerState
from infranetes_common.concurrency import start
from infranetes_common.wire import control, vmserver
from tests.infranetes.control.visit_case import VisitCase, reactor
from tests.infranetes.pods.fakes import box
from tests.support.hostile.agent import HostileAgent
from tests.support.hostile.attacks import ATTACKS
from tests.support.waiting import until
from txgrpc import Code, Service

END = vmserver.SessionOutput(end=vmserver.SessionEnd(exit_code=7))


class Shells:
    """An agent that echoes what is typed, and ends as the test says.

    :ivar asked: the first message of the last call. :ivar reading: whether it reads what is typed.
    :ivar output: what it sends once the input has ended. :ivar closed: how many calls are over.
    """

    def __init__(self) -> None:
        self.asked = vmserver.SessionInput()
        self.sizes: list[tuple[int, int]] = []
        self.reading = True
        self.output = [END]
        self.closed = 0

    async def Shell(
        self, requests: AsyncIterator[vmserver.SessionInput], call: object
    ) -> AsyncIterator[vmserver.SessionOutput]:
        try:
            self.asked = await anext(aiter(requests))
            if not self.reading:
                await Deferred()
            async for request in requests:
                if request.HasField("resize"):
                    self.sizes.append((request.resize.width, request.resize.height))
                else:
                    yield vmserver.SessionOutput(stdout=request.stdin)
            for message in self.output:
                yield message
        finally:
            self.closed += 1


class EnterCase(VisitCase):
    """A pod, its agent, and a client of the control socket."""

    log = "infranetes.control.enter"
    agents = 0

    async def setUp(self) -> None:
        await super().setUp()
        self.calls = EnterCalls(self.world.clock, self.world.node.inventory, lambda: self.allowed)
        await self.serve_control(self.calls)
        self.agent = Shells()
        await self.answers(self.agent)

    async def answers(self, agent: object) -> None:
        """Make `agent` the pod's agent."""
        self.agents += 1
        options = {"limits": limits.CHANNEL, "screen": AgentScreen()}
        channel = await self.channel(f"agent{self.agents}", Service(vmserver.Agent, agent), **options)
        client = AgentClient(self.sandbox, channel)
        self.world.node.inventory.sandboxes[self.sandbox].machine.client = client

    async def enter(self, *inputs: control.EnterPodRequest, **fields: Any) -> Any:
        call = self.stub.EnterPod(timeout=50.0)
        self.addCleanup(call.cancel)
        wanted = control.EnterPodStart(**({"pod": "web"} | fields))
        for one in (control.EnterPodRequest(start=wanted), *inputs):
            await call.send(one)
        return call


class RelayTests(EnterCase):
    async def test_what_goes_in_and_out(self) -> None:
        size = control.EnterPodRequest(resize=control.WindowSize(width=91, height=17))
        call = await self.enter(size, command=["a", "b c"], tty=True, term="vt220")
        await call.send(control.EnterPodRequest(stdin=b"typed"))
        await call.done_sending()
        begun, out, end = [message async for message in call]
        record = self.world.node.inventory.sandboxes[self.sandbox].record
        self.assertEqual(
            begun.begun,
            control.VmOfPod(
                sandbox_id=self.sandbox, namespace="default", name="web", vm_id=record.instance_id
            ),
        )
        self.assertEqual((out.stdout, end.exit_code), (b"typed", 7))
        asked = self.agent.asked.start
        self.assertEqual((list(asked.command), asked.tty, asked.term), (["a", "b c"], True, "vt220"))
        self.assertEqual(self.agent.sizes, [(91, 17)])

    async def test_an_exit_code_that_is_none_is_255(self) -> None:
        for code in (-1, 256, 2**31 - 1):
            self.agent.output = [vmserver.SessionOutput(end=vmserver.SessionEnd(exit_code=code))]
            call = await self.enter()
            await call.done_sending()
            self.assertEqual([message async for message in call][-1].exit_code, 255)

    async def test_it_is_written_down_without_what_was_typed_and_shown(self) -> None:
        self.agent.output = [vmserver.SessionOutput(stderr=b"secret-shown"), END]
        call = await self.enter(control.EnterPodRequest(stdin=b"secret-typed"), command=["secret-word"])
        await anext(aiter(call))
        self.world.clock.advance(3.0)
        await call.done_sending()
        self.assertEqual(len([message async for message in call]), 3)
        await until(lambda: len(self.lines) == 2, "it is written down")
        begin, end = self.lines
        for line in self.lines:
            self.assertEqual((line["uid"], line["pid"]), (os.getuid(), os.getpid()))
            self.assertEqual((line["sandbox"], line["pod"]), (self.sandbox, "default/web"))
            self.assertNotIn("secret", repr(line))
        self.assertNotIn("exit_code", begin)
        self.assertEqual((end["exit_code"], end["seconds"]), (7, 3.0))

    async def test_one_who_does_not_read_has_the_agent_wait(self) -> None:
        self.agent.reading = False
        call = await self.enter()
        await until(lambda: self.agent.asked.HasField("start"), "it is open")
        sent = await self.taken(lambda data: call.send(control.EnterPodRequest(stdin=data)))
        self.assertLess(sent, 4 * AHEAD_BYTES)

    async def test_one_who_goes_away_ends_it(self) -> None:
        call = await self.enter()
        await until(lambda: self.agent.asked.HasField("start"), "it is open")
        call.cancel()
        await until(lambda: self.agent.closed == 1, "the agent's call is over")
        await until(lambda: len(self.lines) == 2, "it is written down")
        self.assertEqual(self.lines[1]["why"], "the caller went away")

    async def test_a_daemon_that_stops_ends_it_and_says_so(self) -> None:
        call = await self.enter()
        await until(lambda: self.agent.asked.HasField("start"), "it is open")
        self.calls.stop()
        self.assertIn("the daemon is stopping", await self.refused(Code.UNAVAILABLE, call))
        await until(lambda: self.agent.closed == 1, "the agent's call is over")


class Commands(Shells):
    """An agent that runs commands in containers as `Shells` runs shells."""

    async def Exec(
        self, requests: AsyncIterator[vmserver.SessionInput], call: object
    ) -> AsyncIterator[vmserver.SessionOutput]:
        async for message in self.Shell(requests, call):
            yield message


class ExecTests(EnterCase):
    """Commands in containers."""

    async def setUp(self) -> None:
        await super().setUp()
        self.main = await self.container("main")
        self.agent = Commands()
        await self.answers(self.agent)

    async def container(self, name: str) -> str:
        """Start a container, by an agent that is a fake."""
        machine = self.world.node.inventory.sandboxes[self.sandbox].machine
        client, fake = machine.client, cast(IAgent, self.world.agents[self.sandbox])
        machine.client = fake
        try:
            made = await start(self.world.containers.create(self.sandbox, box(name)))
            await start(self.world.containers.start(made))
        finally:
            machine.client = client
        return made

    async def execute(self, *inputs: control.EnterPodRequest, **fields: Any) -> Any:
        call = self.stub.ExecPod(timeout=50.0)
        self.addCleanup(call.cancel)
        wanted = control.EnterPodStart(**({"pod": "web", "command": ["cat"]} | fields))
        for one in (control.EnterPodRequest(start=wanted), *inputs):
            await call.send(one)
        await call.done_sending()
        return call

    async def test_what_goes_in_and_out(self) -> None:
        call = await self.execute(control.EnterPodRequest(stdin=b"typed"), command=["a", "b c"])
        begun, out, end = [message async for message in call]
        self.assertEqual((begun.begun.name, out.stdout, end.exit_code), ("web", b"typed", 7))
        asked = self.agent.asked.start
        self.assertEqual((asked.id, list(asked.command)), (self.main, ["a", "b c"]))
        self.assertEqual((asked.stdin, asked.stderr, asked.tty), (True, True, False))

    async def test_without_stdin_it_gets_none(self) -> None:
        call = await self.execute(no_stdin=True)
        self.assertEqual([message async for message in call][-1].exit_code, 7)
        self.assertFalse(self.agent.asked.start.stdin)

    async def test_the_configuration_need_not_allow_it(self) -> None:
        self.allowed = False
        self.assertEqual([message async for message in await self.execute()][-1].exit_code, 7)

    async def test_it_is_written_down_without_arguments(self) -> None:
        async for _ in await self.execute(command=["cat", "secret-word"]):
            pass
        await until(lambda: len(self.lines) == 2, "it is written down")
        for line in self.lines:
            self.assertEqual((line["uid"], line["pod"]), (os.getuid(), "default/web"))
            self.assertNotIn("secret", repr(line))

    async def test_the_container_that_is_meant(self) -> None:
        side = await self.container("side")
        for fields, id in (
            ({"container": "side"}, side),
            ({"container": side[:10]}, side),
            ({"pod": "default/web", "container": "main"}, self.main),
            ({"pod": side}, side),
            ({"pod": self.main[:12]}, self.main),
        ):
            async for _ in await self.execute(**fields):
                pass
            self.assertEqual(self.agent.asked.start.id, id, fields)
        words = await self.refused(Code.INVALID_ARGUMENT, await self.execute())
        self.assertIn("say which of main, side (--container)", words)
        words = await self.refused(Code.NOT_FOUND, await self.execute(container="none"))
        self.assertIn("has no container 'none': it has main, side", words)

    async def test_one_that_does_not_run(self) -> None:
        container = self.world.node.inventory.container(self.main)
        container.record = attrs.evolve(container.record, state=ContainerState.EXITED)
        words = await self.refused(Code.FAILED_PRECONDITION, await self.execute())
        self.assertIn("no container of pod web runs", words)
        words = await self.refused(Code.FAILED_PRECONDITION, await self.execute(container="main"))
        self.assertIn("container main does not run: it is exited", words)

    async def test_without_a_command_there_is_nothing_to_run(self) -> None:
        await self.refused(Code.INVALID_ARGUMENT, await self.execute(command=[]))

    async def test_a_name_has_to_be_whole(self) -> None:
        await self.refused(Code.NOT_FOUND, await self.execute(pod="we"))


class RefusedTests(EnterCase):
    async def test_unless_it_is_allowed(self) -> None:
        self.allowed = False
        words = await self.refused(Code.PERMISSION_DENIED, await self.enter())
        self.assertIn("control.enter = true", words)
        self.assertFalse(self.agent.asked.HasField("start"))
        (line,) = self.lines
        self.assertEqual(line["uid"], os.getuid())

    async def test_a_pod_that_is_not_there_or_not_ready(self) -> None:
        await self.refused(Code.NOT_FOUND, await self.enter(pod="none"))
        await self.refused(Code.INVALID_ARGUMENT, await self.enter(pod=""))
        await start(self.world.sandboxes.stop(self.sandbox))
        await self.refused(Code.FAILED_PRECONDITION, await self.enter())
        await start(self.world.sandboxes.remove(self.sandbox))
        self.assertIn("gone", await self.refused(Code.FAILED_PRECONDITION, await self.enter()))

    async def test_a_pod_whose_vm_is_not_made_yet(self) -> None:
        self.world.node.inventory.sandboxes[self.sandbox].machine.client = None
        words = await self.refused(Code.FAILED_PRECONDITION, await self.enter())
        self.assertIn("has no VM yet", words)

    async def test_input_that_is_wrong(self) -> None:
        window = control.WindowSize
        for wrong in (
            control.EnterPodRequest(stdin=bytes(256 * 1024 + 1)),
            control.EnterPodRequest(resize=window(width=0, height=1)),
            control.EnterPodRequest(resize=window(width=1, height=65536)),
            control.EnterPodRequest(start=control.EnterPodStart(pod="web")),
            control.EnterPodRequest(),
        ):
            closed = self.agent.closed
            await self.refused(Code.INVALID_ARGUMENT, await self.enter(wrong))
            await self.over(closed + 1)

    async def over(self, calls: int) -> None:
        await until(lambda: self.agent.closed == calls, "the agent's call is over")

    async def test_no_start(self) -> None:
        call = self.stub.EnterPod(timeout=50.0)
        await call.done_sending()
        await self.refused(Code.INVALID_ARGUMENT, call)
        call = self.stub.EnterPod(timeout=50.0)
        await call.send(control.EnterPodRequest(stdin=b"x"))
        await self.refused(Code.INVALID_ARGUMENT, call)
        call = self.stub.EnterPod(timeout=50.0)
        await deferLater(reactor, 0.2, lambda: None)
        self.world.clock.advance(module.START_SECONDS)
        await self.refused(Code.DEADLINE_EXCEEDED, call)

    async def test_no_more_than_the_limit_at_once(self) -> None:
        for _ in range(MAX_SHELLS):
            await anext(aiter(await self.enter()))
        words = await self.refused(Code.RESOURCE_EXHAUSTED, await self.enter())
        self.assertIn(f"{MAX_SHELLS} shells", words)


class AgentTests(EnterCase):
    """Agents that are old or hostile."""

    async def test_one_of_an_earlier_release(self) -> None:
        await self.answers(object())
        words = await self.refused(Code.FAILED_PRECONDITION, await self.enter())
        self.assertIn("of an earlier release", words)

    async def test_one_that_is_lost(self) -> None:
        for done in (False, True):
            hostile = HostileAgent(self.sandbox, ())
            hostile.attacks = {"Shell": ATTACKS["Shell", "never"]}
            await self.answers(hostile)
            call = await self.enter()
            await anext(aiter(call))
            if done:
                await call.done_sending()
            await until(lambda: self.server.connections, "the agent is called")
            await deferLater(reactor, 0.2, lambda: None)
            for connection in list(self.server.connections):
                connection.transport.abortConnection()
            self.assertIn("can't be reached", await self.refused(Code.UNAVAILABLE, call))

    async def test_one_that_ends_without_an_exit_code(self) -> None:
        self.agent.output = []
        call = await self.enter()
        await call.done_sending()
        self.assertIn("without an exit code", await self.refused(Code.INTERNAL, call))

    async def test_one_that_lies(self) -> None:
        hostile = HostileAgent(self.sandbox, ())
        await self.answers(hostile)
        await self.refused(Code.NOT_FOUND, await self.enter())
        for name, code in (("huge", Code.RESOURCE_EXHAUSTED), ("broken", Code.INTERNAL)):
            hostile.attacks = {"Shell": ATTACKS["Shell", name]}
            await self.refused(code, await self.enter())

    async def test_one_that_says_nothing(self) -> None:
        hostile = HostileAgent(self.sandbox, ())
        hostile.attacks = {"Shell": ATTACKS["Shell", "never"]}
        await self.answers(hostile)
        call = await self.enter()
        self.assertTrue((await anext(aiter(call))).HasField("begun"))
        call.cancel()
        await until(lambda: len(self.lines) == 2, "it is written down")
