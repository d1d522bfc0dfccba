# SPDX-License-Identifier: Apache-2.0
"""Servers without our agent on a simulated OpenStack."""

from __future__ import annotations

import base64

from twisted.trial.unittest import TestCase

from tests.infranetes.providers.cloud.case import OpenStackCase
from tests.infranetes.providers.cloud.guest_case import GuestCase
from tests.support.clouds.nova_resources import failed


class OpenStackGuestTests(GuestCase, OpenStackCase, TestCase):
    """A server that powers off stays until it is deleted."""

    def user_data(self) -> bytes:
        return base64.b64decode(self.world.bodies[-1]["server"]["user_data"])

    def fail_vm(self, id: str) -> None:
        failed(self.world.api.servers[id], "its host is gone")
