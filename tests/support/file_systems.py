# SPDX-License-Identifier: Apache-2.0
"""File systems and loop devices of a test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase, TestCase


def mounted(case: TestCase, kind: str, size: int) -> Path:
    """Mount a new file system until the test ends, and return its directory."""
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
    """Make a loop device of a file, or of another block device, until the test ends, and return its path."""
    command = ["losetup", "--find", "--show", str(file)]
    device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    case.addCleanup(subprocess.run, ["losetup", "--detach", device], check=True)
    return device


def mount_slave(shared: Path, at: Path) -> None:
    """Mount a new file system at `shared`, and at `at` as a slave: who has mounts of its own, as kubelet may,
    does not see what is mounted there."""
    for path in (shared, at):
        path.mkdir(parents=True)
    for words in (
        ("-t", "tmpfs", "tmpfs", shared),
        ("--make-shared", shared),
        ("--bind", shared, at),
        ("--make-slave", at),
    ):
        subprocess.run(["mount", *words], check=True)
