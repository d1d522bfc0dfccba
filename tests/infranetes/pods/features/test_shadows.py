# SPDX-License-Identifier: Apache-2.0
"""A pod in the CNI's network has a shadow at the delegate as long as it has a VM, whatever is killed when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.cri.translate import sandbox_status
from infranetes.pods.features.shadows import Shadows
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import Attachment
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod


@attrs.define
class FakeShadow:
    """A shadow at the delegate."""

    id: str
    owner: str
    ready: bool = True
    ours: bool = True
    name: str = ""  # unique among the shadows


class FakeRuntime:
    """The delegate, which outlives the daemons.

    :ivar calls: what was done, in order, including calls to the provider. :ivar holding: a Deferred for which
        `run` waits once it has made the shadow. :ivar away: it can't be reached.
    """

    def __init__(self, calls: list[tuple[str, str]]) -> None:
        self.calls = calls
        self.shadows: dict[str, FakeShadow] = {}
        self.holding: Deferred[None] | None = None
        self.away = False
        self.run_error: Exception | None = None
        self.end_error: Exception | None = None
        self._made = 0

    async def run(self, config: cri.PodSandboxConfig, owner: str) -> str:
        self._ask()
        if self.run_error is not None:
            raise self.run_error
        for each in self.shadows.values():
            if each.owner == owner and each.ready:
                return each.id
        taken = {each.name for each in self.shadows.values()}
        if config.metadata.name in taken:
            raise Unavailable("failed to reserve sandbox name")
        self._made += 1
        shadow = FakeShadow(f"shadow-{self._made}", owner, name=config.metadata.name)
        self.shadows[shadow.id] = shadow
        self.calls.append(("run", owner))
        if self.holding is not None:
            await self.holding
        return shadow.id

    async def namespace(self, id: str) -> str:
        self._ask()
        if id not in self.shadows or not self.shadows[id].ready:
            raise NotFound(f"no {id}")
        return f"/run/netns/{id}"

    async def end(self, id: str) -> None:
        self._ask()
        if self.end_error is not None:
            raise self.end_error
        if self.shadows.pop(id, None) is not None:
            self.calls.append(("end", id))

    async def list(self, owner: str = "") -> Sequence[FakeShadow]:
        self._ask()
        return [each for each in self.shadows.values() if owner in ("", each.owner)]

    def _ask(self) -> None:
        if self.away:
            raise Unavailable("the delegate at /run/x does not answer")


class ShadowedNode(FakeNode):
    """A node all of whose pods are in the CNI's network."""

    runtime: FakeRuntime
    has_delegate = True

    def make_features(self) -> list[PodFeature]:
        if not hasattr(self, "runtime"):
            self.runtime = FakeRuntime(self.provider.calls)
        sandboxes = self.sandboxes
        self.shadows = Shadows(self.node.inventory, self.runtime, sandboxes.lost, sandboxes.end_abandoned)
        without_delegate = super().make_features()
        return [self.shadows, *without_delegate[1:]] if self.has_delegate else without_delegate

    def made(self) -> None:
        self.node.handlers.by_name[""] = Handler("", self.node.providers.own, network=CNI)


class ShadowsTestCase(PodsTestCase):
    world: ShadowedNode

    def setUp(self) -> None:
        super().setUp()
        self.runtime = self.world.runtime

    def make_world(self) -> FakeNode:
        return ShadowedNode()

    def sweep(self, times: int = 1) -> None:
        for _ in range(times):
            self.do(self.world.shadows.sweep())

    def names(self) -> list[str]:
        """Return what was done, in order."""
        return [name for name, _ in self.world.provider.calls]

    def assertNothingLeft(self) -> None:
        super().assertNothingLeft()
        self.assertEqual(self.runtime.shadows, {})


class LifeTests(ShadowsTestCase):
    """From WANTED to GONE."""

    def test_the_vm_is_asked_for_once_its_namespace_is_recorded(self) -> None:
        seen: list[SandboxRecord] = []
        real = self.world.provider.launch

        def launch(spec: Any) -> Any:
            seen.extend(self.world.store.contents().sandboxes)
            return real(spec)

        self.world.provider.launch = launch  # type: ignore[method-assign]
        id = self.run_pod()
        [recorded] = seen
        self.assertEqual(recorded.shadow_id, "shadow-1")
        self.assertEqual(recorded.address, "")
        [spec] = self.world.provider.specs
        self.assertEqual(spec.request.attachment, Attachment(Path("/run/netns/shadow-1")))
        self.assertEqual(self.runtime.shadows["shadow-1"].owner, id)

    def test_all_its_addresses_are_told_as_long_as_it_has_its_vm(self) -> None:
        self.world.provider.more_addresses = ("10.0.0.9", "fd00:4::7")
        id = self.run_pod()
        self.world.restart()
        network = sandbox_status(self.world.node.inventory.sandboxes[id]).network
        self.assertEqual(network.ip, "10.0.0.1")
        self.assertEqual([each.ip for each in network.additional_ips], ["10.0.0.9", "fd00:4::7"])
        self.do(self.world.sandboxes.stop(id))
        network = sandbox_status(self.world.node.inventory.sandboxes[id]).network
        self.assertEqual(network, cri.PodSandboxNetworkStatus())

    def test_it_is_ended_after_the_vm(self) -> None:
        id = self.run_pod()
        self.do(self.world.sandboxes.stop(id))
        self.assertEqual(self.names(), ["run", "launch", "destroy", "end"])
        self.assertEqual(self.record(id).shadow_id, "")
        self.do(self.world.sandboxes.stop(id))
        self.do(self.world.sandboxes.remove(id))
        self.assertEqual(self.names(), ["run", "launch", "destroy", "end"])
        self.assertNothingLeft()

    def test_a_stop_whose_shadow_can_not_be_ended_fails_and_is_tried_again(self) -> None:
        id = self.run_pod()
        self.runtime.end_error = Unavailable("cni plugin not initialized")
        stopped = start(self.world.sandboxes.stop(id))
        self.assertIn("cni plugin not initialized", str(self.failureResultOf(stopped, Unavailable).value))
        self.assertEqual(self.record(id).state, SandboxState.STOPPING)
        self.assertEqual(self.world.provider.instances, {})
        self.runtime.end_error = None
        self.do(self.world.sandboxes.stop(id))
        self.do(self.world.sandboxes.remove(id))
        self.assertNothingLeft()

    def test_a_launch_that_fails_leaves_no_shadow(self) -> None:
        self.world.provider.launch_error = FailedPrecondition("the pod's link eth0 is of the kind netkit")
        failed = self.failureResultOf(self.start(), FailedPrecondition)
        self.assertIn("kind netkit", str(failed.value))
        self.assertNothingLeft()

    def test_what_a_failed_launch_has_left_is_ended_before_the_pods_next_one(self) -> None:
        """Otherwise its name would be taken until the next pass."""
        self.world.provider.launch_error = Unavailable("no room")
        self.runtime.end_error = Unavailable("cni plugin not initialized")
        self.failureResultOf(self.start(), Unavailable)
        self.world.provider.launch_error = None
        failed = self.failureResultOf(self.start(), Unavailable)
        self.assertIn("cni plugin not initialized", str(failed.value))
        self.runtime.end_error = None
        id = self.run_pod()
        self.assertEqual(list(self.runtime.shadows), [self.record(id).shadow_id])
        self.assertEqual([each.id for each in self.world.node.inventory], [id])

    def test_a_failed_launch_of_another_pod_is_left_to_the_passes(self) -> None:
        self.world.provider.launch_error = Unavailable("no room")
        self.runtime.end_error = Unavailable("cni plugin not initialized")
        self.failureResultOf(self.start(pod(name="other")), Unavailable)
        self.world.provider.launch_error = None
        id = self.run_pod()
        self.assertEqual(self.record(id).state, SandboxState.READY)

    def test_a_delegate_that_refuses_fails_the_pod_with_its_words(self) -> None:
        self.runtime.run_error = Unavailable("failed to setup network for sandbox")
        self.failureResultOf(self.start(), Unavailable)
        self.assertNotIn("launch", self.names())
        self.assertNothingLeft()

    def test_a_stop_in_the_middle_of_the_delegates_call_ends_what_it_made(self) -> None:
        self.runtime.holding = Deferred()
        running = self.start()
        [sandbox] = self.world.node.inventory
        self.do(self.world.sandboxes.stop(sandbox.id))
        self.failureResultOf(running, Unavailable)
        self.assertNothingLeft()

    def test_host_ports_are_the_cnis(self) -> None:
        config = pod()
        config.port_mappings.add(protocol=cri.TCP, container_port=80, host_port=8080)
        id = self.run_pod(config)
        self.assertEqual(self.record(id).state, SandboxState.READY)

    def test_a_pod_that_asks_for_another_network_is_refused_before_anything_is_made(self) -> None:
        asking = pod(annotations={"infranetes.io/network": "vpc"})
        self.assertIn("leave it out", str(self.failureResultOf(self.start(asking), InvalidArgument).value))
        on_node = pod()
        on_node.linux.security_context.namespace_options.network = cri.NODE
        failed = self.failureResultOf(self.start(on_node), InvalidArgument)
        self.assertIn("leave out the pod's runtimeClassName", str(failed.value))
        self.assertEqual(self.names(), [])

    def test_a_delegate_that_is_configured_no_more_is_asked_for(self) -> None:
        id = self.run_pod()
        self.world.has_delegate = False
        self.world.restart()
        failure = self.failureResultOf(start(self.world.sandboxes.stop(id)), Unavailable)
        self.assertIn("set delegate.socket again", str(failure.value))
        self.failureResultOf(self.start(pod(name="other")), Unavailable)


class VacatedTests(ShadowsTestCase):
    """A pod whose image is the VM keeps its network when its VM is another one."""

    def test_the_shadow_of_a_sandbox_that_stays_stays(self) -> None:
        sandbox = self.world.node.inventory.sandboxes[self.run_pod()]
        self.do(self.world.shadows.vm_destroyed(sandbox))
        self.assertEqual((list(self.runtime.shadows), sandbox.record.shadow_id), (["shadow-1"], "shadow-1"))


class KilledTests(ShadowsTestCase):
    """The daemon is killed, and the next one goes on."""

    def test_before_the_shadow_was_answered_it_is_found_again(self) -> None:
        self.runtime.holding = Deferred()
        self.start()
        self.runtime.holding = None
        self.world.restart()
        id = self.run_pod()
        self.assertEqual(self.names(), ["run", "launch"])
        self.assertEqual(self.record(id).shadow_id, "shadow-1")

    def test_after_the_shadow_was_recorded_it_is_used(self) -> None:
        self.world.provider.launching = Deferred()
        self.start()
        self.world.provider.launching = None
        self.world.restart()
        id = self.run_pod()
        self.assertEqual(self.names(), ["run", "launch", "launch"])
        self.assertEqual(self.record(id).shadow_id, "shadow-1")

    def test_a_shadow_that_did_not_survive_is_made_anew(self) -> None:
        self.world.provider.launching = Deferred()
        self.start()
        self.world.provider.launching = None
        self.runtime.shadows["shadow-1"].ready = False
        self.world.restart()
        id = self.run_pod()
        self.assertEqual(self.record(id).shadow_id, "shadow-2")
        self.assertEqual(list(self.runtime.shadows), ["shadow-2"])
        self.assertEqual(
            self.world.provider.specs[-1].request.attachment, Attachment(Path("/run/netns/shadow-2"))
        )

    def test_between_the_vms_end_and_the_shadows(self) -> None:
        id = self.run_pod()
        self.runtime.end_error = Unavailable("killed")
        self.failureResultOf(start(self.world.sandboxes.stop(id)), Unavailable)
        self.runtime.end_error = None
        self.world.restart()  # the next daemon finishes it
        self.assertEqual(self.record(id).state, SandboxState.STOPPED)
        self.assertEqual(self.runtime.shadows, {})

    def test_a_running_pod_stays(self) -> None:
        id = self.run_pod()
        self.world.restart()
        self.sweep(3)
        self.assertEqual(self.record(id).state, SandboxState.READY)
        self.assertEqual(self.names(), ["run", "launch"])


class SweepTests(ShadowsTestCase):
    """Sweeps find shadows without sandboxes and sandboxes without shadows, in two passes."""

    def setUp(self) -> None:
        super().setUp()
        self.pod = self.run_pod()

    def test_what_no_sandbox_knows_is_ended_in_the_second_pass(self) -> None:
        self.runtime.shadows["lone"] = FakeShadow("lone", "f" * 32)
        self.sweep()
        self.assertIn("lone", self.runtime.shadows)
        self.sweep()
        self.assertEqual(list(self.runtime.shadows), ["shadow-1"])

    def test_another_daemons_is_left(self) -> None:
        """That daemon knows its sandbox. Whose the pod is decides which daemon ends a second shadow of it."""
        self.runtime.shadows["other"] = FakeShadow("other", "f" * 32, ours=False)
        self.runtime.shadows["second"] = FakeShadow("second", self.pod, ours=False)
        self.sweep(3)
        self.assertEqual(list(self.runtime.shadows), ["shadow-1", "other"])

    def test_a_second_shadow_of_one_pod_is_ended(self) -> None:
        self.runtime.shadows["second"] = FakeShadow("second", self.pod)
        self.sweep(2)
        self.assertEqual(list(self.runtime.shadows), ["shadow-1"])

    def test_one_that_is_still_being_launched_is_left(self) -> None:
        self.runtime.holding = Deferred()
        self.start(pod(name="other"))
        self.sweep(3)
        self.assertEqual(sorted(self.runtime.shadows), ["shadow-1", "shadow-2"])

    def test_a_pod_whose_shadow_has_ended_is_lost_in_the_second_pass(self) -> None:
        for change in ("ended", "removed"):
            if change == "ended":
                self.runtime.shadows["shadow-1"].ready = False
            self.sweep()
            if change == "ended":
                self.assertEqual(self.record(self.pod).state, SandboxState.READY)
                self.runtime.shadows.pop("shadow-1")
        record = self.record(self.pod)
        self.assertEqual(record.state, SandboxState.LOST)
        self.assertEqual(record.message, "its network is gone: the delegate's sandbox shadow-1 has ended")
        self.do(self.world.sandboxes.stop(self.pod))
        self.do(self.world.sandboxes.remove(self.pod))
        self.assertNothingLeft()

    def test_one_that_comes_back_in_time_is_not_lost(self) -> None:
        for ready in (False, True, False):
            self.runtime.shadows["shadow-1"].ready = ready
            self.sweep()
        self.assertEqual(self.record(self.pod).state, SandboxState.READY)

    def test_nothing_is_concluded_of_a_delegate_that_does_not_answer(self) -> None:
        self.runtime.shadows["shadow-1"].ready = False
        self.sweep()
        self.runtime.away = True
        self.failureResultOf(start(self.world.shadows.sweep()), Unavailable)
        self.assertEqual(self.record(self.pod).state, SandboxState.READY)

    def test_one_that_can_not_be_ended_does_not_keep_the_others(self) -> None:
        for name in ("one", "two"):
            self.runtime.shadows[name] = FakeShadow(name, "f" * 32)
        self.sweep()
        self.runtime.end_error = Unavailable("cni plugin not initialized")
        self.sweep()
        self.runtime.end_error = None
        self.sweep()
        self.assertEqual(list(self.runtime.shadows), ["shadow-1"])

    def test_the_passes_of_a_started_node_sweep(self) -> None:
        self.runtime.shadows["lone"] = FakeShadow("lone", "f" * 32)
        self.world.clock.advance(self.world.times.sweep)
        self.world.clock.advance(self.world.times.sweep)
        self.assertEqual(list(self.runtime.shadows), ["shadow-1"])
