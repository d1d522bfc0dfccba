# SPDX-License-Identifier: Apache-2.0
"""A program's run in a terminal becomes a picture of it."""

from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NoReturn

from twisted.trial.unittest import SynchronousTestCase

import demo.recording.record as module
from demo.recording.cast import BadCast, Cast, Output, read
from demo.recording.record import NotRecorded, record, taken_on
from demo.recording.screen import Shown, TooTall, shown
from demo.recording.svg import REST, TIMES, drawn

SVG = "{http://www.w3.org/2000/svg}"


def cast(*outputs: tuple[float, str], rows: int = 8) -> Cast:
    return Cast(60, rows, "make demo", "KVM, 2 processors", "1.2.0", tuple(Output(*each) for each in outputs))


class CastTests(SynchronousTestCase):
    """The file of a recording."""

    def test_what_is_written_is_read(self) -> None:
        for made in (cast(), cast((0.0, ""), (1.5, 'ö"\r\x1b[K\n\u2028'), (1e6, "\\"))):
            self.assertEqual(read(made.text()), made)

    def test_it_is_what_players_of_asciicasts_take(self) -> None:
        self.assertIn('{"version": 2, "width": 60, "height": 8,', cast((0.5, "a")).text())
        self.assertTrue(cast((0.5, "a")).text().endswith('\n[0.5, "o", "a"]\n'))

    def test_another_file_is_refused_with_what_to_do(self) -> None:
        for text in ("", "[]", "{}\n", '{"version": 3}\n', '{"version": 2, "width": 1}\n', "no json"):
            with self.assertRaisesRegex(BadCast, "record again"):
                read(text)


class ScreenTests(SynchronousTestCase):
    """What each line of the terminal showed, and when."""

    def test_a_line_that_is_replaced_ends_when_the_other_begins(self) -> None:
        self.assertEqual(
            shown(cast((1.0, "  ·  one ...\r"), (2.0, "\r\x1b[K  ok one\r\n"), (3.0, "two\r\n"))),
            [Shown(0, "  ·  one ...", 1.0, 2.0), Shown(0, "  ok one", 2.0), Shown(1, "two", 3.0)],
        )

    def test_a_line_that_is_cleared_is_gone(self) -> None:
        self.assertEqual(shown(cast((1.0, "a"), (2.0, "\r\x1b[K"))), [Shown(0, "a", 1.0, 2.0)])

    def test_what_is_written_in_pieces_at_once_is_one(self) -> None:
        self.assertEqual(shown(cast((1.0, "a"), (1.01, "b"), (1.02, "c"))), [Shown(0, "abc", 1.0)])

    def test_a_line_that_is_written_again_as_it_was_stays(self) -> None:
        self.assertEqual(shown(cast((1.0, "a"), (2.0, "\ra"))), [Shown(0, "a", 1.0)])

    def test_a_terminal_that_lost_its_first_lines_is_refused(self) -> None:
        with self.assertRaisesRegex(TooTall, "taller"):
            shown(cast((1.0, "1\r\n2\r\n3\r\n"), rows=2))


class PictureTests(SynchronousTestCase):
    """The picture itself."""

    def setUp(self) -> None:
        self.cast = cast(
            (1.0, "  ·  a <step> ...\r"),
            (2.0, "\r\x1b[K  ok a <step>   1.00 s\r\n"),
            (3.0, "     | said & done\r\n"),
        )
        self.picture = drawn(self.cast)
        self.root = ElementTree.fromstring(self.picture)  # noqa: S314  our own

    def rule(self, classes: str) -> str:
        """Return the rule of motion of what has these classes."""
        found = re.search(rf"@keyframes {classes.split()[0]}{{(.*)}}", self.picture)
        assert found is not None, classes
        return found[1]

    def lines(self) -> dict[str, str]:
        """Return each line's words, with its classes."""
        return {"".join(each.itertext()): each.get("class", "") for each in self.root.iter(f"{SVG}text")}

    def test_it_says_what_it_shows_and_what_that_was_taken_on(self) -> None:
        title = "make demo: Infranetes 1.2.0, KVM, 2 processors"
        self.assertEqual(self.root.findtext(f"{SVG}title"), title)
        self.assertIn(title, self.lines())

    def test_without_motion_it_shows_the_end(self) -> None:
        """What is hidden by a rule of its own, outside of those for motion, is just what went."""
        hidden = {words for words, classes in self.lines().items() if "gone" in classes.split()}
        self.assertEqual(hidden, {"  ·  a <step> ..."})
        still, moving = self.picture.split("@media (prefers-reduced-motion: no-preference) {")
        self.assertNotIn("animation", still)
        self.assertIn(".gone { visibility: hidden; }", still)
        self.assertNotIn("animation", moving.split("</style>")[1])

    def test_lines_come_and_go_when_they_did(self) -> None:
        whole = 3.0 + REST
        moving = {words: classes for words, classes in self.lines().items() if re.match(r"t\d", classes)}
        rules = {words: self.rule(classes) for words, classes in moving.items()}
        came, went = 100 / whole, 200 / whole
        self.assertEqual(
            rules["  ·  a <step> ..."],
            f"0%{{visibility:hidden}}{came:g}%{{visibility:visible}}{went:g}%{{visibility:hidden}}",
        )
        self.assertEqual(
            rules["  ok a <step>   1.00 s"], f"0%{{visibility:hidden}}{went:g}%{{visibility:visible}}"
        )

    def test_it_moves_so_many_times_and_then_rests(self) -> None:
        self.assertEqual(len(re.findall(rf"animation:t\d 8.00s step-end {TIMES}\}}", self.picture)), 3)

    def test_it_is_as_tall_as_what_it_shows(self) -> None:
        _, _, _, height = map(float, self.root.get("viewBox").split())
        lowest = max(float(each.get("y") or 0) for each in self.root.iter(f"{SVG}text"))
        self.assertTrue(10 < height - lowest < 50, (height, lowest))


class RecordTests(SynchronousTestCase):
    """A run of a program."""

    def run_program(self, code: str) -> Cast:
        log = Path(self.mktemp())
        log.write_text("provider qemu: QEMU uses tcg: no KVM")
        return record(Path.cwd(), (sys.executable, "-c", code), log)

    def test_it_is_kept_as_it_was_with_what_ran(self) -> None:
        found = self.run_program(
            "import time; print('  ok The node daemon is ready: infranetes 9.8.7', flush=True);"
            "time.sleep(0.2); print('ö')"
        )
        self.assertEqual(found.release, "9.8.7")
        ready, last = shown(found)
        self.assertEqual((ready.text, last.text), ("  ok The node daemon is ready: infranetes 9.8.7", "ö"))
        self.assertGreaterEqual(last.begin - ready.begin, 0.19)

    def test_the_program_has_a_terminal(self) -> None:
        found = self.run_program(
            "import os, sys; print('The node daemon is ready: infranetes 1', sys.stdout.isatty(),"
            "os.get_terminal_size())"
        )
        self.assertIn("True os.terminal_size(columns=100, lines=40)", shown(found)[0].text)

    def test_a_run_that_fails_is_none(self) -> None:
        with self.assertRaisesRegex(NotRecorded, "ended with 3: no luck"):
            self.run_program("print('no luck'); raise SystemExit(3)")

    def test_one_that_says_no_version_is_none(self) -> None:
        with self.assertRaisesRegex(NotRecorded, "did not say which Infranetes is ready: 'hello'"):
            self.run_program("print('hello')")

    def test_a_first_run_is_none(self) -> None:
        with self.assertRaisesRegex(NotRecorded, "record again"):
            self.run_program("print('booting the template\\rThe node daemon is ready: infranetes 1')")

    def test_how_the_vms_were_run_is_told(self) -> None:
        self.assertRegex(taken_on("provider qemu: QEMU uses kvm"), r"^KVM, \d+ processors at load \d+, \w+$")
        self.assertRegex(taken_on("provider qemu: QEMU uses tcg: no KVM"), r"^emulated \(no KVM\), ")
        self.assertRegex(taken_on(""), "^simulated VMs, ")

    def test_one_that_is_interrupted_ends_what_it_records(self) -> None:
        def interrupted(terminal: int) -> NoReturn:
            os.read(terminal, 100)  # it has begun
            raise KeyboardInterrupt

        self.patch(module, "_read", interrupted)
        ended = Path(self.mktemp())
        code = (
            "import pathlib, time\n"
            "try:\n print('ready', flush=True); time.sleep(60)\n"
            f"except KeyboardInterrupt: pathlib.Path({str(ended.absolute())!r}).touch()"
        )
        self.assertRaises(KeyboardInterrupt, self.run_program, code)
        self.assertTrue(ended.exists())
