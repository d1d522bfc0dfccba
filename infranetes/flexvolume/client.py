# SPDX-License-Identifier: Apache-2.0
"""A client that makes one call on the daemon's control socket.

kubelet waits for it, so it uses only h2: importing `txgrpc` and Twisted takes three times the processor time,
and imports are nearly all of a run.
"""

from __future__ import annotations

import socket as sockets
import struct
import time
from collections.abc import Mapping
from urllib.parse import unquote

from google.protobuf.message import Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

from infranetes.flexvolume.options import Volume
from infranetes_common.wire import control

SECONDS = 60.0  # kubelet itself waits for ever, and asks again after an error
_STREAM = 1
_OK, _DEADLINE_EXCEEDED = "0", "4"  # grpc-status


class Failed(Exception):
    """A call that the daemon refused, or no daemon that answers."""


def mount(socket: str, directory: str, volume: Volume) -> None:
    """Have the daemon mount a volume at a path. :raise Failed: it did not."""
    request = control.MountVolumeRequest(
        target=directory,
        pod_uid=volume.pod_uid,
        namespace=volume.namespace,
        volume=volume.volume,
        size=volume.size,
        filesystem=volume.filesystem,
        read_only=volume.read_only,
        group=volume.group,
    )
    call(socket, "MountVolume", request)


def unmount(socket: str, directory: str) -> None:
    """Have the daemon unmount the volume at a path. :raise Failed: it did not."""
    call(socket, "UnmountVolume", control.UnmountVolumeRequest(target=directory))


def call(socket: str, method: str, request: Message, seconds: float = SECONDS) -> None:
    """Make a call of the Control service whose answer is empty.

    :raise Failed: the call failed."""
    deadline = time.monotonic() + seconds
    try:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as link:
            link.settimeout(seconds)
            link.connect(socket)
            found = _exchange(link, f"/{control.Control.full_name}/{method}", request, deadline)
    except TimeoutError:
        found = {"grpc-status": _DEADLINE_EXCEEDED}
    except (OSError, H2Error) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Failed(
            f"the infranetes daemon on {socket} can't be asked: {why} (systemctl status infranetes)"
        ) from None
    status = found.get("grpc-status", "")
    if status == _DEADLINE_EXCEEDED:
        raise Failed(f"the infranetes daemon on {socket} did not answer within {seconds:g} s")
    if status != _OK:
        raise Failed(unquote(found.get("grpc-message", "")) or f"the daemon failed (grpc-status {status!r})")


def _exchange(link: sockets.socket, path: str, request: Message, deadline: float) -> Mapping[str, str]:
    """Send a request and return the headers and trailers of the response.

    :raise OSError: :raise H2Error: the connection fails."""
    connection = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    connection.initiate_connection()
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-timeout": f"{max(1, int((deadline - time.monotonic()) * 1000))}m",
    }
    connection.send_headers(_STREAM, list(headers.items()))
    body = request.SerializeToString()
    connection.send_data(_STREAM, struct.pack(">BI", 0, len(body)) + body, end_stream=True)
    found: dict[str, str] = {}
    ended = False
    while not ended:
        link.sendall(connection.data_to_send())
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        link.settimeout(left)
        received = link.recv(65536)
        if not received:
            raise ConnectionResetError("it closed the connection")
        ended = any([_take(connection, event, found) for event in connection.receive_data(received)])
    return found


def _take(connection: H2Connection, event: Event, found: dict[str, str]) -> bool:
    """Handle an event of the HTTP/2 connection. Returns whether the response is complete."""
    if isinstance(event, ResponseReceived | TrailersReceived):
        found.update((str(key), str(value)) for key, value in event.headers or ())
    elif isinstance(event, DataReceived):
        connection.acknowledge_received_data(event.flow_controlled_length or 0, _STREAM)
    elif isinstance(event, StreamReset) or (isinstance(event, ConnectionTerminated) and event.error_code):
        raise ConnectionResetError("it ended the call")
    return isinstance(event, StreamEnded)
