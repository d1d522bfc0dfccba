# SPDX-License-Identifier: Apache-2.0
"""CreateContainer: what is recorded, what the agent is asked for, and how it is undone."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from infranetes.pods.store.states import ContainerState
from infranetes_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import cri
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fake_images import IMAGE, image
from tests.infranetes.pods.fakes import box


class CreateTests(ContainersTestCase):
    """CreateContainer."""

    def test_the_image_is_brought_once_then_the_container_is_made(self) -> None:
        made = self.create()
        self.assertEqual(self.agent.loads, [(IMAGE, f"{IMAGE} without 1".encode())])
        self.assertEqual(self.kept(made).state, ContainerState.CREATED)
        self.assertEqual(self.kept(made).image_id, IMAGE)
        self.create(box("second"))
        self.assertEqual(len(self.agent.loads), 1)

    def test_an_image_with_a_url_is_fetched_by_the_vm_itself(self) -> None:
        self.world.images.image = image(url="https://localhost/program")
        self.create()
        self.assertEqual(self.agent.loads, [(IMAGE, "https://localhost/program")])

    def test_creates_side_by_side_share_one_load(self) -> None:
        self.agent.holding = Deferred()
        creates = [self.start_create(box(f"c{number}")) for number in range(5)]
        self.agent.holding.callback(None)
        ids = {self.successResultOf(each) for each in creates}
        self.assertEqual(len(ids), 5)
        self.assertEqual(len(self.agent.loads), 1)

    def test_the_record_is_there_before_the_agent_is_asked(self) -> None:
        seen: list[Any] = []
        real = self.agent.create

        async def create(*arguments: Any) -> Any:
            seen.extend(self.world.store.contents().containers)
            return await real(*arguments)

        self.agent.create = create  # type: ignore[method-assign,assignment]
        made = self.create()
        self.assertEqual([(one.id, one.state) for one in seen], [(made, ContainerState.CREATING)])

    def test_one_that_fails_leaves_nothing(self) -> None:
        self.agent.create_error = InvalidArgument("config.working_dir: not a path")
        self.failureResultOf(self.start_create(), InvalidArgument)
        self.assertEqual(self.world.store.contents().containers, ())
        self.assertEqual(self.world.node.inventory.containers, {})
        self.assertEqual(self.agent.containers, {})
        self.agent.create_error = None
        self.create()

    def test_one_whose_creation_is_answered_too_late_is_removed_at_once(self) -> None:
        create = self.agent.create

        async def late(*arguments: Any) -> Any:
            await create(*arguments)
            raise DeadlineExceeded("no answer")

        self.patch(self.agent, "create", late)
        self.failureResultOf(self.start_create(), DeadlineExceeded)
        self.assertEqual(self.agent.containers, {})
        self.assertEqual(self.world.store.contents().containers, ())

    def test_no_container_is_asked_for_when_the_record_can_not_be_written(self) -> None:
        self.world.store.failing = ResourceExhausted("full")
        self.failureResultOf(self.start_create(), ResourceExhausted)
        self.assertEqual(self.agent.calls, [])
        self.world.store.failing = None
        self.create()

    def test_huge_pages_that_its_vm_lacks_are_refused_before_anything_is_brought(self) -> None:
        def asking(size: str, limit: int) -> Any:
            wanted = box()
            wanted.linux.resources.hugepage_limits.add(page_size=size, limit=limit)
            return wanted

        self.agent.huge_page_sizes = [2 << 20]
        refused = self.start_create(asking("1GB", 1 << 30))
        self.assertIn("hugepages-1Gi", str(self.failureResultOf(refused, FailedPrecondition).value))
        self.failureResultOf(self.start_create(asking("some", 0)), InvalidArgument)
        self.assertEqual(self.agent.calls, [])
        self.assertEqual(self.world.store.contents().containers, ())
        self.agent.huge_page_sizes = []
        self.failureResultOf(self.start_create(asking("2MB", 2 << 20)), FailedPrecondition)
        self.create(asking("1GB", 0))

    def test_an_agent_lost_in_the_middle_is_rid_of_it_when_it_is_back(self) -> None:
        self.agent.create_error = Unavailable("the connection is lost")
        real_remove = self.agent.remove

        async def lost(*_: Any, **__: Any) -> None:
            raise Unavailable("the connection is lost")

        self.agent.remove = lost  # type: ignore[method-assign]
        self.failureResultOf(self.start_create(), Unavailable)
        self.assertEqual(self.world.store.contents().containers, ())
        self.agent.remove = real_remove  # type: ignore[method-assign]
        self.agent.become("f" * 32, cri.CONTAINER_CREATED)  # it had been created all the same
        self.assertEqual(self.agent.containers, {})

    def test_an_image_that_is_not_on_the_node_is_said(self) -> None:
        error = self.failureResultOf(self.start_create(box(image="nginx")), NotFound).value
        self.assertIn("nginx", str(error))
        self.assertEqual(self.world.store.contents().containers, ())

    def test_an_unknown_sandbox_is_said(self) -> None:
        self.sandbox = "f" * 32
        self.failureResultOf(self.start_create(), NotFound)

    def test_a_stopped_sandbox_takes_no_container(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.failureResultOf(self.start_create(), FailedPrecondition)

    def test_a_name_is_one_containers(self) -> None:
        self.create()
        self.failureResultOf(self.start_create(), AlreadyExists)
        self.create(box(attempt=1))

    def test_the_second_call_for_a_creation_under_way_joins_it(self) -> None:
        self.agent.holding = Deferred()
        first, second = self.start_create(), self.start_create()
        first.cancel()
        self.failureResultOf(first)
        self.agent.holding.callback(None)
        self.assertIn(self.successResultOf(second), self.agent.containers)

    def test_a_container_that_nobody_was_told_of_is_given_to_who_asks_again(self) -> None:
        self.agent.holding = Deferred()
        first = self.start_create()
        first.cancel()
        self.failureResultOf(first)
        self.agent.holding.callback(None)
        (container,) = self.world.node.inventory.containers
        self.assertEqual(self.create(), container)

    def test_kubelets_second_call_joins_although_it_has_other_words(self) -> None:
        self.agent.holding = Deferred()
        first = self.start_create(box(envs=[variable("DNS"), variable("WEB")]))
        second = self.start_create(box(envs=[variable("WEB"), variable("DNS")]))
        self.agent.holding.callback(None)
        self.assertEqual(self.successResultOf(second), self.successResultOf(first))

    def test_a_call_for_another_container_of_that_name_does_not_join(self) -> None:
        self.agent.holding = Deferred()
        first = self.start_create(box(envs=[variable("DNS")]))
        self.failureResultOf(self.start_create(box(envs=[variable("WEB")])), AlreadyExists)
        self.agent.holding.callback(None)
        self.successResultOf(first)

    def find_later(self) -> Deferred[None]:
        """Have the image found only once the returned Deferred fires."""
        found = self.world.images.finding = Deferred()
        return found

    def test_calls_for_one_container_whose_image_is_looked_for_are_given_one(self) -> None:
        found = self.find_later()
        self.agent.holding = Deferred()
        first, second = self.start_create(), self.start_create()
        found.callback(None)
        self.agent.holding.callback(None)
        self.assertEqual(self.successResultOf(first), self.successResultOf(second))
        self.assertEqual(len(self.agent.containers), 1)

    def test_of_two_containers_with_one_name_the_second_is_refused_after_the_look_for_its_image(self) -> None:
        found = self.find_later()
        first = self.start_create(box(envs=[variable("DNS")]))
        second = self.start_create(box(envs=[variable("WEB")]))
        found.callback(None)
        self.successResultOf(first)
        self.failureResultOf(second, AlreadyExists)

    def test_a_sandbox_that_is_stopped_while_an_image_is_looked_for_takes_no_container(self) -> None:
        found = self.find_later()
        creation = self.start_create()
        self.do(self.world.sandboxes.stop(self.sandbox))
        found.callback(None)
        self.failureResultOf(creation, FailedPrecondition)
        self.assertEqual(self.world.store.contents().containers, ())

    def test_a_call_given_up_while_an_image_is_looked_for_leaves_nothing(self) -> None:
        self.find_later()
        creation = self.start_create()
        creation.cancel()
        self.failureResultOf(creation, CancelledError)
        self.assertEqual(self.world.node.inventory.containers, {})


def variable(name: str) -> cri.KeyValue:
    """Return a variable of the environment."""
    return cri.KeyValue(key=name, value=b"x")
