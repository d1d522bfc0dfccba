# SPDX-License-Identifier: Apache-2.0
"""What docs/provider-libcloud.md says of libcloud's drivers is what they are."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.docs import drivers
from tests.harness.durations import slow
from tests.harness.needs import tool
from tests.support.clouds.agent_processes import ROOT

NEEDS = (tool("wheels"),)
PAGE = ROOT / "docs" / "provider-libcloud.md"


class DriverTests(SynchronousTestCase):
    @slow(4, "another Python imports all of libcloud's drivers")
    def test_the_table_is_current_with_the_pinned_libcloud(self) -> None:
        """python -m tests.docs.drivers prints it."""
        text = PAGE.read_text()
        begin = text.index(drivers.HEADING)
        end = text.find("\n\n", begin)
        self.assertEqual(text[begin : end + 1 if end >= 0 else None], drivers.table())

    def test_a_driver_that_can_not_be_used_says_why(self) -> None:
        row = drivers.Row("x", True, "", True, True, False)
        self.assertIn("no user-data", str(row))
        row = drivers.Row("x", True, "ex_userdata", True, False, True)
        self.assertIn("no sizes", str(row))
        row = drivers.Row("x", False, "ex_userdata", True, True, True)
        self.assertIn("can't make VMs", str(row))
        self.assertIn("| yes |", str(drivers.Row("x", True, "ex_userdata", True, True, True)))
