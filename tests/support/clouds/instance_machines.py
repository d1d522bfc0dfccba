# SPDX-License-Identifier: Apache-2.0
"""Instances that are machines of their own: in namespaces, with the real agent, which runs real containers.

Their network is a bridge of this machine. The metadata service is on it too, at its own address, and tells
instances apart as EC2's does: by their source addresses.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IListeningPort, IReactorSocket
from twisted.internet.threads import deferToThread

from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_simulation.machine import guest, hypervisor, network
from tests.support.clouds.imds import ADDRESS

ROOT = Path(__file__).resolve().parents[3]
CGROUP = f"infranetes-tests-instances-{secrets.token_hex(4)}"  # process ids are not unique among workers


class InstanceMachines:
    """The machines of one test's cloud.

    :param identity: the agents' table `identity`.
    """

    def __init__(self, reactor: object, directory: Path, identity: str) -> None:
        self._reactor = cast(IReactorSocket, reactor)
        self._directory = directory.resolve()
        self._configuration = guest.CONFIGURATION.replace(guest.IDENTITY, f"[identity]\n{identity}\n")
        # For measurements of networks (RFC 2544): no machine has addresses of it.
        prefix = f"198.19.{os.getpid() % 256}"
        self.subnet, self.gateway = f"{prefix}.0/24", f"{prefix}.1"
        self._bridge = network.bridge_of(self._directory)
        self._lock = self._directory / "bridge.lock"
        self._namespace = f"infmeta-{secrets.token_hex(4)}"
        self._cable = network.cable_of(self._bridge, self._namespace)
        self._on: dict[str, subprocess.Popen[bytes]] = {}
        self._metadata: IListeningPort | None = None

    def start(self, metadata: Any) -> None:  # Any: a Site's type is too narrow for adoptStreamPort
        """Make the network, and start the metadata service in it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        network.ip(f"netns add {self._namespace}")
        network.plug_in(self._lock, self._bridge, self._cable, f"{self.gateway}/24", self._namespace)
        network.ip(
            "link set lo up",
            f"link set {network.NETWORK_CARD} up",
            f"address add {ADDRESS}/32 dev {network.NETWORK_CARD}",
            f"route add {self.subnet} dev {network.NETWORK_CARD}",
            namespace=self._namespace,
        )
        with thd_in_namespace(self._namespace, lambda: socket.create_server((ADDRESS, 80))) as listening:
            listening.setblocking(False)
            self._metadata = self._reactor.adoptStreamPort(listening.fileno(), socket.AF_INET, metadata)

    def disk(self, id: str) -> Path:
        """Return the directory that is a machine's disk, at `guest.DISK` there."""
        disk = self._directory / id
        disk.mkdir(mode=0o711, parents=True, exist_ok=True)
        return disk

    def run(self, id: str, address: str = "") -> None:
        """Turn a machine on. :param address: "": its agent sets one."""
        disk = self.disk(id)
        described: hypervisor.MachineSpec = {
            "id": id,
            "address": f"{address}/24" if address else "",
            "gateway": f"{self.gateway}/24",
            "bridge": self._bridge,
            "lock": str(self._lock),
            "cgroup": f"{CGROUP}/{id}",
            "behaviour": guest.AGENT,
            "configuration": self._configuration,
        }
        with (disk / "hypervisor.log").open("ab") as log:
            running = self._on[id] = subprocess.Popen(
                [sys.executable, "-m", hypervisor.__name__, str(disk)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        assert running.stdin is not None
        running.stdin.write(json.dumps(described).encode() + b"\n")
        running.stdin.flush()

    def kill(self, id: str) -> Deferred[None]:
        """Turn a machine off, as by a power cut. Idempotent."""
        running = self._on.pop(id, None)
        return deferToThread(_thd_end, running) if running is not None else succeed(None)

    async def stop(self) -> None:
        """Turn all machines off, and remove the network. Idempotent."""
        for id in list(self._on):
            await self.kill(id)
        if self._metadata is not None:
            await (self._metadata.stopListening() or succeed(None))
        await deferToThread(self._thd_clear)

    def _thd_clear(self) -> None:
        network.unplug(self._lock, self._bridge, self._cable)
        network.ip(f"netns del {self._namespace}", check=False)
        shutil.rmtree(self._directory, ignore_errors=True)


def _thd_end(running: subprocess.Popen[bytes]) -> None:
    assert running.stdin is not None
    running.stdin.close()
    try:
        running.wait(hypervisor.END_SECONDS)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGKILL)
        running.wait()
