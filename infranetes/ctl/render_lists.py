# SPDX-License-Identifier: Apache-2.0
"""Lists of pods, containers and events, as text and as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

from infranetes.ctl.render_pod import agent_words, container_json, step_json
from infranetes.ctl.tables import Column, Json, age, duration, lines, listing
from infranetes.ctl.view import NAME, view_of
from infranetes_common.wire import control

SHORT = 13  # characters of an id, as crictl shows it
_NANOS = 1e9
_PODS = (
    Column("NAMESPACE", least=8),
    Column("NAME", least=12),
    Column("READY", gives_way=3),
    Column("STATUS"),
    Column("AGENT", gives_way=2),
    Column("AGE"),
    Column("IP", gives_way=5),
    Column("NODE", least=8, may_lack=True, gives_way=4),
    Column("VM", least=12, gives_way=1),
    Column("HANDLER", wide=True, may_lack=True, gives_way=1),
    Column("PROVIDER", wide=True, gives_way=1),
    Column("SIZE", wide=True, least=10, gives_way=1),
    Column("USD/H", may_lack=True, gives_way=4),
    Column("WHY", may_lack=True, least=24),
    Column("SANDBOX", gives_way=6),
)
_CONTAINERS = (
    Column("NAMESPACE", least=8),
    Column("POD", least=12),
    Column("NAME", least=8),
    Column("STATUS"),
    Column("EXIT", may_lack=True),
    Column("ATTEMPT", gives_way=3),
    Column("AGE"),
    Column("IMAGE", least=20, gives_way=4),
    Column("STARTED", wide=True, gives_way=1),
    Column("SANDBOX", wide=True, gives_way=2),
    Column("WHY", may_lack=True, least=24),
    Column("CONTAINER", gives_way=5),
)
_EVENTS = (
    Column("LAST SEEN"),
    Column("TYPE"),
    Column("TOOK", gives_way=1),
    Column("OBJECT", least=16),
    Column("CONTAINER", may_lack=True, gives_way=2),
    Column("MESSAGE", least=30),
)
_MOST_WORDS = 120  # characters of a reason in a list; `describe` shows all of it


def just_names(options: argparse.Namespace) -> bool:
    """Whether names or ids alone are asked for."""
    return getattr(options, "quiet", False) or getattr(options, "form", "") == NAME


def below(options: argparse.Namespace, *words: str) -> str:
    """Return the lines below a list. Without headers they go to standard error: the rows are a program's."""
    said = lines(*words)
    if not getattr(options, "no_headers", False):
        return said
    if said:
        print(said, file=sys.stderr)
    return ""


def short(words: str) -> str:
    """Return a reason as the cell of a list."""
    line = " ".join(words.split())
    return line if len(line) <= _MOST_WORDS else f"{line[: _MOST_WORDS - 1]}…"


# ---- pods


def pods_text(answer: control.ListPodsResponse, options: argparse.Namespace) -> str:
    """Return a table of the pods, and what there is to say of all of them."""
    pods = sorted(answer.pods, key=lambda pod: (pod.namespace, pod.name, pod.attempt))
    if just_names(options):
        return "\n".join(pod.id if getattr(options, "quiet", False) else f"pod/{pod.name}" for pod in pods)
    now = time.time()
    rows = [
        (
            pod.namespace,
            pod.name,
            f"{pod.running}/{pod.containers}",
            pod.state,
            agent_words(pod),
            age(pod.created_at, now),
            ",".join(pod.addresses),
            pod.node,
            pod.vm.id,
            pod.handler,
            pod.provider,
            pod.size or "default",
            price(pod.vm),
            short(pod.message),
            pod.id[:SHORT],
        )
        for pod in pods
    ]
    troubles = [
        f"provider {each.name} is not ready: {each.trouble}" for each in answer.providers if each.trouble
    ]
    first = below(options, *answer.cluster_troubles)
    return lines(first, listing(_PODS, rows, view_of(options)), below(options, _counted(pods), *troubles))


def _counted(pods: Sequence[control.Pod]) -> str:
    gone = [pod.state for pod in pods if pod.state in ("failed", "removed")]
    words = count(len(pods) - len(gone), "pod")
    if failed := gone.count("failed"):
        words += f", and {failed} that failed to launch: `infranetes-ctl describe POD` tells more"
    if removed := gone.count("removed"):
        words += f", and {removed} that {'is' if removed == 1 else 'are'} gone"
    total = cost(pod.vm for pod in pods)
    return f"{words}, {total}" if total else words


def cost(vms: Iterable[control.Vm]) -> str:
    """Return what VMs cost together, as far as that is known; "" if it is of none."""
    known = [vm.cost_per_hour for vm in vms if vm.HasField("cost_per_hour")]
    return f"{sum(known):.4f} USD an hour for {count(len(known), 'VM')}" if known else ""


def count(number: int, what: str) -> str:
    """Return a number of things."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def price(vm: control.Vm) -> str:
    """Return what an hour of a VM costs; "": that is not known."""
    return f"{vm.cost_per_hour:.4f}" if vm.HasField("cost_per_hour") else ""


# ---- containers


def containers_text(answer: control.ListContainersResponse, options: argparse.Namespace) -> str:
    """Return a table of the containers."""
    if just_names(options):
        return "\n".join(
            each.container.id if options.quiet else f"container/{each.container.name}"
            for each in answer.containers
        )
    now = time.time()
    rows = [
        (
            each.pod.namespace,
            each.pod.name,
            each.container.name,
            each.container.state,
            str(each.container.exit_code) if each.container.finished_at else "",
            str(each.container.attempt),
            age(each.container.created_at, now),
            each.container.image,
            age(each.container.started_at, now),
            each.pod.sandbox_id[:SHORT],
            short("; ".join(filter(None, (each.container.reason, each.container.message)))),
            each.container.id[:SHORT],
        )
        for each in answer.containers
    ]
    counted = count(len(rows), "container")
    if not options.all and not options.names:
        counted += " running (`--all`: those that do not run too)"
    return lines(listing(_CONTAINERS, rows, view_of(options)), below(options, counted))


def containers_json(answer: control.ListContainersResponse, options: argparse.Namespace) -> Json:
    """Return one document."""
    return {
        "containers": [
            {**container_json(each.container), "pod": _pod_json(each.pod)} for each in answer.containers
        ]
    }


def _pod_json(pod: control.PodOfEntry) -> Json:
    return {
        "id": pod.sandbox_id,
        "namespace": pod.namespace,
        "name": pod.name,
        "labels": dict(pod.labels),
    }


# ---- events


def events_text(answer: control.ListEventsResponse, options: argparse.Namespace) -> str:
    """Return a table of the events, the newest last; first, where the terminal shows the list again."""
    now = time.time()
    events = reversed(answer.events) if options.watch else answer.events
    rows = [
        (
            age(event.step.ended_at or event.step.began_at, now),
            "Warning" if event.step.error else "Normal",
            took(event.step),
            f"{event.pod.namespace}/{event.pod.name}",
            event.step.container,
            ": ".join(filter(None, (event.step.what, event.step.detail, event.step.error))),
        )
        for event in events
    ]
    if not rows:
        return below(options, "nothing has happened of late that is asked for")
    return listing(_EVENTS, rows, view_of(options))


def took(step: control.Step) -> str:
    """Return how long a step took, in words; "": no time."""
    if not step.ended_at:
        return "..."
    seconds = (step.ended_at - step.began_at) / _NANOS
    return "" if not seconds else f"{seconds:.3f}s" if seconds < 10 else duration(seconds)


def events_json(answer: control.ListEventsResponse, options: argparse.Namespace) -> Json:
    """Return one document."""
    return {"events": [_event_json(event) for event in answer.events]}


def _event_json(event: control.Event) -> Json:
    step = event.step
    return {
        "id": f"{event.pod.sandbox_id}/{step.began_at}/{step.container}/{step.what}",
        "type": "Warning" if step.error else "Normal",
        "pod": _pod_json(event.pod),
        **step_json(step),
    }
