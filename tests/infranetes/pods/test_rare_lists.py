# SPDX-License-Identifier: Apache-2.0
"""A node whose provider's lists are dear: it asks for few, and says which agents are silent."""

from __future__ import annotations

from twisted.internet.defer import Deferred, fail
from zope.interface import alsoProvides
from zope.interface.verify import verifyObject

from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import IListsRarely, Instance, InstanceState
from infranetes_common.errors import Unavailable
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod

LIST_SECONDS = 300.0


class RareListTests(PodsTestCase):
    def setUp(self) -> None:
        self.lists: list[float] = []
        self.heard: list[tuple[str, bool]] = []
        self.pace = LIST_SECONDS
        self.list_error: Exception | None = None
        super().setUp()

    def make_world(self) -> FakeNode:
        world = super().make_world()
        provider, list_all = world.provider, world.provider.list

        def counted() -> Deferred[list[Instance]]:
            self.lists.append(world.clock.seconds())
            return list_all() if self.list_error is None else fail(self.list_error)

        provider.list = counted  # type: ignore[method-assign]
        provider.list_seconds = lambda: self.pace  # type: ignore[attr-defined]
        provider.agent_heard = lambda instance_id, heard: self.heard.append((instance_id, heard))  # type: ignore[attr-defined]
        alsoProvides(provider, IListsRarely)
        return world

    def test_the_provider_is_asked_as_often_as_it_says(self) -> None:
        verifyObject(IListsRarely, self.world.provider)
        self.world.wait(3600.0)
        self.assertEqual(len(self.lists), 3600.0 / LIST_SECONDS + 1)

    def test_it_may_say_something_else_each_time(self) -> None:
        self.pace = 4 * LIST_SECONDS
        self.world.wait(LIST_SECONDS + self.world.times.sweep)
        self.lists.clear()
        self.world.wait(4 * LIST_SECONDS)
        self.assertEqual(len(self.lists), 1)

    def test_a_list_that_fails_is_not_asked_for_in_each_pass(self) -> None:
        self.list_error = Unavailable("throttled")
        self.world.wait(LIST_SECONDS)
        self.lists.clear()
        self.world.wait(3600.0)
        self.assertEqual(len(self.lists), 3600.0 / LIST_SECONDS)

    def test_a_vm_on_no_record_is_destroyed_when_two_lists_have_shown_it_not_two_passes(self) -> None:
        stray = Instance("stray", "t" * 32, "s" * 32, InstanceState.RUNNING)
        self.world.provider.instances[stray.id] = stray
        self.world.wait(LIST_SECONDS)  # the first list was before
        self.assertIn(stray.id, self.world.provider.instances)
        self.world.wait(LIST_SECONDS - 1.0)
        self.assertIn(stray.id, self.world.provider.instances)
        self.world.wait(self.world.times.sweep)
        self.assertNotIn(stray.id, self.world.provider.instances)

    def test_what_could_not_be_destroyed_is_tried_again_in_each_pass(self) -> None:
        self.world.provider.destroy_error = Unavailable("down")
        id = self.run_pod()
        self.world.provider.booting = fail(Unavailable("no"))
        self.failureResultOf(self.start(pod("other")))
        lists = len(self.lists)
        self.world.provider.destroy_error = None
        self.world.wait(2 * self.world.times.sweep)
        self.assertEqual([one.id for one in self.world.node.inventory], [id])
        self.assertEqual(len(self.lists), lists)

    def test_it_learns_which_agents_are_silent_and_heard_again(self) -> None:
        id = self.run_pod()
        (instance_id,) = self.world.provider.instances
        self.assertEqual(self.heard, [(instance_id, True)])
        agent = self.world.agents[id]
        agent.go_away()
        self.assertEqual(self.heard[1:], [(instance_id, False)])
        agent.away = False
        self.world.wait(30.0)
        self.assertEqual(self.heard[-1], (instance_id, True))

    def test_a_silent_vm_that_the_provider_says_has_ended_is_lost_at_once(self) -> None:
        id = self.run_pod()
        (instance_id,) = self.world.provider.instances
        lists = len(self.lists)
        self.world.provider.end(instance_id, "its host failed")
        self.assertIs(self.record(id).state, SandboxState.LOST)
        self.assertEqual(len(self.lists), lists)
