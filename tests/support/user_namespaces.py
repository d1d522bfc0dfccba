# SPDX-License-Identifier: Apache-2.0
"""The messages that kubelet sends for pods with `hostUsers: false`."""

from __future__ import annotations

from typing import Any

from infranetes_common.wire import cri

FIRST, LENGTH = 200000, 65536


def ids(first: int = FIRST, length: int = LENGTH) -> list[cri.IDMapping]:
    """Return a mapping of `length` ids, from 0 in the pod and `first` on the host."""
    return [cri.IDMapping(host_id=first, container_id=0, length=length)]


def namespaces(first: int = FIRST, length: int = LENGTH, **others: Any) -> cri.NamespaceOption:
    """Return the namespaces of a pod or of one of its containers."""
    users = cri.UserNamespace(mode=cri.POD, uids=ids(first, length), gids=ids(first, length))
    return cri.NamespaceOption(**{"userns_options": users, "pid": cri.CONTAINER, **others})


def of_pod(options: cri.NamespaceOption) -> cri.LinuxPodSandboxConfig:
    """Return the `linux` of a pod's configuration."""
    context = cri.LinuxSandboxSecurityContext(namespace_options=options)
    return cri.LinuxPodSandboxConfig(security_context=context)


def of_container(options: cri.NamespaceOption, **context: Any) -> cri.LinuxContainerConfig:
    """Return the `linux` of a container's configuration."""
    security = cri.LinuxContainerSecurityContext(namespace_options=options, **context)
    return cri.LinuxContainerConfig(security_context=security)
