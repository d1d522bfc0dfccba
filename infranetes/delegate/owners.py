# SPDX-License-Identifier: Apache-2.0
"""The owners of ids, handlers and images: this daemon or the delegate."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class Owned(enum.Enum):
    """The owner of an id."""

    OURS = "ours"
    THEIRS = "theirs"
    #: One of our ids begins with it, and perhaps one of the delegate's, which has to be asked.
    MAYBE = "maybe"


class Owners(Protocol):
    """Tells what is ours; all else is the delegate's. Each call asks anew: nothing is cached."""

    def sandbox(self, id: str) -> Owned:
        """Return who has the sandbox with this id, which may be the beginning of one."""

    def container(self, id: str) -> Owned:
        """Return who has the container with this id, which may be the beginning of one."""

    def handler(self, name: str) -> bool:
        """Return whether the pods of this runtime handler are ours."""

    def needs(self, handler: str) -> Sequence[str]:
        """Return what pods of this handler of ours need of the delegate: what it may be refused for."""

    def image(self, name: str) -> bool:
        """Return whether the image of this name or id is one of a catalogue of ours."""
