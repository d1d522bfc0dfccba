# SPDX-License-Identifier: Apache-2.0
"""Host ports of a daemon's pods, as the kernel has them."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.hostports.hostports import table_name
from infranetes_common.wire import cri
from infranetes_simulation.provider.settings import Settings


def in_kernel(root: Path) -> str:
    """Return the nft table of the daemon whose `state` is in `root`, or "" if there is none."""
    command = ["nft", "list", "table", "ip", table_name(root / "state")]
    return subprocess.run(command, capture_output=True, text=True).stdout


def drop_table(root: Path) -> None:
    """Delete the table, as another program might."""
    command = ["nft", "delete", "table", "ip", table_name(root / "state")]
    subprocess.run(command, capture_output=True)


def route_to_pods(case: SynchronousTestCase) -> None:
    """Give this machine a way to the simulated VMs' addresses, of which an isolated worker has none."""
    pods = str(Settings().pod_cidr)
    subprocess.run(["ip", "route", "replace", pods, "dev", "lo"], check=True)
    case.addCleanup(subprocess.run, ["ip", "route", "delete", pods, "dev", "lo"], check=True)


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def host_port(port: int, **fields: Any) -> Any:
    """Return a port mapping of that host port."""
    return cri.PortMapping(host_port=port, container_port=80, **fields)
