# SPDX-License-Identifier: Apache-2.0
"""A driver with its credentials, which are the arguments in a file of their own."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import attrs

from infranetes.providers.cloud.any.libcloud_types import Driver
from infranetes.providers.cloud.calls.connections import connection_arguments
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_MAX_BYTES = 64 * 1024


@attrs.frozen(eq=False)
class Session:
    """A driver, and the version of the file with which it was made."""

    driver: Driver
    version: tuple[int, ...]


def version(path: str) -> tuple[int, ...]:
    """Return values that change whenever the file does; empty: it can't be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _thd_read(path: str) -> Mapping[str, object]:
    """Return the arguments in the file.

    :raise CloudError: it can't be used; says why, without its content."""
    where = f"credentials_file {path}"
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(_MAX_BYTES)
    except OSError as error:
        raise CloudError(ErrorKind.CREDENTIALS, f"{where} can't be read: {error.strerror}") from error
    if mode & 0o077:
        raise CloudError(
            ErrorKind.CREDENTIALS, f"{where} may be read by others (mode {mode:04o}): chmod 600 it"
        )
    try:
        return tomllib.loads(content.decode())
    except ValueError:  # whose words may quote it
        raise CloudError(ErrorKind.CREDENTIALS, f'{where} is not TOML: key = "…"') from None


def set_up(driver: Driver, endpoint: str, timeout: float) -> None:
    """Have a driver connect to an endpoint, and wait for `timeout` seconds at most. No request is made."""
    connection = getattr(driver, "connection", None)
    if connection is not None and hasattr(connection, "connect"):
        for name, value in {**connection_arguments(endpoint), "timeout": timeout}.items():
            setattr(connection, name, value)
        connection.connect()
