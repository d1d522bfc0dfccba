# SPDX-License-Identifier: Apache-2.0
"""The release before this one, as a tree that can be run: what a node was before it was upgraded."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest

from infranetes_common import __version__

ROOT = Path(__file__).resolve().parents[2]
_VERSION_FILE = "infranetes_common/__init__.py"

_made: list[Path] = []


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def _last_commit() -> str:
    """The last one before the version was raised to the present one."""
    line = f'__version__ = "{__version__}"'
    raised = _git("log", "--format=%H", "--reverse", f"-S{line}", "--", _VERSION_FILE).decode().split()
    if not raised:
        raise AssertionError(f"no commit raised the version to {__version__}: fetch the whole history")
    return f"{raised[0]}^"


def previous_release() -> Path:
    """Its tree, made once for this process. Blocks.

    :raise SkipTest: this tree is no clone, such as a source package: it has no history.
    """
    if not (ROOT / ".git").exists():
        raise SkipTest("no history here: the release before this one is made from git")
    if not _made:
        tree = Path(tempfile.mkdtemp(prefix="infranetes-previous-"))
        atexit.register(shutil.rmtree, tree, True)
        subprocess.run(["tar", "-x", "-C", tree], input=_git("archive", _last_commit()), check=True)
        subprocess.run([sys.executable, "proto/compile.py"], cwd=tree, check=True)
        _made.append(tree)
    return _made[0]
