# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages show exist, with the options that they are given."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl import cli as ctl
from infranetes.publish import command as guest

TREE = Path(__file__).resolve().parents[2]
PAGES = [TREE / "README.md", TREE / "CONTRIBUTING.md", *sorted((TREE / "docs").glob("*.md"))]
_SHOWN = re.compile(r"^ {4}(.*)$|`([^`]+)`", re.MULTILINE)
_BEFORE = r"(?:\$ |sudo |\S*/inside )*"  # what a command may stand behind


def shown(program: str) -> Iterator[tuple[str, str]]:
    """Return each command line of a program that a page shows, with the page's name."""
    for page in PAGES:
        for code, words in _SHOWN.findall(page.read_text().replace("\\\n", " ")):
            if found := re.match(rf"{_BEFORE}{program} ([^|;>&)\n]*)", (code or words).split("  #")[0]):
                yield page.name, found[1]


def children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return a parser's commands."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:  # argparse has no public name for them
        if isinstance(action, argparse._SubParsersAction):
            found.update(action.choices)
    return found


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options that a parser has."""
    return {each for action in parser._actions for each in action.option_strings}


class CommandTests(SynchronousTestCase):
    def check(self, program: str, top: argparse.ArgumentParser) -> int:
        seen = 0
        for page, line in shown(program):
            words = line.split(" -- ")[0].split()
            parser, known = top, options(top)
            given = [word for word in words if word.startswith("-")]
            names = [word for word in words if not word.startswith("-")]
            while names and children(parser):
                name = names.pop(0)
                if name not in children(parser):
                    if parser is top:  # a word of prose, or a page's own of a command that may be any
                        self.assertRegex(name, r"^(COMMAND|…|\.\.\.)$", f"{page}: {program} {line}")
                    break
                parser = children(parser)[name]
                known |= options(parser)
                seen += 1
            for word in given:
                if re.match(r"--?[a-z]", word):
                    option = word.split("=")[0].strip("[],.")
                    together = {f"-{letter}" for letter in option[1:]} if option[1] != "-" else {option}
                    self.assertTrue(
                        option in known or together <= known, f"{page}: {program} {line}: {option}"
                    )
        return seen

    def test_those_of_infranetes_ctl(self) -> None:
        self.assertGreater(self.check("infranetes-ctl", ctl.parser()), 60)

    def test_those_of_infranetes_guest(self) -> None:
        self.assertGreater(self.check("infranetes-guest", guest.parser()), 30)
