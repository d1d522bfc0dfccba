# SPDX-License-Identifier: Apache-2.0
"""The list of equivalent mutants is true to the code."""

from __future__ import annotations

import tomllib

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.durations import slow
from tests.harness.needs import Tier, in_tier
from tests.mutants import equivalents
from tests.mutants.mutant import Mutant, mutants
from tests.mutants.run_tests import ROOT


class ListTests(SynchronousTestCase):
    """The list of this repository."""

    @in_tier(Tier.TEST)
    @slow(10, "it makes all mutants of the modules that are listed")
    def test_each_entry_is_a_mutant_and_has_a_reason(self) -> None:
        listed = equivalents.read()
        found = {
            module: mutants(module, (ROOT / module).read_text())
            for module in {each.module for each in listed}
        }
        self.assertEqual([each for each in listed if not each.reason], [])
        unmatched = [
            each for each in listed if not any(each.matches(mutant) for mutant in found[each.module])
        ]
        self.assertEqual(unmatched, [], "these match nothing")


class EntryTests(SynchronousTestCase):
    """The entry that is printed for a survivor."""

    def test_it_lists_that_mutant(self) -> None:
        for before in ("""x("a", 'b\\n')""", "x('a')", 'x("a\\n")'):
            mutant = Mutant("m.py", "drop_call", "f", before, "pass", range(1), "")
            [entry] = tomllib.loads(equivalents.entry(mutant))["equivalent"]
            self.assertTrue(equivalents.Equivalent(**entry).matches(mutant), entry)
