# SPDX-License-Identifier: Apache-2.0
"""An archive that only its owner can read, and that replaces nothing."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from infranetes_common.errors import FailedPrecondition

MODE = 0o600


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Make a new file, for its owner alone, and remove it again if the block fails.

    :raise FailedPrecondition: something has its name, if only a link, or it can't be made."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        made = os.open(path, flags, MODE)
    except FileExistsError:
        raise FailedPrecondition(f"{path} is there already: give a FILE that is not") from None
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be made: {error.strerror}") from None
    try:
        with os.fdopen(made, "wb") as file:
            os.fchmod(file.fileno(), MODE)  # whatever the umask
            yield file
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def write(file: BinaryIO, directory: str, parts: Mapping[str, bytes]) -> None:
    """Write a tar.gz with `parts`, given by their names, in one directory. Blocks."""
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in parts.items():
            member = tarfile.TarInfo(f"{directory}/{name}")
            member.size, member.mode, member.mtime = len(content), MODE, int(time.time())
            archive.addfile(member, io.BytesIO(content))
