# SPDX-License-Identifier: Apache-2.0
"""Instances without our agent on a simulated Compute Engine."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import GcpCase
from tests.infranetes.providers.cloud.guest_case import GuestCase


class GcpGuestTests(GuestCase, GcpCase, TestCase):
    """An instance that powers off stays until it is deleted; a preempted one has failed."""

    def user_data(self) -> bytes:
        items = self.world.bodies[-1]["metadata"]["items"]
        [found] = [each["value"] for each in items if each["key"] == "user-data"]
        return str(found).encode()

    def fail_vm(self, id: str) -> None:
        self.world.preempt(id)

    failure = "preempted"
    spot = True
