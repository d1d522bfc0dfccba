# SPDX-License-Identifier: Apache-2.0
"""What a support bundle has of the running daemon: its status, metrics, pool, orphans and pods."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from google.protobuf.json_format import MessageToDict
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.python.failure import Failure

from infranetes.config import Config
from infranetes.ctl import render
from infranetes.ctl.bundle_files import Bundle
from infranetes.ctl.session import Session
from infranetes_common.concurrency import settled
from infranetes_common.errors import InfranetesError
from infranetes_common.redaction import end_of
from infranetes_common.wire import control, cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from txgrpc import Channel, GrpcError

ASK_SECONDS = 15.0
PODS_SECONDS = 50.0  # for all pods together: less than the bundle has
MOST_PODS = 300
AT_ONCE = 8  # pods that are asked about
MAX_CONSOLE = 64 * 1024  # characters

_FAILURES = (InfranetesError, GrpcError)


async def status(session: Session, config: Config) -> object:
    """Return what the CRI socket says of the daemon, as JSON has it."""
    channel = Channel(session.reactor, UNIXClientEndpoint(session.reactor, config.socket_path, timeout=10))
    try:
        answer = await RuntimeStub(channel).Status(cri.StatusRequest(verbose=True), timeout=ASK_SECONDS)
        return _status(MessageToDict(answer))
    finally:
        await channel.close()


async def metrics(session: Session) -> str:
    """Return the daemon's metrics in Prometheus' text format."""
    answer = await session.stub.GetMetrics(control.GetMetricsRequest(), timeout=ASK_SECONDS)
    return answer.text


async def pool(session: Session) -> object:
    """Return the pool as JSON has it."""
    answer = await session.stub.GetPool(control.GetPoolRequest(), timeout=ASK_SECONDS)
    return render.as_json("pool", answer, session.options)


async def orphans(session: Session) -> object:
    """Return the orphans as JSON has them. The providers are asked, which may take longest."""
    answer = await session.stub.ListOrphans(control.ListOrphansRequest(), timeout=PODS_SECONDS)
    return render.as_json("orphans", answer, session.options)


async def add_pods(session: Session, bundle: Bundle) -> None:
    """Add the list of pods, and the timeline and the console of each."""
    until = session.reactor.seconds() + PODS_SECONDS
    try:
        listed = await session.stub.ListPods(control.ListPodsRequest(past=True), timeout=ASK_SECONDS)
    except _FAILURES as error:
        bundle.lacks("pods.json", error)
        return
    bundle.documents["pods.json"] = render.as_json("pods", listed, session.options)
    newest_first = sorted(listed.pods, key=lambda pod: pod.created_at, reverse=True)
    ids = [pod.id for pod in newest_first]
    left = iter(ids[:MOST_PODS])
    for ended in await settled(_add_lives(session, bundle, left, until) for _ in range(AT_ONCE)):
        if isinstance(ended, Failure):
            ended.raiseException()
    more = [*left, *ids[MOST_PODS:]]
    if more:
        bundle.missing["pods"] = (
            f"of {len(ids)} pods the newest {len(ids) - len(more)} are here: no more than {MOST_PODS} are "
            f"asked about, for {PODS_SECONDS:g} s"
        )


async def _add_lives(session: Session, bundle: Bundle, ids: Iterator[str], until: float) -> None:
    """Add what is known of pods one after the other; others take from the same iterator meanwhile."""
    stub, options, clock = session.stub, session.options, session.reactor
    while (left := until - clock.seconds()) > 0 and (id := next(ids, "")):
        describe, console = (f"pods/{word(id)}/{name}" for name in ("describe", "console.txt"))
        try:
            request = control.DescribePodRequest(pod=id)
            life = await stub.DescribePod(request, timeout=min(ASK_SECONDS, left))
            bundle.documents[f"{describe}.json"] = render.as_json("describe", life, options)
            bundle.texts[f"{describe}.txt"] = render.as_text("describe", life, options)
        except _FAILURES as error:
            bundle.lacks(f"{describe}.json", error)
        left = max(until - clock.seconds(), 1.0)
        try:
            answer = await stub.GetConsole(
                control.GetConsoleRequest(sandbox=id), timeout=min(ASK_SECONDS, left)
            )
            bundle.texts[console] = end_of(answer.text, MAX_CONSOLE) + end_of(answer.output, MAX_CONSOLE)
        except _FAILURES as error:
            bundle.lacks(console, error)


def _status(status: dict[str, object]) -> dict[str, object]:
    """Return the CRI's Status with the documents in it as such: it has them as JSON in texts."""
    info = status.get("info")
    if not isinstance(info, dict):
        return status
    return {**status, "info": {key: _json(text) for key, text in info.items()}}


def _json(text: str) -> object:
    try:
        found: object = json.loads(text)
    except ValueError:
        return text
    return found


def word(name: str) -> str:
    """Return a name with what a file's name can't have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
