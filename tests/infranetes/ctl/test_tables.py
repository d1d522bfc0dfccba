# SPDX-License-Identifier: Apache-2.0
"""Tables on terminals and elsewhere."""

from __future__ import annotations

import io
import os

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.cli import read
from infranetes.ctl.tables import Column, listing
from infranetes.ctl.view import PLAIN, View, view_of

COLUMNS = (
    Column("NAMESPACE", least=8),
    Column("NAME", least=6),
    Column("STATUS"),
    Column("AGENT", gives_way=1),
    Column("IP", gives_way=2),
    Column("VM", wide=True),
    Column("WHY", may_lack=True, least=10),
    Column("SANDBOX", gives_way=3),
)
ROW = ("default", "web-7d4b9c6f5", "ready", "live", "10.88.0.2", "vm-1", "", "abababababab")
FAILED = ("kube-system", "api", "failed", "", "", "", "no capacity in any zone", "cdcdcdcdcdcd")


class ListingTests(SynchronousTestCase):
    def heads(self, view: View, *rows: tuple[str, ...]) -> list[str]:
        return listing(COLUMNS, rows or [ROW], view).splitlines()[0].split()

    def test_columns_are_as_wide_as_their_cells_and_three_spaces_apart(self) -> None:
        text = listing((Column("A"), Column("LONG")), [("xyz", "1"), ("", "2")])
        self.assertEqual(text, "A     LONG\nxyz   1\n-     2")

    def test_columns_without_cells_and_those_of_wide_lists_are_left_out(self) -> None:
        plain = ["NAMESPACE", "NAME", "STATUS", "AGENT", "IP", "SANDBOX"]
        self.assertEqual(self.heads(PLAIN), plain)
        self.assertEqual(self.heads(PLAIN, ROW, FAILED), [*plain[:5], "WHY", "SANDBOX"])
        self.assertEqual(self.heads(View(wide=True)), [*plain[:5], "VM", "SANDBOX"])

    def test_rows_alone(self) -> None:
        text = listing(COLUMNS, [ROW], View(headers=False))
        self.assertEqual(text.split()[:2], ["default", "web-7d4b9c6f5"])
        self.assertEqual(len(text.splitlines()), 1)
        self.assertEqual(listing(COLUMNS, [], View(headers=False)), "")

    def test_on_a_narrow_terminal_columns_shrink_then_give_way_in_their_order(self) -> None:
        self.assertEqual(len(self.heads(View(width=200))), 6)
        self.assertEqual(
            self.heads(View(width=62)), ["NAMESPACE", "NAME", "STATUS", "AGENT", "IP", "SANDBOX"]
        )
        self.assertEqual(self.heads(View(width=54)), ["NAMESPACE", "NAME", "STATUS", "IP", "SANDBOX"])
        self.assertEqual(self.heads(View(width=42)), ["NAMESPACE", "NAME", "STATUS", "SANDBOX"])
        text = listing(COLUMNS, [ROW], View(width=62)).splitlines()[1]
        self.assertIn("web-7…", text)

    def test_no_line_is_longer_than_the_terminal(self) -> None:
        for width in range(4, 130):
            for wide in (False, True):
                for line in listing(COLUMNS, [ROW, FAILED], View(width=width, wide=wide)).splitlines():
                    self.assertLessEqual(len(line), width, line)

    def test_states_are_coloured_where_colours_are_wanted(self) -> None:
        text = listing(COLUMNS, [ROW, FAILED], View(colour=True))
        self.assertIn("\x1b[32mready\x1b[0m", text)
        self.assertIn("\x1b[31mfailed\x1b[0m", text)
        self.assertNotIn("\x1b", text.splitlines()[0])
        plain = listing(COLUMNS, [ROW, FAILED])
        self.assertNotIn("\x1b", plain)
        for code in ("\x1b[32m", "\x1b[31m", "\x1b[0m"):
            text = text.replace(code, "")
        self.assertEqual(text, plain)

    def test_what_a_cloud_says_moves_no_cursor(self) -> None:
        text = listing((Column("WHY"),), [("gone\x1b[2J\x07\nforged row",)])
        self.assertEqual(text.splitlines()[1], "gone [2J  forged row")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ViewTests(SynchronousTestCase):
    def view(self, *words: str, terminal: bool = True, **environment: str) -> View:
        self.patch(__import__("sys"), "stdout", _Terminal() if terminal else io.StringIO())
        self.patch(os, "environ", {"COLUMNS": "99", "TERM": "xterm", **environment})
        return view_of(read(["pods", *words]))

    def test_colours_and_the_width_are_a_terminals(self) -> None:
        self.assertEqual(self.view(), View(width=99, colour=True))
        self.assertEqual(self.view(terminal=False), View())
        self.assertEqual(self.view("-o", "json"), View())

    def test_no_colour_where_it_is_not_wanted(self) -> None:
        self.assertFalse(self.view(NO_COLOR="1").colour)
        self.assertTrue(self.view(NO_COLOR="").colour)
        self.assertFalse(self.view(TERM="dumb").colour)

    def test_the_command_line_has_a_say(self) -> None:
        view = self.view("--no-headers", "-o", "wide")
        self.assertEqual((view.headers, view.wide), (False, True))
