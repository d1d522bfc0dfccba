# SPDX-License-Identifier: Apache-2.0
"""The index of the node's images: `images.json` and the values in it.

The file is replaced whole. When it is read it is compared with the blobs: an image that lacks one is dropped,
and pulled again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs import Attribute
from twisted.logger import Logger

from infranetes.images import reference
from infranetes.images.manifest import Manifest
from infranetes_common.concurrency import replace_file
from infranetes_common.errors import InvalidArgument, NotFound

VERSION = 1
MIN_PREFIX = 6  # the fewest digits that are taken for an id; fewer are more likely a name
_log = Logger()


@attrs.frozen
class Image:
    """An image of the node."""

    id: str  # sha256:... of its configuration
    repo_tags: tuple[str, ...]  # docker.io/library/busybox:latest, sorted
    repo_digests: tuple[str, ...]  # docker.io/library/busybox@sha256:..., sorted
    size: int  # in bytes, on the node
    diff_ids: tuple[str, ...]  # sha256:... of the uncompressed layers, lowest first
    user: str  # as in its configuration: "", NAME or UID, with or without :GROUP
    pinned: bool
    url: str = ""  # where each VM fetches it
    machine: str = ""  # a machine image's name in its IaaS; "": it is none
    told_id: str = ""  # the id as the node's runtime spells it, which kubelet compares; empty: `id`

    @property
    def uid(self) -> int | None:
        """The user's number, if the configuration has a number."""
        name = self.user.partition(":")[0]
        return int(name) if name.isascii() and name.isdigit() and len(name) < 19 else None

    @property
    def username(self) -> str:
        """The user's name, if the configuration has a name."""
        return "" if self.uid is not None else self.user.partition(":")[0]


@attrs.frozen
class Record:
    """An image as in the file.

    :ivar unpacked: the size of each uncompressed layer in bytes. An artifact that is a disk has neither these
        nor diff ids.
    """

    manifest: Manifest
    diff_ids: tuple[str, ...]
    unpacked: tuple[int, ...]
    user: str
    tags: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()

    @property
    def id(self) -> str:
        """Its configuration's digest. Of disks, the manifest's: most of them have one configuration, {}."""
        return self.manifest.digest if self.manifest.disk else self.manifest.config_digest

    @property
    def verified(self) -> dict[tuple[str, str], int]:
        """Unpacked sizes by (layer digest, diff id); these pairs were checked to belong together."""
        if self.manifest.disk:
            return {}
        pairs = zip(self.manifest.layers, self.diff_ids, self.unpacked, strict=True)
        return {(layer.digest, diff_id): size for layer, diff_id, size in pairs}

    def image(self, pinned: frozenset[str]) -> Image:
        return Image(
            id=self.id,
            repo_tags=tuple(sorted(self.tags)),
            repo_digests=tuple(sorted(self.digests)),
            size=sum(self.manifest.blobs.values()),
            diff_ids=self.diff_ids,
            user=self.user,
            pinned=bool(pinned & (self.tags | self.digests)),
        )


Records = Mapping[str, Record]  # by image id


def added(records: Records, new: Record) -> dict[str, Record]:
    """Return `records` with `new` added.

    Its tags are taken from the images that had them. References that the same image had are kept.
    """
    result = {
        id: attrs.evolve(record, tags=record.tags - new.tags) if record.tags & new.tags else record
        for id, record in records.items()
    }
    old = result.get(new.id)
    if old is not None:
        new = attrs.evolve(new, tags=new.tags | old.tags, digests=new.digests | old.digests)
    result[new.id] = new
    return result


def find(records: Records, name: str) -> Record:
    """Return the image that a reference, an id or the first 6 or more digits of an id mean.

    :raise InvalidArgument: it is malformed, or the beginning of several ids.
    :raise NotFound: it means no image.
    """
    if name in records:
        return records[name]
    bare = name.removeprefix("sha256:")
    hexadecimal = MIN_PREFIX <= len(bare) <= 64 and not set(bare) - set("0123456789abcdef")
    if not (hexadecimal and (name != bare or len(bare) == 64)):
        full = str(reference.parse(name))
        for record in records.values():
            if full in record.tags or full in record.digests:
                return record
    if hexadecimal:
        meant = [record for id, record in records.items() if id.startswith(f"sha256:{bare}")]
        if len(meant) > 1:
            raise InvalidArgument(f"{name!r} is the beginning of {len(meant)} image ids; give more of it")
        if meant:
            return meant[0]
    raise NotFound(f"image {name} is not on this node; pull it first")


def load(path: Path, blobs: Path) -> dict[str, Record]:
    """Return the images whose blobs are all there; none if the file is missing or unusable."""
    try:
        document: Any = json.loads(path.read_bytes())  # Any: not checked yet
        if document["version"] != VERSION:
            raise ValueError("it is of another version")
        records = [_converter.structure(entry, Record) for entry in document["images"]]
    except FileNotFoundError:
        return {}
    except Exception as e:
        _log.error("{path} can't be used, images will be pulled again: {error}", path=str(path), error=e)
        os.replace(path, path.with_suffix(".broken"))
        return {}
    return {record.id: record for record in records if _whole(record, blobs)}


def save(path: Path, records: Iterable[Record]) -> None:
    """Replace the file.

    :raise OSError: it can't be written, and is as it was.
    """
    document = {
        "version": VERSION,
        "images": [attrs.asdict(record, value_serializer=_plain) for record in records],
    }
    replace_file(path, json.dumps(document, indent=1))


def _whole(record: Record, blobs: Path) -> bool:
    for digest, size in record.manifest.blobs.items():
        file = blobs / digest.removeprefix("sha256:")
        if not file.is_file() or file.stat().st_size != size:
            _log.warn("image {image} lacks {blob}, it is dropped", image=record.id, blob=digest)
            return False
    return True


def _plain(_instance: type, _attribute: Attribute[object], value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else value


_converter = cattrs.Converter()
