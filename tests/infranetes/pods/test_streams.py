# SPDX-License-Identifier: Apache-2.0
"""Streams go to the agent of the right VM, and to none that can't serve them."""

from __future__ import annotations

from infranetes.pods.streams import Streams
from infranetes_common.errors import FailedPrecondition, NotFound
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fakes import pod


class StreamTests(ContainersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.streams = Streams(self.world.sandboxes, self.world.containers)
        self.other = self.run_pod(pod("other"))
        for agent in self.world.agents.values():
            for call in ("exec", "attach", "port_forward"):
                opened = (call, agent.sandbox_id)
                setattr(agent, call, lambda opened=opened: opened)

    def test_each_call_is_opened_at_the_agent_of_its_pod(self) -> None:
        container = self.run_container()
        self.assertEqual(self.streams.exec_call(container), ("exec", self.sandbox))
        self.assertEqual(self.streams.attach_call(container), ("attach", self.sandbox))
        self.assertEqual(self.streams.port_forward_call(self.other), ("port_forward", self.other))

    def test_what_does_not_run_is_refused_before_a_url_is_given(self) -> None:
        container = self.create()
        with self.assertRaisesRegex(FailedPrecondition, f"container {container} is not running"):
            self.streams.container(container)
        self.do(self.world.containers.start(container))
        self.assertEqual(self.streams.container(container).id, container)
        self.assertEqual(self.streams.sandbox(self.sandbox).id, self.sandbox)
        machine = self.world.node.inventory.sandboxes[self.sandbox].machine
        self.successResultOf(machine.disconnect())  # as while the pod is being stopped
        for refused in (
            lambda: self.streams.container(container),
            lambda: self.streams.sandbox(self.sandbox),
        ):
            self.assertRaises(FailedPrecondition, refused)
        self.assertRaises(NotFound, self.streams.container, "f" * 32)
        self.assertRaises(NotFound, self.streams.sandbox, "f" * 32)
