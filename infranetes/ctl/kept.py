# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl keep` and `kept`: pods as they ran, for new pods to start from."""

from __future__ import annotations

import argparse
import time

from infranetes.ctl.render_lists import below, count, just_names
from infranetes.ctl.session import DONE, Session
from infranetes.ctl.tables import Column, Json, age, lines, listing
from infranetes.ctl.view import view_of
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlStub

SECONDS = 600.0
ASK_SECONDS = 150.0
_NANOS = 1e9
_COLUMNS = (
    Column("NAMESPACE", least=8),
    Column("NAME", least=12),
    Column("STAGE"),
    Column("AGE"),
    Column("USED"),
    Column("SIZE"),
    Column("POD", least=12, gives_way=3),
    Column("TEMPLATE", may_lack=True, gives_way=2),
    Column("SECRETS", may_lack=True),
    Column("PROVIDER", wide=True, gives_way=1),
    Column("CONTAINERS", wide=True, least=12),
)


async def keep(session: Session) -> int:
    """Have the daemon keep a pod, and say how large that is. :raise GrpcError: the daemon refuses."""
    options = session.options
    request = control.KeepPodRequest(pod=options.pod, name=options.name, replace=options.replace)
    kept = await session.stub.KeepPod(request, timeout=SECONDS)
    if options.json:
        session.document({"sandbox_id": kept.vm.sandbox_id, "seconds": kept.seconds, **_state(kept.state)})
    else:
        session.print(
            f"{kept.state.namespace}/{kept.state.name}: {_mib(kept.state.size)}, pod {kept.state.pod}; its "
            f"VM was stopped for {kept.state.pause_seconds:.3f} s of {kept.seconds:.1f}"
        )
    return DONE


async def kept(stub: ControlStub, options: argparse.Namespace) -> tuple[control.ListKeptResponse, int]:
    """Ask for the kept states."""
    answer = await stub.ListKept(control.ListKeptRequest(), timeout=ASK_SECONDS)
    if options.namespace:
        chosen = [each for each in answer.states if each.namespace == options.namespace]
        answer = control.ListKeptResponse(states=chosen)
    return answer, DONE


async def remove(stub: ControlStub, options: argparse.Namespace) -> tuple[control.RemoveKeptResponse, int]:
    """Have the daemon remove kept states. :raise InvalidArgument: the command line names none."""
    if not options.names:
        raise InvalidArgument("say which kept states to remove: `infranetes-ctl kept` lists them")
    namespace = f"{options.namespace}/" if options.namespace else ""
    names = [name if "/" in name else f"{namespace}{name}" for name in options.names]
    return await stub.RemoveKept(control.RemoveKeptRequest(names=names), timeout=ASK_SECONDS), DONE


def kept_text(answer: control.ListKeptResponse, options: argparse.Namespace) -> str:
    """Return a table of the states, and how much they take."""
    if just_names(options):
        return lines(*(f"{each.namespace}/{each.name}" for each in answer.states))
    now = time.time()
    rows = [
        (
            each.namespace,
            each.name,
            each.stage,
            age(each.kept_at, now) if each.kept_at else "",
            age(each.used_at, now) if each.used_at else "",
            _mib(each.size) if each.size else "",
            each.pod,
            each.template,
            "kept" if each.secrets else "",
            each.provider,
            ",".join(container.name for container in each.containers),
        )
        for each in answer.states
    ]
    total = sum(each.size for each in answer.states)
    said = f"{count(len(rows), 'kept state')}, {_mib(total)}" if rows else "no pod is kept"
    return lines(listing(_COLUMNS, rows, view_of(options)) if rows else "", below(options, said))


def kept_json(answer: control.ListKeptResponse, options: argparse.Namespace) -> Json:
    """Return the states."""
    return {"states": [_state(each) for each in answer.states]}


def removed_text(answer: control.RemoveKeptResponse, options: argparse.Namespace) -> str:
    """Return what was removed."""
    return lines(*(f"{each.namespace}/{each.name}, {_mib(each.size)}, is removed" for each in answer.removed))


def removed_json(answer: control.RemoveKeptResponse, options: argparse.Namespace) -> Json:
    """Return what was removed."""
    return {"removed": [_state(each) for each in answer.removed]}


def _state(state: control.KeptState) -> Json:
    return {
        "id": state.id,
        "namespace": state.namespace,
        "name": state.name,
        "stage": state.stage,
        "pod": state.pod,
        "template": state.template,
        "provider": state.provider,
        "kept_at": state.kept_at / _NANOS if state.kept_at else None,
        "used_at": state.used_at / _NANOS if state.used_at else None,
        "pause_seconds": state.pause_seconds,
        "bytes": state.size,
        "secrets": state.secrets,
        "containers": [{"name": each.name, "image": each.image} for each in state.containers],
        "machine": dict(state.machine),
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
