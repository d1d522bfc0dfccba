# SPDX-License-Identifier: Apache-2.0
"""When a launch is over whose operation the cloud's lists tell of."""

from __future__ import annotations

import attrs

from infranetes.providers.cloud.interface import CloudVM, LaunchRequest
from infranetes.providers.interface import InstanceState
from tests.infranetes.providers.cloud.vms import test_failed_launches as launches


class LaunchWaitTests(launches.LaunchCase):
    def begun(self, state: InstanceState = InstanceState.PENDING) -> CloudVM:
        """Return a VM whose operation lists tell of, in a state."""
        return attrs.evolve(launches.vm("a"), state=state, operation="op", operation_listed=True)

    def test_it_is_over_when_a_list_shows_that_the_vm_runs(self) -> None:
        launching = self.launch(self.begun())
        self.clock.advance(self.settings.doubt_seconds)
        self.assertNoResult(launching)
        self.cloud.vms["a"] = self.begun(InstanceState.RUNNING)
        self.clock.advance(self.settings.doubt_seconds)
        self.assertIs(self.successResultOf(launching).state, InstanceState.RUNNING)

    def test_the_first_list_that_shows_it_may_show_that_it_runs(self) -> None:
        launching = self.launch(self.begun())
        self.cloud.vms["a"] = self.begun(InstanceState.RUNNING)
        self.clock.advance(self.settings.doubt_seconds)
        self.assertIs(self.successResultOf(launching).state, InstanceState.RUNNING)

    def test_a_list_that_showed_it_before_the_cloud_answered_is_remembered(self) -> None:
        launch = self.cloud._thd_launch

        def listed_meanwhile(driver: None, request: LaunchRequest) -> CloudVM:
            made = launch(driver, request)
            self.ledger.record_list([self.begun(InstanceState.RUNNING)])
            self.watcher.publish_changes()
            return made

        self.patch(self.cloud, "_thd_launch", listed_meanwhile)
        launching = self.launch(self.begun())
        self.assertIs(self.successResultOf(launching).state, InstanceState.RUNNING)
