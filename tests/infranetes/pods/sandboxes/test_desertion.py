# SPDX-License-Identifier: Apache-2.0
"""Launches that nobody waits for any more, and who keeps them."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from infranetes.pods.node.inventory import Sandbox
from infranetes_common.errors import Unavailable
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import FakeNode

DESERTION = 100.0


class DesertionTests(PodsTestCase):
    """It is ended after a while without a caller; not before, and not by a daemon that stops."""

    def make_world(self) -> FakeNode:
        return FakeNode(desertion=DESERTION)

    def setUp(self) -> None:
        super().setUp()
        self.world.provider.booting = Deferred()

    def desert(self) -> Sandbox:
        """Have a call begin a launch, or join it, and give up."""
        call = self.start()
        call.cancel()
        self.failureResultOf(call)
        (sandbox,) = self.world.node.inventory
        return sandbox

    def past(self) -> list[tuple[str, str]]:
        steps = self.world.node.inventory.past[-1].timeline.steps
        return [(step.what, step.error or step.detail) for step in steps]

    def test_who_joins_it_keeps_it_however_long_that_takes(self) -> None:
        self.desert()
        self.world.wait(DESERTION / 2)
        joined = self.start()
        self.world.wait(2 * DESERTION)
        assert self.world.provider.booting is not None
        self.world.provider.booting.callback(None)
        self.successResultOf(joined)

    def test_who_joins_and_gives_up_too_has_it_kept_as_long_again(self) -> None:
        self.desert()
        self.world.wait(DESERTION - 1)
        self.desert()
        self.world.wait(DESERTION - 1)
        self.assertEqual(len(list(self.world.node.inventory)), 1)
        self.world.wait(2)
        self.assertNothingLeft()

    def test_its_end_says_why(self) -> None:
        self.desert()
        self.world.wait(DESERTION + 1)
        self.assertIn(("the launch is ended", "nobody asked for it any more"), self.past())

    def test_one_that_has_failed_before_is_not_ended_again(self) -> None:
        self.desert()
        assert self.world.provider.booting is not None
        self.world.provider.booting.errback(Unavailable("no boot"))
        self.assertNothingLeft()
        self.world.wait(DESERTION + 1)
        self.assertNotIn("the pod is ended", [what for what, _ in self.past()])

    def test_one_that_the_next_daemon_continues_is_ended_when_its_callers_give_up(self) -> None:
        self.start().addErrback(lambda failure: None)
        self.world.restart()
        self.world.wait(DESERTION - 1)
        self.desert()
        self.world.wait(DESERTION - 1)
        self.assertEqual(len(list(self.world.node.inventory)), 1)
        self.world.wait(2)
        self.assertNothingLeft()

    def test_a_daemon_that_stops_ends_none(self) -> None:
        call = self.start()
        call.addErrback(lambda failure: None)
        self.world.node.stopping.succeed(None)
        call.cancel()
        self.world.wait(DESERTION + 1)
        self.assertEqual(len(self.world.provider.instances), 1)
        self.assertNotIn("destroy", [name for name, _ in self.world.provider.calls])
