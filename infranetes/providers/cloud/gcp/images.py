# SPDX-License-Identifier: Apache-2.0
"""Machine images: custom images with our labels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.libcloud_types import Image
from infranetes.providers.cloud.gcp.names import IMAGE, filter_of, image_path, label
from infranetes.providers.cloud.interface import CloudError, ErrorKind, MachineImage

OURS, NAME, VERSION = "infranetes", "infranetes-image-name", "infranetes-image-version"


def architecture_of(image: Image) -> str:
    """Return an image's architecture. The API leaves out x86-64 of older images."""
    return "arm64" if image.get("architecture") == "ARM64" else "x86_64"


def boots_by_uefi(image: Image) -> bool:
    """Return whether an image says that it boots by UEFI."""
    return any(feature.get("type") == "UEFI_COMPATIBLE" for feature in image.get("guestOsFeatures") or ())


def _thd_find(
    driver: Driver, projects: Sequence[str], name: str, version: str, architecture: str
) -> MachineImage:
    """Return the newest usable image. :raise CloudError: there is none; says what was looked for."""
    wanted = {OURS: "true", NAME: name, VERSION: version}
    usable = [
        (str(image.get("creationTimestamp")), project, image)
        for project in projects
        for image in driver.images(project, filter_of(wanted))
        if image.get("status") == "READY"
        and (image.get("deprecated") or {}).get("state") not in ("OBSOLETE", "DELETED")
        and architecture_of(image) == architecture
    ]
    if not usable:
        shown = " ".join(f"{key}={label(value)}" for key, value in wanted.items())
        raise CloudError(
            ErrorKind.NOT_FOUND,
            f"none for {architecture} is ready in {' or '.join(projects)} whose labels are {shown}",
        )
    _, project, newest = max(usable, key=lambda each: (each[0], each[1]))
    size = int(newest.get("archiveSizeBytes") or 0)
    return MachineImage(f"projects/{project}/global/images/{newest['name']}", name, version, size)


def _thd_has(driver: Driver, project: str, id: str) -> bool:
    """Return whether `id` is the path of an image that exists."""
    if not re.fullmatch(IMAGE, id):
        return False
    image = driver.image(image_path(id, project))
    return image is not None and image.get("status") == "READY"
