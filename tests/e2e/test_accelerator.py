# SPDX-License-Identifier: Apache-2.0
"""The guest image's kernel, which proves that an accelerator runs guests."""

from __future__ import annotations

import os

from twisted.trial.unittest import TestCase

from infranetes.guest import image
from infranetes.providers.qemu import accelerator
from infranetes.providers.qemu.privileges import QemuUser
from tests.contract.pod_provider_case import reactor
from tests.e2e.qemu_case import IMAGES, QEMU


class KernelTests(TestCase):
    timeout = 120

    async def test_it_boots_where_guests_do(self) -> None:
        """Emulation always works, so with it the proof must succeed."""
        me = QemuUser(os.getuid(), os.getgid(), [])
        kernel = image.current(IMAGES).kernel
        self.assertEqual(await accelerator.probe_kernel(reactor, QEMU, "tcg", me, kernel, 100.0), "")
