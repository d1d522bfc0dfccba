# SPDX-License-Identifier: Apache-2.0
"""The progress of an upload, kept in a file beside the disk, so that the next run continues from there.

The first line names the upload and its destination; each further line names a part that the cloud has taken.
A line that a kill cut short is ignored, and its part is sent again.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import BinaryIO

import attrs

SUFFIX = ".upload"


@attrs.frozen
class Target:
    """An upload and its destination.

    :ivar key: of the publication. :ivar token: an idempotency key of this attempt.
    :ivar place: the cloud's id of the destination of the parts; `""`: not known yet, but it may exist."""

    key: str
    token: str
    place: str = ""


class Journal:
    """The journal of one disk's upload to one cloud. :ivar target: None: nothing is being uploaded."""

    def __init__(self, disk: Path, cloud: str, key: str) -> None:
        self._path = disk.with_name(f"{disk.name}.{cloud}{SUFFIX}")
        self._key = key
        self._file: BinaryIO | None = None
        self.target: Target | None = None
        self.parts: set[str] = set()
        self._read()

    def begin(self) -> Target:
        """Return the target of the upload that is under way, or of a new one, which is written down."""
        if self.target is None:
            self._write(Target(self._key, secrets.token_hex(20)))
        assert self.target is not None
        return self.target

    def placed(self, place: str) -> None:
        """Write down the destination of the parts. Parts that another destination has taken are forgotten."""
        target = self.begin()
        if target.place != place:
            self._write(attrs.evolve(target, place=place))

    def add(self, part: str) -> None:
        """Write down that a part was taken."""
        self.parts.add(part)
        if self._file is None:
            self._file = self._path.open("ab")
        self._file.write(f"{part}\n".encode())
        self._file.flush()

    def forget(self) -> None:
        """Remove the journal: the upload is done, or has failed for good. Idempotent."""
        self._close()
        self._path.unlink(missing_ok=True)
        self.target, self.parts = None, set()

    def _write(self, target: Target) -> None:
        self._close()
        new = self._path.with_name(self._path.name + ".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(json.dumps(attrs.asdict(target)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        self.target, self.parts = target, set()

    def _read(self) -> None:
        try:
            first, *lines = self._path.read_bytes().split(b"\n")
            target = Target(**{key: str(value) for key, value in json.loads(first).items()})
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return
        if target.key == self._key:
            self.target = target
            self.parts = {line.decode(errors="replace") for line in lines[:-1]}
            if lines and lines[-1]:
                with self._path.open("ab") as file:
                    file.write(b"?\n")  # so that a torn line never looks whole

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
