# SPDX-License-Identifier: Apache-2.0
"""The choice of a pod's ContainerProvider, which runs its containers: by annotation, handler or node.

The VM's agent learns the choice when the VM becomes the pod's, and refuses one that the VM does not offer.
"""

from __future__ import annotations

from infranetes.pods.node.handler_config import DOCKER, MACHINE
from infranetes.pods.node.handlers import Handler
from infranetes.providers.annotations import CONTAINERS, PREFIX
from infranetes.providers.interface import IHasGuestImage
from infranetes_common.errors import InvalidArgument
from infranetes_common.user_namespaces import user_namespace
from infranetes_common.wire import cri

ANNOTATION = PREFIX + CONTAINERS

_WITH_USER_NAMESPACES = ("oci", "fake")  # "fake" is the ContainerProvider of simulated VMs
_USERS = "config.linux.security_context.namespace_options"


def container_provider(default: str, config: cri.PodSandboxConfig, handler: Handler) -> str:
    """Return the name of the pod's ContainerProvider; "" means the first one of its VM's image.

    :param default: the ContainerProvider of pods that choose none; "": the first one."""
    chosen: str = config.annotations.get(ANNOTATION, "")
    nodes = default if handler.kind == DOCKER else ""
    return chosen.strip() or handler.contprovider or nodes


def check_container_provider(config: cri.PodSandboxConfig, handler: Handler) -> None:
    """Check a pod's choice of ContainerProvider before anything is made for the pod.

    :raise InvalidArgument: pods of this handler have no such choice; the message says what to do."""
    if ANNOTATION in config.annotations and handler.kind == MACHINE:
        raise InvalidArgument(
            f"annotation {ANNOTATION} can't be served: images of this handler's pods are whole machines, "
            "in which nothing runs containers; leave it out, or choose another RuntimeClass or node"
        )


def has_user_namespaces(default: str, handler: Handler, config: cri.PodSandboxConfig | None = None) -> bool:
    """Return whether a pod may have a user namespace.

    :param default: as for `container_provider`.
    :param config: the pod's; None: assume a pod that chooses no ContainerProvider."""
    name, provider = (
        container_provider(default, config or cri.PodSandboxConfig(), handler),
        handler.node_provider.provider,
    )
    if not name and IHasGuestImage.providedBy(provider):
        name = next(iter(IHasGuestImage(provider).container_providers()), "")
    return handler.kind == DOCKER and name in _WITH_USER_NAMESPACES


def check_user_namespace(default: str, config: cri.PodSandboxConfig, handler: Handler) -> None:
    """Check that a pod can have the user namespace that it asks for.

    :raise InvalidArgument: it can't; the message says what to do."""
    users = user_namespace(config.linux.security_context.namespace_options, _USERS)
    if users is not None and not has_user_namespaces(default, handler, config):
        raise InvalidArgument(
            f"{_USERS}.userns_options: POD: what runs this pod's containers does not support user "
            "namespaces, and the "
            "VM separates the pod's users from the node's: leave hostUsers out, or have conmon and crun run "
            f"them (contprovider, or the annotation {ANNOTATION}: oci)"
        )
