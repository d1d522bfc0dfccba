# SPDX-License-Identifier: Apache-2.0
"""The daemon's answers as text for people and as JSON for programs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message

from infranetes.ctl import render_config, render_pod, render_policies, render_services, render_sizes
from infranetes.ctl.tables import Json, age, lines, table
from infranetes_common.wire import control

_NANOS = 1e9
_MAY_LACK = ("USD/H", "HANDLER", "WHY")  # columns that are left out where they would be empty
_SHORT = 13  # characters of an id, as crictl shows it
_MOST_WORDS = 120  # characters of a reason in a list; `describe` shows all of it


def as_json(command: str, answer: Message, options: argparse.Namespace) -> Json:
    """Return one document: times as seconds since 1970 UTC, costs as US dollars an hour or null."""
    return _JSON[command](answer, options)


def as_text(command: str, answer: Message, options: argparse.Namespace) -> str:
    """Return tables and sentences."""
    return _TEXT[command](answer, options)


# ---- JSON


def _vm(vm: control.Vm) -> Json:
    return {
        "id": vm.id,
        "state": vm.state,
        "address": vm.address,
        "size": vm.size,
        "cost_per_hour": vm.cost_per_hour if vm.HasField("cost_per_hour") else None,
        "created_at": vm.created_at / _NANOS,
        "detail": vm.detail,
        "sandbox_id": vm.sandbox_id,
        "provider": vm.provider,
    }


def _pod(pod: control.Pod) -> Json:
    return {
        "id": pod.id,
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "attempt": pod.attempt,
        "state": pod.state,
        "message": pod.message,
        "created_at": pod.created_at / _NANOS,
        "containers": pod.containers,
        "agent": pod.agent,
        "way": pod.way,
        "vm": _vm(pod.vm) if pod.HasField("vm") else None,
        "provider": pod.provider,
        "handler": pod.handler,
        "addresses": list(pod.addresses),
        "size": pod.size,
        "refused": {each.share: {"total": each.total, "lately": each.lately} for each in pod.refused},
    }


def _pooled(member: control.Pooled) -> Json:
    vm = _vm(member.vm)
    return {
        "id": member.id,
        "state": member.state,
        "message": member.message,
        "handler": member.handler,
        "vm": vm,
    }


def _pods_json(answer: control.ListPodsResponse, options: argparse.Namespace) -> Json:
    pods = [_pod(pod) for pod in answer.pods]
    providers = [{"name": each.name, "trouble": each.trouble} for each in answer.providers]
    return {
        "provider": answer.provider,
        "trouble": answer.trouble,
        "providers": providers,
        "cluster_troubles": list(answer.cluster_troubles),
        "pods": pods,
    }


def _console_json(answer: control.GetConsoleResponse, options: argparse.Namespace) -> Json:
    return {
        "sandbox_id": answer.sandbox_id,
        "vm_id": answer.vm_id,
        "ended_at": answer.ended_at / 1e9 if answer.ended_at else None,
        "detail": answer.detail,
        "text": answer.text,
        "output": answer.output,
    }


def _ended_json(answer: control.EndOrphansResponse, options: argparse.Namespace) -> Json:
    failed = [{"vm": _vm(one.vm), "error": one.error} for one in answer.failed]
    return {
        "dry_run": options.dry_run,
        "ended": [_vm(vm) for vm in answer.ended],
        "failed": failed,
        "troubles": list(answer.troubles),
    }


def _pool_json(answer: control.GetPoolResponse, options: argparse.Namespace) -> Json:
    return {
        "drained": answer.drained,
        "trouble": answer.trouble,
        "wanted": answer.wanted,
        "vms": [_pooled(member) for member in answer.vms],
    }


def _drain_json(answer: control.DrainPoolResponse, options: argparse.Namespace) -> Json:
    return {
        "dry_run": options.dry_run,
        "ended": [_pooled(member) for member in answer.ended],
        "left": [_pooled(member) for member in answer.left],
    }


_JSON: dict[str, Callable[[Any, argparse.Namespace], Json]] = {  # Any: the command's own answer
    "console": _console_json,
    "pods": _pods_json,
    "describe": lambda answer, options: render_pod.pod_json(answer, _pod(answer.pod)),
    "services": render_services.services_json,
    "policies": render_policies.policies_json,
    "sizes": render_sizes.sizes_json,
    "orphans": lambda answer, options: {
        "vms": [_vm(vm) for vm in answer.vms],
        "troubles": list(answer.troubles),
    },
    "end-orphans": _ended_json,
    "pool": _pool_json,
    "drain": _drain_json,
    "fill": lambda answer, options: {"wanted": answer.wanted},
    "config": render_config.config_json,
}


# ---- text


def cost(vms: Iterable[control.Vm]) -> str:
    """Return what VMs cost together, as far as that is known; "" if it is of none."""
    known = [vm.cost_per_hour for vm in vms if vm.HasField("cost_per_hour")]
    return f"{sum(known):.4f} USD an hour for {_count(len(known), 'VM')}" if known else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _price(vm: control.Vm) -> str:
    return f"{vm.cost_per_hour:.4f}" if vm.HasField("cost_per_hour") else ""


def _short(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _MOST_WORDS else f"{line[: _MOST_WORDS - 1]}…"


def _pods_text(answer: control.ListPodsResponse, options: argparse.Namespace) -> str:
    now = time.time()
    head = (
        *("POD", "NAME", "STATE", "HANDLER", "PROVIDER", "AGENT", "VM", "ADDRESS", "SIZE", "AGE", "USD/H"),
        "WHY",
    )
    rows = [
        (
            pod.id[:_SHORT],
            f"{pod.namespace}/{pod.name}",
            pod.state,
            pod.handler,
            pod.provider,
            render_pod.agent_words(pod),
            pod.vm.id,
            ",".join(pod.addresses),
            pod.size or "default",
            age(pod.created_at, now),
            _price(pod.vm),
            _short(pod.message),
        )
        for pod in sorted(answer.pods, key=lambda pod: (pod.namespace, pod.name, pod.attempt))
    ]
    troubles = [
        f"provider {each.name} is not ready: {each.trouble}" for each in answer.providers if each.trouble
    ]
    total = cost(pod.vm for pod in answer.pods)
    failed = sum(pod.state == "failed" for pod in answer.pods)
    counted = _count(len(rows) - failed, "pod")
    if failed:
        counted += f", and {failed} that failed to launch: `infranetes-ctl describe POD` tells more"
    return lines(
        *answer.cluster_troubles,
        table(head, rows, may_lack=_MAY_LACK),
        f"{counted}, {total}" if total else counted,
        *troubles,
    )


def _vms_text(vms: Sequence[control.Vm]) -> str:
    now = time.time()
    head = ("VM", "PROVIDER", "STATE", "ADDRESS", "SANDBOX", "SIZE", "AGE", "USD/H")
    rows = [
        (
            vm.id,
            vm.provider,
            vm.state,
            vm.address,
            vm.sandbox_id[:_SHORT],
            vm.size,
            age(vm.created_at, now),
            _price(vm),
        )
        for vm in vms
    ]
    return table(head, rows, may_lack=_MAY_LACK)


def _orphans_text(answer: control.ListOrphansResponse, options: argparse.Namespace) -> str:
    unasked = _unasked(answer.troubles)
    if not answer.vms:
        return lines(_NONE_FOUND if unasked else "no orphans", *unasked)
    return lines(_vms_text(answer.vms), _count(len(answer.vms), "orphan"), cost(answer.vms), *unasked)


_NONE_FOUND = "no orphans of the providers that could be asked"


def _unasked(troubles: Iterable[str]) -> list[str]:
    return [f"there may be more orphans: {trouble}" for trouble in troubles]


def _ended_text(answer: control.EndOrphansResponse, options: argparse.Namespace) -> str:
    verb = "would be ended" if options.dry_run else "ended"
    failed = [f"{one.vm.id} is not ended: {one.error}" for one in answer.failed]
    unasked = _unasked(answer.troubles)
    if not answer.ended and not failed:
        return lines(_NONE_FOUND if unasked else "no orphans", *unasked)
    shown = _vms_text(answer.ended) if answer.ended else ""
    return lines(shown, f"{_count(len(answer.ended), 'orphan')} {verb}", *failed, *unasked)


def _members_text(members: Sequence[control.Pooled]) -> str:
    now = time.time()
    head = ("VM", "HANDLER", "PROVIDER", "STATE", "ADDRESS", "SIZE", "AGE", "USD/H", "WHY")
    rows = [
        (
            one.vm.id,
            one.handler,
            one.vm.provider,
            one.state,
            one.vm.address,
            one.vm.size or "default",
            age(one.vm.created_at, now),
            _price(one.vm),
            one.message,
        )
        for one in members
    ]
    return table(head, rows, may_lack=_MAY_LACK)


def _pool_text(answer: control.GetPoolResponse, options: argparse.Namespace) -> str:
    idle = sum(one.state == "idle" for one in answer.vms)
    return lines(
        _members_text(answer.vms) if answer.vms else "",
        f"{idle} of {_count(answer.wanted, 'VM')} wait for pods",
        "drained: nothing is made until `infranetes-ctl pool fill`" if answer.drained else "",
        f"the last launch failed: {answer.trouble}" if answer.trouble else "",
        cost(one.vm for one in answer.vms),
    )


def _drain_text(answer: control.DrainPoolResponse, options: argparse.Namespace) -> str:
    verb = "would be ended" if options.dry_run else "ended"
    left = [f"{one.vm.id or one.id} is not ended yet; the daemon goes on trying" for one in answer.left]
    return lines(
        _members_text(answer.ended) if answer.ended else "",
        f"{_count(len(answer.ended), 'VM')} {verb}",
        *left,
    )


def _fill_text(answer: control.FillPoolResponse, options: argparse.Namespace) -> str:
    if not answer.wanted:
        return "the configuration has no pool.sizes: there is nothing to fill"
    return f"filling up to {_count(answer.wanted, 'VM')}"


def _console_text(answer: control.GetConsoleResponse, options: argparse.Namespace) -> str:
    state = "it runs, or is not removed yet"
    if answer.ended_at:
        ended = datetime.fromtimestamp(answer.ended_at / 1e9, UTC)
        state = f"removed at {ended:%Y-%m-%d %H:%M:%S} UTC"
    return lines(
        f"sandbox {answer.sandbox_id}, VM {answer.vm_id}: {state}",
        f"why it ended: {answer.detail}" if answer.detail else "",
        *(("---- the hypervisor's own messages", answer.output) if answer.output else ()),
        "---- console",
        answer.text or "(nothing)",
    )


_TEXT: dict[str, Callable[[Any, argparse.Namespace], str]] = {  # Any: the command's own answer
    "pods": _pods_text,
    "describe": render_pod.pod_text,
    "services": render_services.services_text,
    "policies": render_policies.policies_text,
    "sizes": render_sizes.sizes_text,
    "console": _console_text,
    "orphans": _orphans_text,
    "end-orphans": _ended_text,
    "pool": _pool_text,
    "drain": _drain_text,
    "fill": _fill_text,
    "config": render_config.config_text,
}
