# SPDX-License-Identifier: Apache-2.0
"""Whose an id, a handler or an image is: this daemon's or the delegate's."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class Owned(enum.Enum):
    """Who has an id."""

    OURS = "ours"
    THEIRS = "theirs"
    #: One of ours begins so, and perhaps one of theirs: the delegate has to be asked.
    MAYBE = "maybe"


class Owners(Protocol):
    """What is ours; all else is the delegate's. It is asked anew at each call: nothing is remembered."""

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
