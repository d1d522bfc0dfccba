# SPDX-License-Identifier: Apache-2.0
"""The daemon's answers as text for people and as JSON for programs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message

from infranetes.ctl import (
    kept,
    render_config,
    render_lists,
    render_pod,
    render_policies,
    render_services,
    render_sizes,
)
from infranetes.ctl.render_lists import SHORT, below, cost, count, just_names, price
from infranetes.ctl.tables import Column, Json, age, lines, listing
from infranetes.ctl.view import view_of
from infranetes_common.wire import control

_NANOS = 1e9


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
        "running": pod.running,
        "labels": dict(pod.labels),
        **({"node": pod.node} if pod.node else {}),
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
    "ps": render_lists.containers_json,
    "events": render_lists.events_json,
    "describe": lambda answer, options: render_pod.pod_json(answer, _pod(answer.pod)),
    "services": render_services.services_json,
    "policies": render_policies.policies_json,
    "sizes": render_sizes.sizes_json,
    "orphans": lambda answer, options: {
        "vms": [_vm(vm) for vm in answer.vms],
        "troubles": list(answer.troubles),
    },
    "end-orphans": _ended_json,
    "kept": kept.kept_json,
    "remove": kept.removed_json,
    "pool": _pool_json,
    "drain": _drain_json,
    "fill": lambda answer, options: {"wanted": answer.wanted},
    "config": render_config.config_json,
}


# ---- text


_VMS = (
    Column("VM", least=16),
    Column("PROVIDER", gives_way=2),
    Column("STATUS"),
    Column("AGE"),
    Column("IP", gives_way=3),
    Column("SIZE", least=8, gives_way=1),
    Column("USD/H", may_lack=True, gives_way=4),
    Column("SANDBOX", gives_way=5),
)
_MEMBERS = (
    Column("VM", least=16),
    Column("HANDLER", may_lack=True, gives_way=2),
    Column("PROVIDER", gives_way=3),
    Column("STATUS"),
    Column("AGE"),
    Column("IP", gives_way=4),
    Column("SIZE", least=8, gives_way=1),
    Column("USD/H", may_lack=True, gives_way=5),
    Column("WHY", may_lack=True, least=24),
)


def _vms_text(vms: Sequence[control.Vm], options: argparse.Namespace) -> str:
    now = time.time()
    rows = [
        (
            vm.id,
            vm.provider,
            vm.state,
            age(vm.created_at, now),
            vm.address,
            vm.size,
            price(vm),
            vm.sandbox_id[:SHORT],
        )
        for vm in vms
    ]
    return listing(_VMS, rows, view_of(options))


def _orphans_text(answer: control.ListOrphansResponse, options: argparse.Namespace) -> str:
    unasked = _unasked(answer.troubles)
    if just_names(options):
        return lines(*(vm.id for vm in answer.vms))
    if not answer.vms:
        return below(options, _NONE_FOUND if unasked else "no orphans", *unasked)
    counted = count(len(answer.vms), "orphan")
    return lines(_vms_text(answer.vms, options), below(options, counted, cost(answer.vms), *unasked))


_NONE_FOUND = "no orphans of the providers that could be asked"


def _unasked(troubles: Iterable[str]) -> list[str]:
    return [f"there may be more orphans: {trouble}" for trouble in troubles]


def _ended_text(answer: control.EndOrphansResponse, options: argparse.Namespace) -> str:
    verb = "would be ended" if options.dry_run else "ended"
    failed = [f"{one.vm.id} is not ended: {one.error}" for one in answer.failed]
    unasked = _unasked(answer.troubles)
    if not answer.ended and not failed:
        return lines(_NONE_FOUND if unasked else "no orphans", *unasked)
    shown = _vms_text(answer.ended, options) if answer.ended else ""
    return lines(shown, f"{count(len(answer.ended), 'orphan')} {verb}", *failed, *unasked)


def _members_text(members: Sequence[control.Pooled], options: argparse.Namespace) -> str:
    now = time.time()
    rows = [
        (
            one.vm.id,
            one.handler,
            one.vm.provider,
            one.state,
            age(one.vm.created_at, now),
            one.vm.address,
            one.vm.size or "default",
            price(one.vm),
            one.message,
        )
        for one in members
    ]
    return listing(_MEMBERS, rows, view_of(options))


def _pool_text(answer: control.GetPoolResponse, options: argparse.Namespace) -> str:
    if just_names(options):
        return lines(*(one.vm.id for one in answer.vms))
    waiting = sum(one.state in ("idle", "stopped") for one in answer.vms)
    said = (
        f"{waiting} of {count(answer.wanted, 'VM')} wait for pods",
        "drained: nothing is made until `infranetes-ctl pool fill`" if answer.drained else "",
        f"the last launch failed: {answer.trouble}" if answer.trouble else "",
        cost(one.vm for one in answer.vms),
    )
    return lines(_members_text(answer.vms, options) if answer.vms else "", below(options, *said))


def _drain_text(answer: control.DrainPoolResponse, options: argparse.Namespace) -> str:
    verb = "would be ended" if options.dry_run else "ended"
    left = [f"{one.vm.id or one.id} is not ended yet; the daemon goes on trying" for one in answer.left]
    return lines(
        _members_text(answer.ended, options) if answer.ended else "",
        f"{count(len(answer.ended), 'VM')} {verb}",
        *left,
    )


def _fill_text(answer: control.FillPoolResponse, options: argparse.Namespace) -> str:
    if not answer.wanted:
        return "the configuration has no pool.sizes: there is nothing to fill"
    return f"filling up to {count(answer.wanted, 'VM')}"


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
    "pods": render_lists.pods_text,
    "ps": render_lists.containers_text,
    "events": render_lists.events_text,
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
    "kept": kept.kept_text,
    "remove": kept.removed_text,
    "config": render_config.config_text,
}
