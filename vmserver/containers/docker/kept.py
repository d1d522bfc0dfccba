"""What Docker does not know of a container, kept until it is gone, for agents to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError


class Kept:
    """One message for each container.

    :param directory: a small file for each; made when first needed. :param kind: the messages' class."""

    def __init__(self, directory: Path, kind: Any) -> None:
        self._directory = directory
        self._kind = kind
        self._known: dict[str, Any] = {}

    def load(self) -> None:
        """Take up what an earlier agent kept."""
        for path in self._directory.glob("*"):
            try:
                self._known[path.name] = self._kind.FromString(path.read_bytes())
            except (OSError, DecodeError):
                continue

    def of(self, id: str) -> Any:
        """The message, or None."""
        return self._known.get(id)

    def put(self, id: str, message: Any) -> None:
        """Keep `message` in the place of the one before. :raise OSError: it can't be kept."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._directory / id).write_bytes(message.SerializeToString())
        self.remember(id, message)

    def remember(self, id: str, message: Any) -> None:
        """Keep `message` for as long as this agent runs."""
        self._known[id] = message

    def ids(self) -> set[str]:
        """The containers with a message."""
        return set(self._known)

    def drop(self, id: str) -> None:
        """Its container is gone. Unknown: nothing to do."""
        if self._known.pop(id, None) is not None:
            (self._directory / id).unlink(missing_ok=True)
