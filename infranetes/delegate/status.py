# SPDX-License-Identifier: Apache-2.0
"""Status on a node with a delegate: the delegate's own, to which ours is added so that it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from infranetes.delegate.channel import Delegate, refused_name
from infranetes.delegate.owners import Owners
from infranetes_common.errors import Unavailable
from infranetes_common.wire import cri

PROVIDER = "InfranetesProvider"
DELEGATE = "InfranetesDelegate"
INFO = "infranetes"

_SAME = (
    "the runtime handler {name!r} is the delegate's, too: give it another name in handlers or "
    "runtime_handlers, and in its RuntimeClass"
)
_READY = "RuntimeReady"
# kubelet makes the node NotReady if one of these is false, so only the delegate's count.
_DELEGATES_OWN = frozenset({_READY, "NetworkReady"})


def with_additions(theirs: bytes, ours: bytes, delegate: Delegate, owners: Owners) -> bytes:
    """Return the delegate's StatusResponse with our conditions, handlers and information.

    Joined messages are one message, and the lists in it are joined too: the delegate's bytes come first, as
    they came. A provider that is not ready fails pods in VMs, not the node.

    :raise Unavailable: the delegate's is not such a message."""
    try:
        their_status = cri.StatusResponse.FromString(theirs)
    except Exception:  # DecodeError; its class differs between protobuf's implementations
        raise Unavailable("the delegate's Status can't be read") from None
    our_status = cri.StatusResponse.FromString(ours)
    handlers = [each for each in our_status.runtime_handlers if each.name]
    known = [each.name for each in their_status.runtime_handlers]
    names = [each.name for each in handlers]
    for name in names:
        delegate.refuse(refused_name(name), _SAME.format(name=name) if name in known else "")
    refused = cri.RuntimeCondition(type=DELEGATE, status=True)
    if words := _refusal(delegate, owners, names):
        refused = cri.RuntimeCondition(type=DELEGATE, status=False, reason="DelegateRefused", message=words)
    conditions = [*_conditions(our_status), refused]
    added = cri.StatusResponse(status=cri.RuntimeStatus(conditions=conditions))
    if "" not in known:  # else kubelet doesn't know the handler of pods without a RuntimeClass
        added.runtime_handlers.add(name="")
    added.runtime_handlers.extend(each for each in handlers if each.name not in known)
    if our_status.info:
        found = {"delegate": delegate.shown(), **{key: _value(text) for key, text in our_status.info.items()}}
        added.info[INFO] = json.dumps(found)
    return theirs + added.SerializeToString()


def _conditions(ours: cri.StatusResponse) -> list[cri.RuntimeCondition]:
    conditions = [each for each in ours.status.conditions if each.type not in _DELEGATES_OWN]
    for each in ours.status.conditions:
        if each.type == _READY:
            conditions.append(
                cri.RuntimeCondition(
                    type=PROVIDER, status=each.status, reason=each.reason, message=each.message
                )
            )
    return conditions


def _refusal(delegate: Delegate, owners: Owners, handlers: Sequence[str]) -> str:
    """Say what the delegate is refused for, and whose pods that concerns."""
    words = []
    for about, why in delegate.refusals.items():
        if names := ", ".join(name for name in handlers if about in owners.needs(name)):
            words.append(f"{why} (pods of these handlers are refused: {names})")
    return "; ".join(words)


def _value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value
