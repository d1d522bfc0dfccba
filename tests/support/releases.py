# SPDX-License-Identifier: Apache-2.0
"""The previous release, as a tree that can be run and as packages, for nodes before their upgrade.

Before the first release there is none. Until then the last commit's own tree stands in for it, under a lower
version: whether one daemon's pods live on with another's, and packages replace others, is tested by that too.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SkipTest

from infranetes_common import __version__
from tests.support.disk_space import Scratch

ROOT = Path(__file__).resolve().parents[2]
FIRST_RELEASE, STAND_IN = "0.2.0", "0.1.9"
_VERSION_FILE = "infranetes_common/__init__.py"


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def _last_commit() -> str:
    """Return the last commit before the version was raised to the present one; HEAD in the first version."""
    if __version__ == FIRST_RELEASE:
        return "HEAD"
    line = f'__version__ = "{__version__}"'
    raised = _git("log", "--format=%H", "--reverse", f"-S{line}", "--", _VERSION_FILE).decode().split()
    if not raised:
        raise AssertionError(f"no commit raised the version to {__version__}: fetch the whole history")
    return f"{raised[0]}^"


def _unpacked() -> Path:
    """Return a new directory with the previous release's tree, which is removed when this process ends.

    :raise SkipTest: this tree has no history, because it is not a clone but, say, a source package.
    """
    if not (ROOT / ".git").exists():
        raise SkipTest("no history here: the release before this one is made from git")
    scratch = Scratch.make("previous")
    atexit.register(scratch.remove)
    tree = scratch.path
    subprocess.run(["tar", "-x", "-C", tree], input=_git("archive", _last_commit()), check=True)
    if __version__ == FIRST_RELEASE:
        for name in (_VERSION_FILE, "debian/changelog"):
            path = tree / name
            path.write_text(path.read_text().replace(FIRST_RELEASE, STAND_IN, 1))
    return tree


@functools.cache
def previous_release() -> Path:
    """Return the previous release's tree, made once for this process. Blocks.

    :raise SkipTest: this tree has no history."""
    tree = _unpacked()
    subprocess.run([sys.executable, "proto/compile.py"], cwd=tree, check=True)
    return tree


@functools.cache
def previous_packages() -> Path:
    """Return the directory of its Debian packages, built once for this process, without their tests. Blocks.

    :raise SkipTest: this tree has no history."""
    tree = _unpacked()
    environment = {**os.environ, "DEB_BUILD_OPTIONS": "nocheck"}
    made = subprocess.run(
        ["debian/make-deb"], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise AssertionError(f"{made.stdout}\n{made.stderr}")
    return tree / "dist"
