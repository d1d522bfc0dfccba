"""The catalogue of machine images: custom images with our labels."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.names import IMAGE, filter_of, image_path
from infranetes.providers.cloud.interface import MachineImage

OURS, NAME, VERSION = "infranetes", "infranetes-image-name", "infranetes-image-version"


def _thd_find(driver: Driver, projects: Iterable[str], name: str, version: str) -> MachineImage | None:
    """The newest image that can be used."""
    wanted = filter_of({OURS: "true", NAME: name, VERSION: version})
    found = [
        (str(one.get("creationTimestamp")), project, one)
        for project in projects
        for page in driver.pages(f"projects/{project}/global/images", filter=wanted)
        for one in page.get("items") or []
        if one.get("status") == "READY"
        and (one.get("deprecated") or {}).get("state") not in ("OBSOLETE", "DELETED")
    ]
    if not found:
        return None
    _, project, one = max(found, key=lambda each: (each[0], each[1]))
    size = int(one.get("archiveSizeBytes") or 0)
    return MachineImage(f"projects/{project}/global/images/{one['name']}", name, version, size)


def _thd_has(driver: Driver, project: str, id: str) -> bool:
    """Whether an image is there. What is no image's path is none."""
    if not re.fullmatch(IMAGE, id):
        return False
    found = driver.find(image_path(id, project))
    return found is not None and found.get("status") == "READY"
