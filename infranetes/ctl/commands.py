# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl's commands: what each asks the daemon, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import attrs
from google.protobuf.message import Message

from infranetes.ctl import arguments, calls, config_files, explaining, kept, render, sleep
from infranetes.ctl.bundle import support_bundle
from infranetes.ctl.calls import Ask
from infranetes.ctl.checkpoints import checkpoint
from infranetes.ctl.consoles import console
from infranetes.ctl.logs import logs
from infranetes.ctl.pictures import screenshot
from infranetes.ctl.session import Session
from infranetes.ctl.shell import enter, execute
from infranetes.ctl.top import top
from infranetes.ctl.viewers import vnc
from infranetes.ctl.watching import Watched, follow
from infranetes_common.concurrency import Coro
from infranetes_common.errors import InvalidArgument

Run = Callable[[Session], Coro[int]]
RunOffline = Callable[[argparse.Namespace], int]
AddArguments = Callable[[argparse.ArgumentParser], None]


@attrs.frozen
class Command:
    """One command.

    :ivar words: what it does, in its help. :ivar run: does it, and returns the exit status.
    :ivar arguments: adds what it takes. :ivar part_of: the command that it belongs to, such as `pool`.
    :ivar aliases: other names of it, as a part.
    :ivar alone: whether it is a command without that too.
    :ivar offline: does it in place of `run`, without a daemon.
    :ivar needs_config: it can't do without the daemon's configuration, which says where the daemon is.
    """

    words: str
    run: Run
    arguments: AddArguments = arguments.answer
    part_of: str = ""
    aliases: Sequence[str] = ()
    alone: bool = True
    offline: RunOffline | None = None
    needs_config: bool = True


def answered(name: str, ask: Ask, watched: Watched | None = None) -> Run:
    """Return a command that asks once and prints the answer or, with `watched` and --watch, its changes."""

    def text(answer: Message, session: Session) -> str:
        return render.as_text(name, answer, session.options)

    async def run(session: Session) -> int:
        options = session.options
        if watched is not None and options.watch:
            return await follow(
                session,
                lambda: ask(session.stub, options),
                watched,
                lambda answer: render.as_json(name, answer, options),
                lambda answer: text(answer, session),
            )
        answer, code = await ask(session.stub, options)
        if options.json:
            session.document(render.as_json(name, answer, options))
        elif words := text(answer, session):
            session.print(words)
        return code

    return run


def _offline(words: str, run: RunOffline, add: AddArguments, part_of: str = "config") -> Command:
    """Return a command that needs no daemon."""

    async def done(session: Session) -> int:
        return run(session.options)

    return Command(words, done, add, part_of=part_of, alone=not part_of, offline=run)


_PODS, _VMS = Watched("pods", "pod"), Watched("vms", "vm")
_CONTAINERS, _EVENTS = Watched("containers", "container"), Watched("events", "event")
_ORPHANS = Watched("vms", "vm", seconds=30.0, may_be_partial=True)  # the providers are asked each time


async def _get(session: Session) -> int:
    """Say what can be listed: the command line names nothing."""
    lists = ", ".join(name for name, each in COMMANDS.items() if each.part_of == "get")
    raise InvalidArgument(f"say what to list: infranetes-ctl get {lists}")


COMMANDS: dict[str, Command] = {
    "get": Command("list what is named next, such as `get pods -o wide`", _get, arguments.nothing),
    "pods": Command(
        "list pods with their state, and what is wrong with them; also `get pods`",
        answered("pods", calls.pods, _PODS),
        arguments.pods,
        part_of="get",
        aliases=("pod", "po"),
    ),
    "ps": Command(
        "list containers; also `get containers`",
        answered("ps", calls.containers, _CONTAINERS),
        arguments.containers,
        part_of="get",
        aliases=("containers", "container"),
    ),
    "events": Command(
        "list what has happened to pods, the newest last; also `get events`",
        answered("events", calls.events, _EVENTS),
        arguments.events,
        part_of="get",
        aliases=("event", "ev"),
    ),
    "describe": Command(
        "tell a pod's life: each step with its time, what it waited for, and its errors; also `describe pod`",
        answered("describe", calls.describe),
        arguments.described,
    ),
    "console": Command(
        "show what a pod's VM wrote to its console, also when it is gone", console, arguments.console
    ),
    "enter": Command(
        "open a shell in a pod's VM, outside of its containers, or run a command there",
        enter,
        arguments.enter,
    ),
    "exec": Command(
        "run a command in a container of a pod, as `kubectl exec` does", execute, arguments.execute
    ),
    "screenshot": Command(
        "write what the screen of a pod's VM shows, as PNG", screenshot, arguments.screenshot
    ),
    "vnc": Command(
        "let VNC viewers of this machine use screen and keyboard of a pod's VM", vnc, arguments.vnc
    ),
    "checkpoint": Command(
        "write a pod as it runs, with memory, processes and disk, into a file of the node; the pod goes on",
        checkpoint,
        arguments.checkpoint,
    ),
    "keep": Command(
        "keep a pod as it runs, for new pods to start from; the pod goes on", kept.keep, arguments.keep
    ),
    "kept": Command(
        "list the kept states that pods start from; also `get kept`",
        answered("kept", kept.kept),
        arguments.kept,
        part_of="get",
    ),
    "remove": Command(
        "remove kept states; pods that have started from them go on",
        answered("remove", kept.remove),
        arguments.remove_kept,
        part_of="kept",
        alone=False,
    ),
    "sleep": Command(
        "let a pod sleep: its memory goes to the node's disk until somebody needs it",
        sleep.fall_asleep,
        arguments.described,
    ),
    "wake": Command("wake a pod that sleeps", sleep.wake, arguments.described),
    "logs": Command("show a container's log, as it is on the node", logs, arguments.logs),
    "top": Command("list what pods use, the busiest first", top, arguments.top),
    "explain": _offline(
        "say what an annotation does that a pod may have, or a key of infranetes.toml",
        explaining.explain,
        arguments.explained,
        part_of="",
    ),
    "support-bundle": Command(
        "write all that a maintainer needs to know of this node into a file, without secrets",
        support_bundle,
        arguments.bundle,
        needs_config=False,
    ),
    "services": Command(
        "list the rules of Kubernetes' Services, and which VMs have them",
        answered("services", calls.services),
        arguments.services,
    ),
    "policies": Command(
        "say what pods may receive and send by NetworkPolicies, and what is in force",
        answered("policies", calls.policies),
        arguments.policies,
    ),
    "sizes": Command(
        "say which size of VM a pod would get, what it costs, and why no cheaper one",
        answered("sizes", calls.sizes),
        arguments.sizes,
    ),
    "orphans": Command(
        "list VMs that are tagged ours and that no record knows; also `get orphans`",
        answered("orphans", calls.orphans, _ORPHANS),
        arguments.listed_vms,
        part_of="get",
    ),
    "end-orphans": Command(
        "destroy the orphans, all of them or those named",
        answered("end-orphans", calls.end_orphans),
        arguments.end_orphans,
    ),
    "pool": Command(
        "list the VMs that wait for pods; also `get pool`",
        answered("pool", calls.pool, _VMS),
        arguments.watched_pool,
        part_of="get",
    ),
    "drain": Command(
        "end the VMs that wait for pods, and make no more until `pool fill`; also `pool drain`",
        answered("drain", calls.drain),
        arguments.drain,
        part_of="pool",
    ),
    "fill": Command(
        "make VMs that wait for pods again; also `pool fill`",
        answered("fill", calls.fill),
        arguments.handler,
        part_of="pool",
    ),
    "config": Command("show the configuration that is in force", answered("config", calls.config)),
    "show": Command(
        "show each key that is in force, its value, where that is from, and what waits for a restart",
        answered("config", calls.config),
        part_of="config",
        alone=False,
    ),
    "check": _offline(
        "say what is wrong with a configuration file, with file and line",
        config_files.check,
        arguments.config_file,
    ),
    "default": _offline(
        "print all keys with their defaults, as comments", config_files.default, arguments.answer
    ),
}
"""By name. Some that are part of another are commands of their own besides: `drain` is `pool drain`."""
