# SPDX-License-Identifier: Apache-2.0
"""Machine images: versions of galleries' images, with our tags."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.names import IMAGE, Group, definition_of
from infranetes.providers.cloud.azure.resources import Image, Version
from infranetes.providers.cloud.interface import CloudError, ErrorKind, MachineImage
from infranetes_common.errors import FailedPrecondition

# Values of the feature SecurityType of an image's definition.
_CONFIDENTIAL = ("confidentialvm", "confidentialvmsupported", "trustedlaunchandconfidentialvmsupported")
OURS, NAME, VERSION = "infranetes", "infranetes-image-name", "infranetes-image-version"


def architecture_of(image: Image) -> str:
    """Return an image's architecture. Older images have none: they are for x86-64."""
    return "arm64" if image["properties"].get("architecture") == "Arm64" else "x86_64"


def takes_confidential(image: Image) -> bool:
    """Return whether an image's definition says that confidential VMs can be made of it."""
    features = image["properties"].get("features") or ()
    said = next((each["value"] for each in features if each["name"] == "SecurityType"), "")
    return said.lower() in _CONFIDENTIAL


def check(image: Image, where: str) -> None:
    """Check that VMs of an image need nothing but itself.

    :param where: the image, for people. :raise FailedPrecondition: it is a generalized one."""
    if image["properties"].get("osState") != "Specialized":
        raise FailedPrecondition(
            f"{where} is a generalized image: Azure would wait for its own agent in VMs of it; make it again "
            "with --os-state Specialized"
        )


def _thd_find(
    driver: Driver, group: Group, galleries: Sequence[str], name: str, version: str, architecture: str
) -> MachineImage:
    """Return the newest usable version. :raise CloudError: there is none; says what was looked for."""
    usable = [
        each
        for gallery in galleries
        for image in driver.images(gallery)
        if _is_called(image, NAME, name)
        and architecture_of(image) == architecture
        and image["properties"].get("osState") == "Specialized"
        for each in driver.versions(image["id"])
        if _is_called(each, VERSION, version) and _is_ready(each)
    ]
    if not usable:
        raise CloudError(
            ErrorKind.NOT_FOUND,
            f"the galleries {' and '.join(galleries) or '(image_galleries names none)'} have no specialized "
            f"image for {architecture} with the tags {OURS}=true {NAME}={name}, and a version of it that is "
            f"ready with the tags {OURS}=true {VERSION}={version}",
        )
    newest = max(usable, key=_published)
    gib = int(newest["properties"].get("storageProfile", {}).get("osDiskImage", {}).get("sizeInGB") or 0)
    return MachineImage(newest["id"].lstrip("/"), name, version, gib << 30)


def _is_called(resource: Image | Version, tag: str, value: str) -> bool:
    tags = resource.get("tags") or {}
    return tags.get(OURS) == "true" and tags.get(tag) == value


def _is_ready(version: Version) -> bool:
    return version["properties"].get("provisioningState") == "Succeeded"


def _published(version: Version) -> str:
    return version["properties"].get("publishingProfile", {}).get("publishedDate", "")


def _thd_has(driver: Driver, group: Group, id: str) -> bool:
    """Return whether `id` is the id of an image, or of a version, that can be used."""
    if not re.fullmatch(IMAGE, id):
        return False
    path = group.image(id)
    if path == definition_of(path):
        return driver.image(path) is not None
    version = driver.version(path)
    return version is not None and _is_ready(version)
