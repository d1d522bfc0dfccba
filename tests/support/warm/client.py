# SPDX-License-Identifier: Apache-2.0
"""Ask the server for a program. As a script: detached, with this process's directory, environment and files.

It imports as little as can be, since the script is on the way of many tests.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence


def ask(
    address: str,
    arguments: Sequence[str],
    files: Sequence[int],
    directory: str,
    environment: dict[str, str],
    kept: bool,
) -> socket.socket:
    """Ask for `python *arguments`. Return the connection, on which its pid comes, and at last how it ended.

    :param kept: kill it when the connection is lost.
    """
    request = json.dumps([list(arguments), directory, environment, kept]).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], list(files))
    connection.sendall(request)
    return connection


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2:], (0, 1, 2), os.getcwd(), dict(os.environ), False).recv(100)
