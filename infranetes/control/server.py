# SPDX-License-Identifier: Apache-2.0
"""The server of the control socket, and the bounds of what its clients may use."""

from __future__ import annotations

from infranetes_common import errors
from infranetes_common.reactors import IReactor
from txgrpc import Limits, Server, Service
from txgrpc.limits import MIB

# Programs of root's, each with a connection of its own for a call or two: far more than open shells, commands
# and screens have together. Beyond, the clients give way that wait for nothing, or don't read their answers.
LIMITS = Limits(max_connections=256, max_concurrent_streams=16, max_receive_message=1 * MIB)


def control_server(reactor: IReactor, calls: Service) -> Server:
    """Return a server of Control."""
    return Server(reactor, [calls], limits=LIMITS, translate_error=errors.to_grpc)
