# SPDX-License-Identifier: Apache-2.0
"""The daemon's answers about Services, as text for people and as JSON for programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from google.protobuf.message import Message

from infranetes.ctl.tables import Json, at, lines, some, table
from infranetes_common.wire import control

OFF = "no VM is told of Services: kubernetes.kubeconfig is not set, or kubernetes.service_proxy is off"
Answer = control.GetServicesResponse | control.TraceServiceResponse
_WORDS = {
    "refused": "refused at once",
    "dropped": "dropped",
    "other port": "refused at once",
    "unallocated": "dropped",
    "untouched": "sent as they are",
}


def _optional(message: Message, field: str) -> float | None:
    found: float | None = getattr(message, field) if message.HasField(field) else None
    return found


# ---- JSON


def services_json(answer: Answer, options: argparse.Namespace) -> Json:
    """Return what `services` and `services --trace` answer."""
    return _trace_json(answer) if isinstance(answer, control.TraceServiceResponse) else _all_json(answer)


def _all_json(answer: control.GetServicesResponse) -> Json:
    followed = [
        {
            "path": each.path,
            "optional": each.optional,
            "listed": each.listed,
            "trouble": each.trouble,
            "heard_seconds": _optional(each, "heard_seconds"),
        }
        for each in answer.followed
    ]
    return {
        "enabled": answer.enabled,
        "complete": answer.complete,
        "number": answer.number,
        "rule_count": answer.rule_count,
        "service_cidrs": list(answer.ranges),
        "followed": followed,
        "vms": [_vm_json(each) for each in answer.vms],
        "rules": [_rule_json(each) for each in answer.rules],
    }


def _vm_json(vm: control.VmServices) -> Json:
    found: Json = {
        "sandbox_id": vm.sandbox_id,
        "namespace": vm.namespace,
        "name": vm.name,
        "address": vm.address,
        "told": vm.told,
        "by_node": vm.by_node,
        "current": vm.current,
        "trouble": vm.trouble,
        "measured": vm.measured,
        "counts_trouble": vm.counts_trouble,
        "counts": None,
    }
    for name in ("number", "behind", "heard_seconds", "last_seconds", "p99_seconds"):
        found[name] = _optional(vm, name)
    if vm.HasField("counts"):
        names = ("rules", "refused_packets", "dropped_packets", "flows", "max_flows")
        found["counts"] = {name: getattr(vm.counts, name) for name in names}
    return found


def _rule_json(rule: control.ServiceRule) -> Json:
    return {
        "address": rule.address,
        "protocol": rule.protocol,
        "port": rule.port,
        "services": list(rule.services),
        "endpoints": list(rule.endpoints),
        "without_endpoints": "dropped" if rule.dropped else "refused",
        "cluster_ip": rule.cluster_ip,
        "affinity_seconds": rule.affinity_seconds,
        "source_ranges": list(rule.source_ranges),
    }


def _trace_json(answer: control.TraceServiceResponse) -> Json:
    return {
        "vm": _vm_json(answer.vm),
        "services": list(answer.services),
        "node": _verdict_json(answer.node),
        "in_vm": _verdict_json(answer.in_vm) if answer.HasField("in_vm") else None,
        "same": same(answer),
    }


def _verdict_json(verdict: control.ServiceVerdict) -> Json:
    return {
        "outcome": verdict.outcome,
        "why": verdict.why,
        "endpoints": list(verdict.endpoints),
        "endpoint_count": verdict.endpoint_count,
        "affinity_seconds": verdict.affinity_seconds,
    }


# ---- text


def seconds(value: float | None) -> str:
    """Return a duration in words; "" if it is not known."""
    if value is None:
        return ""
    return f"{value * 1000:.0f}ms" if value < 1 else f"{value:.1f}s" if value < 10 else f"{value:.0f}s"


def services_text(answer: Answer, options: argparse.Namespace) -> str:
    """Return what `services` and `services --trace` answer."""
    return _trace_text(answer, options) if isinstance(answer, control.TraceServiceResponse) else _all(answer)


def _all(answer: control.GetServicesResponse) -> str:
    if not answer.enabled:
        return OFF
    troubles = [f"{each.path}: {each.trouble}" for each in answer.followed if _counts(each)]
    heard = [each.heard_seconds for each in answer.followed if each.HasField("heard_seconds")]
    state = f"heard of {seconds(min(heard))} ago" if heard else "never heard of"
    counts = [line for each in answer.vms for line in _counts_lines(each)]
    return lines(
        f"API server: {state}" + ("" if answer.complete else "; not all has been listed yet"),
        *(f"  {each}" for each in troubles),
        f"{answer.rule_count} rules, change {answer.number}"
        + (f", ServiceCIDRs {', '.join(answer.ranges)}" if answer.ranges else ""),
        f"\n{_vms_table(answer.vms)}",
        *counts,
        f"\n{_rules_table(answer.rules)}" if answer.rules else "no rules",
    )


def _counts(each: control.Followed) -> bool:
    return bool(each.trouble) and not each.optional


def _vms_table(vms: Iterable[control.VmServices]) -> str:
    head = ("POD", "NAME", "RULES", "CHANGE", "HEARD", "LAST", "P99", "TROUBLE")
    rows = [
        (
            vm.sandbox_id[:13],
            f"{vm.namespace}/{vm.name}",
            _state(vm),
            f"{vm.number}" if vm.HasField("number") else "",
            seconds(_optional(vm, "heard_seconds")),
            seconds(_optional(vm, "last_seconds")),
            seconds(_optional(vm, "p99_seconds")),
            vm.trouble,
        )
        for vm in vms
    ]
    return table(head, rows) if rows else "no pod has a VM"


def _state(vm: control.VmServices) -> str:
    if not vm.told:
        return "not told"
    state = f"{vm.behind} behind" if vm.HasField("behind") else "unknown"
    return ("current" if vm.current else state) + (" on the node" if vm.by_node else "")


def _counts_lines(vm: control.VmServices) -> list[str]:
    if vm.counts_trouble:
        return [f"{'the node' if vm.by_node else 'the VM'} does not say what it has: {vm.counts_trouble}"]
    if not vm.HasField("counts"):
        return []
    its = vm.counts
    flows = f"; {its.flows} of {its.max_flows} connections are followed" if its.max_flows else ""
    return [
        f"{_where(vm)}: {its.rules} rules; packets refused: {its.refused_packets}, "
        f"dropped: {its.dropped_packets}{flows}"
    ]


def _where(vm: control.VmServices) -> str:
    """Return where what translates for a VM is."""
    return "on the node, for all VMs on its bridge" if vm.by_node else "in the VM"


def _rules_table(rules: Iterable[control.ServiceRule]) -> str:
    head = ("SERVICE", "ADDRESS", "ENDPOINTS", "MORE")
    rows = [
        (
            rule.services[0] if rule.services else "",
            f"{at(rule.address, rule.port)}/{rule.protocol}",
            some(rule.endpoints) or ("none: dropped" if rule.dropped else "none: refused"),
            _more(rule),
        )
        for rule in sorted(rules, key=lambda rule: (list(rule.services), rule.address, rule.port))
    ]
    return table(head, rows)


def _more(rule: control.ServiceRule) -> str:
    words = []
    if rule.affinity_seconds:
        words.append(f"affinity {rule.affinity_seconds} s")
    if rule.source_ranges:
        words.append(f"only from {some(rule.source_ranges)}")
    if len(rule.services) > 1:
        words.append(f"also wanted by {some(rule.services[1:])}")
    return "; ".join(words)


def _trace_text(answer: control.TraceServiceResponse, options: argparse.Namespace) -> str:
    vm = answer.vm
    whose = f"{answer.services[0]}'s" if answer.services else "no Service's"
    if same(answer):
        in_force = "the same is in force"
    elif answer.HasField("in_vm"):
        in_force = _becomes(answer.in_vm)
    else:
        in_force = f"not known: {vm.counts_trouble}"
    behind = "" if vm.current else f"the VM's rules: {_state(vm)}" + (f": {vm.trouble}" if vm.trouble else "")
    others = f"  also wanted by {some(answer.services[1:])}" if len(answer.services) > 1 else ""
    return lines(
        f"{options.trace} is {whose}",
        others,
        f"connections of {vm.namespace}/{vm.name} are {_becomes(answer.node)}",
        f"{_where(vm)}: {in_force}",
        behind,
    )


def _becomes(verdict: control.ServiceVerdict) -> str:
    if verdict.outcome != "translated":
        return _WORDS.get(verdict.outcome, "of unknown fate") + (f": {verdict.why}" if verdict.why else "")
    affinity = verdict.affinity_seconds
    how = f"sent to one of these, for {affinity} s the same" if affinity else "spread evenly"
    return f"{how}: {some(verdict.endpoints, verdict.endpoint_count)}"


def same(answer: control.TraceServiceResponse) -> bool:
    """Whether what the node knows is in force in the VM."""
    node, in_vm = answer.node, answer.in_vm
    return answer.HasField("in_vm") and (
        (node.outcome, node.affinity_seconds, node.endpoint_count, set(node.endpoints))
        == (in_vm.outcome, in_vm.affinity_seconds, in_vm.endpoint_count, set(in_vm.endpoints))
    )
