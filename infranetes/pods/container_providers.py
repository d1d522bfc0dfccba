# SPDX-License-Identifier: Apache-2.0
"""Which ContainerProvider of its VM runs a pod's containers: its annotation says it, else the node.

The VM's agent is told when the VM becomes the pod's. What the VM does not offer is refused by the agent then.
"""

from __future__ import annotations

from infranetes.pods.context import NodeContext
from infranetes.providers.annotations import CONTAINERS, PREFIX
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

ANNOTATION = PREFIX + CONTAINERS


def container_provider(node: NodeContext, config: cri.PodSandboxConfig) -> str:
    """Return the name of the ContainerProvider for the pod; "": the first one of its VM's image."""
    chosen: str = config.annotations.get(ANNOTATION, "")
    return chosen.strip() or node.contprovider


def check_container_provider(node: NodeContext, config: cri.PodSandboxConfig) -> None:
    """Check a pod's choice before anything is made for it.

    :raise InvalidArgument: pods of this node have nothing to choose; says what to do."""
    if ANNOTATION in config.annotations and node.images.machine_images:
        raise InvalidArgument(
            f"annotation {ANNOTATION} can't be served: images of this node's pods are whole machines, "
            "in which nothing runs containers; leave it out, or have the pod scheduled to other nodes"
        )
