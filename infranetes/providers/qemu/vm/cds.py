# SPDX-License-Identifier: Apache-2.0
"""Writes the CDs that configure a guest: ISO 9660, with the names that Linux (Rock Ridge) and Windows
(Joliet) read."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from infranetes.providers.machine_images import Cd
from infranetes_common.errors import InvalidArgument

if TYPE_CHECKING:
    from pycdlib.pycdlib import PyCdlib

MOST_BYTES = 64 << 20  # of one CD's files
_NEW = ".cd"  # a file that is being written
_LEVEL = 4  # of ISO 9660: directories as deep as they are


def key_of(cd: Cd) -> str:
    """Return a key of a CD's content."""
    digest = hashlib.sha256(cd.label.encode())
    for name, content in sorted(cd.files.items()):
        digest.update(b"%s\0%d\0%s" % (name.encode(), len(content), content))
    return digest.hexdigest()


def thd_open(cd: Cd, directory: Path) -> int:
    """Write a CD's image to a file that nobody else finds, and return a descriptor to read it by. Blocks.

    Its room is given back when nobody has it open any more.

    :raise InvalidArgument: there can't be such a CD. :raise OSError: it can't be written."""
    path = directory / _NEW
    path.unlink(missing_ok=True)
    try:
        write(cd, path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        path.unlink(missing_ok=True)


def write(cd: Cd, path: Path) -> None:
    """Write a CD's image to a new file, for root alone. Blocks.

    :raise InvalidArgument: there can't be such a CD. :raise OSError: it can't be written."""
    from pycdlib.pycdlib import PyCdlib  # late: it takes 6 MiB, and few nodes boot images
    from pycdlib.pycdlibexception import PyCdlibException

    size = sum(len(content) for content in cd.files.values())
    if size > MOST_BYTES:
        raise InvalidArgument(f"the CD {cd.label} would have {size} bytes: {MOST_BYTES >> 20} MiB at most")
    image = PyCdlib()
    try:
        image.new(interchange_level=_LEVEL, vol_ident=cd.label, joliet=3, rock_ridge="1.09")
        with contextlib.closing(image):
            _fill(image, cd)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                image.write_fp(file)
    except PyCdlibException as error:
        raise InvalidArgument(f"there can't be a CD {cd.label[:80]!r} with these files: {error}") from error


def _fill(image: PyCdlib, cd: Cd) -> None:
    """Add directories and files. The names of ISO 9660 itself are short, and nobody reads those."""
    short: dict[PurePosixPath, str] = {PurePosixPath("/"): ""}
    for number, (name, content) in enumerate(sorted(cd.files.items())):
        path = PurePosixPath("/") / name
        if ".." in path.parts or len(path.parts) < 2:
            raise InvalidArgument(f"the CD {cd.label[:80]!r} can't have a file {name[:200]!r}")
        for parent in reversed(path.parents):
            if parent not in short:
                short[parent] = f"{short[parent.parent]}/D{len(short)}"
                image.add_directory(short[parent], rr_name=parent.name, joliet_path=str(parent))
        image.add_fp(
            io.BytesIO(content),
            len(content),
            f"{short[path.parent]}/F{number}.;1",
            rr_name=path.name,
            joliet_path=str(path),
        )
