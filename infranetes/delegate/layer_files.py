# SPDX-License-Identifier: Apache-2.0
"""The files that hold layers for as long as a VM's disk is made of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def thd_clear(directory: Path) -> None:
    """Have the directory, without what an earlier daemon left. :raise OSError: it can't be used."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)


def thd_create(path: Path) -> int:
    """Open an empty file for writing. :return: its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
