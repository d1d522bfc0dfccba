# SPDX-License-Identifier: Apache-2.0
"""UpdatePodSandboxResources: if it succeeds, the resources are in force; what can't be done is refused."""

from __future__ import annotations

from typing import Any, cast

import attrs
from twisted.internet.defer import CancelledError, Deferred
from zope.interface import alsoProvides

from infranetes.pods.vm.resize import SETTLE_SECONDS
from infranetes.providers.interface import IGuest, IResizesVms, MemoryRange, Size
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    NotOffered,
    Unavailable,
)
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box, pod
from txgrpc import Call

GIB, PAGE = 1 << 30, 2 << 20
RANGES = (MemoryRange(4 * GIB, GIB),)
NO_OVERHEAD = cri.LinuxContainerResources()


def resources(cpu_millis: int = 0, memory: int = 0, shares: int = 2) -> cri.LinuxContainerResources:
    """Return resources as kubelet sends them."""
    quota = cpu_millis * 100 if cpu_millis else -1
    return cri.LinuxContainerResources(
        cpu_quota=quota, cpu_period=100_000, cpu_shares=shares, memory_limit_in_bytes=memory
    )


def limited(name: str, cpu_millis: int = 0, memory: int = 0) -> cri.ContainerConfig:
    config: cri.ContainerConfig = box(name)
    config.linux.resources.CopyFrom(resources(cpu_millis, memory))
    return config


class ResizeCase(PodsTestCase):
    """A pod of one processor and 1 GiB."""

    def setUp(self) -> None:
        super().setUp()
        self.before()
        overhead = cri.LinuxContainerResources(memory_limit_in_bytes=GIB // 4)
        linux = cri.LinuxPodSandboxConfig(resources=resources(1000, GIB), overhead=overhead)
        self.sandbox = self.run_pod(pod(linux=linux))
        self.agent = self.world.agents[self.sandbox]
        self.has = Size(1000, GIB)
        self.patch(self.agent, "info", self.info)
        self.calls = self.world.sandbox_calls

    def before(self) -> None:
        """Prepare the world before the pod runs."""

    async def info(self, within: float = 30.0) -> vmserver.InfoResponse:
        self.agent._reach()
        return vmserver.InfoResponse(
            sandbox_id=self.sandbox,
            cpus=-(-self.has.cpu_millis // 1000),
            memory_bytes=self.has.all_bytes,
            huge_page_sizes=[PAGE],
        )

    def running(self, config: cri.ContainerConfig) -> str:
        made = str(self.do(self.world.containers.create(self.sandbox, config)))
        self.do(self.world.containers.start(made))
        return made

    def update(self, id: str, wanted: cri.LinuxContainerResources) -> Deferred[None]:
        return start(self.world.containers.update(id, wanted))

    def ask(self, wanted: cri.LinuxContainerResources, id: str = "") -> Deferred[Any]:
        request = cri.UpdatePodSandboxResourcesRequest(
            pod_sandbox_id=id or self.sandbox,
            resources=wanted,
            overhead=cri.LinuxContainerResources(memory_limit_in_bytes=GIB // 4),
        )
        return start(self.calls.UpdatePodSandboxResources(request, cast(Call, None)))

    def done(self, wanted: cri.LinuxContainerResources) -> None:
        self.successResultOf(self.ask(wanted))

    def refused(self, kind: type[Exception], wanted: cri.LinuxContainerResources, id: str = "") -> str:
        words = str(self.failureResultOf(self.ask(wanted, id), kind).value)
        self.assertNotIn("not implemented", words, "for which kubelet would go on")
        return words

    def recorded(self) -> tuple[int, int]:
        record = self.record(self.sandbox)
        return record.cpu_millis, record.memory_bytes


class ResizeTests(ResizeCase):
    """With a provider that can resize VMs."""

    def before(self) -> None:
        self.provider = cast(Any, self.world.provider)  # Any: a method is added to it
        alsoProvides(self.provider, IResizesVms)
        self.provider.resize = self.resize
        self.asked: list[Size] = []
        self.most = Size(4000, 8 * GIB)
        self.keeps_memory = False
        self.follows = True  # whether the guest uses what it is given
        self.trouble: Exception | None = None
        self.waiting: Deferred[None] | None = None
        self.meanwhile: list[tuple[int, int]] = []  # the records when the provider was called

    @deferred
    async def resize(self, instance_id: str, size: Size, guest: IGuest) -> Size:
        self.assertEqual(instance_id, self.record(self.sandbox).instance_id)
        self.asked.append(size)
        self.meanwhile.append(self.recorded())
        if size.memory_bytes < self.has.memory_bytes:
            await guest.release(RANGES, 60.0)
        await guest.use_processors(-(-size.cpu_millis // 1000))
        if self.waiting is not None:
            await self.waiting
        if self.trouble is not None:
            raise self.trouble
        had = self.has
        memory = max(had.memory_bytes, size.memory_bytes) if self.keeps_memory else size.memory_bytes
        memory = min(memory, self.most.memory_bytes)
        has = attrs.evolve(size, cpu_millis=min(size.cpu_millis, self.most.cpu_millis), memory_bytes=memory)
        if self.follows:
            self.has = has
        return has

    def test_an_update_of_a_container_enlarges_the_vm_to_what_all_limits_need(self) -> None:
        """kubelet does not ask for that where a container has no limit."""
        first, second, ended = (
            self.running(limited("first", 500, GIB // 2)),
            self.running(limited("second", 0, GIB // 4)),
            self.running(limited("ended", 4000, 4 * GIB)),
        )
        self.running(box("unlimited"))
        self.agent.become(ended, cri.CONTAINER_EXITED)
        self.successResultOf(self.update(first, resources(500, GIB * 3 // 4)))  # all has room
        self.assertEqual(self.asked, [])
        self.successResultOf(self.update(second, resources(2000, 2 * GIB)))
        self.assertEqual(
            [(each.cpu_millis, each.memory_bytes) for each in self.asked], [(2500, GIB * 11 // 4)]
        )
        self.assertEqual(self.recorded(), (2500, GIB * 11 // 4))
        self.successResultOf(self.update(second, resources(0, GIB)))  # less is for kubelet to ask for
        self.assertEqual(len(self.asked), 1)

    def test_an_update_beyond_what_the_vm_can_have_is_refused_and_changes_nothing(self) -> None:
        made = self.running(limited("first", 0, GIB // 2))
        failure = self.failureResultOf(self.update(made, resources(0, 16 * GIB)), FailedPrecondition)
        self.assertIn("its VM can have 8192 MiB for the pod, not 16384", str(failure.value))
        limits = self.world.node.inventory.container(made).limits
        self.assertEqual((limits.memory_limit_in_bytes, self.recorded()[1]), (GIB // 2, GIB))
        self.most = Size(1000, 8 * GIB)
        self.failureResultOf(self.update(made, resources(3000)), FailedPrecondition)

    def test_a_vm_grows_and_shrinks(self) -> None:
        for cpu, memory in ((2000, GIB), (2000, 4 * GIB), (2000, 4 * GIB), (500, 2 * GIB)):
            self.done(resources(cpu, memory))
            self.assertEqual(self.asked[-1], Size(cpu, memory, GIB // 4))
            self.assertEqual(self.recorded(), (cpu, memory))
            self.assertEqual(self.has, self.asked[-1])

    def test_what_is_not_said_stays_as_it_is(self) -> None:
        self.done(resources(0, 2 * GIB))
        self.assertEqual(self.asked[-1], Size(1000, 2 * GIB, GIB // 4))
        self.done(resources(3000, (1 << 63) - 4096 - GIB // 4))  # the value of a cgroup without a limit
        self.assertEqual(self.asked[-1], Size(3000, 2 * GIB, GIB // 4))
        self.done(resources(shares=4096))
        self.assertEqual(self.asked[-1], Size(4000, 2 * GIB, GIB // 4))

    def restart(self) -> None:
        self.world.restart()
        self.calls = self.world.sandbox_calls

    def test_the_next_daemon_knows_how_large_it_is(self) -> None:
        self.done(resources(2000, 4 * GIB))
        self.restart()
        self.keeps_memory = True
        self.assertIn("keeps 4096 MiB", self.refused(FailedPrecondition, resources(2000, 2 * GIB)))

    def test_a_guest_is_asked_before_its_memory_is_taken(self) -> None:
        self.done(resources(1000, 4 * GIB))
        self.assertEqual(self.agent.released, [])
        self.done(resources(1000, 2 * GIB))
        self.assertEqual(self.agent.released, [RANGES])
        self.assertEqual(self.agent.processors, [1, 1])

    def test_what_the_guest_does_not_give_back_the_pod_keeps(self) -> None:
        self.done(resources(1000, 4 * GIB))
        for error, kind, words in (
            (FailedPrecondition("what is running leaves 80 MiB"), FailedPrecondition, "leaves 80 MiB"),
            (DeadlineExceeded("not in 60 s"), DeadlineExceeded, "not in 60 s"),
            (NotOffered("of an earlier release"), FailedPrecondition, "of an earlier release"),
        ):
            self.agent.release_error = error
            told = self.refused(kind, resources(1000, 2 * GIB))
            self.assertIn("keeps 4096 MiB for the pod, not 2048", told)
            self.assertIn(words, told)
            self.assertEqual(self.recorded(), (1000, 4 * GIB))
        self.agent.release_error = None
        self.done(resources(1000, 2 * GIB))

    def test_a_pod_is_recorded_as_smaller_before_its_vm_is(self) -> None:
        self.done(resources(1000, 4 * GIB))
        self.done(resources(1000, 2 * GIB))
        self.done(resources(1000, 3 * GIB))
        self.assertEqual([memory for _, memory in self.meanwhile], [GIB, 2 * GIB, 2 * GIB])

    def test_when_the_daemon_is_killed_meanwhile_the_next_one_goes_on(self) -> None:
        for memory in (2 * GIB, 4 * GIB):  # retried, or reverted
            self.done(resources(1000, 4 * GIB))
            self.waiting = Deferred()
            asked = self.ask(resources(1000, 2 * GIB))
            asked.addErrback(lambda failure: None)
            self.waiting = None
            self.restart()
            self.assertEqual(self.recorded(), (1000, 2 * GIB))
            self.has = Size(1000, 2 * GIB)  # where it had stopped
            self.done(resources(1000, memory))
            self.assertEqual((self.recorded(), self.has.memory_bytes), ((1000, memory), memory))

    def test_memory_that_the_guest_keeps_is_not_told_as_given_back(self) -> None:
        self.keeps_memory = True
        self.done(resources(1000, 4 * GIB))
        words = self.refused(FailedPrecondition, resources(1000, 2 * GIB))
        self.assertIn("keeps 4096 MiB", words)
        self.assertEqual(self.recorded(), (1000, 4 * GIB))
        self.done(resources(1000, 4 * GIB))

    def test_a_vm_that_shrank_before_another_part_was_refused_is_as_large_as_before(self) -> None:
        self.done(resources(1000, 4 * GIB))
        self.assertIn("4000 mCPU", self.refused(FailedPrecondition, resources(9000, 2 * GIB)))
        self.assertEqual(self.has, Size(1000, 4 * GIB, GIB // 4))
        self.assertEqual(self.recorded(), (1000, 4 * GIB))

    def test_where_a_vm_does_not_become_as_large_again_the_first_refusal_is_told(self) -> None:
        self.done(resources(1000, 4 * GIB))
        self.trouble = FailedPrecondition("the guest refuses dimm1")
        self.assertIn("keeps 4096 MiB", self.refused(FailedPrecondition, resources(1000, 2 * GIB)))
        self.assertEqual([size.memory_bytes for size in self.asked[-2:]], [2 * GIB, 4 * GIB])
        self.assertEqual(self.recorded(), (1000, 4 * GIB))

    def test_one_that_is_cancelled_twice_is_undone_before_the_next_begins(self) -> None:
        self.done(resources(1000, 4 * GIB))
        steps: list[int] = []
        undone: Deferred[None] = Deferred()

        @deferred
        async def resize(instance_id: str, size: Size, guest: IGuest) -> Size:
            steps.append(size.memory_bytes // GIB)
            await (Deferred() if len(steps) == 1 else undone)
            return size

        self.provider.resize = resize
        sandbox = self.world.node.inventory.sandboxes[self.sandbox]
        smaller = start(self.world.node.resizer.resize(sandbox, resources(1000, 2 * GIB), NO_OVERHEAD))
        for _ in range(2):
            smaller.cancel()
        larger = start(self.world.node.resizer.resize(sandbox, resources(1000, 5 * GIB), NO_OVERHEAD))
        self.assertEqual(steps, [2, 4])
        undone.callback(None)
        self.failureResultOf(smaller, CancelledError)
        self.assertEqual(steps, [2, 4, 5])
        larger.addErrback(lambda failure: None)
        larger.cancel()

    def test_more_processors_than_there_can_be_are_refused(self) -> None:
        self.assertIn("4000 mCPU", self.refused(FailedPrecondition, resources(9000, GIB)))
        self.assertEqual(self.recorded(), (1000, GIB))
        self.done(resources(4000, GIB))

    def test_a_pod_that_was_made_with_more_processors_than_there_can_be_still_gets_memory(self) -> None:
        linux = cri.LinuxPodSandboxConfig(resources=resources(64000, GIB))
        self.sandbox = self.run_pod(pod("large", uid="large", linux=linux))
        self.agent = self.world.agents[self.sandbox]
        self.patch(self.agent, "info", self.info)
        self.done(resources(64000, 2 * GIB))

    def test_what_the_provider_refuses_is_refused_in_its_words(self) -> None:
        for trouble in (
            InvalidArgument("the most that this node gives is 8192 MiB"),
            FailedPrecondition("the guest refuses dimm1"),
            DeadlineExceeded("the guest's taking dimm1 into use took longer than 60 s"),
        ):
            self.trouble = trouble
            self.assertEqual(self.refused(type(trouble), resources(2000, GIB)), str(trouble))
        self.assertEqual(self.recorded(), (1000, GIB))

    def test_it_is_done_when_the_guest_uses_what_it_was_given(self) -> None:
        self.follows = False
        asked = self.ask(resources(2000, 2 * GIB))
        self.world.wait(5.0)
        self.assertNoResult(asked)
        self.has = Size(2000, GIB)
        self.world.wait(5.0)
        self.assertNoResult(asked)
        self.has = Size(2000, 2 * GIB - GIB // 32)  # the kernel reserves the rest
        self.world.wait(5.0)
        self.successResultOf(asked)
        self.assertEqual(self.recorded(), (2000, 2 * GIB))

    def test_one_whose_guest_does_not_use_it_is_refused_and_may_be_tried_again(self) -> None:
        self.follows = False
        asked = self.ask(resources(2000, GIB))
        self.world.wait(SETTLE_SECONDS + 5.0)
        self.assertIn("has 1 processors of 2", str(self.failureResultOf(asked, Unavailable).value))
        self.assertEqual(self.recorded(), (1000, GIB))
        self.follows = True
        self.done(resources(2000, GIB))

    def test_an_agent_that_is_away_can_not_say_that_it_is_done(self) -> None:
        self.agent.away = True
        self.refused(Unavailable, resources(2000, GIB))
        self.assertEqual(self.recorded(), (1000, GIB))
        self.agent.away = False
        self.done(resources(2000, GIB))

    def test_back_again_after_a_failure_is_done(self) -> None:
        """kubelet does this when a cgroup can't be changed."""
        self.keeps_memory = True
        self.has = Size(1000, 2 * GIB)  # more than it was made with, left over from an attempt
        self.done(resources(1000, GIB))

    def test_calls_are_served_one_after_the_other(self) -> None:
        self.waiting = Deferred()
        first, second = self.ask(resources(2000, GIB)), self.ask(resources(3000, GIB))
        self.assertEqual([size.cpu_millis for size in self.asked], [2000])
        waiting, self.waiting = self.waiting, None
        waiting.callback(None)
        self.successResultOf(first)
        self.successResultOf(second)
        self.assertEqual([size.cpu_millis for size in self.asked], [2000, 3000])
        self.assertEqual(self.recorded(), (3000, GIB))

    def test_a_caller_that_gives_up_does_not_end_it(self) -> None:
        self.waiting = Deferred()
        asked = self.ask(resources(2000, GIB))
        asked.addErrback(lambda failure: None)
        asked.cancel()
        self.waiting.callback(None)
        self.assertEqual(self.recorded(), (2000, GIB))

    def test_only_a_pod_that_is_ready_is_resized(self) -> None:
        self.refused(NotFound, resources(2000, GIB), "f" * 32)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertIn("stopped", self.refused(FailedPrecondition, resources(2000, GIB)))
        self.assertEqual(self.asked, [])

    def test_one_that_is_stopped_meanwhile_stays_stopped(self) -> None:
        self.waiting = Deferred()
        asked = self.ask(resources(2000, GIB))
        self.do(self.world.sandboxes.stop(self.sandbox))
        stopped = self.record(self.sandbox)
        self.waiting.callback(None)
        self.failureResultOf(asked, Unavailable, FailedPrecondition)
        self.assertEqual(self.record(self.sandbox), stopped)

    def test_without_resources_there_is_nothing_to_do(self) -> None:
        request = cri.UpdatePodSandboxResourcesRequest(pod_sandbox_id=self.sandbox)
        call = start(self.calls.UpdatePodSandboxResources(request, cast(Call, None)))
        self.failureResultOf(call, InvalidArgument)


class CloudTests(ResizeCase):
    """With a provider whose VMs keep the size that they were made with."""

    def test_what_the_vm_has_anyway_is_done(self) -> None:
        self.has = Size(2000, 4 * GIB)
        for cpu, memory in ((2000, 2 * GIB), (1500, 4 * GIB), (100, GIB)):
            self.done(resources(cpu, memory))
            self.assertEqual(self.recorded(), (cpu, memory))

    def test_more_than_that_is_refused(self) -> None:
        words = self.refused(FailedPrecondition, resources(2000, GIB))
        self.assertIn("has 1 processors of 2", words)
        self.assertIn("VMs of fake can't grow", words)
        self.assertIn("has 1024 MiB of 4096", self.refused(FailedPrecondition, resources(1000, 4 * GIB)))
        self.assertEqual(self.recorded(), (1000, GIB))

    def test_an_update_of_a_container_beyond_that_is_refused(self) -> None:
        made = self.running(limited("first", 0, GIB // 2))
        self.running(box("unlimited"))
        self.successResultOf(self.update(made, resources(0, GIB)))
        failure = self.failureResultOf(self.update(made, resources(0, 4 * GIB)), FailedPrecondition)
        self.assertIn("its VM has 1024 MiB of 4096, and VMs of fake can't grow", str(failure.value))
        self.assertEqual(self.world.node.inventory.container(made).limits.memory_limit_in_bytes, GIB)
        self.has = Size(1000, 4 * GIB)
        self.successResultOf(self.update(made, resources(0, 4 * GIB)))


def pages(number: int) -> cri.LinuxContainerResources:
    """Return limits of so many huge pages."""
    limit = cri.HugepageLimit(page_size="2MB", limit=number * PAGE)
    return cri.LinuxContainerResources(hugepage_limits=[limit])


class HugePageTests(ResizeCase):
    """A VM has room for its containers' huge pages, beside what its pod requests."""

    def before(self) -> None:
        self.provider = cast(Any, self.world.provider)  # Any: a method is added to it
        alsoProvides(self.provider, IResizesVms)
        self.provider.resize = self.resize
        self.asked: list[tuple[Size, bool]] = []  # with whether memory may be asked of the guest
        self.most = 8 * GIB

    @deferred
    async def resize(self, instance_id: str, size: Size, guest: IGuest | None = None) -> Size:
        self.asked.append((size, guest is not None))
        self.has = attrs.evolve(size, memory_bytes=min(size.memory_bytes, self.most - size.huge_bytes))
        return self.has

    def creating(self, name: str, number: int) -> Deferred[str]:
        config = box(name)
        config.linux.resources.CopyFrom(pages(number))
        return start(self.world.containers.create(self.sandbox, config))

    def create(self, name: str, number: int) -> str:
        return self.successResultOf(self.creating(name, number))

    def grown_to(self) -> list[int]:
        """Return the pages for which the VM was to have room, each time."""
        self.assertEqual({(size.cpu_millis, size.memory_bytes) for size, _ in self.asked}, {(0, GIB)})
        self.assertFalse(any(guest for _, guest in self.asked), "no memory is taken out for a container")
        return [size.huge_bytes // PAGE for size, _ in self.asked]

    def test_a_vm_grows_before_its_agent_is_asked_for_the_container(self) -> None:
        self.create("plain", 0)
        self.assertEqual(self.asked, [])
        self.create("first", 4)
        self.create("second", 2)
        self.assertEqual(self.grown_to(), [4, 6])

    def test_one_that_has_ended_is_not_counted(self) -> None:
        first = self.create("first", 4)
        self.agent.become(first, cri.CONTAINER_EXITED)
        self.create("second", 2)
        self.assertEqual(self.grown_to(), [4, 2])

    def test_a_container_whose_pages_the_vm_has_no_room_for_is_refused_and_leaves_nothing(self) -> None:
        self.most = GIB + 3 * PAGE
        words = str(self.failureResultOf(self.creating("first", 4), FailedPrecondition).value)
        self.assertIn("can have 1030 MiB for the pod, not 1032", words)
        self.assertEqual(self.world.store.contents().containers, ())
        self.create("first", 3)
        self.assertEqual(self.grown_to(), [4, 3])

    def test_other_limits_are_had_before_they_hold(self) -> None:
        container = self.create("first", 4)
        self.do(self.world.containers.update(container, pages(6)))
        self.do(self.world.containers.update(container, resources(1000, GIB // 2)))
        self.assertEqual(self.grown_to(), [4, 6])
        self.most = GIB
        self.failureResultOf(start(self.world.containers.update(container, pages(7))), FailedPrecondition)
        self.assertEqual(list(self.agent.containers[container].resources.hugepage_limits), [])
        self.most = 64 * GIB
        before = self.grown_to()
        larger = cri.HugepageLimit(page_size="1GB", limit=GIB)
        update = self.world.containers.update(
            container, cri.LinuxContainerResources(hugepage_limits=[larger])
        )
        self.failureResultOf(start(update), FailedPrecondition)
        self.assertEqual(self.grown_to(), before, "a VM does not grow for pages that it can't have")

    def test_a_pod_that_is_resized_keeps_room_for_them(self) -> None:
        self.create("first", 4)
        self.done(resources(1000, 2 * GIB))
        size, _ = self.asked[-1]
        self.assertEqual((size.memory_bytes, size.huge_bytes), (2 * GIB, 4 * PAGE))
        self.assertEqual(self.recorded(), (1000, 2 * GIB))

    def test_the_next_daemon_knows_of_them(self) -> None:
        self.create("first", 4)
        self.world.restart()
        self.create("second", 2)
        self.assertEqual(self.grown_to(), [4, 6])


class HugePagesWithoutRoomTests(ResizeCase):
    """With a provider that can't resize VMs, whose agents report whether there is room."""

    def test_a_container_is_made_as_far_as_its_agent_goes_along(self) -> None:
        config = box()
        config.linux.resources.CopyFrom(pages(4))
        self.successResultOf(start(self.world.containers.create(self.sandbox, config)))
