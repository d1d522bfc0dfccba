# SPDX-License-Identifier: Apache-2.0
"""What happened to a pod, as text and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from infranetes.ctl.tables import Json, lines, table
from infranetes_common.wire import control

_NANOS = 1e9
_REACHED = {
    "agent": "by its agent",
    "none": "by its console alone: `kubectl attach -it`, `infranetes-ctl console`",
}
_ENDED = ("off", "crashed")  # the states of guests that do not execute any more


def pod_json(answer: control.DescribePodResponse, pod: Json) -> Json:
    """Return one document. :param pod: the part of it that is about the pod itself."""
    return {
        "pod": pod,
        "containers": [container_json(each) for each in answer.containers],
        "guest": _guest_json(answer.guest) if answer.HasField("guest") else None,
        "steps": [step_json(each) for each in answer.steps],
        "left_out": answer.left_out,
    }


def agent_words(pod: control.Pod) -> str:
    """Return whether the agent can be reached; of a guest without ours that can be: by which way."""
    return pod.way if pod.way and pod.agent == "live" else pod.agent


def _guest_json(guest: control.Guest) -> Json:
    ended = guest.state in _ENDED
    return {
        "way": guest.way,
        "troubles": {each.way: each.trouble for each in guest.troubles},
        "state": guest.state or None,
        "trouble": guest.trouble,
        "started_at": guest.started_at / _NANOS if guest.started_at else None,
        "finished_at": guest.finished_at / _NANOS if guest.finished_at else None,
        "exit_code": guest.exit_code if ended else None,
        "reason": guest.reason,
        "message": guest.message,
    }


def container_json(one: control.PodContainer) -> Json:
    """Return a container's part of a document."""
    return {
        "id": one.id,
        "name": one.name,
        "attempt": one.attempt,
        "state": one.state,
        "image": one.image,
        "created_at": one.created_at / _NANOS,
        "started_at": one.started_at / _NANOS if one.started_at else None,
        "finished_at": one.finished_at / _NANOS if one.finished_at else None,
        "exit_code": one.exit_code if one.finished_at else None,
        "reason": one.reason,
        "message": one.message,
        "log_directory": one.log_directory,
        "log_path": one.log_path,
    }


def step_json(step: control.Step) -> Json:
    """Return a step's part of a document."""
    return {
        "what": step.what,
        "container": step.container,
        "began_at": step.began_at / _NANOS,
        "seconds": (step.ended_at - step.began_at) / _NANOS if step.ended_at else None,
        "under_way": not step.ended_at,
        "detail": step.detail,
        "error": step.error,
    }


def pod_text(answer: control.DescribePodResponse, options: argparse.Namespace) -> str:
    """Return the facts of the pod, and tables of its containers and its timeline."""
    guest = _guest(answer.guest) if answer.HasField("guest") else []
    parts = _facts(answer.pod, guest), _containers(answer), _timeline(answer)
    return "\n\n".join(part for part in parts if part)


def _guest(guest: control.Guest) -> list[str]:
    """Return lines on the guest: its state, and how it is reached."""
    words = guest.state or f"in a state that is not known: {guest.trouble}"
    if guest.state in _ENDED:
        words += f" with exit code {guest.exit_code} since {_moment(guest.finished_at)} UTC"
    elif guest.started_at:
        words += f" since {_moment(guest.started_at)} UTC"
    said = "; ".join(each for each in (guest.reason, guest.message) if each)
    reached = _REACHED.get(guest.way, f"by {guest.way}")
    return [
        f"guest      {words}" + (f": {said}" if said else ""),
        f"reached    {reached}" if guest.state not in _ENDED else "",
        *(f"not by     {each.way}: {each.trouble}" for each in guest.troubles),
    ]


def _facts(pod: control.Pod, guest: Sequence[str]) -> str:
    vm = pod.vm
    price = f", {vm.cost_per_hour:.4f} USD an hour" if vm.HasField("cost_per_hour") else ""
    made_by = f"{pod.provider}, handler {pod.handler}" if pod.handler else pod.provider
    return lines(
        f"pod        {pod.namespace}/{pod.name} (uid {pod.uid}, attempt {pod.attempt})",
        f"sandbox    {pod.id}",
        f"state      {pod.state}" + (f": {pod.message}" if pod.message else ""),
        f"created    {_moment(pod.created_at)} UTC",
        f"provider   {made_by}",
        f"VM         {vm.id} {vm.state}{price}" if vm.id else "",
        f"why        {vm.detail}" if vm.detail else "",
        f"agent      {pod.agent}" if pod.agent and not pod.way else "",
        *guest,
        f"addresses  {' '.join(pod.addresses)}" if pod.addresses else "",
        *(f"label      {key}={value}" for key, value in sorted(pod.labels.items())),
        f"size       {pod.size}" if pod.size else "",
        *(f"refused    {_refused(each)}" for each in pod.refused),
    )


def _refused(one: control.Refused) -> str:
    lately = f", {one.lately:,} of them in the last half minute" if one.lately else ""
    return f"{one.total:,} packets beyond its share of {one.share}{lately}"


def _containers(answer: control.DescribePodResponse) -> str:
    head = ("CONTAINER", "NAME", "ATTEMPT", "STATE", "IMAGE", "STARTED", "ENDED", "EXIT", "WHY")
    rows = [
        (
            one.id[:13],
            one.name,
            str(one.attempt),
            one.state,
            one.image,
            _moment(one.started_at),
            _moment(one.finished_at),
            str(one.exit_code) if one.finished_at else "",
            "; ".join(each for each in (one.reason, one.message) if each),
        )
        for one in answer.containers
    ]
    return table(head, rows, may_lack=("STARTED", "ENDED", "EXIT", "WHY")) if rows else ""


def _timeline(answer: control.DescribePodResponse) -> str:
    head = ("TIME", "TOOK", "CONTAINER", "STEP", "DETAIL", "ERROR")
    rows = [
        (
            _moment(step.began_at),
            _took(step),
            step.container,
            step.what,
            step.detail,
            step.error,
        )
        for step in answer.steps
    ]
    left_out = f"{answer.left_out} steps in between are not kept" if answer.left_out else ""
    if not rows:
        return "nothing has happened to it since the daemon was started"
    return lines(
        table(head, rows, may_lack=("CONTAINER", "DETAIL", "ERROR")), left_out, *_waiting(answer.steps)
    )


def _waiting(steps: Iterable[control.Step]) -> list[str]:
    """Say what the pod waits for now: steps under way contain one another, so the last is the innermost."""
    under_way = [step for step in steps if not step.ended_at]
    if not under_way:
        return []
    last = under_way[-1]
    container = f" (container {last.container})" if last.container else ""
    detail = f": {last.detail}" if last.detail else ""
    return [f"under way{container}: {last.what}{detail}"]


def _took(step: control.Step) -> str:
    if not step.ended_at:
        return "..."
    if step.ended_at == step.began_at:
        return ""
    return f"{(step.ended_at - step.began_at) / _NANOS:.3f}s"


def _moment(nanos: int) -> str:
    if not nanos:
        return ""
    return f"{datetime.fromtimestamp(nanos / _NANOS, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]
