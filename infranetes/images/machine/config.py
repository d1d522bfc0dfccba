# SPDX-License-Identifier: Apache-2.0
"""The tables `[machine_images."NAME:VERSION"]` of the configuration: the node's own catalogue of machines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import attrs
from attrs import Attribute
from attrs.validators import in_

from infranetes.images import reference
from infranetes.images.machine.disk import DiskFormat
from infranetes_common import config_outside as outside
from infranetes_common.errors import InvalidArgument

KEY = "machine_images"
MAX_URL = 4096
DOMAIN = "qemu.infranetes.io"  # of the references to the catalogue's images
_SUM = re.compile("(?:sha256:)?[0-9a-f]{64}")
_NAME_WORDS = "an image's name has lower-case letters, digits and separators, a colon, and a version"


def _is_url(instance: object, attribute: Attribute[str], url: str) -> None:
    if not url:
        return
    try:
        parts = urlsplit(url)
        whole = parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole or len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("an https URL is needed, such as https://HOST/disk.qcow2")
    if "@" in parts.netloc:
        raise ValueError("no user and password can be in it")


def _is_sum(instance: object, attribute: Attribute[str], text: str) -> None:
    if text and _SUM.fullmatch(text) is None:
        raise ValueError("it has to be the 64 hex digits in lower case that sha256sum prints")


def _is_absolute(instance: object, attribute: Attribute[str], path: str) -> None:
    if path and not os.path.isabs(path):
        raise ValueError(f"{path[:300]!r} is not an absolute path")


@attrs.frozen
class MachineImageConfig:
    """An image of the node's own catalogue. It has a `url` or a `path`."""

    # https://...: the disk's file, which may be compressed.
    url: str = attrs.field(default="", validator=_is_url)
    # The file's sha256; with a path it may be left out.
    sha256: str = attrs.field(default="", validator=_is_sum)
    # A file of the node.
    path: str = attrs.field(default="", validator=_is_absolute)
    # raw, qcow2 or iso; empty: its content tells.
    format: str = attrs.field(default="", validator=in_(("", *(each.value for each in DiskFormat))))
    agent: bool = False  # whether our agent is in it

    @property
    def digest(self) -> str:
        """The file's digest, sha256: and 64 hex digits; "": it is not known yet."""
        return f"sha256:{self.sha256.removeprefix('sha256:')}" if self.sha256 else ""

    @property
    def said(self) -> DiskFormat | None:
        """The format that is said of it."""
        return DiskFormat(self.format) if self.format else None


def machine_faults(images: Mapping[str, MachineImageConfig]) -> Iterator[str]:
    """Yield what is wrong with each image: the dotted key, a colon, and the reason."""
    for name, its in images.items():
        key = f"{KEY}.{name[:200]}"
        if not _is_name(name):
            yield f'{key}: {_NAME_WORDS}, such as "debian:12"'
        if bool(its.url) == bool(its.path):
            yield f"{key}: it needs either url or path, where its disk is"
        elif its.url and not its.sha256:
            yield f"{key}.sha256: what is downloaded needs the checksum of its file"


def _is_name(name: str) -> bool:
    try:
        parsed = reference.parse(f"{DOMAIN}/{name}")
    except InvalidArgument:
        return False
    return not parsed.digest and f"{parsed.path}:{parsed.tag}" == name


def look(images: Mapping[str, MachineImageConfig]) -> Iterator[outside.Finding]:
    """Look at the files that the catalogue names, and say that servers were not asked."""
    for name, its in images.items():
        if its.url:
            yield outside.unseen(f"{name}: no server was asked")
        elif its.path:
            for said in outside.file(its.path):
                yield attrs.evolve(said, words=f"{name}: {said.words}")
