# SPDX-License-Identifier: Apache-2.0
"""A container's user namespace, which must be that of its pod."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument
from infranetes_common.user_namespaces import UserNamespace, mapped_ids, user_namespace
from infranetes_common.wire import cri

_FIELD = "config.linux.security_context"


def check(config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig) -> None:
    """Check that a container and its mounts have the id mappings of their pod.

    :raise InvalidArgument: they have others; the message names the field."""
    users = _of(sandbox_config.linux.security_context.namespace_options)
    if _of(config.linux.security_context.namespace_options) != users:
        raise InvalidArgument(
            f"{_FIELD}.namespace_options.userns_options: not the sandbox's: the containers of a pod share "
            "its user namespace"
        )
    for index, mount in enumerate(config.mounts):
        named = f"config.mounts[{index}] at {mount.container_path[:256]}"
        if mapped_ids(mount.uidMappings, mount.gidMappings, named) not in (None, users):
            raise InvalidArgument(f"{named}: uidMappings and gidMappings are not those of the pod")


def _of(options: cri.NamespaceOption) -> UserNamespace | None:
    return user_namespace(options, f"{_FIELD}.namespace_options")
