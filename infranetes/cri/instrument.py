"""Every RPC logged with its time and its sandbox or container; never with what else the request holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.logger import Logger, LogLevel

from infranetes_common import errors
from txgrpc import Code

_log = Logger(namespace="infranetes.cri")

# What the client did wrong, or what it has to expect; the rest is ours to look at.
_EXPECTED = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.ALREADY_EXISTS,
        Code.FAILED_PRECONDITION,
        Code.CANCELLED,
        Code.UNIMPLEMENTED,
        Code.PERMISSION_DENIED,
        Code.UNAUTHENTICATED,
    }
)


class Instrumented:
    """The RPCs that `implementation` has of one service, each logged; what it lacks is lacking here too.

    :param descriptor: the service's. :param reactor: for the clock.
    """

    def __init__(self, reactor: Any, descriptor: Any, implementation: Any) -> None:
        for method in descriptor.methods:
            answer = getattr(implementation, method.name, None)
            if answer is not None:
                streams = getattr(method, "server_streaming", False)
                setattr(self, method.name, answer if streams else _logged(reactor, method.name, answer))


def _logged(reactor: Any, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    async def logged(request: Any, call: Any) -> Any:
        began = reactor.seconds()
        fields = {"rpc": name, **_who(request)}
        try:
            response = await answer(request, call)
        except CancelledError:
            _log.info("{rpc} was given up by its caller after {seconds:.3f} s",
                      seconds=reactor.seconds() - began, **fields)  # fmt: skip
            raise
        except Exception as error:
            status = errors.to_grpc(error)
            level = LogLevel.info if status.code in _EXPECTED else LogLevel.warn
            _log.emit(
                level,
                "{rpc} failed after {seconds:.3f} s: {code} {error}",
                seconds=reactor.seconds() - began,
                code=status.code.name,
                error=status.message,
                **fields,
            )
            raise
        _log.debug("{rpc} took {seconds:.3f} s", seconds=reactor.seconds() - began, **fields)
        return response

    return logged


def _who(request: Any) -> dict[str, str]:
    found = {}
    sandbox, container = getattr(request, "pod_sandbox_id", ""), getattr(request, "container_id", "")
    if sandbox:
        found["sandbox"] = sandbox[:64]
    if container:
        found["container"] = container[:64]
    return found
