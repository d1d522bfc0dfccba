# SPDX-License-Identifier: Apache-2.0
"""The node daemon as a child process, with a directory, a socket and a registry of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater

from bench.client import Client
from bench.figures import Missing
from infranetes.config.schema import CONTROL_SOCKET
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control, cri
from infranetes_common.wire.control_rpcs import ControlStub
from txgrpc import Channel, GrpcError

FILL_SECONDS = 300.0  # until the pool is full
START_SECONDS = 600.0  # a provider may have to build a template first
_TWISTD = "from twisted.scripts.twistd import run; run()"
_RECORDED = f"import sys; from bench.turns import record; record(sys.argv.pop(1)); {_TWISTD}"
ROOT = Path(__file__).resolve().parents[1]


class Daemon:
    """`twistd infranetes` with a directory of its own. It may be killed and started again.

    :param provider: the provider's name.
    :param table: the provider's table in the configuration.
    :param preload: images that its VMs have from the start.
    :param more: TOML that is appended.
    :param environment: its environment, in place of this process'.
    :param turns: whether the file `turns` has its reactor's longest turns (`bench.turns`).
    """

    def __init__(
        self,
        reactor: IReactor,
        provider: str,
        table: Mapping[str, object],
        registry: str = "",
        preload: Sequence[str] = (),
        more: str = "",
        environment: Mapping[str, str] = os.environ,
        turns: bool = False,
    ) -> None:
        self._reactor = reactor
        self._environment = environment
        self.root = Path(tempfile.mkdtemp(prefix="infranetes-bench-"))
        self.root.chmod(0o755)  # a provider may run its VMs as a different user
        self.socket = self.root / "run" / "infranetes.sock"
        self.logs = self.root / "pods"
        self.turns = self.root / "turns"
        self._program = ["-c", _RECORDED, str(self.turns)] if turns else ["-c", _TWISTD]
        self._config = self.root / "infranetes.toml"
        text = _toml(configuration(self.root, self.socket, provider, table, registry, preload))
        self._config.write_text(f"{text}\n{more}")
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Client(reactor, self.socket)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.root / "daemon.log").read_text(errors="replace")

    async def start(self) -> float:
        """Start it and wait until it is ready. Return the seconds since the start of the process."""
        begun = time.monotonic()
        with (self.root / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, "-n", "--pidfile=", "infranetes", "-c", str(self._config)],
                cwd=ROOT,
                env={**self._environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        while True:
            try:
                answer = await self.client.runtime.Status(cri.StatusRequest(), timeout=5.0)
                lacking = [each.message for each in answer.status.conditions if not each.status]
                if not lacking:
                    return time.monotonic() - begun
            except GrpcError as error:
                lacking = [str(error)]
            if self._process.poll() is not None:
                raise Missing(why_ended(self.log))
            if time.monotonic() - begun > START_SECONDS:
                raise Missing(f"the daemon is not ready after {START_SECONDS:g} s: {'; '.join(lacking)}")
            await deferLater(self._reactor, 0.01)

    async def accelerator(self) -> str:
        """Return the accelerator that QEMU uses, and why."""
        answer = await self.client.runtime.Status(cri.StatusRequest(verbose=True), timeout=30.0)
        return str(json.loads(answer.info["provider"])["accelerator"])

    def resident_mib(self) -> float:
        """Return the daemon's resident memory (proc(5), VmRSS)."""
        return resident_mib(Path(f"/proc/{self.pid}/status").read_text())

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    async def pool_filled(self, count: int) -> float:
        """Wait until there are that many VMs in the pool. Return the seconds that it took."""
        control_socket = UNIXClientEndpoint(self._reactor, str(self.root / "run" / CONTROL_SOCKET))
        channel = Channel(self._reactor, control_socket)
        begun = self._reactor.seconds()
        try:
            while True:
                answer = await ControlStub(channel).GetPool(control.GetPoolRequest(), timeout=30.0)
                taken = self._reactor.seconds() - begun
                if sum(one.state == "idle" for one in answer.vms) == count:
                    return taken
                if taken > FILL_SECONDS:
                    raise AssertionError(f"the pool is not full after {FILL_SECONDS:g} s: {answer.trouble}")
                await deferLater(self._reactor, 0.2)
        finally:
            await channel.close()

    async def close(self) -> None:
        """Stop it and remove its directory. The bench has to remove its pods first."""
        await self.client.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        if not os.environ.get("BENCH_KEEP"):
            self.remove()

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.root, ignore_errors=True)


def why_ended(log: str) -> str:
    """Return why a daemon exited at once, according to its log."""
    said = [line.partition(" critical ")[2] for line in log.splitlines() if " critical " in line]
    return said[-1].partition(": ")[2] if said else f"the daemon ended at once:\n{log[-1500:]}"


def resident_mib(status: str) -> float:
    """Return the VmRSS in the text of a /proc/PID/status."""
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def configuration(
    root: Path,
    socket: Path,
    provider: str,
    table: Mapping[str, object],
    registry: str,
    preload: Sequence[str],
) -> dict[str, object]:
    """The daemon's configuration for one bench."""
    return {
        "socket": str(socket),
        "state_dir": str(root / "state"),
        "run_dir": str(root / "run"),
        "node": "bench",
        "provider": provider,
        "providers": {provider: dict(table)},
        "images": {"insecure_registries": [registry] if registry else [], "preload": [*preload]},
    }


def _toml(table: Mapping[str, object], prefix: str = "") -> str:
    """Format as TOML: strings, numbers, booleans, lists of those, and tables."""
    plain = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    parts = ["\n".join(plain)] if plain else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            parts.append(f"[{prefix}{key}]\n{_toml(value, f'{prefix}{key}.')}")
    return "\n".join(parts)


def _value(value: object) -> str:
    return json.dumps(value)
