# SPDX-License-Identifier: Apache-2.0
"""Merges serialized lists: concatenated protobuf messages parse as one."""

from __future__ import annotations

from infranetes.delegate.wire import items, string_field
from infranetes_common.errors import ResourceExhausted

#: The largest message that kubelet accepts.
MAX_LIST = 16 * 1024 * 1024


def joined(ours: bytes, theirs: bytes) -> bytes:
    """Return both lists as one.

    :raise ResourceExhausted: it is larger than kubelet takes."""
    if len(ours) + len(theirs) > MAX_LIST:
        raise ResourceExhausted(
            f"the list is over {MAX_LIST} bytes: {len(ours)} of pods in VMs and {len(theirs)} of the "
            "delegate's; remove pods that have ended"
        )
    return ours + theirs


def only_new(ours: bytes, theirs: bytes) -> bytes:
    """Return both lists as one, without those of ours that have the name (field 1) of one of theirs."""
    names = {string_field(item) for _, item in items(theirs, 1)}
    return joined(
        b"".join(whole for whole, item in items(ours, 1) if string_field(item) not in names), theirs
    )
