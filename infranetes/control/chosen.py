# SPDX-License-Identifier: Apache-2.0
"""Finds the pods that a command names."""

from __future__ import annotations

from infranetes.kubernetes.cluster import Cluster
from infranetes.pods.node.inventory import Inventory, PastSandbox, Sandbox
from infranetes.pods.store.states import WITH_VM
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.wire import control

_MAX_NAME = 520


def chosen(inventory: Inventory, pod: str) -> list[Sandbox]:
    """Return the sandboxes with VMs, or the one that is meant.

    :param pod: the beginning of its id, or namespace/name; empty: all.
    :raise NotFound: there is none. :raise InvalidArgument: there are several.
    """
    there = [each for each in inventory if each.record.state in WITH_VM]
    if not pod:
        return sorted(there, key=lambda each: each.pod)
    pod = pod[:_MAX_NAME]
    found = [each for each in there if each.pod == pod or each.id.startswith(pod)]
    if not found:
        raise NotFound(f"no pod {pod!r} has a VM here: give its sandbox's id, or namespace/name")
    if len(found) > 1:
        ids = ", ".join(sorted(each.id for each in found)[:5])
        raise InvalidArgument(f"several sandboxes are meant by {pod!r}: {ids}; give one of these ids")
    return found


def find_sandbox(inventory: Inventory, pod: str) -> Sandbox | PastSandbox:
    """Return the sandbox that is meant: one that has a record, or else the newest that is gone.

    :param pod: its id or the beginning of it, namespace/name, or the name alone.
    :raise NotFound: there is none. :raise InvalidArgument: several pods are meant."""
    pod = pod[:_MAX_NAME]
    if not pod:
        raise InvalidArgument("no pod is named: give its namespace/name, or its sandbox's id")
    past = list(inventory.past)
    for there in (list(inventory), past):
        named = [each for each in there if pod in (each.pod, each.record.id)]
        named = named or [each for each in there if pod == each.pod.partition("/")[2]]
        found = named or [each for each in there if each.record.id.startswith(pod)]
        if len({each.pod if named else each.record.id for each in found}) > 1:
            several = ", ".join(sorted(f"{each.pod} ({each.record.id[:13]})" for each in found)[:5])
            raise InvalidArgument(f"several pods are meant by {pod!r}: {several}; say which")
        if found:
            return max(found, key=lambda each: each.record.created_at)
    raise NotFound(f"nothing is known of a pod {pod!r} here: give namespace/name, or its sandbox's id")


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
