# SPDX-License-Identifier: Apache-2.0
"""`make clean` leaves of a tree what git has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

TREE = Path(__file__).resolve().parents[2]


class CleanTests(SynchronousTestCase):
    def test_it_removes_all_that_git_ignores(self) -> None:
        """Of each kind that .gitignore names there is one; nothing else is touched."""
        copy = Path(self.mktemp()).absolute()
        (copy / "infranetes_common/wire").mkdir(parents=True)
        (copy / "twisted/plugins").mkdir(parents=True)
        for name in ("Makefile", ".gitignore", "twisted/plugins/infranetes_plugin.py"):
            shutil.copy(TREE / name, copy / name)
        patterns = [line for line in (TREE / ".gitignore").read_text().splitlines() if line.strip()]
        for number, pattern in enumerate(patterns):
            made = copy / pattern.strip("/").replace("*", f"x{number}")
            if pattern.endswith("/"):
                (made / "inner").mkdir(parents=True)
            else:
                made.touch()
        deep = copy / "infranetes_common/__pycache__/a.pyc"
        deep.parent.mkdir()
        deep.touch()
        subprocess.run(["make", "--silent", "clean"], cwd=copy, check=True, capture_output=True)
        left = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        self.assertEqual(left, {"Makefile", ".gitignore", "twisted/plugins/infranetes_plugin.py"})
        self.assertEqual(
            {path.name for path in copy.iterdir() if path.is_dir()}, {"infranetes_common", "twisted"}
        )
