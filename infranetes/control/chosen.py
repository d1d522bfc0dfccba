# SPDX-License-Identifier: Apache-2.0
"""The pods that a question is about."""

from __future__ import annotations

from infranetes.kubernetes.cluster import Cluster
from infranetes.pods.context import NodeContext
from infranetes.pods.inventory import Sandbox
from infranetes.pods.states import WITH_VM
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.wire import control

_MAX_NAME = 520


def chosen(node: NodeContext, pod: str) -> list[Sandbox]:
    """Return the sandboxes with VMs, or the one that is meant.

    :param pod: the beginning of its id, or namespace/name; empty: all.
    :raise NotFound: there is none. :raise InvalidArgument: there are several.
    """
    there = [each for each in node.inventory if each.record.state in WITH_VM]
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
