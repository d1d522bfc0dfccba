# SPDX-License-Identifier: Apache-2.0
"""Files with one of the node's secrets for Azure, which nobody else may read."""

from __future__ import annotations

import os
from pathlib import Path

from infranetes.providers.cloud.interface import CloudError, ErrorKind

_MAX_FILE = 64 * 1024


def thd_read(path: str, key: str) -> str:
    """Read a secret. :raise CloudError: it can't be used; says why, without its content."""
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(_MAX_FILE)
    except OSError as error:
        raise CloudError(ErrorKind.CREDENTIALS, f"{key} {path} can't be read: {error.strerror}") from None
    if mode & 0o077:
        raise CloudError(
            ErrorKind.CREDENTIALS, f"{key} {path} may be read by others (mode {mode:04o}): chmod 600 it"
        )
    text = content.decode(errors="replace").strip()
    if not text or not text.isprintable():
        raise CloudError(ErrorKind.CREDENTIALS, f"{key} {path} has no secret in one line")
    return text
