# SPDX-License-Identifier: Apache-2.0
"""Ask the daemon whether it serves: `python3 -m infranetes.installer.probe SOCKET SECONDS`.

A process of its own, since the installer has no reactor. The version that it asks for is answered by the
node's own
runtime, so that an answer shows both.
"""

from __future__ import annotations

import sys

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater, react

from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from txgrpc import Channel, GrpcError

_PAUSE = 1.0
_CALL_SECONDS = 10.0


async def answered(reactor: IReactor, socket: str, seconds: float) -> str:
    """Return the name and the version of the runtime, once it answers.

    :raise GrpcError: it does not for so many seconds."""
    until = reactor.seconds() + seconds
    while True:
        channel = Channel(reactor, UNIXClientEndpoint(reactor, socket))
        try:
            answer = await RuntimeStub(channel).Version(cri.VersionRequest(), timeout=_CALL_SECONDS)
            return f"{answer.runtime_name} {answer.runtime_version}"
        except GrpcError:
            if reactor.seconds() >= until:
                raise
        finally:
            await channel.close()
        await deferLater(reactor, _PAUSE)


def main(reactor: IReactor, socket: str, seconds: str) -> Deferred[None]:
    """Print the answer; fail with why there is none."""

    async def run() -> None:
        try:
            print(await answered(reactor, socket, float(seconds)))
        except GrpcError as error:
            raise SystemExit(f"the daemon does not answer at {socket}: {error}") from None

    return Deferred.fromCoroutine(run())


if __name__ == "__main__":
    react(main, sys.argv[1:])
