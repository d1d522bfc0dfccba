# SPDX-License-Identifier: Apache-2.0
"""The licence: one, and said by everything that is published."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

TREE = Path(__file__).resolve().parents[2]
LINE = "SPDX-License-Identifier: Apache-2.0"
SUFFIXES = {".c", ".go", ".in", ".proto", ".py", ".sh", ".sql", ".service", ".postinst", ".postrm", ".prerm"}
NAMES = {"Makefile", "pyproject.toml"}


def is_source(file: Path) -> bool:
    """Whether `file` is a program, or part of one."""
    return (
        file.suffix in SUFFIXES or file.name in NAMES or (file.is_file() and file.read_bytes()[:2] == b"#!")
    )


def sources() -> list[Path]:
    """Every source file that git knows, or would if it were added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=TREE, check=True, capture_output=True, text=True).stdout
    files = [TREE / name for name in names.split("\0") if name]
    return [file for file in files if file.is_file() and is_source(file)]


class LicenceTests(SynchronousTestCase):
    def test_every_source_file_says_its_licence_at_its_top(self) -> None:
        found = sources()
        self.assertGreater(len(found), 500)
        silent = []
        for file in found:
            lines = [*file.read_text().split("\n", 2), ""]
            if LINE not in (lines[1] if lines[0].startswith("#!") else lines[0]):
                silent.append(str(file.relative_to(TREE)))
        self.assertEqual(silent, [], f"these lack the line '# {LINE}', first or after '#!'")

    def test_the_licence_is_given_in_full(self) -> None:
        text = (TREE / "LICENSE").read_text()
        for words in ("Apache License", "Version 2.0, January 2004", "END OF TERMS AND CONDITIONS"):
            self.assertIn(words, text)

    def test_what_is_published_names_it(self) -> None:
        self.assertIn('license="Apache-2.0"', (TREE / "setup.py").read_text())
        self.assertIn('license_files=["LICENSE"]', (TREE / "setup.py").read_text())
        self.assertIn("License: Apache-2.0", (TREE / "debian" / "copyright").read_text())
        self.assertIn("include LICENSE", (TREE / "MANIFEST.in").read_text())
