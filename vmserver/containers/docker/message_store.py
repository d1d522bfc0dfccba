# SPDX-License-Identifier: Apache-2.0
"""Protobuf messages on disk, one per container: facts that a restarted agent needs and Docker lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from infranetes_common.concurrency import replace_file
from infranetes_common.concurrency.files import SUFFIX

M = TypeVar("M", bound=Message)


class MessageStore(Generic[M]):
    """A message for each container.

    :param directory: has a small file for each; created when it is first needed.
    :param kind: the messages' class."""

    def __init__(self, directory: Path, kind: type[M]) -> None:
        self._directory = directory
        self._kind = kind
        self._messages: dict[str, M] = {}

    def load(self) -> None:
        """Read the messages of earlier agents."""
        for path in self._directory.glob("*"):
            if path.suffix == SUFFIX:
                continue
            try:
                self._messages[path.name] = self._kind.FromString(path.read_bytes())
            except (OSError, DecodeError):
                continue

    def get(self, id: str) -> M | None:
        """Return a container's message; None if there is none."""
        return self._messages.get(id)

    def put(self, id: str, message: M) -> None:
        """Write a container's message, in place of an earlier one. :raise OSError: writing fails."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._directory / id, message.SerializeToString(), durable=False)  # /run is in memory
        self.remember(id, message)

    def remember(self, id: str, message: M) -> None:
        """Keep a message in memory alone."""
        self._messages[id] = message

    def ids(self) -> set[str]:
        """Return the ids of the containers with a message."""
        return set(self._messages)

    def remove(self, id: str) -> None:
        """Delete a container's message. Idempotent."""
        if self._messages.pop(id, None) is not None:
            (self._directory / id).unlink(missing_ok=True)
