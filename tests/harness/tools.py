# SPDX-License-Identifier: Apache-2.0
"""The programs that tests run. If one is missing, the test that needs it fails and is not skipped."""

from __future__ import annotations

from tests.harness.needs import PACKAGES, find_program


def need(command: str) -> str:
    """Find the path of a program.

    :raise AssertionError: it is missing; the message names what to install.
    """
    path = find_program(command)
    if path is None:
        raise AssertionError(f"{command} is missing: apt-get install {PACKAGES.get(command, command)}")
    return path
