"""The farm's process; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
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

from infranetes_common.errors import FailedPrecondition
from vmserver.farm.control import ControlFactory
from vmserver.farm.farm import Farm, claim, raise_file_limit


async def run(reactor: Any, socket: Path, state: Path) -> None:
    """Hold a farm until it is told to stop."""
    stopped: Deferred[None] = Deferred()

    def end() -> None:
        if not stopped.called:
            stopped.callback(None)

    def stop() -> None:
        reactor.callLater(0.05, end)  # after the answer is out

    factory = ControlFactory(stop)
    farm = factory.farm = Farm(reactor, state, factory.tell)
    try:
        claim(state, socket)
        farm.load()
        port = await UNIXServerEndpoint(reactor, str(socket), mode=0o600).listen(factory)
    except (OSError, CannotListenError, FailedPrecondition) as error:
        raise SystemExit(f"the farm can't start: {error}") from error
    reactor.addSystemEventTrigger("before", "shutdown", lambda: Deferred.fromCoroutine(farm.stop()))
    await stopped
    await port.stopListening()


def main(arguments: list[str]) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m vmserver.farm", description="Simulated VMs in one process."
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
    react(lambda reactor: Deferred.fromCoroutine(run(reactor, options.socket, options.state)))


if __name__ == "__main__":
    main(sys.argv[1:])
