# SPDX-License-Identifier: Apache-2.0
"""The farm's process: its command line, and its life."""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.task import react
from twisted.logger import (
    FilteringLogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    globalLogBeginner,
    textFileLogObserver,
)

from infranetes_common.concurrency import Event, start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_simulation.farm.claim import claim_in_time
from infranetes_simulation.farm.control import ControlFactory
from infranetes_simulation.farm.farm import Farm


async def run(reactor: IReactor, socket: Path, state: Path) -> None:
    """Run a farm until it is told to stop."""
    stopped: Event[None] = Event()

    def stop() -> None:
        reactor.callLater(0.05, stopped.succeed, None)  # once the answer is sent

    factory = ControlFactory(stop)
    farm = factory.farm = Farm(reactor, state, factory.report)
    try:
        await claim_in_time(reactor, state, socket)
        farm.load()
        port = await UNIXServerEndpoint(reactor, str(socket), mode=0o600).listen(factory)
    except (OSError, CannotListenError, FailedPrecondition) as error:
        raise SystemExit(f"the farm can't start: {error}") from error
    reactor.addSystemEventTrigger("before", "shutdown", lambda: start(farm.stop()))
    await stopped.wait()
    await port.stopListening()


def raise_file_limit() -> None:
    """Allow as many open files as the kernel does: each VM needs several."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(arguments: list[str]) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m infranetes_simulation.farm", description="Simulated VMs in one process."
    )
    parser.add_argument("--socket", type=Path, required=True, help="the unix socket of the control protocol")
    parser.add_argument("--state", type=Path, required=True, help="where the VMs' state is kept")
    parser.add_argument(
        "--log-level", choices=[level.name for level in LogLevel.iterconstants()], default="warn"
    )
    options = parser.parse_args(arguments)
    predicate = LogLevelFilterPredicate(LogLevel.lookupByName(options.log_level))
    observer = FilteringLogObserver(textFileLogObserver(sys.stderr), [predicate])
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False, discardBuffer=True)
    raise_file_limit()
    react(lambda reactor: start(run(reactor, options.socket, options.state)))


if __name__ == "__main__":
    main(sys.argv[1:])
