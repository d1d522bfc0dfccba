"""Machine images: those of the catalogue, by their tags, and what their disks are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs

from infranetes.providers.cloud.aws.driver import Driver
from infranetes.providers.cloud.interface import CloudError, MachineImage, Trouble

OURS = "infranetes"  # the tag that says so, with the value "true"
NAME = "infranetes.image_name"  # the tag with NAME:VERSION

_ID = re.compile(r"ami-[0-9a-f]{8,17}")
_OWNER = re.compile(r"self|amazon|aws-marketplace|[0-9]{12}")
_GIB = 1 << 30
_MAX_DISKS = 256  # images whose disks are remembered


def are_owners(instance: Any, attribute: Any, value: Sequence[str]) -> None:
    """The validator of `image_owners`."""
    if not 1 <= len(value) <= 20 or not all(_OWNER.fullmatch(owner) for owner in value):
        raise ValueError("1 to 20 of self, amazon, aws-marketplace or account ids of 12 digits are expected")


@attrs.frozen
class RootDisk:
    """Of an image: the device's name, and GiB; "" and 0 where EC2 does not tell."""

    name: str
    gib: int


class Images:
    """One region's. Methods are called in threads."""

    def __init__(self, owners: Sequence[str]) -> None:
        self._owners = owners
        self._disks: dict[str, RootDisk] = {}  # an image never changes, so this doesn't either

    def _thd_get(self, driver: Driver, id: str) -> Any:
        """libcloud's image, or None."""
        found = driver.list_images(ex_image_ids=[id])
        if found:
            self._remember(found[0])
        return found[0] if found else None

    def _thd_find(self, driver: Driver, name: str, version: str, architecture: str) -> MachineImage:
        wanted = {
            f"tag:{OURS}": "true",
            f"tag:{NAME}": f"{name}:{version}",
            "architecture": architecture,
            "state": "available",
        }
        # libcloud takes one owner
        with driver.connection.adding({f"Owner.{n}": owner for n, owner in enumerate(self._owners, 1)}):
            images = driver.list_images(ex_filters=wanted)
        fit = [image for image in images if _ID.fullmatch(image.id or "")]
        if not fit:
            raise CloudError(
                Trouble.MISSING,
                f"none of {architecture} is available whose owner is {' or '.join(self._owners)} and whose "
                f"tags are {OURS}=true and {NAME}={name}:{version}",
            )
        newest = max(fit, key=lambda image: (image.extra["created"], image.id))
        self._remember(newest)
        return MachineImage(newest.id, name, version, newest.extra["disks_gib"] * _GIB)

    def _thd_has(self, driver: Driver, id: str) -> bool:
        # A filter, for an id that is not there is an error.
        return bool(driver.list_images(ex_filters={"image-id": id, "state": "available"}))

    def _thd_root_disk(self, driver: Driver, id: str) -> RootDisk:
        """:raise CloudError: there is no such image."""
        known = self._disks.get(id)
        if known is not None:
            return known
        image = self._thd_get(driver, id)
        if image is None:
            raise CloudError(Trouble.INVALID, f"there is no image {id}")
        return self._remember(image)

    def _remember(self, image: Any) -> RootDisk:
        if len(self._disks) >= _MAX_DISKS:
            self._disks.clear()
        disk = RootDisk(image.extra["root_device_name"], image.extra["root_disk_gib"])
        self._disks[image.id] = disk
        return disk
