# SPDX-License-Identifier: Apache-2.0
"""Logging and counting of every RPC with its duration.

Logs name the sandbox or container, never the request."""

from __future__ import annotations

from google.protobuf.message import Message
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger, LogLevel

from infranetes.observer import NULL_OBSERVER, Observer
from infranetes_common import errors
from txgrpc import Call, Code
from txgrpc.service import Answer, Interceptor, Method

_log = Logger(namespace="infranetes.cri")

# The client's mistakes, and outcomes that it has to expect. Any other code points to trouble in the daemon.
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


def logged(clock: IReactorTime, observer: Observer = NULL_OBSERVER) -> Interceptor:
    """Return an interceptor for a service that logs each call and reports it to the observer.

    Calls that stream responses are left out."""

    def interceptor(method: Method, answer: Answer) -> Answer:
        return answer if method.server_streaming else _logged(clock, observer, method, answer)

    return interceptor


def _logged(clock: IReactorTime, observer: Observer, method: Method, answer: Answer) -> Answer:
    rpc, service = method.name, method.path.split("/")[1]

    async def call_logged(request: Message, call: Call) -> Message | bytes:
        began = clock.seconds()
        fields = {"rpc": rpc, **_subject(request)}
        try:
            response: Message | bytes = await answer(request, call)
        except CancelledError:
            seconds = clock.seconds() - began
            _log.info("{rpc} was given up by its caller after {seconds:.3f} s", seconds=seconds, **fields)
            observer.answered(service, rpc, Code.CANCELLED.name, seconds)
            raise
        except Exception as error:
            status, seconds = errors.to_grpc(error), clock.seconds() - began
            level = LogLevel.info if status.code in _EXPECTED else LogLevel.warn
            _log.emit(
                level,
                "{rpc} failed after {seconds:.3f} s: {code} {error}",
                seconds=seconds,
                code=status.code.name,
                error=status.message,
                **fields,
            )
            observer.answered(service, rpc, status.code.name, seconds)
            raise
        seconds = clock.seconds() - began
        _log.debug("{rpc} took {seconds:.3f} s", seconds=seconds, **fields)
        observer.answered(service, rpc, Code.OK.name, seconds)
        return response

    return call_logged


def _subject(request: Message) -> dict[str, str]:
    fields = {}
    sandbox, container = getattr(request, "pod_sandbox_id", ""), getattr(request, "container_id", "")
    volume = getattr(request, "volume_id", "")
    if sandbox:
        fields["sandbox"] = sandbox[:64]
    if container:
        fields["container"] = container[:64]
    if volume:
        fields["volume"] = volume[:128]
    return fields
