# SPDX-License-Identifier: Apache-2.0
"""The CRI's requests that a stream answers."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

StreamRequest = cri.ExecRequest | cri.AttachRequest | cri.PortForwardRequest


def validate(kind: str, request: StreamRequest) -> None:
    """Check a request of that kind: exec, attach or portforward.

    :raise InvalidArgument: it asks for no stream, or for what can't be."""
    if isinstance(request, cri.PortForwardRequest):
        for port in request.port:
            if not 0 < port < 65536:
                raise InvalidArgument(f"port: {port} is not a TCP port")
        return
    if not (request.stdin or request.stdout or request.stderr):
        raise InvalidArgument("one of stdin, stdout and stderr has to be true")
    if request.tty and request.stderr:
        raise InvalidArgument("stderr: a terminal has none of its own; leave it false where tty is true")
    if isinstance(request, cri.ExecRequest) and not request.cmd:
        raise InvalidArgument("cmd: has to name a command")
