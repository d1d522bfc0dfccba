# SPDX-License-Identifier: Apache-2.0
"""Filters shadow sandboxes, the delegate's that hold the network of pods of ours, out of its answers.

They are known by a label. Where that is not told, as with metrics and with events of what is removed, they
are known by the ids that were seen with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from infranetes.delegate.wire import items, string_field
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

#: The label of a shadow sandbox. Its value is the id of our sandbox.
SHADOW_OF = "infranetes.io/shadow-of"
#: Another label of it: the state directory of the daemon that made it, which alone may sweep it.
SHADOW_BY = "infranetes.io/shadow-by"
#: The most ids that are kept: many times a node's pods, so that each is kept long after its sandbox's end.
MAX_IDS = 4096
#: RPCs whose items have no labels; field 1 is the sandbox's id.
UNLABELLED = frozenset({"ListPodSandboxMetrics", "StreamPodSandboxMetrics"})

_MARK = SHADOW_OF.encode()
_Told = tuple[str, Mapping[str, str]]


def _sandbox(item: bytes) -> _Told:
    told = cri.PodSandbox.FromString(item)
    return told.id, told.labels


def _stats(item: bytes) -> _Told:
    told = cri.PodSandboxStats.FromString(item).attributes
    return told.id, told.labels


# The functions that return the id and labels of an item, which is a list's field 1.
_TOLD: Mapping[str, Callable[[bytes], _Told]] = {
    "ListPodSandbox": _sandbox,
    "StreamPodSandboxes": _sandbox,
    "ListPodSandboxStats": _stats,
    "StreamPodSandboxStats": _stats,
}


class Hidden:
    """The ids of shadow sandboxes, as far as they have been seen; also those of another daemon beside us."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}  # in the order in which they were last seen

    def note(self, id: str) -> None:
        """Know the id of a shadow from now on."""
        self._ids.pop(id, None)
        self._ids[id] = None
        if len(self._ids) > MAX_IDS:
            del self._ids[next(iter(self._ids))]

    def without_shadows(self, rpc: str, listed: bytes) -> bytes:
        """Return the delegate's list without shadow sandboxes; the same bytes if it has none."""
        if rpc in UNLABELLED and self._ids:
            return b"".join(
                whole for whole, item in items(listed, 1) if not item or string_field(item) not in self._ids
            )
        told = _TOLD.get(rpc)
        if told is None or _MARK not in listed:
            return listed
        return b"".join(
            whole for whole, item in items(listed, 1) if _MARK not in item or not self._noted(*told(item))
        )

    def is_shadow(self, event: bytes) -> bool:
        """Return whether a ContainerEventResponse is of a shadow sandbox."""
        if _MARK in event:
            status = cri.ContainerEventResponse.FromString(event).pod_sandbox_status
            if self._noted(status.id, status.labels):
                return True
        # The event of a removed sandbox has no labels any more.
        return bool(self._ids) and string_field(event) in self._ids

    def _noted(self, id: str, labels: Mapping[str, str]) -> bool:
        shadow = SHADOW_OF in labels
        if shadow:
            self.note(id)
        return shadow


def refuse_label(request: bytes) -> None:
    """Refuse a RunPodSandboxRequest of the delegate's pods with our label, which would hide the pod.

    :raise InvalidArgument: it has it."""
    if _MARK in request and SHADOW_OF in cri.RunPodSandboxRequest.FromString(request).config.labels:
        raise InvalidArgument(f"config.labels: {SHADOW_OF} is for the runtime's own sandboxes; leave it out")
