# SPDX-License-Identifier: Apache-2.0
"""moto's server, in a process of its own that ends with this one.

`python -m tests.support.clouds.moto` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.clouds.agent_processes import ROOT

REGION = "eu-west-1"
KEYS = ("AKIATEST", "secret-of-the-test")


class Moto:
    """The test's side. Debian has no moto, so it is always the virtual environment's."""

    def __init__(self) -> None:
        python = sys.executable if find_spec("moto") else str(ROOT / ".venv" / "bin" / "python")
        process = subprocess.Popen(
            ["setsid", "--fork", python, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        process.wait()
        assert process.stdout is not None
        with process.stdout:
            self.port = int(process.stdout.readline())
        self._input = process.stdin  # moto runs until it is closed
        self._clients: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, service: str = "ec2") -> Any:
        """Return the boto3 client that calls moto directly."""
        if service not in self._clients:
            self._clients[service] = self._make_client(service)
        return self._clients[service]

    def _make_client(self, service: str) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id=KEYS[0],
            aws_secret_access_key=KEYS[1],
            config=Config(retries={"max_attempts": 0}),
        )


_shared: list[Moto] = []


def shared() -> Moto:
    """Return the one for all tests of this process."""
    if not _shared:
        _shared.append(Moto())
    return _shared[0]


def _serve() -> None:
    # moto has hundreds of images, and every list of snapshots looks at a snapshot of each. Tests name three.
    # moto reads this when it is imported.
    os.environ["MOTO_AMIS_PATH"] = str(Path(__file__).with_name("moto_images.json"))
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            pass

    class Keeping(Quiet):
        protocol_version = "HTTP/1.1"

    server = make_server(
        "127.0.0.1",
        0,
        DomainDispatcherApplication(create_backend_app),
        threaded=True,
        request_handler=Keeping,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.write(1, f"{server.server_port}\n".encode())
    os.close(1)
    while os.read(0, 65536):
        pass
    os._exit(0)


if __name__ == "__main__":
    _serve()
