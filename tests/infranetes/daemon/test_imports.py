# SPDX-License-Identifier: Apache-2.0
"""What a daemon has in memory that no pod needs: libraries come with what a configuration chooses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import infranetes
from tests.harness.durations import slow

PROGRAM = """
import sys
import infranetes.service, infranetes.providers.qemu.provider
print(*sorted({each.partition(".")[0] for each in sys.modules} | sys.modules.keys()))
"""
#: 20 MiB of libraries: of clouds, for a kubeconfig, for VMs that boot images, for programs of their own.
LATE = {
    "boto3",
    "infranetes.images.machine.unpack",
    "libcloud",
    "matplotlib",
    "pyVmomi",
    "pycdlib",
    "treq",
    "twisted.web.client",
    "twisted.web.http",
    "yaml",
}


class ImportTests(SynchronousTestCase):
    @slow(3, "a process loads all of the daemon")
    def test_what_a_node_of_qemu_need_not_have_is_not_loaded(self) -> None:
        root = Path(infranetes.__file__).parents[1]
        said = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=root
        ).stdout
        self.assertIn("infranetes.providers.qemu.provider", said.split())
        self.assertEqual(LATE.intersection(said.split()), set())
