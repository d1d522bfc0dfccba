# SPDX-License-Identifier: Apache-2.0
"""Machine images: finding them by their tags, and their disks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from infranetes.providers.cloud.aws.libcloud_types import Image
from infranetes.providers.cloud.interface import CloudError, ErrorKind, MachineImage

if TYPE_CHECKING:  # settings are read without libcloud, too
    from infranetes.providers.cloud.aws.driver import Driver

OURS = "infranetes"  # the tag of images of ours; its value is "true"
NAME = "infranetes.image_name"  # the tag with NAME:VERSION

_ID = re.compile(r"ami-[0-9a-f]{8,17}")
_OWNER = re.compile(r"self|amazon|aws-marketplace|[0-9]{12}")
_GIB = 1 << 30
_MAX_DISKS = 256  # how many images' disks are remembered


def are_owners(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: Sequence[str]) -> None:
    """The validator of `image_owners`."""
    if not 1 <= len(value) <= 20 or not all(_OWNER.fullmatch(owner) for owner in value):
        raise ValueError("1 to 20 of self, amazon, aws-marketplace or account ids of 12 digits are expected")


@attrs.frozen
class RootDisk:
    """An image's root disk: device name and GiB; "" and 0 where EC2 does not tell."""

    name: str
    gib: int


class Images:
    """The images of one region. Methods are called in threads."""

    def __init__(self, owners: Sequence[str]) -> None:
        self._owners = owners
        self._disks: dict[str, RootDisk] = {}  # by image id; an image never changes

    def _thd_get(self, driver: Driver, id: str) -> Image | None:
        """Return the image with this id, if there is one."""
        for image in driver.images([id]):
            self._remember(image)
            return image
        return None

    def _thd_find(self, driver: Driver, name: str, version: str, architecture: str) -> MachineImage:
        wanted = {
            f"tag:{OURS}": "true",
            f"tag:{NAME}": f"{name}:{version}",
            "architecture": architecture,
            "state": "available",
        }
        # libcloud's own parameter takes only one owner.
        with driver.connection.adding({f"Owner.{n}": owner for n, owner in enumerate(self._owners, 1)}):
            images = driver.images(filters=wanted)
        usable = [image for image in images if _ID.fullmatch(image.id or "")]
        if not usable:
            raise CloudError(
                ErrorKind.NOT_FOUND,
                f"none for {architecture} is available whose owner is {' or '.join(self._owners)} and whose "
                f"tags are {OURS}=true and {NAME}={name}:{version}",
            )
        newest = max(usable, key=lambda image: (image.extra["created"], image.id))
        self._remember(newest)
        return MachineImage(newest.id, name, version, newest.extra["disks_gib"] * _GIB)

    def _thd_has(self, driver: Driver, id: str) -> bool:
        # A filter is used because asking for an id that does not exist is an error.
        return bool(driver.images(filters={"image-id": id, "state": "available"}))

    def _thd_root_disk(self, driver: Driver, id: str) -> RootDisk:
        """Return an image's root disk. :raise CloudError: there is no such image."""
        if id in self._disks:
            return self._disks[id]
        image = self._thd_get(driver, id)
        if image is None:
            raise CloudError(ErrorKind.INVALID, f"there is no image {id}")
        return self._remember(image)

    def _remember(self, image: Image) -> RootDisk:
        if len(self._disks) >= _MAX_DISKS:
            self._disks.clear()
        disk = RootDisk(image.extra["root_device_name"], image.extra["root_disk_gib"])
        self._disks[image.id] = disk
        return disk
