# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's images that are imported from Cloud Storage.

Source: Compute Engine API reference, `images.insert`; its manual, "Requirements to build custom images".
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from typing import cast

import attrs

from tests.support.clouds import gce_resources as resources
from tests.support.clouds.gce_disks import LABEL, NAME
from tests.support.clouds.gce_operations import Error, Operations, Refusal, path_of
from tests.support.clouds.gce_resources import Json

_SOURCE = re.compile(r"https://storage\.googleapis\.com/([^/]+)/([^/]+)")
_GIB = 1 << 30


@attrs.define
class Images:
    """The project's images.

    :ivar archive: returns an object's content; None: there is none.
    :ivar contents: the content of each image's disk, by offset.
    """

    _operations: Operations
    _images: dict[str, Json]
    archive: Callable[[str, str], bytes | None] = lambda bucket, name: None
    contents: dict[str, dict[int, bytes]] = attrs.field(factory=dict)

    def insert(self, query: dict[str, str], body: Json) -> Json:
        """Import an image; return the operation. :raise Refusal: it can't be imported."""
        return self._operations.once(query.get("requestId", ""), ["insert", body], lambda: self._insert(body))

    def _insert(self, body: Json) -> Json:
        name, source = body["name"], _SOURCE.fullmatch(body["rawDisk"]["source"])
        labels = body.get("labels", {})
        for field, is_right in (
            ("name", NAME.fullmatch(name)),
            ("labels", all(LABEL.fullmatch(each) for each in labels.values())),
            ("rawDisk.source", source),
        ):
            if not is_right:
                raise Refusal(400, "invalid", f"Invalid value for field 'resource.{field}'")
        if name in self._images:
            path = path_of(self._images[name]["selfLink"])
            raise Refusal(409, "alreadyExists", f"The resource '{path}' already exists")
        assert source is not None
        archive = self.archive(source[1], source[2])
        if archive is None:
            raise Refusal(404, "notFound", f"The resource '{source[0]}' was not found")
        fields = {key: value for key, value in body.items() if key != "name"}
        image = resources.image(name, **{**fields, "status": "PENDING", "labels": labels})
        self._images[name] = image

        def imported() -> Error | None:
            size, content = _disk_in(archive)
            if not size or size % _GIB:
                image["status"] = "FAILED"
                return "INVALID_USAGE", "The tar archive is not a valid image."
            self.contents[name] = content
            image.update(status="READY", diskSizeGb=str(size // _GIB))
            return None

        def undo() -> None:
            image["status"] = "FAILED"

        return self._operations.run("", "insert", image, imported, undo=undo)

    def delete(self, image: Json) -> Json:
        """Delete an image; return the operation."""

        def gone() -> None:
            del self._images[image["name"]]

        image["status"] = "DELETING"
        return self._operations.run("", "delete", image, gone)


def _disk_in(archive: bytes) -> tuple[int, dict[int, bytes]]:
    """Return the size of an archive's disk, and its content by offset; 0: Compute Engine would refuse it."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        members = opened.getmembers()
        file = opened.extractfile("disk.raw") if [each.name for each in members] == ["disk.raw"] else None
        content: dict[int, bytes] = {}
        if file is None:
            return 0, content
        pieces = cast("list[tuple[int, int]] | None", members[0].sparse)  # typeshed has it wrong
        for begin, length in pieces or [(0, members[0].size)]:
            file.seek(begin)
            content[begin] = file.read(length)
        return members[0].size, content
