# SPDX-License-Identifier: Apache-2.0
"""The previous release, as a tree that can be run and as packages, for nodes before their upgrade.

It is the last commit before the version became what it is now: a development version begins with the first
commit after a release.
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
_VERSION_FILE = "infranetes_common/__init__.py"


def begun(version: str) -> str:
    """Return the development version that a version has, or began as."""
    return version if ".dev" in version else f"{version}.dev0"


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def _last_commit() -> str:
    """Return the last commit that had another `__version__` than the present one.

    A release ends a development version, so before it comes what was before that one.
    """
    line = f'__version__ = "{begun(__version__)}"'
    raised = _git("log", "--format=%H", "--reverse", f"-S{line}", "--", _VERSION_FILE).decode().split()
    if not raised:
        raise AssertionError(f"no commit raised the version to {begun(__version__)}: fetch the whole history")
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
