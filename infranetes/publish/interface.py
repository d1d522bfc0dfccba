# SPDX-License-Identifier: Apache-2.0
"""The interface that each cloud implements for publishing, and the values it is given."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from infranetes.publish.plan import DiskPlan
from infranetes_common.errors import InvalidArgument

MACHINE = "machine"  # the kind of images that are pods themselves

Report = Callable[[str], None]
"""Tells a person how far it is."""

_LABEL = re.compile(r"([a-z0-9]+(?:[._/-][a-z0-9]+)*):([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})")
_MOST = 100  # characters of NAME:VERSION


@attrs.frozen
class ImageLabel:
    """The purpose of an image. :ivar name: NAME:VERSION that pods ask for; `""`: it runs pods' containers."""

    kind: str
    name: str = ""


def label_of(kind: str, name: str) -> ImageLabel:
    """Return what an image is for, by the command's arguments.

    :raise InvalidArgument: they don't go together; says what to write."""
    if kind != MACHINE:
        if name:
            raise InvalidArgument(
                f"--name is for images of --kind {MACHINE}: pods never name those of {kind}"
            )
        return ImageLabel(kind)
    if not _LABEL.fullmatch(name) or len(name) > _MOST:
        raise InvalidArgument(
            f"an image of --kind {MACHINE} needs --name NAME:VERSION, as pods name it, such as web:1.0, "
            f"in lower case and of at most {_MOST} characters"
        )
    return ImageLabel(kind, name)


@attrs.frozen
class Publication:
    """A disk that becomes an image. :ivar key: identifies it among all disks and labels."""

    disk: DiskPlan
    label: ImageLabel

    @property
    def key(self) -> str:
        parts = (self.disk.digest, self.label.kind, self.label.name)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]

    @property
    def title(self) -> str:
        """A name that every cloud takes: lower-case letters, digits and `-`, at most 60 characters."""
        words = re.sub("[^a-z0-9]+", "-", self.label.name.lower()).strip("-")[:24].strip("-")
        return "-".join(part for part in ("infranetes", self.label.kind, words, self.key[:12]) if part)


@attrs.frozen
class Published:
    """An image that is ready.

    :ivar image: the cloud's id. :ivar name: as in `ImageLabel`.
    :ivar settings: what to write into the cloud's table of the configuration."""

    cloud: str
    image: str
    title: str
    name: str
    settings: Mapping[str, str]


@attrs.frozen
class CloudImage:
    """An image of ours that a cloud has, or what is left of one that was not finished.

    :ivar created: seconds since 1970. :ivar used_by: why it stays; `""`: nothing that is known."""

    id: str
    title: str
    kind: str
    name: str
    created: float
    parts: Sequence[str] = ()  # snapshots, which are deleted with it
    used_by: str = ""


class ImagePublisher(Protocol):
    """A publisher for one account of one cloud. Errors are `InfranetesError`s that say what to do."""

    cloud: str

    def publish(self, publication: Publication, report: Report) -> Published:
        """Return the image, which is made unless it is there. Idempotent, and goes on where an earlier run
        was stopped."""

    def images(self) -> list[CloudImage]:
        """Return the images that `publish` has made, the newest first."""

    def remove(self, image: CloudImage) -> None:
        """Remove an image with its parts. Idempotent."""

    def close(self) -> None:
        """End what connects it to the cloud."""
