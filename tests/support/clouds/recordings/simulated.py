# SPDX-License-Identifier: Apache-2.0
"""The simulated clouds, for sessions that record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, succeed

from infranetes_common.reactors import IReactor
from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.faults import NO_AGENT
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.recordings.session import Request, Session
from tests.support.clouds.recordings.wire import AWS

_SECONDS = 120.0
_BUDGET = 1.0
# How long transient states last where none may be missed, even on a busy machine; some states of Compute
# Engine are visible only by polling.
_EC2_SECONDS, _COMPUTE_SECONDS = 0.15, 0.25
_BRIEFLY = 0.01  # where they are not looked at
_POLL_SECONDS = 0.02


def world(
    reactor: IReactor, cloud: str, directory: Path, cluster: str, lasting: bool
) -> SimulatedAws | SimulatedGce:
    """Return a started cloud, whose instances have no agents.

    :param lasting: whether transient states last long enough to be recorded."""
    made: SimulatedAws | SimulatedGce
    if cloud == AWS:
        made = aws = SimulatedAws(reactor, directory / "machines", cluster)
        seconds = _EC2_SECONDS if lasting else _BRIEFLY
        aws.boot_seconds = aws.volumes.seconds = aws.endings.seconds = seconds
    else:
        made = gce = SimulatedGce(reactor, directory / "machines")
        gce.operation_seconds = _COMPUTE_SECONDS if lasting else _BRIEFLY
    made.start()
    made.behaviour = NO_AGENT
    return made


def session(
    reactor: IReactor,
    cloud: str,
    made: SimulatedAws | SimulatedGce,
    place: Path,
    cluster: str,
    say: Callable[[str], None] = lambda words: None,
    ask: Callable[[str], Deferred[bool]] = lambda words: succeed(True),
    **changes: Any,  # Any: of a `Request`
) -> Session:
    """Return a session with a simulated cloud, which writes to `recording.jsonl` in its directory.

    :param changes: to the request."""
    table, path = {**made.table(), "poll_seconds": _POLL_SECONDS}, place / "recording.jsonl"
    request = Request(cloud, table, "test", cluster, place, path, _SECONDS, _BUDGET)
    return Session(reactor, attrs.evolve(request, **changes), ask, say)
