# SPDX-License-Identifier: Apache-2.0
"""Which events the lives of sandboxes and containers have."""

from __future__ import annotations

from infranetes.pods.node.events import EventType
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box

CREATED, STARTED, STOPPED, DELETED = EventType


class EventTests(PodsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.emitted: list[tuple[EventType, str]] = []
        self.world.node.inventory.events.listen(self.listen)

    def listen(self, event: EventType, sandbox: Sandbox, container: Container | None) -> None:
        self.emitted.append((event, sandbox.id if container is None else container.id))

    def since(self) -> list[tuple[EventType, str]]:
        """Return the events since the last call."""
        emitted, self.emitted = self.emitted, []
        return emitted

    def test_a_pod_is_ready_then_stopped_then_deleted_once_each(self) -> None:
        sandbox = self.run_pod()
        self.assertEqual(self.since(), [(CREATED, sandbox), (STARTED, sandbox)])
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(self.since(), [(STOPPED, sandbox)])
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertEqual(self.since(), [(DELETED, sandbox)])

    def test_a_lost_pod_is_stopped_once_and_so_is_its_container(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.start(container))
        self.since()
        self.world.provider.end(self.record(sandbox).instance_id, "power")
        self.assertEqual(self.since(), [(STOPPED, sandbox), (STOPPED, container)])
        self.do(self.world.sandboxes.stop(sandbox))
        self.assertEqual(self.since(), [])

    def test_an_interrupted_pod_is_stopped_before_it_ends(self) -> None:
        sandbox = self.run_pod()
        self.since()
        for _ in range(2):
            self.world.agents[sandbox].interrupt("it will be reclaimed")
        self.assertEqual(self.since(), [(STOPPED, sandbox)])

    def test_what_was_never_shown_has_none(self) -> None:
        self.world.provider.launch_error = Unavailable("no capacity")
        self.failureResultOf(self.start(), Unavailable)
        self.world.provider.launch_error = None
        sandbox = self.run_pod()
        self.since()
        self.world.agents[sandbox].create_error = InvalidArgument("config.working_dir: not a path")
        creation = self.world.containers.create(sandbox, box())
        self.failureResultOf(start(creation), InvalidArgument)
        self.assertEqual(self.since(), [])

    def test_a_container_that_ended_at_once_was_started(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.since()
        self.world.agents[sandbox].become(container, cri.CONTAINER_EXITED, started_at=6, finished_at=6)
        self.assertEqual(self.since(), [(STARTED, container), (STOPPED, container)])

    def test_a_container_that_never_ran_is_deleted_without_having_ended(self) -> None:
        sandbox = self.run_pod()
        container = self.do(self.world.containers.create(sandbox, box()))
        self.do(self.world.containers.remove(container))
        self.assertEqual(self.since()[2:], [(CREATED, container), (DELETED, container)])
