# SPDX-License-Identifier: Apache-2.0
"""The Agent service as the node sees it: over mutual TLS, on the fake ContainerProvider."""

from __future__ import annotations

import time
from typing import Any

from twisted.internet import process
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer_only

from infranetes_common import __version__
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_simulation.containers import FakeProvider
from tests.contract.container_provider_case import busybox_image
from tests.harness.needs import needs_programs
from tests.support.dockerd import archive
from tests.support.user_namespaces import namespaces, of_pod
from tests.support.waiting import until
from tests.vmserver.harness import Agent, run_directory
from txgrpc import Code, GrpcError
from vmserver.config import LimitsConfig
from vmserver.containers.interface import IContainerProvider
from vmserver.interruptions import Interruption
from vmserver.rpc.watch import Watcher

reactor = installed()
ID = "c0" * 16


@implementer_only(IContainerProvider)
class Plain(FakeProvider):
    """A provider without any optional features."""


def children() -> set[Any]:
    """Return the reactor's processes that have not ended, or whose pipes are open."""
    found = set(process.reapProcessHandlers.values())
    for each in (*reactor.getReaders(), *reactor.getWriters()):
        if isinstance(each, process.ProcessReader | process.ProcessWriter):
            found.add(each.proc)
        elif isinstance(each, process.PTYProcess):
            found.add(each)
    return found


class AgentCase(TestCase):
    """An agent and a node's stub of it."""

    async def setUp(self) -> None:
        await self.begin(Agent(reactor, run_directory(self), limits=LimitsConfig(execs=2)))

    async def begin(self, agent: Agent) -> None:
        """Start the test's agent; stop it, with everything that it began, after the test."""
        self.agent = agent
        self._others = children()
        self.addCleanup(lambda: Deferred.fromCoroutine(self._clean_up()))
        await agent.start()
        self.stub = agent.stub()
        self.image = busybox_image()

    async def _clean_up(self) -> None:
        if self.agent.service is not None:
            for state in await self.agent.provider.containers():
                await self.agent.provider.remove(state.id)
            await self.agent.stop()
        # A command that was killed is not reaped at once.
        await until(lambda: children() <= self._others, "the agent's commands are over")

    async def load(self) -> None:
        data = archive(self.image)

        def requests() -> Any:
            yield messages.LoadImageRequest(header=messages.LoadImageHeader(image_id=self.image.id))
            for at in range(0, len(data), 65536):
                yield messages.LoadImageRequest(data=data[at : at + 65536])

        loaded = await self.stub.LoadImage(requests(), timeout=30.0)
        self.assertEqual(loaded.image_id, self.image.id)

    async def create(self, *command: str, id: str = ID) -> Any:
        config = cri.ContainerConfig(command=command)
        request = messages.CreateContainerRequest(id=id, image_id=self.image.id, config=config)
        return (await self.stub.CreateContainer(request, timeout=10.0)).state

    async def run_container(self, *command: str, id: str = ID) -> Any:
        await self.create(*command, id=id)
        return (await self.stub.StartContainer(messages.StartContainerRequest(id=id), timeout=10.0)).state

    async def refused(self, code: Code, work: Any) -> str:
        try:
            result = await work
        except GrpcError as error:
            self.assertEqual(error.code, code, str(error))
            return error.message
        self.fail(f"not refused: {result!r}")


@needs_programs("busybox")
class AgentTests(AgentCase):
    """What each call does."""

    async def test_an_engine_that_takes_images_from_the_node_alone_says_so(self) -> None:
        request = messages.FetchImageRequest(image_id=self.image.id, url="https://localhost/x")
        words = await self.refused(Code.UNIMPLEMENTED, self.stub.FetchImage(request, timeout=10.0))
        self.assertIn("systemd provider", words)

    async def test_info_says_who_and_when(self) -> None:
        info = await self.stub.Info(messages.InfoRequest(), timeout=10.0)
        self.assertEqual(len(info.boot_id), 32)
        self.assertEqual(len(info.agent_id), 32)
        self.assertNotEqual(info.boot_id, info.agent_id)
        self.assertLess(abs(info.now_nanos - time.time_ns()), 10**10)
        self.assertEqual(info.steady_nanos, 0, "the machine's clock is not the pod's alone")
        self.assertGreaterEqual(info.cpus, 1)
        self.assertEqual(info.version, __version__)

    async def test_a_containers_whole_life(self) -> None:
        await self.load()
        self.assertEqual(
            list((await self.stub.ListImages(messages.ListImagesRequest(), timeout=5.0)).image_ids),
            [self.image.id],
        )
        self.assertEqual(
            (await self.create("sh", "-c", "echo hello; sleep 600")).state, cri.CONTAINER_CREATED
        )
        state = (await self.stub.StartContainer(messages.StartContainerRequest(id=ID), timeout=10.0)).state
        self.assertEqual(state.state, cri.CONTAINER_RUNNING)
        command = ["sh", "-c", "echo inside; exit 4"]
        ran = await self.stub.ExecSync(messages.ExecSyncRequest(id=ID, command=command), timeout=10.0)
        self.assertEqual((ran.stdout, ran.exit_code), (b"inside\n", 4))
        following = self.stub.ReadLog(messages.ReadLogRequest(id=ID, follow=True), timeout=None)
        async for record in following:
            self.assertEqual(record.line, b"hello")
            break
        following.cancel()
        resources = cri.LinuxContainerResources(
            cpu_shares=77, cpuset_cpus="0-99", cpuset_mems="7", unified={"cpuset.cpus": "0-99"}
        )
        updated = await self.stub.UpdateContainer(
            messages.UpdateContainerRequest(id=ID, resources=resources), timeout=5.0
        )
        limits = updated.state.resources
        self.assertEqual(limits.cpu_shares, 77)
        self.assertEqual((limits.cpuset_cpus, limits.cpuset_mems, dict(limits.unified)), ("", "", {}))
        stopped = await self.stub.StopContainer(
            messages.StopContainerRequest(id=ID, grace_seconds=0), timeout=10.0
        )
        self.assertEqual((stopped.state.state, stopped.state.exit_code), (cri.CONTAINER_EXITED, 137))
        listed = await self.stub.ListContainers(messages.ListContainersRequest(), timeout=5.0)
        self.assertEqual(list(listed.containers), [stopped.state])
        for _ in range(2):
            await self.stub.RemoveContainer(messages.RemoveContainerRequest(id=ID), timeout=10.0)
            await self.stub.RemoveImage(messages.RemoveImageRequest(image_id=self.image.id), timeout=5.0)

    async def test_watching_begins_with_all_there_is_and_goes_on_with_changes(self) -> None:
        await self.load()
        await self.create("true", id="a" * 32)
        watch = self.stub.Watch(messages.WatchRequest(), timeout=None)
        first = await anext(watch)
        self.assertEqual((first.container.id, first.container.state), ("a" * 32, cri.CONTAINER_CREATED))
        self.assertTrue((await anext(watch)).HasField("synced"))
        await self.run_container("sleep", "600", id="b" * 32)
        seen: list[Any] = []
        while not seen or seen[-1] != cri.CONTAINER_RUNNING:
            seen.append((await anext(watch)).container.state)
        await self.stub.RemoveContainer(messages.RemoveContainerRequest(id="b" * 32), timeout=10.0)
        while not (event := await anext(watch)).HasField("removed"):
            self.assertEqual(event.container.state, cri.CONTAINER_EXITED)
        self.assertEqual(event.removed, "b" * 32)
        watch.cancel()
        assert self.agent.service is not None
        watchers = self.agent.service._agent.watch.watchers
        await until(lambda: not watchers, "its watcher is gone")

    async def test_who_watches_is_told_that_the_machine_will_be_taken_away(self) -> None:
        assert self.agent.service is not None
        calls = self.agent.service._agent.watch
        before = self.stub.Watch(messages.WatchRequest(), timeout=None)
        self.assertTrue((await anext(before)).HasField("synced"))
        calls.interrupted(Interruption(1_700_000_000.5, "EC2 interrupts it"))
        after = self.stub.Watch(messages.WatchRequest(), timeout=None)
        self.assertTrue((await anext(after)).HasField("synced"))
        for watch in (before, after):
            told = (await anext(watch)).interruption
            self.assertEqual((told.at_nanos, told.reason), (1_700_000_000_500_000_000, "EC2 interrupts it"))
            watch.cancel()

    async def test_configuring_the_sandbox_checks_it(self) -> None:
        good = messages.ConfigureSandboxRequest(config=cri.PodSandboxConfig(hostname="pod"))
        for _ in range(2):
            await self.stub.ConfigureSandbox(good, timeout=5.0)
        bad = messages.ConfigureSandboxRequest(config=cri.PodSandboxConfig(hostname="a b"))
        self.assertIn(
            "hostname",
            await self.refused(Code.INVALID_ARGUMENT, self.stub.ConfigureSandbox(bad, timeout=5.0)),
        )

    async def test_a_machine_is_warmed_up_before_it_has_containers_alone(self) -> None:
        for _ in range(2):
            await self.stub.WarmUp(messages.WarmUpRequest(), timeout=5.0)
        await self.load()
        await self.create("true")
        warming = self.stub.WarmUp(messages.WarmUpRequest(), timeout=5.0)
        self.assertIn("has containers", await self.refused(Code.FAILED_PRECONDITION, warming))

    async def test_a_provider_without_user_namespaces_refuses_pods_that_have_one(self) -> None:
        request = messages.ConfigureSandboxRequest(config=cri.PodSandboxConfig(linux=of_pod(namespaces())))
        await self.stub.ConfigureSandbox(request, timeout=5.0)
        await self.agent.stop()
        directory = run_directory(self)
        await self.begin(Agent(reactor, directory, provider=lambda: Plain(reactor, directory / "fake")))
        refused = self.stub.ConfigureSandbox(request, timeout=5.0)
        self.assertIn("the provider oci", await self.refused(Code.FAILED_PRECONDITION, refused))

    async def test_commands_at_a_time_are_bounded(self) -> None:
        await self.load()
        await self.run_container("sleep", "600")
        sleeping = messages.ExecSyncRequest(id=ID, command=["sleep", "1"])
        running = [self.stub.ExecSync(sleeping, timeout=20.0) for _ in range(2)]
        await deferLater(reactor, 0.2, lambda: None)
        await self.refused(Code.RESOURCE_EXHAUSTED, self.stub.ExecSync(sleeping, timeout=20.0))
        for each in running:
            await each
        await self.stub.ExecSync(messages.ExecSyncRequest(id=ID, command=["true"]), timeout=20.0)

    async def test_a_command_out_of_time(self) -> None:
        await self.load()
        await self.run_container("sleep", "600")
        request = messages.ExecSyncRequest(id=ID, command=["sleep", "600"], timeout_seconds=1)
        await self.refused(Code.DEADLINE_EXCEEDED, self.stub.ExecSync(request, timeout=20.0))


@needs_programs("busybox")
class HostileTests(AgentCase):
    """Requests that an honest node does not send."""

    async def test_ids_that_are_no_ids(self) -> None:
        for id in ("", "../../etc/passwd", "A", "x" * 65, "a\0b", "a/b", "ä"):
            for work in (
                self.stub.StartContainer(messages.StartContainerRequest(id=id), timeout=5.0),
                self.stub.StopContainer(messages.StopContainerRequest(id=id), timeout=5.0),
                self.stub.RemoveContainer(messages.RemoveContainerRequest(id=id), timeout=5.0),
                self.stub.UpdateContainer(messages.UpdateContainerRequest(id=id), timeout=5.0),
                self.stub.ExecSync(messages.ExecSyncRequest(id=id, command=["true"]), timeout=5.0),
                self.stub.CreateContainer(
                    messages.CreateContainerRequest(id=id, image_id=self.image.id), timeout=5.0
                ),
                self._read(id, ""),
            ):
                await self.refused(Code.INVALID_ARGUMENT, work)

    async def _read(self, id: str, cursor: str) -> None:
        async for _ in self.stub.ReadLog(messages.ReadLogRequest(id=id, cursor=cursor), timeout=5.0):
            pass

    async def test_images_that_are_no_images(self) -> None:
        for image in ("", "busybox", "sha256:xyz", "sha256:" + "A" * 64, "sha256:" + "0" * 64 + "/../x"):
            for work in (
                self.stub.RemoveImage(messages.RemoveImageRequest(image_id=image), timeout=5.0),
                self.stub.CreateContainer(
                    messages.CreateContainerRequest(id=ID, image_id=image), timeout=5.0
                ),
                self.stub.MissingLayers(messages.MissingLayersRequest(diff_ids=[image]), timeout=5.0),
            ):
                await self.refused(Code.INVALID_ARGUMENT, work)
        many = messages.MissingLayersRequest(diff_ids=["sha256:" + "0" * 64] * 600)
        await self.refused(Code.INVALID_ARGUMENT, self.stub.MissingLayers(many, timeout=5.0))

    async def test_commands_and_variables_that_can_not_be(self) -> None:
        await self.load()
        await self.run_container("sleep", "600")
        for command in ([], [""], ["a\0b"], ["x"] * 9000, ["x" * 1100000]):
            request = messages.ExecSyncRequest(id=ID, command=command)
            await self.refused(Code.INVALID_ARGUMENT, self.stub.ExecSync(request, timeout=5.0))
        for env in (cri.KeyValue(key=""), cri.KeyValue(key="a=b"), cri.KeyValue(key="a", value=b"x\0y")):
            config = cri.ContainerConfig(envs=[env])
            made = messages.CreateContainerRequest(id="d" * 32, image_id=self.image.id, config=config)
            await self.refused(Code.INVALID_ARGUMENT, self.stub.CreateContainer(made, timeout=5.0))

    async def test_times_that_can_not_be(self) -> None:
        stop = messages.StopContainerRequest(id=ID, grace_seconds=-1)
        await self.refused(Code.INVALID_ARGUMENT, self.stub.StopContainer(stop, timeout=5.0))
        run = messages.ExecSyncRequest(id=ID, command=["true"], timeout_seconds=2**40)
        await self.refused(Code.INVALID_ARGUMENT, self.stub.ExecSync(run, timeout=5.0))

    async def test_loads_out_of_order(self) -> None:
        header = messages.LoadImageRequest(header=messages.LoadImageHeader(image_id=self.image.id))
        data = messages.LoadImageRequest(data=b"x")
        for requests in (
            [],
            [data],
            [messages.LoadImageRequest()],
            [header, header],
            [header, data],
            [header],
        ):
            await self.refused(Code.INVALID_ARGUMENT, self.stub.LoadImage(iter(requests), timeout=5.0))
        self.assertEqual(
            list((await self.stub.ListImages(messages.ListImagesRequest(), timeout=5.0)).image_ids), []
        )

    async def test_cursors_of_nowhere(self) -> None:
        await self.load()
        await self.run_container("sleep", "600")
        for cursor in ("x", "1." * 200, "1.0.0.0"):
            await self.refused(Code.INVALID_ARGUMENT, self._read(ID, cursor))


class WatcherTests(SynchronousTestCase):
    """A client that does not read costs at most one event per container."""

    def test_of_each_container_the_latest_is_kept_in_the_order_of_first_changes(self) -> None:
        watcher = Watcher()
        for number in range(1000):
            watcher.changed(messages.ContainerState(id=f"{number % 3}", exit_code=number))
        watcher.removed("1")
        taken = watcher.take()
        self.assertEqual(list(taken), ["0", "1", "2"])
        self.assertEqual((taken["0"].container.exit_code, taken["1"].removed), (999, "1"))
        self.assertEqual(watcher.take(), {})

    def test_it_wakes_for_each_batch(self) -> None:
        watcher = Watcher()
        waiting = Deferred.fromCoroutine(watcher.wait())
        self.assertNoResult(waiting)
        watcher.removed("a")
        self.successResultOf(waiting)
        self.successResultOf(Deferred.fromCoroutine(watcher.wait()))
        watcher.take()
        self.assertNoResult(Deferred.fromCoroutine(watcher.wait()))


@needs_programs("busybox")
class StatsTests(AgentCase):
    """What the machine and its containers use."""

    async def stats(self) -> Any:
        return await self.stub.Stats(messages.StatsRequest(), timeout=10.0)

    async def test_a_machine_without_containers_has_figures_all_the_same(self) -> None:
        stats = await self.stats()
        self.assertEqual(list(stats.containers), [])
        self.assertGreater(stats.machine.time_nanos, 0)
        self.assertEqual(stats.machine.cpu.total_nanos, 0)  # the machine is not the pod's alone
        self.assertEqual(list(stats.cards), [])

    async def test_containers_have_figures_and_rates_from_the_first(self) -> None:
        await self.load()
        await self.run_container("sh", "-c", "while :; do :; done")
        other = "c1" * 16
        await self.create("sleep", "600", id=other)
        deadline = reactor.seconds() + 30.0
        while True:
            stats = await self.stats()
            found = {one.id: one for one in stats.containers}
            if found[ID].usage.cpu.total_nanos > 50_000_000 or reactor.seconds() > deadline:
                break
            await deferLater(reactor, 0.05, lambda: None)
        self.assertEqual(set(found), {ID, other})
        self.assertFalse(found[other].HasField("usage"))
        usage = found[ID].usage
        self.assertGreater(usage.cpu.nano_cores.value, 0)
        self.assertLess(usage.cpu.nano_cores.value, 64 * 10**9)
        self.assertEqual(stats.machine.cpu.total_nanos, usage.cpu.total_nanos)
        self.assertEqual(stats.machine.memory.working_set, usage.memory.working_set)
        self.assertEqual(stats.machine.processes, 1)

    async def test_those_who_ask_at_once_share_one_measurement(self) -> None:
        waiting: Deferred[Any] = Deferred()
        calls: list[Any] = []

        def usage() -> Any:
            calls.append(1)
            return waiting

        self.patch(self.agent.provider, "usage", usage)
        asking = [Deferred.fromCoroutine(self.stats()) for _ in range(20)]
        stats = self.agent.service._agent.stats
        while stats._measuring is None or stats._measuring.waiters < 20:
            await deferLater(reactor, 0.01, lambda: None)
        waiting.callback([])
        self.assertEqual(len({(await one).machine.time_nanos for one in asking}), 1)
        self.assertEqual(calls, [1])

    async def test_a_failure_is_told_to_all_who_ask_and_the_next_one_tries_again(self) -> None:
        waiting: Deferred[Any] = Deferred()
        held = self.patch(self.agent.provider, "usage", lambda: waiting)
        asking = [Deferred.fromCoroutine(self.stats()) for _ in range(3)]
        gone = asking.pop()
        gone.addErrback(lambda _: None)
        await deferLater(reactor, 0.2, lambda: None)
        gone.cancel()
        waiting.errback(Unavailable("no figures here"))
        for one in asking:
            self.assertIn("no figures here", await self.refused(Code.UNAVAILABLE, one))
        held.restore()
        self.assertGreater((await self.stats()).machine.time_nanos, 0)
