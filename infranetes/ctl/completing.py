# SPDX-License-Identifier: Apache-2.0
"""What shells complete besides commands and options: names that the daemon knows.

A shell runs `infranetes-ctl __complete KIND CURRENT [WORD...]` at each Tab. So this imports little, waits for
a moment at most, and says nothing of errors.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from infranetes_common.wire import control

COMMAND = "__complete"
PODS, CONTAINERS, NAMESPACES, ANNOTATIONS = "pods", "containers", "namespaces", "annotations"
"""Kinds of what is completed."""

_HARMLESS = re.compile(r"[A-Za-z0-9._/-]+")  # bash evaluates what is offered
MOST_SECONDS = 2.0
MOST = 500  # that are offered
_CONFIG, _RUN_DIR, _SOCKET = Path("/etc/infranetes/infranetes.toml"), "/run/infranetes", "control.sock"
_LEAST_OF_ID = 2  # characters, before ids are offered


def main(words: Sequence[str]) -> int:
    """Print what the last word may become; return the exit status.

    :param words: the kind, the beginning of the last word, and the words before it. The kind may be two: then
        a container is meant if a pod is among the words before, else a pod."""
    kind, current, *before = [*words, "", ""][: max(len(words), 2)]
    offered: Iterable[str] = ()
    if kind == ANNOTATIONS:
        from infranetes.ctl.explaining import all_annotations

        offered = (each.name for each in all_annotations())
    else:
        offered = _asked(kind, current, before)
    found = {each for each in offered if each.startswith(current) and _HARMLESS.fullmatch(each)}
    for each in sorted(found)[:MOST]:
        print(each)
    return 0


def _asked(kind: str, current: str, before: Sequence[str]) -> list[str]:
    """Ask the daemon; return nothing if it does not answer."""
    # Imported late: annotations need none of it.
    from twisted.internet.endpoints import UNIXClientEndpoint
    from twisted.internet.task import react

    from infranetes_common.concurrency import start
    from infranetes_common.reactors import IReactor
    from infranetes_common.wire.control_rpcs import ControlStub
    from txgrpc import Channel, GrpcError

    found: list[str] = []
    kinds = kind.split(",")

    async def ask(reactor: IReactor) -> None:
        socket = UNIXClientEndpoint(reactor, str(socket_of(before)), timeout=MOST_SECONDS)
        channel = Channel(reactor, socket)
        try:
            stub = ControlStub(channel)
            if CONTAINERS in kinds:
                listed: list[control.ListedContainer] = []
                async for part in stub.ListContainers(control.ListContainersRequest(), timeout=MOST_SECONDS):
                    listed += part.containers
                found.extend(containers(listed, before, anywhere=PODS not in kinds))
            if not found and kind != CONTAINERS:
                answer = await stub.ListPods(control.ListPodsRequest(), timeout=MOST_SECONDS)
                found.extend(
                    namespaces(answer.pods) if kind == NAMESPACES else pods(answer.pods, current, before)
                )
        except GrpcError:
            pass
        finally:
            await channel.close()

    with suppress(SystemExit):
        react(lambda reactor: start(ask(reactor)))
    return found


def pods(listed: Sequence[control.Pod], current: str, before: Sequence[str]) -> list[str]:
    """Return names of pods that begin so; else with their namespaces; else the ids of sandboxes."""
    namespace = value_of(before, "-n", "--namespace")
    meant = [pod for pod in listed if namespace in ("", pod.namespace)]
    names = [pod.name for pod in meant]
    alone = {name for name in names if namespace or names.count(name) == 1}
    for offered in (alone, {f"{pod.namespace}/{pod.name}" for pod in meant if not namespace}):
        if found := [name for name in offered if name.startswith(current)]:
            return found
    return [pod.id for pod in meant if len(current) >= _LEAST_OF_ID and pod.id.startswith(current)]


def containers(
    listed: Sequence[control.ListedContainer], before: Sequence[str], *, anywhere: bool = True
) -> list[str]:
    """Return the names of the containers of a pod that is one of the words before.

    :param anywhere: if there is none, return those of all pods."""
    words = {*before, *(f"{value_of(before, '-n', '--namespace')}/{word}" for word in before)}
    of_pod = [
        each
        for each in listed
        if words & {each.pod.name, f"{each.pod.namespace}/{each.pod.name}", each.pod.sandbox_id}
    ]
    return [each.container.name for each in of_pod or (listed if anywhere else ())]


def namespaces(listed: Iterable[control.Pod]) -> list[str]:
    """Return the namespaces of pods."""
    return [pod.namespace for pod in listed]


def value_of(words: Sequence[str], *options: str) -> str:
    """Return the value of an option among words; "": it is not there."""
    for number, word in enumerate(words):
        if word in options:
            return [*words, ""][number + 1]
        for option in options:
            if word.startswith(f"{option}="):
                return word.removeprefix(f"{option}=")
    return ""


def socket_of(words: Sequence[str]) -> Path:
    """Return the socket of the daemon that the words are for.

    Of the configuration this reads nothing but `run_dir`."""
    if socket := value_of(words, "--socket"):
        return Path(socket)
    main_file = Path(value_of(words, "--config") or _CONFIG)
    run_dir = _RUN_DIR
    for file in (main_file, *sorted(main_file.with_name(f"{main_file.name}.d").glob("*.toml"))):
        with suppress(OSError, ValueError):
            given = tomllib.loads(file.read_text()).get("run_dir")
            run_dir = given if isinstance(given, str) else run_dir
    return Path(run_dir) / _SOCKET
