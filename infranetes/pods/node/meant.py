# SPDX-License-Identifier: Apache-2.0
"""Finds the sandbox that a person means by a pod's name or by an id.

What a command only shows may be named by the beginning of a name. What it acts on may not: once the pod
`web` is gone, `web` must not mean `web-admin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import TypeVar

from infranetes.pods.node.inventory import Container, Inventory, PastSandbox, Sandbox
from infranetes.pods.store.states import WITH_VM, ContainerState
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound

MAX_NAME = 520
# A guess takes no time that others wait for.
MAX_COMPARED = 300  # pods
MAX_GUESSED = 64  # characters of a name
_KINDS = ("pod/", "pods/", "po/")  # which kubectl writes before names
AnySandbox = TypeVar("AnySandbox", Sandbox, PastSandbox)
_Is = Callable[[str, str], bool]


def find_sandbox(inventory: Inventory, pod: str, *, whole: bool = False) -> Sandbox | PastSandbox:
    """Return the sandbox that is meant: one that has a record, or else the newest that is gone.

    :param pod: its id or the beginning of it, namespace/name, or the name alone or its beginning.
    :param whole: take no beginning of a name for the name.
    :raise NotFound: there is none. :raise InvalidArgument: several pods are meant."""
    pod = pod[:MAX_NAME]
    for exactly in (True,) if whole else (True, False):
        meant = _newest_meant(inventory, pod, exactly) or _newest_meant(inventory.past, pod, exactly)
        if meant is not None:
            return meant
    raise NotFound(_unknown(f"nothing is known of a pod {pod!r} here", inventory, pod))


def present_sandbox(inventory: Inventory, pod: str) -> Sandbox:
    """Return the sandbox that is meant by its whole name or by its id, if it has a record.

    :raise FailedPrecondition: it is gone. :raise NotFound, InvalidArgument: as `find_sandbox`."""
    meant = find_sandbox(inventory, pod, whole=True)
    if isinstance(meant, PastSandbox):
        raise FailedPrecondition(f"sandbox {meant.record.id} is gone, and its VM with it")
    return meant


def running_container(inventory: Inventory, pod: str, name: str) -> Container:
    """Return the container in which a command is to run.

    :param pod: as of `present_sandbox`; without a name, a container's id or the beginning of it too.
    :param name: its name, or its id or the beginning of it; "": the only one that runs.
    :raise NotFound: there is none. :raise InvalidArgument: several are meant.
    :raise FailedPrecondition: it does not run, or the pod is gone."""
    try:
        sandbox = present_sandbox(inventory, pod)
    except NotFound:
        by_id = [
            container for id, container in inventory.containers.items() if not name and id.startswith(pod)
        ]
        if len(by_id) != 1:
            raise
        return _running(by_id[0])
    every = list(sandbox.containers.values())
    running = [container for container in every if container.state is ContainerState.RUNNING]
    if not name:
        if len(running) > 1:
            which = ", ".join(container.config.metadata.name for container in running)
            raise InvalidArgument(f"pod {pod} has several containers: say which of {which} (--container)")
        if not running:
            raise FailedPrecondition(
                f"no container of pod {pod} runs: `infranetes-ctl describe {pod}` says why"
            )
        return running[0]
    named = [container for container in every if container.config.metadata.name == name]
    named = named or [container for container in every if container.id.startswith(name)]
    if not named:
        names = ", ".join(dict.fromkeys(container.config.metadata.name for container in every))
        raise NotFound(f"pod {pod} has no container {name[:80]!r}: it has {names or 'none'}")
    return _running(max(named, key=lambda container: container.record.created_at))


def _running(container: Container) -> Container:
    if container.state is not ContainerState.RUNNING:
        raise FailedPrecondition(
            f"container {container.config.metadata.name} does not run: it is {container.state.value}; "
            f"`infranetes-ctl describe {container.sandbox.pod}` says why"
        )
    return container


def sandbox_with_vm(inventory: Inventory, pod: str) -> Sandbox:
    """Return the sandbox that is meant, of those with a VM.

    :raise NotFound, InvalidArgument: as `find_sandbox`."""
    pod = pod[:MAX_NAME]
    those = sandboxes_with_vms(inventory)
    meant = _newest_meant(those, pod, True) or _newest_meant(those, pod, False)
    if meant is None:
        raise NotFound(_unknown(f"no pod {pod!r} has a VM here", inventory, pod))
    return meant


def sandboxes_with_vms(inventory: Inventory) -> list[Sandbox]:
    """Return the sandboxes that have a VM, in the order of their pods' names."""
    sandboxes = [sandbox for sandbox in inventory if sandbox.record.state in WITH_VM]
    return sorted(sandboxes, key=lambda sandbox: sandbox.pod)


def _newest_meant(sandboxes: Iterable[AnySandbox], pod: str, exactly: bool) -> AnySandbox | None:
    """Return the sandbox with this name or id, of several of one pod the newest; None: there is none.

    :param exactly: whether names have to be whole. The beginning of an id is always enough."""
    if not pod:
        raise InvalidArgument("no pod is named: give its namespace/name, or its sandbox's id")
    sandboxes = list(sandboxes)
    for name in _names(pod):
        named = _named(sandboxes, name, str.__eq__ if exactly else str.startswith)
        meant = named or [sandbox for sandbox in sandboxes if exactly and sandbox.record.id.startswith(name)]
        if len({sandbox.pod if named else sandbox.record.id for sandbox in meant}) > 1:
            several = ", ".join(sorted(f"{sandbox.pod} ({sandbox.record.id[:13]})" for sandbox in meant)[:5])
            raise InvalidArgument(f"several pods are meant by {pod!r}: {several}; say which")
        if meant:
            return max(meant, key=lambda sandbox: sandbox.record.created_at)
    return None


def _names(pod: str) -> Iterator[str]:
    """Yield what is named: `pod/web` is web of the namespace `pod`, or else web."""
    yield pod
    for kind in _KINDS:
        if pod.startswith(kind) and pod != kind:
            yield pod.removeprefix(kind)


def _named(sandboxes: Iterable[AnySandbox], pod: str, means: _Is) -> list[AnySandbox]:
    sandboxes = list(sandboxes)
    named = [sandbox for sandbox in sandboxes if means(sandbox.pod, pod) or sandbox.record.id == pod]
    return named or [sandbox for sandbox in sandboxes if means(sandbox.pod.partition("/")[2], pod)]


def _unknown(words: str, inventory: Inventory, pod: str) -> str:
    """Return an error on a name that nothing has, with those that it may be meant for."""
    words += ": give namespace/name, or its sandbox's id"
    guessed = pod.rpartition("/")[2]
    alike = {
        sandbox.pod: sandbox.pod.partition("/")[2] for sandbox in inventory if len(guessed) <= MAX_GUESSED
    }
    close = get_close_matches(guessed, alike.values(), n=3, cutoff=0.6) if len(alike) <= MAX_COMPARED else []
    near = sorted(name for name, alone in alike.items() if alone in close)[:3]
    return f"{words}; did you mean {' or '.join(near)}?" if near else words
