# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl's commands: what each asks the daemon, and what it prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Coroutine
from typing import Any

import attrs
from google.protobuf.message import Message

from infranetes.ctl import arguments, calls, config_files, render
from infranetes.ctl.bundle import support_bundle
from infranetes.ctl.calls import Ask
from infranetes.ctl.consoles import console
from infranetes.ctl.logs import logs
from infranetes.ctl.pictures import screenshot
from infranetes.ctl.session import Session
from infranetes.ctl.shell import enter
from infranetes.ctl.top import top
from infranetes.ctl.viewers import vnc
from infranetes.ctl.watching import Watched, follow

Run = Callable[[Session], Coroutine[Any, Any, int]]  # Any: what a coroutine yields
RunOffline = Callable[[argparse.Namespace], int]
AddArguments = Callable[[argparse.ArgumentParser], None]


@attrs.frozen
class Command:
    """One command.

    :ivar words: what it does, in its help. :ivar run: does it, and returns the exit status.
    :ivar arguments: adds what it takes. :ivar part_of: the command that it belongs to, such as `pool`.
    :ivar alone: whether it is a command without that too.
    :ivar offline: does it in place of `run`, without a daemon.
    :ivar needs_config: it can't do without the daemon's configuration, which says where the daemon is.
    """

    words: str
    run: Run
    arguments: AddArguments = arguments.nothing
    part_of: str = ""
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
            session.print(json.dumps(render.as_json(name, answer, options), indent=2))
        else:
            session.print(text(answer, session))
        return code

    return run


def _offline(words: str, run: RunOffline, add: AddArguments = arguments.nothing) -> Command:
    """Return a part of `config` that needs no daemon."""

    async def done(session: Session) -> int:
        return run(session.options)

    return Command(words, done, add, part_of="config", alone=False, offline=run)


_PODS, _VMS = Watched("pods", "pod"), Watched("vms", "vm")
_ORPHANS = Watched("vms", "vm", seconds=30.0, may_be_partial=True)  # the providers are asked each time

COMMANDS: dict[str, Command] = {
    "pods": Command(
        "list pods with their VM, its size, age and cost, and their state",
        answered("pods", calls.pods, _PODS),
        arguments.watch,
    ),
    "describe": Command(
        "tell a pod's life: each step with its time, what it waited for, and its errors",
        answered("describe", calls.describe),
        arguments.pod,
    ),
    "console": Command(
        "show what a pod's VM wrote to its console, also when it is gone", console, arguments.console
    ),
    "enter": Command(
        "open a shell in a pod's VM, outside of its containers, or run a command there",
        enter,
        arguments.enter,
    ),
    "screenshot": Command(
        "write what the screen of a pod's VM shows, as PNG", screenshot, arguments.screenshot
    ),
    "vnc": Command(
        "let VNC viewers of this machine use screen and keyboard of a pod's VM", vnc, arguments.vnc
    ),
    "logs": Command("show a container's log, as it is on the node", logs, arguments.logs),
    "top": Command("list what pods use, the busiest first", top, arguments.watch),
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
        arguments.maybe_pod,
    ),
    "sizes": Command(
        "say which size of VM a pod would get, what it costs, and why no cheaper one",
        answered("sizes", calls.sizes),
        arguments.sizes,
    ),
    "orphans": Command(
        "list VMs that are tagged ours and that no record knows",
        answered("orphans", calls.orphans, _ORPHANS),
        arguments.watch,
    ),
    "end-orphans": Command(
        "destroy the orphans, all of them or those named",
        answered("end-orphans", calls.end_orphans),
        arguments.end_orphans,
    ),
    "pool": Command(
        "list the VMs that wait for pods", answered("pool", calls.pool, _VMS), arguments.watched_pool
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
    "default": _offline("print all keys with their defaults, as comments", config_files.default),
}
"""By name. Some that are part of another are commands of their own besides: `drain` is `pool drain`."""
