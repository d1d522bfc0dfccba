# SPDX-License-Identifier: Apache-2.0
"""Pods that are not well are listed with their state, and why."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred

from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.wire import control
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.pods.sandboxes.test_machine_images import MachineImageNode


class FailedPodsTestCase(PodsTestCase):
    def shown(self, past: bool = False) -> list[tuple[str, str, str]]:
        """Return name, state and message of each pod that is listed."""
        service = self.world.control
        answer = self.do(service.ListPods(control.ListPodsRequest(past=past), NO_CALL))
        return [(one.name, one.state, one.message) for one in answer.pods]

    def fails(self, name: str, why: str) -> None:
        """Have the launch of a pod fail."""
        self.world.provider.launch_error = Unavailable(why)
        self.failureResultOf(self.start(pod(name)), Unavailable)
        self.world.provider.launch_error = None


class LaunchTests(FailedPodsTestCase):
    def test_a_pod_whose_launch_failed_is_listed_until_it_has_another_sandbox(self) -> None:
        self.fails("web", "no capacity")
        self.fails("web", "quota exceeded")
        self.fails("api", "no such image")
        failed = [("web", "failed", "quota exceeded"), ("api", "failed", "no such image")]
        self.assertEqual(self.shown(), failed)
        self.world.provider.booting = Deferred()
        launched = self.start(pod("web"))
        again = ("web", "launching", "an earlier launch has failed: quota exceeded")
        self.assertEqual(self.shown(), [again, failed[1]])
        self.world.provider.booting.callback(None)
        web = self.successResultOf(launched)
        self.assertEqual(self.shown(), [("web", "ready", ""), failed[1]])
        self.do(self.world.sandboxes.stop(web))
        self.do(self.world.sandboxes.remove(web))
        self.assertEqual(self.shown(), [failed[1]])
        self.assertIn(("web", "removed", ""), self.shown(past=True))

    def test_one_that_was_never_recorded_is_listed_too(self) -> None:
        self.world.store.failing = Unavailable("the disk is full")
        self.failureResultOf(self.start(pod("web")), Unavailable)
        self.assertEqual(self.shown(), [("web", "failed", "the disk is full")])

    def test_one_that_was_ended_says_by_whom(self) -> None:
        self.world.provider.booting = Deferred()
        launched = self.start(pod("web"))
        launched.cancel()
        self.failureResultOf(launched, CancelledError)
        self.world.wait(self.world.node.times.desertion + 1)
        self.assertEqual(self.shown(), [("web", "failed", "nobody asked for it any more")])

    def test_one_whose_vm_is_not_destroyed_yet_says_why_it_failed(self) -> None:
        self.world.provider.booting = Deferred()
        launched = self.start(pod("web"))
        self.world.provider.destroy_error = Unavailable("not now")
        (vm,) = self.world.provider.instances
        self.world.provider.end(vm, "out of memory")
        self.failureResultOf(launched, Unavailable)
        listed = ("web", "abandoned", "its VM ended: out of memory")
        self.assertEqual(self.shown(), [listed])
        self.world.restart()
        self.assertEqual(self.shown(), [listed])


class LaterTests(FailedPodsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.run_pod()

    def test_one_whose_vm_ended_says_why(self) -> None:
        (vm,) = self.world.provider.instances
        self.world.provider.end(vm, "its process was killed by SIGKILL")
        words = "the VM ended by itself: its process was killed by SIGKILL"
        self.assertEqual(self.shown(), [("web", "lost", words)])

    def test_one_that_is_to_lose_its_vm_says_why(self) -> None:
        self.world.agents[self.sandbox].interrupt("the cloud takes it away at noon")
        self.assertEqual(self.shown(), [("web", "ready", "the cloud takes it away at noon")])

    def test_one_that_can_not_be_stopped_says_why_until_it_is(self) -> None:
        self.world.provider.destroy_error = Unavailable("not now")
        self.failureResultOf(start(self.world.sandboxes.stop(self.sandbox)), InfranetesError)
        self.assertEqual(self.shown(), [("web", "stopping", "it is not stopped yet: not now")])
        self.world.provider.destroy_error = None
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertEqual(self.shown(), [("web", "stopped", "")])


class BootTests(FailedPodsTestCase):
    def make_world(self) -> FakeNode:
        return MachineImageNode()

    def test_one_whose_image_does_not_boot_says_why_until_it_does(self) -> None:
        sandbox = self.run_pod()
        self.world.provider.launch_error = Unavailable("no capacity")
        self.failureResultOf(start(self.world.containers.create(sandbox, box())), Unavailable)
        self.assertEqual(self.shown(), [("web", "vacant", "no capacity")])
        self.world.provider.launch_error = None
        (sandbox,) = self.world.node.inventory.sandboxes
        self.do(self.world.containers.create(sandbox, box()))
        self.assertEqual(self.shown(), [("web", "ready", "")])
