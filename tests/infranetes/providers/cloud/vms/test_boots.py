# SPDX-License-Identifier: Apache-2.0
"""What is told of a VM that does not boot."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import succeed
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.interface import CloudVM
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.boots import Boots
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable


class BootTests(SynchronousTestCase):
    def test_of_a_console_the_end_is_told_without_half_of_a_secret(self) -> None:
        vm = CloudVM("i-1", "t", "s", InstanceState.ENDED, detail="it has crashed")
        console = "[1.0] booted\n" * 99 + f"curl /?token={'Planted' * 150} failed\n[2.0] halted"
        fake: Any = SimpleNamespace(
            call=lambda *_, **__: succeed(console),
            entries={vm.id: SimpleNamespace(vm=vm)},
            waiting=lambda id: nullcontext(lambda: succeed(None)),
            get=None,
            _thd_console_output=lambda driver, id: console,
        )
        boots = Boots(fake, CloudSettings(), fake, fake, fake.waiting, fake.get)
        error = self.failureResultOf(start(boots.wait_running(vm.id)), Unavailable)
        self.assertEqual(
            error.getErrorMessage(),
            "VM i-1 has ended: it has crashed; its console ends with: (hidden) failed\n[2.0] halted",
        )
