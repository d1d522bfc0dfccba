# SPDX-License-Identifier: Apache-2.0
"""Glance's images: the configured one, and those of VM-image pods, which have our properties."""

from __future__ import annotations

from collections.abc import Sequence

from infranetes.providers.cloud.interface import CloudError, ErrorKind, MachineImage
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.openstack.libcloud_types import Image
from infranetes.providers.cloud.openstack.names import is_any_id

OURS, NAME, VERSION = "infranetes", "infranetes_image_name", "infranetes_image_version"


def architecture_of(image: Image) -> str:
    """Return an image's architecture (source: Glance, "Useful image properties"); x86-64 if it tells none."""
    told = image.get("hw_architecture") or image.get("architecture") or ""
    return "arm64" if told in ("aarch64", "arm64") else "x86_64"


def _thd_resolve(driver: Driver, text: str) -> Image | None:
    """Return the active image with this id, or the newest one with this name."""
    if is_any_id(text):
        image = driver.image(text)
        return image if image is not None and image.get("status") == "active" else None
    return next(iter(driver.images({"name": text})), None)


def _thd_find(
    driver: Driver, projects: Sequence[str], name: str, version: str, architecture: str
) -> MachineImage:
    """Return the newest usable image. :raise CloudError: there is none; says what was looked for."""
    wanted = {OURS: "true", NAME: name, VERSION: version}
    usable = [
        image
        for image in driver.images(wanted)
        if image.get("owner") in projects and architecture_of(image) == architecture
    ]
    if not usable:
        shown = " ".join(f"{key}={value}" for key, value in wanted.items())
        raise CloudError(
            ErrorKind.NOT_FOUND,
            f"none for {architecture} is active in {' or '.join(projects)} whose properties are {shown}",
        )
    return MachineImage(usable[0]["id"], name, version, int(usable[0].get("size") or 0))
