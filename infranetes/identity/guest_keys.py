# SPDX-License-Identifier: Apache-2.0
"""The secrets of guests without our agent, all made of one: nothing has to be kept of any guest.

`STATE_DIR/ca/guests.key` (mode 0600 in a directory of mode 0700) holds that one. Who has it can log in to the
guests of this node, and answer in their place; a guest gets no more than its own.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from infranetes_common.concurrency import sync_directory
from infranetes_common.errors import ConfigError

SEED_BYTES = 32
_FILE = "guests.key"


class GuestSecrets:
    """Makes secrets of guests.

    :param state_dir: of the daemon. The file in it is made if it is not there.
    :raise ConfigError: it can't be read or made."""

    def __init__(self, state_dir: Path) -> None:
        directory = state_dir / "ca"
        try:
            self._secret = _read(directory) or _made(directory)
        except OSError as error:
            raise ConfigError(f"{directory / _FILE} can't be used: {error.strerror}") from None

    def seed(self, purpose: str, sandbox_id: str) -> bytes:
        """Return SEED_BYTES bytes for a purpose of a guest: always the same, and not to be guessed."""
        info = f"infranetes {purpose}\0{sandbox_id}".encode()
        return HKDF(SHA256(), SEED_BYTES, None, info).derive(self._secret)


def _read(directory: Path) -> bytes:
    """Return the secret; b"": there is none, or it was not written to its end."""
    try:
        secret = (directory / _FILE).read_bytes()
    except FileNotFoundError:
        return b""
    return secret if len(secret) == SEED_BYTES else b""


def _made(directory: Path) -> bytes:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret, new = secrets.token_bytes(SEED_BYTES), directory / f".{_FILE}"
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    new.replace(directory / _FILE)
    sync_directory(directory)
    return secret
