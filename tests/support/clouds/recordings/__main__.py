# SPDX-License-Identifier: Apache-2.0
"""`make record-cloud`: record a real cloud's answers during a pod VM's life, scrubbed.

It costs money, and asks for confirmation first. See docs/provider-aws.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred, succeed

from infranetes import config
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor, installed
from tests.support.clouds.agent_processes import ROOT
from tests.support.clouds.recordings.session import CLOUDS, Request, Session

_LINE = 1024
DIRECTORY = ROOT / "build" / "record-cloud"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make record-cloud", description=__doc__)
    parser.add_argument("cloud", choices=CLOUDS)
    parser.add_argument("--config", required=True, help="the daemon's configuration, with the cloud's table")
    parser.add_argument("--output", type=Path, help="the recording (default: in build/record-cloud)")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of what outlives this command")
    parser.add_argument("--minutes", type=float, default=15.0, help="after which everything is ended")
    parser.add_argument("--budget", type=float, default=0.25, help="for the VM, in the prices' currency")
    parser.add_argument("--yes", action="store_true", help="don't ask")
    options = parser.parse_args(arguments)
    if not options.config:
        parser.error("which configuration? CONFIG=FILE says it")
    return options


def _request(options: argparse.Namespace) -> Request:
    """:raise ConfigError: the configuration is wrong, or lacks this cloud."""
    found = config.load(options.config, {"provider": options.cloud})
    directory = options.directory / options.cloud
    today = datetime.datetime.now(datetime.UTC).date()
    return Request(
        options.cloud,
        found.providers.get(options.cloud, {}),
        options.config,
        found.cluster,
        directory,
        options.output or directory / f"{options.cloud}-{today}.jsonl",
        60.0 * options.minutes,
        options.budget,
    )


def _say(words: str) -> None:
    print(words, flush=True)


def _asked(reactor: IReactor, words: str) -> Deferred[bool]:
    """Ask the user at the terminal. Without a terminal the answer is no."""
    answered: Deferred[bool] = Deferred(lambda _: None)

    def answer(text: str) -> None:
        if not answered.called:
            answered.callback(text.strip().lower() in ("y", "yes"))

    def ask() -> None:
        _say(f"{words}\nGo on? [y/N]")
        try:
            text = os.read(0, _LINE).decode(errors="replace")
        except OSError:
            text = ""
        reactor.callFromThread(answer, text)

    threading.Thread(target=ask, daemon=True).start()  # Ctrl-C does not end it: nothing waits for it
    return answered


def main(arguments: Sequence[str]) -> int:
    """Record. Return the exit code."""
    options, reactor = _options(arguments), installed()

    def ask(words: str) -> Deferred[bool]:
        if options.yes:
            _say(words)
            return succeed(True)
        return _asked(reactor, words)

    try:
        session = Session(reactor, _request(options), ask, _say)
    except InfranetesError as error:
        print(error, file=sys.stderr)
        return 2
    failed = [True]

    async def run() -> None:
        try:
            await session.run()
            failed.clear()
        except CancelledError:
            print("interrupted", file=sys.stderr)
        except InfranetesError as error:
            print(error, file=sys.stderr)
        except Exception:
            traceback.print_exc()

    def begin() -> None:
        running = start(run())
        stopping: list[bool] = []

        def interrupt() -> Deferred[None]:  # the reactor ends once this fires
            stopping.append(True)
            session.interrupt()
            return running

        reactor.addSystemEventTrigger("before", "shutdown", interrupt)
        running.addCallback(lambda _: None if stopping else reactor.stop())

    reactor.callWhenRunning(begin)
    reactor.run()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
