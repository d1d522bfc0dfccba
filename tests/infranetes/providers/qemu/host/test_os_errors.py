# SPDX-License-Identifier: Apache-2.0
"""The operating system's errors say what to do."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.host.os_errors import as_infranetes_error
from infranetes_common.errors import ResourceExhausted


class ErrorTests(SynchronousTestCase):
    """Errors of files."""

    def test_a_full_disk_is_told_as_one(self) -> None:
        error = as_infranetes_error(OSError(28, "No space left on device", "/x/disk.qcow2"))
        self.assertIsInstance(error, ResourceExhausted)
        self.assertIn("/x/disk.qcow2", str(error))
