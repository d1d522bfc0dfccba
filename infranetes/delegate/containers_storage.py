# SPDX-License-Identifier: Apache-2.0
"""Reads images from the directory of containers/storage, the library with which CRI-O and Podman keep them.

Below its root, for the driver overlay::

    overlay-images/ID/manifest         the image's manifest, of the one platform
    overlay-images/ID/=BASE64          its configuration, by its digest
    overlay-layers/layers.json         all layers; replaced whole
    overlay-layers/ID.tar-split.gz     what else a layer's tar consists of than files
    overlay/ID/diff                    the layer's own files

Nothing is written, no lock taken and nothing mounted: that would take rights which the daemon does not have,
and the libraries clean up behind others that were killed. What is read may go at any moment, then, and each
layer's digest is compared when its disk is made.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import attrs

from infranetes.delegate.tar_split import Assembly
from infranetes.images.manifest import MAX_CONFIG_BYTES, MAX_MANIFEST_BYTES, digest_of
from infranetes.images.reference import is_digest
from infranetes_common.errors import DataLoss, FailedPrecondition, NotFound, Unavailable

MAX_LAYERS_BYTES = 32 << 20  # the most bytes of the file that lists the layers, of about 1 KB each
AGAIN = "remove the image with crictl rmi, and pull it again"
_IMAGES = "-images"
_ID = re.compile(r"[0-9a-f]{64}")
# The directory of a layer's own files, by the driver's name.
_FILES = {"overlay": "overlay/{}/diff", "vfs": "vfs/dir/{}"}


@attrs.frozen
class StoredLayer:
    """A layer as the storage has it.

    :ivar id: the storage's own. :ivar size: of its tar, in bytes.
    """

    id: str
    size: int


@attrs.frozen
class ContainersStorage:
    """A storage by its root and its driver. All methods block."""

    root: Path
    driver: str

    @classmethod
    def of(cls, images: str) -> ContainersStorage:
        """Return the storage whose directory of images ImageFsInfo names.

        :raise FailedPrecondition: it is none that is known here; says why."""
        path = Path(images)
        driver = path.name.removesuffix(_IMAGES)
        if not path.is_absolute() or driver == path.name or driver not in _FILES:
            raise FailedPrecondition(
                f"CRI-O keeps its images in {images[:300]!r}, and VMs can use images of its storage drivers "
                "overlay and vfs only: set storage_driver in its configuration"
            )
        return cls(path.parent, driver)

    def thd_manifest(self, image_id: str) -> bytes:
        """Return the image's manifest. :raise NotFound: the image is not there."""
        return self._thd_read(self._image(image_id) / "manifest", MAX_MANIFEST_BYTES, image_id)

    def thd_config(self, image_id: str) -> bytes:
        """Return the image's configuration.

        :raise NotFound: it is not there. :raise DataLoss: it is not the id's."""
        name = "=" + base64.b64encode(image_id.encode()).decode()
        data = self._thd_read(self._image(image_id) / name, MAX_CONFIG_BYTES, image_id)
        if digest_of(data) != image_id:
            raise DataLoss(f"CRI-O's configuration of image {image_id} has another digest; {AGAIN}")
        return data

    def thd_layers(self, diff_ids: Collection[str]) -> Mapping[str, StoredLayer]:
        """Return those of these layers that are there completely, by diff id.

        :raise Unavailable: the files can't be read."""
        wanted, found = set(diff_ids), dict[str, StoredLayer]()
        path = self.root / f"{self.driver}-layers" / "layers.json"
        try:
            listed = json.loads(_thd_bounded(path, MAX_LAYERS_BYTES))
            for entry in listed:
                diff_id, flags = entry.get("diff-digest"), entry.get("flags") or {}
                if diff_id in wanted and not flags.get("incomplete") and self._whole(entry):
                    found[diff_id] = StoredLayer(entry["id"], entry["diff-size"])
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise Unavailable(f"CRI-O's layers can't be read: {path}: {error}") from None
        return found

    def thd_write(self, layer: StoredLayer, target: int, stop: threading.Event) -> None:
        """Write a layer's tar to a file.

        :param stop: set from another thread to have it end soon.
        :raise NotFound: it is not there any more. :raise DataLoss: it is not what it was.
        :raise OSError: `target` can't be written."""
        files = self.root / _FILES[self.driver].format(layer.id)
        Assembly(self._described(layer.id), files, layer.size, stop).thd_write(target)

    def _whole(self, entry: Mapping[str, object]) -> bool:
        id, size = entry.get("id"), entry.get("diff-size")
        return (
            isinstance(id, str)
            and _ID.fullmatch(id) is not None
            and isinstance(size, int)
            and size > 0
            and self._described(id).is_file()
        )

    def _described(self, layer: str) -> Path:
        return self.root / f"{self.driver}-layers" / f"{layer}.tar-split.gz"

    def _image(self, image_id: str) -> Path:
        if not is_digest(image_id):
            raise NotFound(f"{image_id[:100]!r} is not the id of an image")
        return self.root / (self.driver + _IMAGES) / image_id.removeprefix("sha256:")

    def _thd_read(self, path: Path, limit: int, image_id: str) -> bytes:
        try:
            return _thd_bounded(path, limit)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"image {image_id} is not in CRI-O's storage {self.root}; pull it again") from None
        except OSError as error:
            raise Unavailable(f"CRI-O's image {image_id} can't be read: {path}: {error.strerror}") from None


def _thd_bounded(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise DataLoss(f"{path} has over {limit} bytes")
    return data
