# SPDX-License-Identifier: Apache-2.0
"""Features join in pods' lives: in order while a pod begins, backwards while it ends, whatever fails."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs

from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.store.records import Contents
from infranetes.pods.store.states import SandboxState
from infranetes.pods.vm.vm_request import vm_request
from infranetes.providers.interface import Attachment
from infranetes_common.concurrency import replace_file, start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, box
from tests.support.threads import in_this_thread


class Recorder(PodFeature):
    """Notes each hook that is called, and fails where a test says so.

    :ivar failing: by hook, what it raises. :ivar holding: by hook, a Deferred for which it waits first.
    :ivar vms: by hook, how many VMs there were when it was called last."""

    def __init__(self, name: str, calls: list[str], world: FakeNode) -> None:
        self.name = name
        self.world = world
        self.calls = calls
        self.failing: dict[str, Exception] = {}
        self.holding: dict[str, Deferred[None]] = {}
        self.vms: dict[str, int] = {}
        self.where = ""
        self.joined: Attachment | None = None
        self.says = ""
        self.kept: Path | None = None
        self.gives: vmserver.ContainerState | None = None

    def note(self, hook: str) -> None:
        self.calls.append(f"{hook} {self.name}")
        self.vms[hook] = len(self.world.provider.instances)
        if hook in self.failing:
            raise self.failing[hook]

    async def wait(self, hook: str) -> None:
        self.note(hook)
        if hook in self.holding:
            await self.holding[hook]

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        self.note("check")

    async def before_launch(self, sandbox: Sandbox) -> None:
        await self.wait("before_launch")

    async def before_create(self, container: Container) -> None:
        await self.wait("before_create")

    async def zone(self, sandbox: Sandbox) -> str:
        await self.wait("zone")
        return self.where

    async def attachment(self, sandbox: Sandbox) -> Attachment | None:
        await self.wait("attachment")
        return self.joined

    def connected(self, sandbox: Sandbox) -> None:
        self.note("connected")

    async def answered(self, sandbox: Sandbox) -> None:
        await self.wait("answered")

    def ready(self, sandbox: Sandbox) -> None:
        assert sandbox.state is SandboxState.READY
        self.note("ready")

    async def live(self, sandbox: Sandbox) -> None:
        await self.wait("live")

    def interrupted(self, sandbox: Sandbox, reason: str) -> None:
        self.note("interrupted")

    def lost(self, sandbox: Sandbox) -> None:
        self.note("lost")

    async def stopping(self, sandbox: Sandbox) -> None:
        await self.wait("stopping")

    def disconnected(self, sandbox: Sandbox) -> None:
        self.note("disconnected")

    async def address_released(self, id: str) -> None:
        await self.wait("address_released")

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        await self.wait("vm_destroyed")

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        await self.wait("prepare")
        changed = cri.ContainerConfig()
        changed.CopyFrom(config)
        changed.labels["prepared"] += self.name
        return changed

    async def before_start(self, container: Container) -> None:
        await self.wait("before_start")

    async def caught_up(self, container: Container) -> None:
        await self.wait("caught_up")

    async def collect(self, container: Container) -> str:
        await self.wait("collect")
        return self.says

    async def hold_still(self, sandbox: Sandbox) -> list[str]:
        await self.wait("hold_still")
        return [f"volume {self.name}"]

    async def go_on(self, sandbox: Sandbox) -> None:
        await self.wait("go_on")

    async def volumes_of(self, container: Container) -> dict[str, str]:
        await self.wait("volumes_of")
        return {f"/{self.name}": f"volume {self.name}"}

    async def start_from(self, sandbox: Sandbox) -> Path | None:
        return self.kept

    async def adopted(
        self, container: Container, config: cri.ContainerConfig
    ) -> vmserver.ContainerState | None:
        return self.gives

    def unwritten(self, container: Container) -> str:
        self.note("unwritten")
        return self.says

    async def release(self, container: Container) -> None:
        await self.wait("release")

    async def load(self, contents: Contents) -> None:
        await self.wait("load")

    async def resume(self, inventory: Inventory) -> None:
        await self.wait("resume")

    async def sweep(self) -> None:
        await self.wait("sweep")

    async def stop(self) -> None:
        await self.wait("stop")


class World(FakeNode):
    """A node with two features, a and b."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__()

    def make_features(self) -> list[PodFeature]:
        self.a, self.b = Recorder("a", self.calls, self), Recorder("b", self.calls, self)
        return [self.a, self.b]


def both(*hooks: str, backwards: bool = False) -> list[str]:
    """Return the calls of the hooks of a and b."""
    return [f"{hook} {name}" for hook in hooks for name in ("ba" if backwards else "ab")]


class HooksCase(PodsTestCase):
    world: World

    def setUp(self) -> None:
        super().setUp()
        self.a, self.b = self.world.a, self.world.b

    def make_world(self) -> FakeNode:
        return World()

    def called(self) -> list[str]:
        """Return the calls since the last time, without the passes."""
        calls = [call for call in self.world.calls if not call.startswith("sweep")]
        self.world.calls.clear()
        return calls

    def running(self) -> tuple[str, str]:
        """Return a sandbox and a container that runs in it."""
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.start(container))
        self.called()
        return sandbox, container


LAUNCH = both("check", "zone", "before_launch", "attachment", "connected", "answered", "live", "ready")
END = both("disconnected", "address_released", "vm_destroyed", backwards=True)


class LifeTests(HooksCase):
    def test_each_takes_part_in_a_pods_life_in_order_and_in_its_end_backwards(self) -> None:
        self.assertEqual(self.called(), both("load", "resume"))
        sandbox = self.run_pod()
        self.assertEqual(self.called(), LAUNCH)
        container = self.do(self.world.containers.create(sandbox, box()))
        self.assertEqual(self.called(), both("before_create", "prepare"))
        self.do(self.world.containers.start(container))
        self.assertEqual(self.called(), both("before_start"))
        self.do(self.world.containers.exec_sync(container, ["true"], 0, None))
        self.assertEqual(self.called(), both("caught_up"))
        self.do(self.world.containers.stop(container, 0))
        self.assertEqual(list(dict.fromkeys(self.called())), both("collect"))
        self.do(self.world.containers.remove(container))
        self.assertEqual(self.called(), both("release", backwards=True))
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(self.called(), both("stopping", backwards=True) + END)
        with_vm = {hook: self.a.vms[hook] for hook in ("stopping", "address_released", "vm_destroyed")}
        self.assertEqual(with_vm, {"stopping": 1, "address_released": 1, "vm_destroyed": 0})
        self.do(self.world.sandboxes.remove(sandbox))
        self.world.stop()
        self.assertEqual(self.called(), both("stop", backwards=True))

    def test_a_container_is_created_as_all_of_them_have_prepared_it(self) -> None:
        sandbox = self.run_pod()
        configs: list[cri.ContainerConfig] = []
        agent = self.world.agents[sandbox]
        create = agent.create

        async def noting(
            id: str, image_id: str, config: cri.ContainerConfig, of: cri.PodSandboxConfig
        ) -> object:
            configs.append(config)
            return await create(id, image_id, config, of)

        self.patch(agent, "create", noting)
        self.do(self.world.containers.create(sandbox, box()))
        self.assertEqual([config.labels["prepared"] for config in configs], ["ab"])

    def test_the_first_that_names_a_zone_or_a_namespace_counts(self) -> None:
        self.a.where, self.b.where = "east", "west"
        self.b.joined = Attachment(Path("/run/netns/b"))
        self.run_pod()
        [spec] = self.world.provider.specs
        self.assertEqual((spec.request.zone, spec.request.attachment), ("east", self.b.joined))
        self.assertNotIn("zone b", self.called())

    def test_the_first_that_has_a_kept_state_or_container_counts(self) -> None:
        self.a.kept, self.b.kept = None, Path("/kept/b")
        sandbox = self.run_pod()
        self.assertEqual(self.world.provider.specs[-1].kept, Path("/kept/b"))
        self.a.gives = vmserver.ContainerState(id="of a", state=cri.CONTAINER_CREATED, created_at=7)
        self.b.gives = vmserver.ContainerState(id="of b", state=cri.CONTAINER_CREATED, created_at=9)
        container = self.do(self.world.containers.create(sandbox, box()))
        self.assertEqual(self.world.node.inventory.containers[container].record.created_at, 7)
        self.assertEqual(self.world.agents[sandbox].created, [])

    def test_a_pod_that_is_kept_goes_on_in_all_of_them_backwards_though_one_fails(self) -> None:
        sandbox, id = self.running()
        one = self.world.node.inventory.sandboxes[sandbox]
        features = self.world.node.features
        self.assertEqual(self.do(features.hold_still(one)), {"volume a", "volume b"})
        container = self.world.node.inventory.containers[id]
        self.assertEqual(self.do(features.volumes_of(container)), {"/a": "volume a", "/b": "volume b"})
        self.b.failing["go_on"] = Unavailable("no")
        self.failureResultOf(start(features.go_on(one)), Unavailable)
        self.assertEqual(self.called(), both("hold_still", "volumes_of") + both("go_on", backwards=True))

    def test_of_a_vm_that_exists_neither_is_asked_for(self) -> None:
        self.a.where, self.b.joined = "east", Attachment(Path("/run/netns/b"))
        sandbox = self.world.node.inventory.sandboxes[self.run_pod()]
        self.called()
        handler = self.world.node.handlers.of(sandbox.record)
        request = self.do(vm_request(handler, self.world.node.features, sandbox, has_vm=True))
        self.assertEqual((request.zone, request.attachment, self.called()), ("", None, []))

    def test_the_next_daemon_loads_before_and_resumes_after_it_has_the_pods(self) -> None:
        self.run_pod()
        self.called()
        self.world.restart()
        self.assertEqual(
            self.called(), both("stop", backwards=True) + both("load", "connected", "live", "resume")
        )

    def test_what_an_ended_container_left_in_its_vm_is_said_by_all(self) -> None:
        _, container = self.running()
        self.a.says, self.b.says = "x is missing", "y is missing"
        self.do(self.world.containers.stop(container, 0))
        shown = self.world.node.inventory.containers[container].record
        self.assertEqual((shown.reason, shown.message), ("VolumesNotWritten", "x is missing; y is missing"))

    def test_of_a_vm_that_is_lost_they_say_what_may_be_missing(self) -> None:
        sandbox, container = self.running()
        self.b.says = "y may be missing"
        self.world.provider.end(self.record(sandbox).instance_id, "power")
        expected = [*both("unwritten"), *both("disconnected", "lost", backwards=True)]
        self.assertEqual(self.called(), expected)
        self.assertIn("y may be missing", self.world.node.inventory.containers[container].record.message)

    def test_a_vm_that_comes_back_is_brought_up_to_date(self) -> None:
        sandbox, _ = self.running()
        agent = self.world.agents[sandbox]
        agent.go_away()
        agent.away = False
        self.world.wait(2)
        self.assertEqual(self.called(), both("live"))

    def test_an_interruption_is_said_once(self) -> None:
        sandbox, _ = self.running()
        for _ in range(2):
            self.world.agents[sandbox].interrupt("spot")
        self.assertEqual(self.called(), both("interrupted"))


class FailureTests(HooksCase):
    def setUp(self) -> None:
        super().setUp()
        self.called()

    def test_a_pod_that_one_refuses_is_never_recorded(self) -> None:
        self.b.failing["check"] = FailedPrecondition("no")
        self.failureResultOf(self.start(), FailedPrecondition)
        self.assertEqual(self.called(), both("check"))
        self.assertNothingLeft()

    def test_a_launch_that_one_fails_is_undone_by_all_backwards(self) -> None:
        for hook in ("answered", "attachment"):
            self.a.failing[hook] = Unavailable("not now")
            self.failureResultOf(self.start(), Unavailable)
            self.assertEqual([call for call in self.called() if call in END], END, hook)
            self.assertNothingLeft()
            self.a.failing.clear()

    def test_a_launch_that_is_stopped_while_one_works_is_undone(self) -> None:
        self.b.holding["answered"] = Deferred()
        launching = self.start()
        (sandbox,) = self.world.node.inventory
        self.do(self.world.sandboxes.stop(sandbox.id))
        self.failureResultOf(launching, Unavailable)
        self.assertEqual(self.called()[-2:], END[-2:])
        self.assertNothingLeft()

    def test_a_stop_that_one_fails_calls_the_others_and_the_next_calls_all_again(self) -> None:
        sandbox = self.run_pod()
        self.b.failing["vm_destroyed"] = Unavailable("not yet")
        self.failureResultOf(start(self.world.sandboxes.stop(sandbox)), Unavailable)
        self.assertEqual(self.called()[-2:], END[-2:])
        self.assertEqual(self.record(sandbox).state, SandboxState.STOPPING)
        self.b.failing.clear()
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(self.called()[-2:], END[-2:])
        self.assertEqual(self.record(sandbox).state, SandboxState.STOPPED)

    def test_an_address_that_something_still_leads_to_is_not_given_away(self) -> None:
        sandbox = self.run_pod()
        self.a.failing["address_released"] = Unavailable("nft is broken")
        self.failureResultOf(start(self.world.sandboxes.stop(sandbox)), Unavailable)
        self.assertEqual(len(self.world.provider.instances), 1)

    def test_a_creation_that_one_fails_is_released_by_all_and_at_the_agent(self) -> None:
        sandbox = self.run_pod()
        self.called()
        self.b.failing["prepare"] = FailedPrecondition("no such volume")
        creating = start(self.world.containers.create(sandbox, box()))
        self.failureResultOf(creating, FailedPrecondition)
        self.assertEqual(self.called(), both("before_create", "prepare") + both("release", backwards=True))
        self.assertIn("remove", [call for call, _ in self.world.agents[sandbox].calls])
        self.assertEqual(self.world.store.contents().containers, ())

    def test_a_vm_that_one_can_not_bring_up_to_date_is_said_and_the_others_do(self) -> None:
        sandbox, _ = self.running()
        agent = self.world.agents[sandbox]
        self.a.failing["live"] = Unavailable("the export is away")
        agent.go_away()
        agent.away = False
        with capturedLogs() as logs:
            self.world.wait(2)
        self.assertEqual(self.called(), both("live"))
        [said] = [each for each in logs if "may lack" in each["log_format"]]
        self.assertEqual(
            (said["feature"], said["sandbox"], str(said["error"])), ("a", sandbox, "the export is away")
        )

    def test_nothing_is_said_of_a_vm_that_was_given_up_meanwhile(self) -> None:
        sandbox, _ = self.running()
        agent = self.world.agents[sandbox]
        self.a.holding["live"] = Deferred()
        agent.go_away()
        agent.away = False
        self.world.wait(2)
        self.do(self.world.sandboxes.stop(sandbox))
        with capturedLogs() as logs:
            self.a.holding["live"].errback(Unavailable("its VM is gone"))
        self.assertEqual([each for each in logs if "may lack" in each["log_format"]], [])

    def test_one_that_never_brings_a_vm_up_to_date_begins_anew_with_each_connection(self) -> None:
        sandbox, _ = self.running()
        agent = self.world.agents[sandbox]
        ended: list[object] = []
        self.a.holding["live"] = Deferred(ended.append)
        for _ in range(2):
            agent.go_away()
            agent.away = False
            self.world.wait(2)
        self.assertEqual((self.called(), len(ended)), (both("live", "live"), 1))


class DaemonTests(HooksCase):
    def test_the_pool_s_vms_release_their_addresses_too(self) -> None:
        self.called()
        self.do(self.world.node_provider.release_address("somebody"))
        self.assertEqual(self.called(), both("address_released", backwards=True))


class ExampleTests(PodsTestCase):
    """The feature that docs/ways.md has as an example works as it says."""

    def test_each_pod_that_is_ready_has_its_file_until_its_address_is_free(self) -> None:
        page = Path(__file__).resolve().parents[4] / "docs" / "ways.md"
        way = page.read_text().split("\n## A feature's way\n")[1]
        code = way.split("```python\n")[1].split("```")[0]
        names: dict[str, Any] = {
            "PodFeature": PodFeature,
            "Path": Path,
            "partial": partial,
            "replace_file": replace_file,
            "run_in_thread": in_this_thread,
        }
        exec(f"from __future__ import annotations\n{code}", names)  # noqa: S102 - from our own page
        directory = Path(self.mktemp())
        directory.mkdir()
        self.world.join(names["AddressFiles"](None, directory))
        sandbox = self.run_pod()
        self.assertEqual((directory / sandbox).read_text(), self.record(sandbox).address)
        for _ in range(2):
            self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(list(directory.iterdir()), [])
