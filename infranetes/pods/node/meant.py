# SPDX-License-Identifier: Apache-2.0
"""Finds the sandbox that a person means by a pod's name or by an id."""

from __future__ import annotations

from infranetes.pods.node.inventory import Inventory, PastSandbox, Sandbox
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound

MAX_NAME = 520


def find_sandbox(inventory: Inventory, pod: str) -> Sandbox | PastSandbox:
    """Return the sandbox that is meant: one that has a record, or else the newest that is gone.

    :param pod: its id or the beginning of it, namespace/name, or the name alone.
    :raise NotFound: there is none. :raise InvalidArgument: several pods are meant."""
    pod = pod[:MAX_NAME]
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


def present_sandbox(inventory: Inventory, pod: str) -> Sandbox:
    """Return the sandbox that is meant, if it has a record.

    :raise FailedPrecondition: it is gone. :raise NotFound, InvalidArgument: as `find_sandbox`."""
    meant = find_sandbox(inventory, pod)
    if isinstance(meant, PastSandbox):
        raise FailedPrecondition(f"sandbox {meant.record.id} is gone, and its VM with it")
    return meant
