# SPDX-License-Identifier: Apache-2.0
"""Which ContainerProvider runs the pod's containers: in the agent, and as the node sees it."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase
from zope.interface import directlyProvides

from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.identity import encode
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.harness.durations import slow
from tests.harness.needs import needs_docker
from tests.support import warm
from tests.support.dockerd import Dockerd
from tests.support.waiting import until
from tests.vmserver.harness import SANDBOX, Agent, run_directory
from tests.vmserver.test_daemon import ROOT, VMSERVER
from txgrpc import Code, GrpcError
from vmserver.containers.interface import IMountsForItself
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.identity.delivery import save

reactor = installed()


class _Provider:
    """A provider that starts when the test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starting: Deferred[None] = Deferred()
        self.calls: list[str] = []
        self.states: list[Any] = []
        self.watchers: list[tuple[Any, Any]] = []

    def start(self) -> Deferred[None]:
        self.calls.append("start")
        return self.starting

    def stop(self) -> Deferred[None]:
        self.calls.append("stop")
        return succeed(None)

    def watch(self, changed: Any, removed: Any) -> None:
        self.watchers.append((changed, removed))

    def containers(self) -> Deferred[list[Any]]:
        return succeed(self.states)


class ChoiceTests(TestCase):
    """A choice among `first`, which is configured, and `second` and `third`, which may be chosen."""

    async def setUp(self) -> None:
        self.file = run_directory(self) / "own" / "provider"
        self.refused = False
        self.made: dict[str, list[_Provider]] = {"first": [], "second": [], "third": []}
        await self.begin()

    async def begin(self, *choices: str) -> None:
        """Start an agent with providers that start at once."""
        self.ready = True
        self.done: list[str] = []
        self.choice = ProviderChoice(
            reactor, self.make("first"), choices or ("second", "third"), self.make, self.file, self.share
        )
        await self.choice.recall()
        self.done.append("recalled")
        await self.choice.start()

    def share(self) -> None:
        """Stand for what makes the agent's mounts visible."""
        self.done.append("mounts are seen")
        if self.refused:
            raise FailedPrecondition("the kernel refuses")

    def make(self, name: str) -> Any:
        provider = _Provider(name)
        if name == "first":
            directlyProvides(provider, IMountsForItself)
        self.made[name].append(provider)
        if self.ready:
            provider.starting.callback(None)
        return provider

    async def started(self, name: str) -> _Provider:
        """Wait until the provider is being started that was made first."""
        await until(lambda: self.made[name] and self.made[name][0].calls, f"{name} is started")
        return self.made[name][0]

    async def test_the_configured_one_is_in_charge_until_another_is_chosen(self) -> None:
        self.assertEqual(self.choice.provider.name, "first")
        for name in ("", "first"):
            await self.choice.choose(name)
        self.assertEqual(
            ([one.calls for one in self.made["first"]], self.file.exists()), ([["start"]], False)
        )

    async def test_a_chosen_one_is_started_once_watched_and_kept_for_the_next_agent(self) -> None:
        watcher = (lambda state: None, lambda id: None)
        self.choice.watch(*watcher)
        for _ in range(2):
            await self.choice.choose("second")
        [first], [second] = self.made["first"], self.made["second"]
        self.assertEqual((first.calls, second.calls), (["start", "stop"], ["start"]))
        self.assertEqual((self.choice.provider, second.watchers), (second, [watcher]))
        await self.begin()
        self.assertEqual((self.choice.provider.name, self.made["first"][1].calls), ("second", []))
        self.assertEqual(self.made["second"][1].calls, ["start"])
        await self.choice.choose("")
        await self.begin()
        self.assertEqual(self.choice.provider.name, "first")

    async def test_the_machine_sees_the_agents_mounts_before_a_chosen_one_needs_it(self) -> None:
        await self.choice.choose("")
        self.assertEqual(self.done, ["recalled"])
        self.ready = False
        choosing = start(self.choice.choose("second"))
        second = await self.started("second")
        self.assertEqual(self.done, ["recalled", "mounts are seen"])
        second.starting.callback(None)
        await choosing
        await self.begin()
        # Mounts that are restored after a reboot come after the choice is known.
        self.assertEqual(self.done, ["mounts are seen", "recalled"])

    async def test_one_that_could_not_see_them_is_not_started(self) -> None:
        self.refused = True
        with self.assertRaises(FailedPrecondition):
            await self.choice.choose("second")
        self.assertEqual([one.calls for one in self.made["second"]], [[]])
        self.assertEqual((self.choice.provider.name, self.file.exists()), ("first", False))

    async def test_what_is_not_offered_is_refused_with_what_is(self) -> None:
        for name in ("fourth", "x" * 100_000):
            with self.assertRaises(FailedPrecondition) as caught:
                await self.choice.choose(name)
            for words in (name[:50], "first, second, third", "infranetes.io/containers", "--containers both"):
                self.assertIn(words, str(caught.exception))
            self.assertLess(len(str(caught.exception)), 500)
        self.assertEqual(self.choice.provider.name, "first")

    async def test_a_pod_with_containers_keeps_what_runs_them(self) -> None:
        self.made["first"][0].states = [messages.ContainerState(id="a")]
        with self.assertRaises(FailedPrecondition) as caught:
            await self.choice.choose("second")
        self.assertIn("only another pod can have second", str(caught.exception))
        await self.choice.choose("first")

    async def test_one_that_fails_changes_nothing_and_may_be_chosen_again(self) -> None:
        self.ready = False
        choosing = start(self.choice.choose("second"))
        failed = await self.started("second")
        failed.starting.errback(Unavailable("no engine"))
        with self.assertRaises(Unavailable):
            await choosing
        self.assertEqual((failed.calls, self.choice.provider.name), (["start", "stop"], "first"))
        self.assertFalse(self.file.exists())
        self.ready = True
        await self.choice.choose("second")
        self.assertEqual(self.choice.provider, self.made["second"][1])

    async def test_a_caller_that_leaves_ends_no_start_and_the_next_waits_for_it(self) -> None:
        self.ready = False
        first = start(self.choice.choose("second"))
        first.addErrback(lambda failure: None)
        first.cancel()
        second = start(self.choice.choose("second"))
        self.assertNoResult(second)
        provider = await self.started("second")
        provider.starting.callback(None)
        await second
        self.assertEqual((provider.calls, self.choice.provider), (["start"], provider))

    async def test_an_agent_that_stops_meanwhile_has_chosen_nothing(self) -> None:
        self.ready = False
        choosing = start(self.choice.choose("second"))
        choosing.addErrback(lambda failure: None)
        await self.started("second")
        await self.choice.stop()
        await choosing
        self.assertEqual(self.made["second"][0].calls, ["start", "stop"])
        await self.begin()
        self.assertEqual(self.choice.provider.name, "first")

    async def test_one_that_the_configuration_offers_no_more_is_not_taken_up_again(self) -> None:
        await self.choice.choose("second")
        await self.begin("third")
        self.assertEqual(self.choice.provider.name, "first")
        self.assertEqual(self.made["second"][0].calls, ["start"])

    async def test_without_choices_no_file_is_read(self) -> None:
        self.file.parent.mkdir(parents=True)
        self.file.write_text("second\n")
        choice = ProviderChoice(reactor, self.make("first"), (), self.make, self.file)
        await choice.recall()
        self.assertEqual(choice.provider.name, "first")

    async def test_a_file_that_can_not_be_written_is_named(self) -> None:
        self.file.mkdir(parents=True)
        await self.begin()
        with self.assertRaises(FailedPrecondition) as caught:
            await self.choice.choose("second")
        self.assertIn(str(self.file), str(caught.exception))
        self.assertEqual(self.choice.provider.name, "first")


@needs_docker
class ProcessTests(TestCase):
    """`twistd vmserver` whose Docker is not started before a pod chooses it, and a node."""

    timeout = 180

    @classmethod
    def setUpClass(cls) -> None:
        warm.wait_until_ready()

    async def setUp(self) -> None:
        self.directory = run_directory(self)
        self.docker = Dockerd()
        self.addCleanup(deferToThread, self.docker.stop)
        await deferToThread(self.docker.start)
        self.begun, self.go = self.directory / "begun", self.directory / "go"
        script = f"echo >>{self.begun}; while [ ! -e {self.go} ]; do sleep 0.05; done; exec cat {self.go} >&2"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.config = self.directory / "vmserver.toml"
        self.config.write_text(
            f'provider = "fake"\nchoices = ["docker"]\nchoice_file = "{self.directory}/kept/provider"\n'
            f'run_dir = "{self.directory}/own"\nlisten = "127.0.0.1:{self.port}"\n'
            f'[identity]\nsource = "file"\npath = "{self.directory}/identity"\napply = false\n'
            f'[providers.docker]\nsocket = "{self.docker.socket}"\n'
            f'start_command = ["/bin/sh", "-c", "{script}"]\n'
        )
        self.node = Agent(reactor, self.directory)
        save(self.directory / "identity", encode(self.node.authority.identity(SANDBOX)).decode())
        self.process: warm.Process | None = None
        self.addCleanup(lambda: Deferred.fromCoroutine(self._clean_up()))

    async def _clean_up(self) -> None:
        self.go.touch()
        for channel in self.node.channels:
            await channel.close()
        await self.kill()

    def start(self) -> None:
        with open(self.directory / "log", "ab") as log:
            self.process = warm.Process((*VMSERVER, str(self.config)), log.fileno(), ROOT, os.environ)

    async def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            await deferToThread(self.process.wait)
            self.process = None

    def stub(self) -> AgentStub:
        self.node.service = self  # type: ignore[assignment]
        return self.node.stub()

    def choose(self, stub: AgentStub, name: str) -> Deferred[messages.ConfigureSandboxResponse]:
        request = messages.ConfigureSandboxRequest(config=cri.PodSandboxConfig(), container_provider=name)
        return stub.ConfigureSandbox(request, timeout=60.0)

    async def provider(self, stub: AgentStub) -> tuple[str, bool]:
        """Return what runs containers, and whether it accepts layers."""
        until = reactor.seconds() + 60.0
        while True:
            try:
                info = await stub.Info(messages.InfoRequest(), timeout=5.0)
            except GrpcError:
                if reactor.seconds() > until:
                    self.fail((self.directory / "log").read_text())
                await deferLater(reactor, 0.1, lambda: None)
            else:
                return info.container_provider, info.takes_layers

    @slow(5, "Docker starts, and three agents one after the other")
    async def test_an_agent_killed_while_docker_starts_chooses_when_asked_again_and_the_next_has_it(
        self,
    ) -> None:
        self.start()
        stub = self.stub()
        self.assertEqual(await self.provider(stub), ("fake", False))
        choosing = self.choose(stub, "docker")
        await until(self.begun.exists, "Docker is being started")
        await self.kill()
        with self.assertRaises(GrpcError) as caught:
            await choosing
        self.assertEqual(caught.exception.code, Code.UNAVAILABLE)
        self.start()
        self.assertEqual(await self.provider(stub), ("fake", False))
        self.go.touch()
        await self.choose(stub, "docker")
        self.assertEqual(await self.provider(stub), ("docker", False))
        self.assertEqual(
            list((await stub.ListImages(messages.ListImagesRequest(), timeout=10.0)).image_ids), []
        )
        watch = stub.Watch(messages.WatchRequest(), timeout=None)
        self.assertTrue((await anext(watch)).HasField("synced"))
        watch.cancel()
        await self.kill()
        self.start()
        self.assertEqual(await self.provider(stub), ("docker", False))
        await self.choose(stub, "docker")
        self.assertEqual(await self.provider(stub), ("docker", False))
        self.assertEqual(len(self.begun.read_text().splitlines()), 3)  # once by each of these agents

    async def test_what_keeps_docker_from_starting_is_told(self) -> None:
        program = self.directory / "fail"
        program.write_text("#!/bin/sh\necho 'Job for docker.service failed' >&2\nexit 1\n")
        text = self.config.read_text()
        self.config.write_text(text[: text.index("start_command")] + f'start_command = ["{program}"]\n')
        self.start()
        stub = self.stub()
        self.assertEqual(await self.provider(stub), ("fake", False))
        for mode, words in (
            (0o644, "is not a program"),
            (0o755, "ended with exit code 1: Job for docker.service failed"),
        ):
            program.chmod(mode)
            with self.assertRaises(GrpcError) as caught:
                await self.choose(stub, "docker")
            self.assertEqual(caught.exception.code, Code.UNAVAILABLE)
            self.assertIn(words, caught.exception.message)
        await self.choose(stub, "")
        self.assertEqual(await self.provider(stub), ("fake", False))
        with self.assertRaises(GrpcError) as caught:
            await self.choose(stub, "oci")
        self.assertEqual(caught.exception.code, Code.FAILED_PRECONDITION)
