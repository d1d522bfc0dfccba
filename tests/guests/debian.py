# SPDX-License-Identifier: Apache-2.0
"""Debian's packages, unpacked and not installed: kernels, boot loaders."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

#: The kernel with drivers of all kinds of hardware.
KERNEL = "linux-image-amd64"
#: Without drivers of real hardware, and quick to unpack itself.
CLOUD_KERNEL = "linux-image-cloud-amd64"


def said(*command: str, cwd: Path | None = None) -> str:
    """Return what a program says. :raise RuntimeError: it fails."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def unpack(packages: Sequence[str], target: Path) -> None:
    """Download packages from the archives that this machine's apt uses, and unpack them below `target`.

    A kernel's name stands for its newest release's.
    """
    archives = target.parent / f"{target.name}.debs"
    archives.mkdir()
    names = [_of_release(each) if each in (KERNEL, CLOUD_KERNEL) else each for each in packages]
    # Not by apt's own user, who can't write there.
    said("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *names, cwd=archives)
    for package in sorted(archives.glob("*.deb")):
        said("dpkg-deb", "--extract", str(package), str(target))
        package.unlink()
    archives.rmdir()


def _of_release(kernel: str) -> str:
    """Return the package of a kernel's newest release."""
    for line in said("apt-cache", "depends", "--important", kernel).splitlines():
        kind, _, name = line.strip().partition(": ")
        if kind == "Depends" and name.startswith("linux-image-"):
            return name
    raise RuntimeError(f"apt knows no {kernel}: apt-get update")
