# SPDX-License-Identifier: Apache-2.0
"""The recording on top of README is of this release's demo."""

from __future__ import annotations

import ast
import re

from twisted.trial.unittest import SynchronousTestCase

from demo.daemon import TREE
from demo.recording.__main__ import CAST, PICTURE
from demo.recording.cast import read
from demo.recording.screen import shown
from demo.recording.svg import drawn
from infranetes_common import __version__

AGAIN = "record it again: make recording"


def steps() -> list[str]:
    """Return the steps of the demo in their order, each as a pattern of what it shows."""
    tree = ast.parse((TREE / "demo/__main__.py").read_text())
    calls = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
    ]
    found = []
    for name in sorted(calls, key=lambda each: each.lineno):
        parts = name.values if isinstance(name, ast.JoinedStr) else [name]
        found.append("".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in parts))
    return found


def base(version: str) -> str:
    """Return the release that a version is, or becomes."""
    return version.partition(".dev")[0]


class DemoPictureTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.cast = read(CAST.read_text())
        self.end = "\n".join(each.text for each in shown(self.cast) if each.end is None)

    def test_it_is_of_this_release(self) -> None:
        """A development version may still show the release before it."""
        allowed = {base(__version__)}
        if ".dev" in __version__:
            changelog = (TREE / "CHANGELOG.md").read_text()
            allowed.add(re.findall(r"^## ([\d.]+) \(", changelog, flags=re.M)[0])
        self.assertIn(base(self.cast.release), allowed, AGAIN)
        self.assertIn(f"The node daemon is ready: infranetes {self.cast.release}", self.end)

    def test_it_shows_each_step_of_the_demo_in_its_order(self) -> None:
        found = steps()
        self.assertGreater(len(found), 10)
        self.assertEqual(len(re.findall("^  ok ", self.end, flags=re.M)), len(found), AGAIN)
        self.assertRegex(self.end, "(?s)" + ".*\n".join(f"  ok {each}" for each in found), AGAIN)
        self.assertRegex(self.end, r"\nAll of it took [\d.]+ s\.$")

    def test_the_picture_is_of_the_recording(self) -> None:
        self.assertEqual(PICTURE.read_text(), drawn(self.cast), "draw it again: make recording DRAW=1")

    def test_it_names_no_place_of_the_machine_that_recorded_it(self) -> None:
        self.assertNotRegex(self.cast.text(), r"/(work|root|home)/")
