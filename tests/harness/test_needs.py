# SPDX-License-Identifier: Apache-2.0
"""What tests need decides their tier, and whether they are skipped."""

from __future__ import annotations

import os

from twisted.trial.reporter import TestResult
from twisted.trial.unittest import SynchronousTestCase

from tests.harness.needs import (
    CAP_NET_ADMIN,
    CAP_SYS_ADMIN,
    NIGHT,
    ROOT_USER,
    Need,
    Tier,
    capable,
    in_tier,
    needs,
    needs_of,
    needs_programs,
    nightly,
    repetitions,
    tier_of,
)

UNICORN = Need("a unicorn", "catch one", Tier.TEST, lambda: False)
AIR = Need("air", "breathe", Tier.TEST, lambda: True)


class Case(SynchronousTestCase):
    """What the tests below decorate."""

    def runTest(self) -> None:
        pass


def skipped(case: type[SynchronousTestCase], method: str = "runTest") -> list[str]:
    """Run a test; return why it was skipped, if it was."""
    result = TestResult()
    case(method).run(result)
    return [reason for _test, reason in result.skips]


class NeedsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(os, "environ", {"PATH": os.environ["PATH"]})  # without CI

    def test_a_class_is_skipped_where_its_need_is_not_met(self) -> None:
        class Needy(Case):
            pass

        needs(AIR, UNICORN)(Needy)
        self.assertEqual(skipped(Needy), ["needs a unicorn: catch one"])

    def test_the_set_up_of_a_class_that_is_skipped_does_not_run(self) -> None:
        @needs(UNICORN)
        class Needy(Case):
            pass

        self.assertTrue(getattr(Needy, "__unittest_skip__", False))

    def test_what_is_met_skips_nothing(self) -> None:
        @needs(AIR)
        class Needy(Case):
            pass

        self.assertEqual(skipped(Needy), [])

    def test_one_method_is_skipped_and_the_others_run(self) -> None:
        class Needy(Case):
            @needs(UNICORN)
            def test_needy(self) -> None:
                pass

            def test_content(self) -> None:
                pass

        self.assertEqual(skipped(Needy, "test_needy"), ["needs a unicorn: catch one"])
        self.assertEqual(skipped(Needy, "test_content"), [])

    def test_a_subclass_needs_what_its_base_needs_and_the_base_nothing_more(self) -> None:
        @needs(AIR)
        class Base(Case):
            pass

        @needs(UNICORN)
        class Needy(Base):
            pass

        self.assertEqual(needs_of(Needy()), (AIR, UNICORN))
        self.assertEqual(needs_of(Base()), (AIR,))
        self.assertEqual(skipped(Base), [])

    def test_ci_skips_nothing(self) -> None:
        self.patch(os, "environ", {"CI": "1"})

        @needs(UNICORN)
        class Needy(Case):
            pass

        self.assertEqual(skipped(Needy), [])

    def test_a_program_that_is_missing_names_its_package(self) -> None:
        self.patch(os, "environ", {"PATH": self.mktemp()})

        @needs_programs("no-such-program")
        class Needy(Case):
            pass

        self.assertEqual(
            skipped(Needy), ["needs the program no-such-program: apt-get install no-such-program"]
        )

    def test_root_without_a_capability_lacks_what_it_allows(self) -> None:
        self.assertEqual(capable(), True)
        self.assertEqual(capable(63), False)  # none has this number
        if os.geteuid() != 0:
            self.assertFalse(capable(CAP_NET_ADMIN, CAP_SYS_ADMIN))


class TierTests(SynchronousTestCase):
    def test_a_test_that_needs_nothing_is_checked_by_anybody(self) -> None:
        self.assertEqual(tier_of(Case()), Tier.CHECK)

    def test_the_largest_need_decides(self) -> None:
        @nightly
        @needs(AIR)
        class Needy(Case):
            pass

        self.assertEqual(tier_of(Needy()), Tier.NIGHTLY)
        self.assertEqual(needs_of(Needy()), (AIR, NIGHT))

    def test_a_stated_tier_comes_before(self) -> None:
        @in_tier(Tier.TEST)
        @nightly
        class Needy(Case):
            pass

        self.assertEqual(tier_of(Needy()), Tier.TEST)

    def test_a_package_says_it_for_all_that_is_in_it(self) -> None:
        from tests.e2e.test_pods import PodTests

        self.assertEqual(tier_of(PodTests("id")), Tier.ALL)
        self.assertIn(ROOT_USER, needs_of(PodTests("id")))

    def test_more_is_repeated_at_night(self) -> None:
        self.patch(os, "environ", {})
        self.assertEqual(repetitions(3, nightly=100), 3)
        self.patch(os, "environ", {"INFRANETES_TEST_NIGHTLY": "1"})
        self.assertEqual(repetitions(3, nightly=100), 100)
