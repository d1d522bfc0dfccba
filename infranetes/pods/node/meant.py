# SPDX-License-Identifier: Apache-2.0
"""Finds the sandbox that a person means by a pod's name or by an id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from infranetes.pods.node.inventory import Inventory, PastSandbox, Sandbox
from infranetes.pods.store.states import WITH_VM
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound

MAX_NAME = 520
AnySandbox = TypeVar("AnySandbox", Sandbox, PastSandbox)


def find_sandbox(inventory: Inventory, pod: str) -> Sandbox | PastSandbox:
    """Return the sandbox that is meant: one that has a record, or else the newest that is gone.

    :param pod: its id or the beginning of it, namespace/name, or the name alone.
    :raise NotFound: there is none. :raise InvalidArgument: several pods are meant."""
    pod = pod[:MAX_NAME]
    meant = _newest_meant(inventory, pod) or _newest_meant(inventory.past, pod)
    if meant is None:
        raise NotFound(f"nothing is known of a pod {pod!r} here: give namespace/name, or its sandbox's id")
    return meant


def present_sandbox(inventory: Inventory, pod: str) -> Sandbox:
    """Return the sandbox that is meant, if it has a record.

    :raise FailedPrecondition: it is gone. :raise NotFound, InvalidArgument: as `find_sandbox`."""
    meant = find_sandbox(inventory, pod)
    if isinstance(meant, PastSandbox):
        raise FailedPrecondition(f"sandbox {meant.record.id} is gone, and its VM with it")
    return meant


def sandbox_with_vm(inventory: Inventory, pod: str) -> Sandbox:
    """Return the sandbox that is meant, of those with a VM.

    :raise NotFound, InvalidArgument: as `find_sandbox`."""
    pod = pod[:MAX_NAME]
    meant = _newest_meant(sandboxes_with_vms(inventory), pod)
    if meant is None:
        raise NotFound(f"no pod {pod!r} has a VM here: give namespace/name, or its sandbox's id")
    return meant


def sandboxes_with_vms(inventory: Inventory) -> list[Sandbox]:
    """Return the sandboxes that have a VM, in the order of their pods' names."""
    sandboxes = [sandbox for sandbox in inventory if sandbox.record.state in WITH_VM]
    return sorted(sandboxes, key=lambda sandbox: sandbox.pod)


def _newest_meant(sandboxes: Iterable[AnySandbox], pod: str) -> AnySandbox | None:
    """Return the sandbox with this name or id, of several of one pod the newest; None: there is none."""
    if not pod:
        raise InvalidArgument("no pod is named: give its namespace/name, or its sandbox's id")
    sandboxes = list(sandboxes)
    named = [sandbox for sandbox in sandboxes if pod in (sandbox.pod, sandbox.record.id)]
    named = named or [sandbox for sandbox in sandboxes if pod == sandbox.pod.partition("/")[2]]
    meant = named or [sandbox for sandbox in sandboxes if sandbox.record.id.startswith(pod)]
    if len({sandbox.pod if named else sandbox.record.id for sandbox in meant}) > 1:
        several = ", ".join(sorted(f"{sandbox.pod} ({sandbox.record.id[:13]})" for sandbox in meant)[:5])
        raise InvalidArgument(f"several pods are meant by {pod!r}: {several}; say which")
    return max(meant, key=lambda sandbox: sandbox.record.created_at, default=None)
