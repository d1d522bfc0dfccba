# SPDX-License-Identifier: Apache-2.0
"""Names and labels that Infranetes gives to Docker's containers."""

from __future__ import annotations

NAME_PREFIX = "infranetes-"
INIT_NAME = "infranetes.init"  # the container whose PID namespace is the pod's
INIT_IMAGE = "infranetes.init:1"
LABEL_ID = "io.infranetes.container"  # the CRI's id
LABEL_IMAGES = "io.infranetes.images"  # ids of the images mounted as volumes, separated by commas
LABEL_INIT = "io.infranetes.init"  # of the image of the pod's init
LABEL_SHARES = "io.infranetes.shares-processes"  # the container joins the pod's init
LABEL_RESOURCES = "io.infranetes.resources"  # the LinuxContainerResources of the creation, base64


def container_name(id: str) -> str:
    """Return Docker's name of a container."""
    return NAME_PREFIX + id
