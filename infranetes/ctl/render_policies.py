# SPDX-License-Identifier: Apache-2.0
"""The daemon's answers about NetworkPolicies, as text for people and as JSON for programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from infranetes.ctl.render_services import seconds
from infranetes.ctl.tables import Json, lines, some, table
from infranetes_common.wire import control

OFF = "NetworkPolicies don't hold on this node: kubernetes.network_policies is off"


def policies_json(answer: control.GetPoliciesResponse, options: argparse.Namespace) -> Json:
    """Return what `policies` answers."""
    return {
        "enabled": answer.enabled,
        "complete": answer.complete,
        "troubles": _troubles(answer),
        "pods": [_pod_json(each) for each in answer.pods],
    }


def _pod_json(pod: control.PodPolicies) -> Json:
    return {
        "sandbox_id": pod.sandbox_id,
        "namespace": pod.namespace,
        "name": pod.name,
        "address": pod.address,
        "policies": [
            {"name": each.name, "ingress": each.ingress, "egress": each.egress} for each in pod.policies
        ],
        "known": pod.known,
        "current": pod.current,
        "trouble": pod.trouble,
        "ingress": _direction_json(pod.ingress) if pod.HasField("ingress") else None,
        "egress": _direction_json(pod.egress) if pod.HasField("egress") else None,
    }


def _direction_json(direction: control.Direction) -> list[Json]:
    return [
        {
            "networks": list(each.networks),
            "network_count": each.network_count,
            "ports": list(each.ports) or None,
        }
        for each in direction.allowed
    ]


def _troubles(answer: control.GetPoliciesResponse) -> list[str]:
    return [f"{each.path}: {each.trouble}{_age(each)}" for each in answer.followed if each.trouble]


def _age(kind: control.Followed) -> str:
    known = kind.listed and kind.HasField("heard_seconds")
    return f"; known as of {seconds(kind.heard_seconds)} ago" if known else ""


def policies_text(answer: control.GetPoliciesResponse, options: argparse.Namespace) -> str:
    """Return what `policies` answers."""
    if not answer.enabled:
        return OFF
    state = (
        "" if answer.complete else "not all policies, namespaces and pods are known yet: new pods are closed"
    )
    if options.pod and answer.pods:
        return lines(*_troubles(answer), state, *_pod_lines(answer.pods[0]))
    head = ("POD", "NAME", "RECEIVES", "SENDS", "POLICIES", "IN FORCE")
    rows = [
        (
            pod.sandbox_id[:13],
            f"{pod.namespace}/{pod.name}",
            _short(pod, "ingress"),
            _short(pod, "egress"),
            some([each.name for each in pod.policies]),
            _in_force(pod),
        )
        for pod in answer.pods
    ]
    return lines(*_troubles(answer), state, table(head, rows) if rows else "no pod has a VM")


def _in_force(pod: control.PodPolicies) -> str:
    words = "yes" if pod.current else "an earlier one" if pod.known else "not known"
    return words + (f": {pod.trouble}" if pod.trouble else "")


def _short(pod: control.PodPolicies, direction: str) -> str:
    if not pod.known:
        return "nothing"
    if not pod.HasField(direction):
        return "everything"
    return "some" if getattr(pod, direction).allowed else "nothing"


def _pod_lines(pod: control.PodPolicies) -> Iterator[str]:
    yield f"pod {pod.namespace}/{pod.name}, {pod.address}; in force: {_in_force(pod)}"
    for each in pod.policies:
        kinds = [kind for kind, holds in (("Ingress", each.ingress), ("Egress", each.egress)) if holds]
        yield f"  policy {each.name}: {', '.join(kinds)}"
    if not pod.policies:
        yield "  no policy selects it"
    for verb, side, direction in (("receives", "from", "ingress"), ("sends", "to", "egress")):
        amount = _short(pod, direction)
        if amount != "some":
            besides = ", but from its own node" if (direction, amount) == ("ingress", "nothing") else ""
            yield f"it {verb} {amount}{besides}"
            continue
        yield f"it {verb}"
        for allowed in getattr(pod, direction).allowed:
            ports = some(allowed.ports, most=20) or "everything"
            yield f"  {ports} {side} {some(allowed.networks, allowed.network_count, 20)}"
