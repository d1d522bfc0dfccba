# SPDX-License-Identifier: Apache-2.0
"""Names and labels that Infranetes gives to Docker's containers."""

from __future__ import annotations

NAME_PREFIX = "infranetes-"
LABEL_ID = "io.infranetes.container"  # the CRI's id
LABEL_IMAGES = "io.infranetes.images"  # ids of the images mounted as volumes, separated by commas
LABEL_RESOURCES = "io.infranetes.resources"  # the LinuxContainerResources of the creation, base64


def container_name(id: str) -> str:
    """Return Docker's name of a container."""
    return NAME_PREFIX + id
