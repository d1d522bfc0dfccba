# SPDX-License-Identifier: Apache-2.0
"""Tokens of Azure and OpenStack expire: the next one is there in time, or the log says that there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence

from twisted.logger import LogEvent, LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.azure import credentials as azure_credentials
from infranetes.providers.cloud.calls import renewal
from infranetes.providers.cloud.openstack import credentials as openstack_credentials
from infranetes_common.errors import Unavailable
from tests.infranetes.providers.cloud.case import AzureCase, CloudCase, OpenStackCase
from tests.support.clouds.faults import FaultKind


class _Clock:
    """A clock that a test can advance. :ivar later: by how many seconds."""

    later = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.later


class TokensOfAnHour(CloudCase):
    """The promises."""

    def setUp(self) -> object:
        self.clock = _Clock()
        for module in (renewal, azure_credentials, openstack_credentials):
            self.patch(module, "time", self.clock)
        self.patch(renewal, "_PAUSE", 0.0)
        return super().setUp()

    async def test_one_is_renewed_while_calls_go_on_with_the_old_one(self) -> None:
        provider = await self.started()
        self.clock.later = 3600 - 290
        fault = self.world.faults.add(FaultKind.ERROR, "token")
        with capturedLogs() as logged:
            self.assertEqual(await self.within(provider.list()), [])
            await self.until(lambda: fault.happened, "another one is asked for")
            self.assertEqual(await self.within(provider.list()), [])
            await self.until(lambda: _told(logged), "that is told")
        self.assertIn("can't be renewed yet, and the old one stays in use", _told(logged)[0])
        self.world.faults.clear()
        asked = self.world.faults.calls["token"]
        deadline = time.monotonic() + 100
        while self.world.faults.calls["token"] == asked:  # a renewal still failing may delay the next
            self.assertLess(time.monotonic(), deadline, "it is asked for again")
            self.assertEqual(await self.within(provider.list()), [])
        self.assertEqual(provider.status()["calls"].partition(", ")[2], "0 failed")

    async def test_without_one_the_cloud_is_not_said_to_be_silent(self) -> None:
        self.settings["retry_seconds"] = 1.0
        provider = await self.started()
        self.clock.later = 3600
        self.world.faults.add(FaultKind.ERROR, "token")
        with capturedLogs() as logged:
            await self.refused(Unavailable, provider.list())
            error = await self.refused(Unavailable, provider.list())
        self.assertIn("can't be called", str(error))
        self.assertIn("not called, without credentials", provider.status()["cloud"])
        self.world.faults.clear()
        words = "; ".join(_told(logged))
        self.assertIn("can't be called without credentials", words)
        self.assertNotIn("does not answer", words)


def _told(logged: Sequence[LogEvent]) -> list[str]:
    """Return the warnings of a log."""
    return [formatEvent(each) for each in logged if each["log_level"] is LogLevel.warn]


class AzureTokenTests(TokensOfAnHour, AzureCase, TestCase):
    """Entra's tokens."""


class OpenStackTokenTests(TokensOfAnHour, OpenStackCase, TestCase):
    """Keystone's tokens."""
