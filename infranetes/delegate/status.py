# SPDX-License-Identifier: Apache-2.0
"""Status on a node with a delegate: the delegate's own, to which ours is added so that it changes nothing."""

from __future__ import annotations

import json

from infranetes.delegate.channel import Delegate
from infranetes_common.errors import Unavailable
from infranetes_common.wire import cri

PROVIDER = "InfranetesProvider"
DELEGATE = "InfranetesDelegate"
INFO = "infranetes"

_READY = "RuntimeReady"
# kubelet makes the node NotReady by these, which are the delegate's to say.
_DELEGATES_OWN = frozenset({_READY, "NetworkReady"})


def with_additions(theirs: bytes, ours: bytes, delegate: Delegate) -> bytes:
    """Return the delegate's StatusResponse with our conditions, handlers and information.

    Joined messages are one message, and the lists in it are joined too: the delegate's bytes come first, as
    they came. A provider that is not ready fails pods in VMs, not the node.

    :raise Unavailable: the delegate's is no such message."""
    try:
        their_status = cri.StatusResponse.FromString(theirs)
    except Exception:  # DecodeError; its class differs between protobuf's implementations
        raise Unavailable("the delegate's Status can't be read") from None
    our_status = cri.StatusResponse.FromString(ours)
    handlers = [each for each in our_status.runtime_handlers if each.name]
    known = [each.name for each in their_status.runtime_handlers]
    delegate.refuse("runtime handlers", _conflict([each.name for each in handlers], known))
    added = cri.StatusResponse(status=cri.RuntimeStatus(conditions=_conditions(our_status, delegate)))
    if "" not in known:  # else kubelet doesn't know the handler of pods without a RuntimeClass
        added.runtime_handlers.add(name="")
    added.runtime_handlers.extend(each for each in handlers if each.name not in known)
    if our_status.info:
        found = {"delegate": delegate.shown(), **{key: _value(text) for key, text in our_status.info.items()}}
        added.info[INFO] = json.dumps(found)
    return theirs + added.SerializeToString()


def _conditions(ours: cri.StatusResponse, delegate: Delegate) -> list[cri.RuntimeCondition]:
    conditions = [each for each in ours.status.conditions if each.type not in _DELEGATES_OWN]
    for each in ours.status.conditions:
        if each.type == _READY:
            conditions.append(
                cri.RuntimeCondition(
                    type=PROVIDER, status=each.status, reason=each.reason, message=each.message
                )
            )
    refusal = delegate.refusal
    conditions.append(
        cri.RuntimeCondition(
            type=DELEGATE, status=not refusal, reason="DelegateRefused" if refusal else "", message=refusal
        )
    )
    return conditions


def _conflict(ours: list[str], theirs: list[str]) -> str:
    both = sorted(set(ours) & set(theirs))
    if not both:
        return ""
    return (
        f"the runtime handler {both[0]!r} is the delegate's, too: give it another name in handlers or "
        "runtime_handlers, and in its RuntimeClass"
    )


def _value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value
