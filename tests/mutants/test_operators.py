# SPDX-License-Identifier: Apache-2.0
"""What each operator makes of a piece of code, and what no operator touches."""

from __future__ import annotations

import textwrap

from twisted.trial.unittest import SynchronousTestCase

from tests.mutants.mutant import Mutant, mutants


def of(body: str, *, head: str = "async def function(self, a, b):") -> list[Mutant]:
    """Return the mutants of a function with this body."""
    return mutants("module.py", f"{head}\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n")


class OperatorTests(SynchronousTestCase):
    """The bugs that each operator puts in."""

    def assert_becomes(self, operator: str, body: str, *expected: str) -> None:
        """Check what an operator makes of a function's body, in one line each."""
        found = [each for each in of(body) if each.operator == operator]
        bodies = [" ".join(each.text.partition("\n")[2].split()) for each in found]
        self.assertEqual(sorted(bodies), sorted(expected))

    def test_a_call_is_left_out(self) -> None:
        self.assert_becomes("drop_call", "a.cancel()\nawait b()", "pass await b()", "a.cancel() pass")

    def test_a_change_of_state_is_left_out(self) -> None:
        self.assert_becomes(
            "drop_assignment",
            "self.x = 1\nx = 2\na[1] += 1",
            "pass x = 2 a[1] += 1",
            "self.x = 1 x = 2 pass",
        )

    def test_a_clean_up_is_left_out(self) -> None:
        self.assert_becomes(
            "drop_finally", "try:\n a = 1\nfinally:\n a = b\n b = 1", "try: a = 1 finally: pass"
        )

    def test_an_error_is_ignored_or_not_handled(self) -> None:
        self.assert_becomes(
            "drop_handler",
            "try:\n a = 1\nexcept OSError:\n a = b\n raise",
            "try: a = 1 except OSError: pass",
            "try: a = 1 except OSError: raise",
            "try: a = 1 except OSError: a = b pass",
        )

    def test_a_lock_is_not_taken(self) -> None:
        self.assert_becomes("drop_with", "with a(x=b[1:]):\n a = 1", "if True: a = 1")

    def test_what_a_block_is_given_by_name_stays(self) -> None:
        self.assert_becomes("drop_with", "with a as b:\n a = b")

    def test_the_end_of_a_function_is_not_reached(self) -> None:
        self.assert_becomes("return_early", "a = 1\nb = 2\na = b", "a = 1 return")

    def test_a_function_that_returns_something_does_so(self) -> None:
        self.assert_becomes("return_early", "a = 1\nb = 2\nreturn b")

    def test_two_effects_are_swapped(self) -> None:
        self.assert_becomes("swap", "await a()\nself.x = 1\nb = 2", "self.x = 1 await a() b = 2")

    def test_a_condition_always_or_never_holds(self) -> None:
        self.assert_becomes("fix_condition", "if a:\n b = 1", "if True: b = 1", "if False: b = 1")

    def test_a_part_of_a_condition_is_forgotten(self) -> None:
        self.assert_becomes(
            "drop_operand",
            "x = (a or b) and not a",
            "x = ((a)) and not a",
            "x = ((b)) and not a",
            "x = (not a)",
            "x = (a or b)",
        )

    def test_a_filter_is_forgotten(self) -> None:
        self.assert_becomes("drop_filter", "x = [e for e in a if e]", "x = [e for e in a if True]")

    def test_a_result_is_negated(self) -> None:
        self.assert_becomes("negate_result", "return a == b", "return not (a == b)")

    def test_a_loop_ends_early_or_goes_on(self) -> None:
        self.assert_becomes("leave_loop", "for x in a:\n  continue", "for x in a: break")

    def test_a_bound_moves(self) -> None:
        self.assert_becomes("move_boundary", "x = a < b == 1", "x = (a) <= (b) == (1)")
        self.assert_becomes("off_by_one", "x = a[:3] + 1", "x = a[:4] + 1", "x = a[:3] + 2")

    def test_true_is_taken_for_false(self) -> None:
        self.assert_becomes("flip_constant", "return True", "return False")

    def test_an_extreme_is_the_other(self) -> None:
        self.assert_becomes("other_extreme", "return min(a, b)", "return max(a, b)")

    def test_an_argument_is_left_out(self) -> None:
        self.assert_becomes("drop_argument", "a.b(a, b, c=1)", "a.b(a, b)", "a.b(a, None, c=1)")


class LeftOutTests(SynchronousTestCase):
    """Code in which a bug would not be one."""

    def test_texts_are_left_alone(self) -> None:
        for body in (
            '"""Do it: True and False."""',
            '_log.info("{x}", x=a or b)',
            'self._log.warn("x", not_now=True)',
            "raise ValueError(a or b)",
            "x = f'{a or b}'",
            "assert a or b",
        ):
            self.assertEqual(of(body), [], body)

    def test_types_are_left_alone(self) -> None:
        self.assertEqual(of("x: A[True] = a"), [])
        self.assertEqual(of("pass", head="def function(a: T[True] = True) -> T[False]:"), [])
        self.assertEqual(mutants("m.py", "class A(Protocol):\n    def f(self):\n        return True\n"), [])
        self.assertEqual(of("if TYPE_CHECKING:\n    a()"), [])

    def test_a_representation_is_left_alone(self) -> None:
        self.assertEqual(of("return a or b", head="def __repr__(self):"), [])

    def test_an_object_that_is_made_is_made_whole(self) -> None:
        self.assertEqual(of("self.a = a\nself.b = b\nself.c = 1", head="def __init__(self, a, b):"), [])


class MutantTests(SynchronousTestCase):
    """What a mutant says of itself."""

    def test_it_names_the_function_and_both_texts(self) -> None:
        text = "class A:\n  async def f(self):\n    def g():\n      if a and (\n b):\n        c()\n"
        [mutant] = [each for each in mutants("m.py", text) if each.operator == "drop_call"]
        self.assertEqual((mutant.function, mutant.before, mutant.after), ("A.f.g", "c()", "pass"))
        [first, _] = [each for each in mutants("m.py", text) if each.operator == "drop_operand"]
        self.assertEqual(first.before, "if a and ( b):")
        self.assertEqual(first.lines, range(4, 6))

    def test_a_simple_statement_is_reached_by_any_of_its_lines(self) -> None:
        [mutant] = of("x = f(\n    a,\n    True,\n)")
        self.assertEqual((mutant.operator, mutant.lines), ("flip_constant", range(2, 6)))

    def test_offsets_are_right_behind_other_letters(self) -> None:
        [mutant] = of("x = 'Größe', True")
        self.assertIn("'Größe', False", mutant.text)

    def test_the_difference_shows_changed_lines_alone(self) -> None:
        [mutant] = of("x = 1\nreturn True")
        original = mutant.text.replace("False", "True")
        self.assertEqual(mutant.difference(original), "-    return True\n+    return False")
