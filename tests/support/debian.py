# SPDX-License-Identifier: Apache-2.0
"""Debian as a tar and as layers of an image, from the archives that this machine's apt uses."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from infranetes.guest import sources

RELEASE = "bookworm"  # not this machine's release, so that images are the same everywhere


@contextlib.contextmanager
def tar(packages: Sequence[str], variant: str = "minbase") -> Iterator[Path]:
    """Make a tar of a small Debian with these packages, and remove it afterwards.

    :param variant: mmdebstrap's variant; `extract` unpacks the packages without configuring them.
    :raise RuntimeError: mmdebstrap failed.
    """
    archives = sources.of_release(RELEASE)
    with tempfile.TemporaryDirectory(prefix="debian-", dir="/var/tmp") as directory:
        work = Path(directory)
        (work / "sources.list").write_text("".join(f"{line}\n" for line in archives.lines))
        (work / "apt.conf").write_text("".join(f"{line}\n" for line in archives.settings))
        command = [
            *("mmdebstrap", "--mode=root", f"--variant={variant}", f"--include={','.join(packages)}"),
            *(f"--aptopt={work / 'apt.conf'}", '--aptopt=Acquire::Languages "none"'),
            *(archives.codename, str(work / "debian.tar"), str(work / "sources.list")),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
        )
        if done.returncode:
            raise RuntimeError(f"mmdebstrap: {done.stderr[-2000:]}")
        yield work / "debian.tar"


def layers(path: Path, each: int) -> Iterator[bytes]:
    """Divide a tar into layers of about `each` bytes, which together have the same files.

    Hard links to files of earlier layers are left out, so that each layer stands alone.
    """
    with tarfile.open(path) as whole:
        part: list[tarfile.TarInfo] = []
        for member in whole:
            if part and member.offset - part[0].offset > each:
                yield _layer(whole, part)
                part = []
            part.append(member)
        yield _layer(whole, part)


def _layer(whole: tarfile.TarFile, part: Sequence[tarfile.TarInfo]) -> bytes:
    out = io.BytesIO()
    names = {member.name for member in part}
    with tarfile.open(fileobj=out, mode="w") as layer:
        for member in part:
            if not member.islnk() or member.linkname in names:
                layer.addfile(member, whole.extractfile(member) if member.isreg() else None)
    return out.getvalue()
