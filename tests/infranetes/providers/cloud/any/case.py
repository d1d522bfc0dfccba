# SPDX-License-Identifier: Apache-2.0
"""Base classes for tests of the provider of any driver of libcloud's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tests.contract.pod_provider_case import reactor
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.case import Call, CloudCase
from tests.infranetes.providers.cloud.faults import LastingFaults, PassingFaults
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.nodes import PLACES, SimulatedNodes
from tests.support.clouds.vps import Api, SimulatedVps

TOO_LATE = {"retry_first": 2.0, "retry_most": 2.0}
"""Has launches give up before they are repeated, look for the VM, and find it."""


class NodesCase(CloudCase):
    """A cloud that a driver tells of by lists alone. A launch first looks whether a list has its VM."""

    provider_name = "libcloud"
    launch_action, destroy_action, list_action = "launch", "destroy", "list"
    cheapest, large, quota = ("s-1", "s-2"), "s-4", "limit"
    asked_again = 0
    world: SimulatedNodes

    @classmethod
    def setUpClass(cls) -> None:
        """Nothing is read that takes long."""

    def zones(self) -> Sequence[str]:
        return PLACES

    def asked(self, launch: Call) -> tuple[str, str]:
        return launch["size"], launch["place"]

    def key(self, launch: Call) -> str:
        return launch["name"]

    def break_launches(self) -> Callable[[], None]:
        mend = super().break_launches()
        kept = {key: self.settings[key] for key in TOO_LATE}
        self.settings.update(TOO_LATE)

        def mended() -> None:
            mend()
            self.settings.update(kept)

        return mended


class NodesPassingFaults(PassingFaults):
    """Faults after which a retried call succeeds."""

    settings: dict[str, Any]

    async def test_a_daemon_that_was_killed_before_its_launch_was_listed(self) -> None:
        self.settings["settle_seconds"] = 10.0  # the next daemon takes a while to start
        await super().test_a_daemon_that_was_killed_before_its_launch_was_listed()


class NodesLastingFaults(LastingFaults):
    """Faults that make calls fail."""

    settings: dict[str, Any]

    async def test_launches_whose_answers_are_always_lost(self) -> None:
        self.settings.update(TOO_LATE)
        await super().test_launches_whose_answers_are_always_lost()

    async def test_a_vm_that_shows_up_after_its_launch_was_given_up(self) -> None:
        self.settings.update(TOO_LATE)
        self.world.faults.add(FaultKind.STALE, "list", times=3)
        await super().test_a_vm_that_shows_up_after_its_launch_was_given_up()


@needs_tools("wheels")
class VpsCase(NodesCase):
    """A vendor's HTTP API."""

    api: ClassVar[type[Api]]

    def make_world(self) -> SimulatedVps:
        return SimulatedVps(reactor, self.run_dir / "machines", self.api())

    async def finish(self) -> None:
        await super().finish()
        self.assertEqual(set(self.world.malformed), set())
