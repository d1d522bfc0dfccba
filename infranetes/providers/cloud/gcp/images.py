"""The catalogue of machine images: custom images with our labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.names import IMAGE, filter_of, image_path, label
from infranetes.providers.cloud.interface import CloudError, MachineImage, Trouble

OURS, NAME, VERSION = "infranetes", "infranetes-image-name", "infranetes-image-version"


def architecture_of(image: dict[str, Any]) -> str:
    """Of an image as the API describes it, which tells of ARM only for certain."""
    return "arm64" if image.get("architecture") == "ARM64" else "x86_64"


def _thd_find(
    driver: Driver, projects: Sequence[str], name: str, version: str, architecture: str
) -> MachineImage:
    """The newest image that can be used. :raise CloudError: there is none; says what was looked for."""
    wanted = {OURS: "true", NAME: name, VERSION: version}
    found = [
        (str(one.get("creationTimestamp")), project, one)
        for project in projects
        for page in driver.pages(f"projects/{project}/global/images", filter=filter_of(wanted))
        for one in page.get("items") or []
        if one.get("status") == "READY"
        and (one.get("deprecated") or {}).get("state") not in ("OBSOLETE", "DELETED")
        and architecture_of(one) == architecture
    ]
    if not found:
        shown = " ".join(f"{key}={label(value)}" for key, value in wanted.items())
        raise CloudError(
            Trouble.MISSING,
            f"none of {architecture} is ready in {' or '.join(projects)} whose labels are {shown}",
        )
    _, project, one = max(found, key=lambda each: (each[0], each[1]))
    size = int(one.get("archiveSizeBytes") or 0)
    return MachineImage(f"projects/{project}/global/images/{one['name']}", name, version, size)


def _thd_has(driver: Driver, project: str, id: str) -> bool:
    """Whether an image is there. What is no image's path is none."""
    if not re.fullmatch(IMAGE, id):
        return False
    found = driver.find(image_path(id, project))
    return found is not None and found.get("status") == "READY"
