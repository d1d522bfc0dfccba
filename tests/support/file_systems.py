# SPDX-License-Identifier: Apache-2.0
"""File systems and loop devices that a test has to itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase, TestCase


def mounted(case: TestCase, kind: str, size: int) -> Path:
    """A file system of its own, as long as the test takes."""
    root = Path(case.mktemp()).absolute()
    directory, image = root / "mounted", root / "image"
    directory.mkdir(parents=True)
    if kind == "tmpfs":
        what = ["-t", "tmpfs", "-o", f"size={size}", "none"]
    else:
        image.touch()
        os.truncate(image, size)
        subprocess.run([f"mkfs.{kind}", "-q", image], check=True)
        what = ["-o", "loop", str(image)]
    subprocess.run(["mount", *what, directory], check=True)
    case.addCleanup(lambda: subprocess.run(["umount", "-l", directory], check=True))
    return directory


def loop_device(case: SynchronousTestCase, file: Path) -> str:
    """A loop device of a file, or of another one, as long as the test takes."""
    command = ["losetup", "--find", "--show", str(file)]
    device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    case.addCleanup(subprocess.run, ["losetup", "--detach", device], check=True)
    return device
