# SPDX-License-Identifier: Apache-2.0
"""Shadow sandboxes: the delegate's sandboxes that hold the network of pods of ours, and that nobody is shown.

They are known by a label, so that nothing has to be remembered of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from infranetes.delegate.wire import items
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

#: The label of a shadow sandbox; its value is the id of the sandbox of ours.
SHADOW_OF = "infranetes.io/shadow-of"
_MARK = SHADOW_OF.encode()


def _sandbox(item: bytes) -> Mapping[str, str]:
    return cri.PodSandbox.FromString(item).labels


def _stats(item: bytes) -> Mapping[str, str]:
    return cri.PodSandboxStats.FromString(item).attributes.labels


# What an item of a list's field 1 has for labels.
_LABELS: Mapping[str, Callable[[bytes], Mapping[str, str]]] = {
    "ListPodSandbox": _sandbox,
    "StreamPodSandboxes": _sandbox,
    "ListPodSandboxStats": _stats,
    "StreamPodSandboxStats": _stats,
}


def without_shadows(rpc: str, listed: bytes) -> bytes:
    """Return the delegate's list without shadow sandboxes; the same bytes if it has none."""
    labels = _LABELS.get(rpc)
    if labels is None or _MARK not in listed:
        return listed
    return b"".join(
        whole for whole, item in items(listed, 1) if _MARK not in item or SHADOW_OF not in labels(item)
    )


def is_shadow(event: bytes) -> bool:
    """Return whether a ContainerEventResponse is of a shadow sandbox."""
    return _MARK in event and SHADOW_OF in (
        cri.ContainerEventResponse.FromString(event).pod_sandbox_status.labels
    )


def refuse_label(request: bytes) -> None:
    """Refuse a RunPodSandboxRequest of the delegate's pods with our label, which would hide the pod.

    :raise InvalidArgument: it has it."""
    if _MARK in request and SHADOW_OF in cri.RunPodSandboxRequest.FromString(request).config.labels:
        raise InvalidArgument(f"config.labels: {SHADOW_OF} is for the runtime's own sandboxes; leave it out")
