# SPDX-License-Identifier: Apache-2.0
"""Paths inside of an image that is mounted, which its links can't lead out of."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from infranetes_common.errors import InvalidArgument

_MAX_LINKS = 40


def within(root: Path, sub_path: str, field: str) -> str:
    """Return the path of the file or directory at `sub_path`; symbolic links stay within `root`.

    :raise InvalidArgument: there is no such file or directory.
    """
    parts = [part for part in reversed(sub_path.split("/")) if part not in ("", ".")]
    at: list[str] = []
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            at = at[:-1]
            continue
        path = root.joinpath(*at, part)
        try:
            found = path.lstat()
        except OSError as error:
            raise InvalidArgument(f"{field}: the image has no {sub_path[:200]!r}") from error
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise InvalidArgument(f"{field}: {sub_path[:200]!r} in the image has too many links")
            target = os.readlink(path)
            at = [] if target.startswith("/") else at
            parts += [each for each in reversed(target.split("/")) if each not in ("", ".")]
        elif stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and not parts):
            at.append(part)
        else:
            raise InvalidArgument(f"{field}: {sub_path[:200]!r} in the image is not a file or directory")
    return str(root.joinpath(*at))
