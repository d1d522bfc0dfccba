# SPDX-License-Identifier: Apache-2.0
"""Instances without our agent on a simulated EC2."""

from __future__ import annotations

import base64

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import AwsCase
from tests.infranetes.providers.cloud.guest_case import GuestCase


class AwsGuestTests(GuestCase, AwsCase, TestCase):
    """An instance that powers itself off is terminated; one that is stopped stays until then."""

    def user_data(self) -> bytes:
        launches = [call for call in self.world.requests if call["Action"] == "RunInstances"]
        return base64.b64decode(launches[-1]["UserData"])

    def fail_vm(self, id: str) -> None:
        self.world.fail(id, "Server.InternalError", "its host is gone")
