# SPDX-License-Identifier: Apache-2.0
"""Finds the pods that a command names."""

from __future__ import annotations

from infranetes.kubernetes.cluster import Cluster
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.meant import MAX_NAME, find_sandbox
from infranetes.pods.store.states import WITH_VM
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.wire import control


def chosen(inventory: Inventory, pod: str) -> list[Sandbox]:
    """Return the sandboxes with VMs, or the one that is meant.

    :param pod: the beginning of its id, or namespace/name; empty: all.
    :raise NotFound: there is none. :raise InvalidArgument: there are several.
    """
    there = [each for each in inventory if each.record.state in WITH_VM]
    if not pod:
        return sorted(there, key=lambda each: each.pod)
    pod = pod[:MAX_NAME]
    found = [each for each in there if each.pod == pod or each.id.startswith(pod)]
    if not found:
        raise NotFound(f"no pod {pod!r} has a VM here: give its sandbox's id, or namespace/name")
    if len(found) > 1:
        ids = ", ".join(sorted(each.id for each in found)[:5])
        raise InvalidArgument(f"several sandboxes are meant by {pod!r}: {ids}; give one of these ids")
    return found


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
            path=each.path,
            optional=each.optional,
            listed=each.listed,
            trouble=each.trouble,
            heard_seconds=each.heard_seconds,
        )
        for each in cluster.followed
    ]
