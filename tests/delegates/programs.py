# SPDX-License-Identifier: Apache-2.0
"""The programs that `tests/delegates/tools` builds."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.interop.critest_runtimes import TOOLS


def built(program: str) -> Path:
    """Find a program by its runtime's directory and its name.

    :raise AssertionError: it is missing; the message names what to do."""
    path = TOOLS / program
    if not os.access(path, os.X_OK):
        raise AssertionError(f"{path} is missing: make delegate-tools")
    return path


def use_built_containerd(test: SynchronousTestCase) -> None:
    """Make the built programs of containerd the ones that run, until the test ends."""
    programs = built("containerd/containerd").parent
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{programs}:{before}"
    test.addCleanup(os.environ.__setitem__, "PATH", before)
