# SPDX-License-Identifier: Apache-2.0
"""Releases of PyPI that say what a cloud's API is like, of which tests read the files.

`make tools` fetches those that `wheels.txt` pins; tests fetch nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from tests.support.clouds.agent_processes import ROOT

PINNED = Path(__file__).with_name("wheels.txt")
DIRECTORY = ROOT / "build" / "tools" / "wheels"


@lru_cache
def pinned() -> dict[str, str]:
    """Return the versions of all releases by their names."""
    return dict(re.findall(r"^([\w-]+)==(\S+)", PINNED.read_text(), re.MULTILINE))


def wheel(release: str) -> Path:
    """Return the wheel of a release. :raise AssertionError: it has not been fetched."""
    name = f"{release.replace('-', '_')}-{pinned()[release]}-py3-none-any.whl"
    found = DIRECTORY / name
    if not found.exists():
        raise AssertionError(f"{found} is missing: make tools")
    return found
