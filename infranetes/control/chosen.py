# SPDX-License-Identifier: Apache-2.0
"""Finds the pods that a command names."""

from __future__ import annotations

from infranetes.kubernetes.cluster import Cluster
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.meant import find_sandbox, sandbox_with_vm, sandboxes_with_vms
from infranetes_common.errors import NotFound
from infranetes_common.wire import control


def chosen(inventory: Inventory, pod: str) -> list[Sandbox]:
    """Return the sandboxes with VMs, or the one that is meant.

    :param pod: empty: all. :raise NotFound, InvalidArgument: as `sandbox_with_vm`.
    """
    return [sandbox_with_vm(inventory, pod)] if pod else sandboxes_with_vms(inventory)


def id_meant(inventory: Inventory, pod: str) -> str:
    """Return the id of the sandbox that is meant, or the word itself, as an id, if no pod is known by it."""
    try:
        return find_sandbox(inventory, pod).record.id
    except NotFound:
        return pod


def followed(cluster: Cluster) -> list[control.Followed]:
    """Return how kinds of objects are followed."""
    return [
        control.Followed(
            path=followed.path,
            optional=followed.optional,
            listed=followed.listed,
            trouble=followed.trouble,
            heard_seconds=followed.heard_seconds,
        )
        for followed in cluster.followed
    ]
