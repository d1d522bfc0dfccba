# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl top`: what pods use, the busiest first."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

import attrs

from infranetes.ctl.calls import ASK_SECONDS, names_of_pod
from infranetes.ctl.render_lists import SHORT, below
from infranetes.ctl.selecting import named
from infranetes.ctl.session import DONE, Session
from infranetes.ctl.tables import Column, Json, lines, listing
from infranetes.ctl.view import view_of
from infranetes.ctl.watching import Watched, follow
from infranetes_common.concurrency import sleep
from infranetes_common.wire import control

SAMPLE_SECONDS = 1.0  # between the two samples that one table is made of
WATCHED = Watched("pods", "pod", seconds=2.0)
_NANOS = 1e9
_COLUMNS = (
    Column("NAMESPACE", least=8),
    Column("NAME", least=12),
    Column("CPU"),
    Column("OF", gives_way=3),
    Column("MEMORY"),
    Column("OF", gives_way=4),
    Column("RECEIVED/S", gives_way=5),
    Column("SENT/S", gives_way=5),
    Column("PROCESSES", gives_way=2),
    Column("WHY", may_lack=True, least=24),
    Column("VM", least=12, gives_way=1),
    Column("SANDBOX", gives_way=6),
)


@attrs.frozen
class Use:
    """What a pod uses. None: that is not known, or not yet.

    :ivar cpu: processors. :ivar received: bytes per second, as is `sent`."""

    pod: control.PodUsage
    cpu: float | None = None
    received: float | None = None
    sent: float | None = None

    @property
    def rank(self) -> tuple[bool, float, str, str]:
        """The key by which pods are sorted."""
        return not self.pod.measured_at, -(self.cpu or 0.0), self.pod.namespace, self.pod.name


def rate(before: int, now: int, seconds: float) -> float:
    """Return by how much a counter grows in a second. One that is lower than before began again at 0."""
    return (now - before if now >= before else now) / seconds


def use(pod: control.PodUsage, before: Use | None) -> Use:
    """Return what a pod uses, by this sample and the one before."""
    cpu = pod.nano_cores / _NANOS if pod.HasField("nano_cores") else None
    if before is None or not pod.measured_at or not before.pod.measured_at:
        return Use(pod, cpu)
    seconds = (pod.measured_at - before.pod.measured_at) / _NANOS
    if seconds <= 0:  # the same sample, or the clock was set back
        return attrs.evolve(before, pod=pod)
    cpu = rate(before.pod.cpu_nanos, pod.cpu_nanos, seconds) / _NANOS
    if not pod.HasField("received_bytes") or not before.pod.HasField("received_bytes"):
        return Use(pod, cpu)
    received = rate(before.pod.received_bytes, pod.received_bytes, seconds)
    return Use(pod, cpu, received, rate(before.pod.sent_bytes, pod.sent_bytes, seconds))


class Top:
    """Computes what pods use from consecutive samples."""

    def __init__(self) -> None:
        self._uses: Mapping[str, Use] = {}

    def add(self, sample: control.ListUsageResponse) -> None:
        """Take the next sample."""
        self._uses = {pod.id: use(pod, self._uses.get(pod.id)) for pod in sample.pods}

    @property
    def uses(self) -> list[Use]:
        """What pods use, the busiest first, those without figures last."""
        return sorted(self._uses.values(), key=lambda each: each.rank)

    def as_json(self) -> Json:
        """Return one document."""
        return {"pods": [_json(each) for each in self.uses]}

    def as_text(self, options: argparse.Namespace) -> str:
        """Return a table, and a line with the totals."""
        shown = listing(_COLUMNS, map(_row, self.uses), view_of(options))
        return lines(shown, below(options, _together(self.uses)))


async def top(session: Session) -> int:
    """Print what pods use, measured over a second; with --watch, again and again.

    :raise GrpcError: the daemon refuses, or does not answer at first.
    :raise NotFound: a pod that is named is not there, or not ready."""
    found = Top()

    options = session.options

    async def ask() -> tuple[control.ListUsageResponse, int]:
        sample = await session.stub.ListUsage(control.ListUsageRequest(), timeout=ASK_SECONDS)
        chosen = [pod for pod in sample.pods if options.namespace in (None, pod.namespace)]
        chosen = named(chosen, () if options.watch else options.names, names_of_pod, "pod")
        sample = control.ListUsageResponse(pods=chosen)
        found.add(sample)
        return sample, DONE

    await ask()
    await sleep(session.reactor, SAMPLE_SECONDS)
    if options.watch:
        return await follow(
            session, ask, WATCHED, lambda _: found.as_json(), lambda _: found.as_text(options)
        )
    await ask()
    if options.json:
        session.document(found.as_json())
    else:
        session.print(found.as_text(options))
    return DONE


def _json(each: Use) -> Json:
    pod = each.pod
    known = bool(pod.measured_at)
    return {
        "id": pod.id,
        "namespace": pod.namespace,
        "name": pod.name,
        "vm_id": pod.vm_id,
        "agent": pod.agent,
        "measured_at": pod.measured_at / _NANOS if known else None,
        "cpu": each.cpu,
        "cpus": pod.cpus or None,
        "memory_bytes": pod.memory_bytes if known else None,
        "memory_limit_bytes": pod.memory_limit_bytes if known else None,
        "received_bytes_per_second": each.received,
        "sent_bytes_per_second": each.sent,
        "received_bytes": pod.received_bytes if pod.HasField("received_bytes") else None,
        "sent_bytes": pod.sent_bytes if pod.HasField("sent_bytes") else None,
        "processes": pod.processes if known else None,
        "why": pod.why,
    }


def _row(each: Use) -> tuple[str, ...]:
    pod = each.pod
    known = bool(pod.measured_at)
    return (
        pod.namespace,
        pod.name,
        "" if each.cpu is None else f"{each.cpu:.2f}",
        str(pod.cpus or ""),
        size(pod.memory_bytes) if known else "",
        size(pod.memory_limit_bytes) if known else "",
        "" if each.received is None else size(each.received),
        "" if each.sent is None else size(each.sent),
        str(pod.processes) if known else "",
        "" if known else pod.why or f"its agent does not answer: it is {pod.agent or 'not connected'}",
        pod.vm_id,
        pod.id[:SHORT],
    )


def _together(uses: Iterable[Use]) -> str:
    known = [each for each in uses if each.pod.measured_at]
    if not known:
        return "no pod has figures"
    cpu = sum(each.cpu or 0.0 for each in known)
    memory = size(sum(each.pod.memory_bytes for each in known))
    return f"{len(known)} pod{'' if len(known) == 1 else 's'}: {cpu:.2f} CPUs, {memory}"


def size(count: float) -> str:
    """Return a number of bytes in the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
