# SPDX-License-Identifier: Apache-2.0
"""What the bench of libraries asks of its processes is something that they do."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from bench.daemon import ROOT
from bench.libraries import IMPORTS, NETLINK
from bench.library_calls import PARTS


class LibrariesTests(SynchronousTestCase):
    def test_every_call_names_a_part_and_gives_its_arguments(self) -> None:
        for call in NETLINK:
            inspect.signature(PARTS[call.part]).bind(*call.arguments)

    def test_each_library_is_compared_with_what_is_in_its_place(self) -> None:
        for name in {call.name for call in NETLINK}:
            ours = [call.whose for call in NETLINK if call.name == name and call.whose.startswith("ours")]
            self.assertEqual(len(ours), 1, name)
        self.assertEqual({each.whose for each in IMPORTS if not each.beside} & {"ours"}, {"ours"})

    def test_an_import_is_measured_beside_what_is_there_anyway(self) -> None:
        def imported(*modules: str) -> dict[str, float]:
            command = [sys.executable, "-m", "bench.library_calls", "imports", *modules]
            found: dict[str, float] = json.loads(subprocess.check_output(command, cwd=ROOT))
            return found

        alone, beside = imported("sqlite3"), imported("sqlite3", "sqlite3.dbapi2")
        self.assertGreater(alone["modules"], 0)
        self.assertEqual(beside["modules"], 0)
