# SPDX-License-Identifier: Apache-2.0
"""What is left of VMs that earlier daemons had."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.launch.find import remove_other_sockets

TOKEN = "0123456789abcdef" * 2


class FindTests(SynchronousTestCase):
    """VMs are found by their records."""

    def test_sockets_of_vms_that_are_no_more_go_and_the_others_stay(self) -> None:
        directory = Path(self.mktemp())
        for name in (TOKEN, "f" * 32, "template-x"):
            (directory / name).mkdir(parents=True)
            (directory / name / "qmp").write_text("")
        remove_other_sockets(directory, {TOKEN})
        self.assertEqual([path.name for path in directory.iterdir()], [TOKEN])
