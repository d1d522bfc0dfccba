# SPDX-License-Identifier: Apache-2.0
"""A real Docker engine with a root of its own, and `docker load` archives for it; no network needed."""

from __future__ import annotations

import atexit
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.tools import need
from tests.support.oci import BuiltImage

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0

# A shell script that ends the engine together with the test process, however that ends.
_KEEPER = """
dockerd "$@" &
engine=$!
trap 'kill $engine 2>/dev/null' TERM
while kill -0 "$PARENT" 2>/dev/null && kill -0 $engine 2>/dev/null; do sleep 0.2; done
kill $engine 2>/dev/null
wait $engine
kill -0 "$PARENT" 2>/dev/null && exit
awk -v root="$ROOT/" 'index($2, root) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r -n 1 umount -l
rm -rf "$ROOT"
"""


class Dockerd:
    """One engine. It is not a child of this process, so that tests can share it.

    :param runtime: the program that runs its containers; None: Docker's default.
    """

    def __init__(self, runtime: Path | None = None) -> None:
        self._runtime = runtime
        self.root = Path(tempfile.mkdtemp(prefix="dockerd-"))  # short: it has sockets in it
        self.socket = self.root / "docker.sock"

    def start(self) -> Dockerd:
        """Start the engine, and wait until it serves. After `stop_engine` it has the same content."""
        need("dockerd")
        # Where process 1 does not reap, a killed containerd stays a zombie, which dockerd would take for
        # alive.
        (self.root / "exec/containerd/containerd.pid").unlink(missing_ok=True)
        arguments = [
            f"--data-root={self.root}/data", f"--exec-root={self.root}/exec", f"--host=unix://{self.socket}",
            f"--pidfile={self._pid_file}", "--bridge=none", "--iptables=false", "--ip6tables=false",
        ]  # fmt: skip
        if self._runtime is not None:
            arguments += [f"--add-runtime=other={self._runtime}", "--default-runtime=other"]
        environment = {**os.environ, "PARENT": str(os.getpid()), "ROOT": str(self.root)}
        with open(self.root / "log", "ab") as log:
            subprocess.run(
                ["setsid", "--fork", "sh", "-c", _KEEPER, "dockerd", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/", check=True,
            )  # fmt: skip
        until = time.monotonic() + _START_SECONDS
        while not self.serves():
            if time.monotonic() > until:
                said = (self.root / "log").read_text(errors="replace")[-4000:]
                self.stop()
                raise AssertionError(f"dockerd does not start: {said}")
            time.sleep(0.05)
        return self

    @property
    def _pid_file(self) -> Path:
        return self.root / "pid"

    def serves(self) -> bool:
        """Return whether the engine answers."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5.0)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
                return b" 200 " in probe.recv(4096)
            except OSError:
                return False

    def pid(self) -> int:
        """The id of the engine's process; 0: it does not run."""
        try:
            pid = int(self._pid_file.read_text())
            os.kill(pid, 0)
        except (OSError, ValueError):
            return 0
        return pid

    def stop_engine(self, number: int = 15) -> None:
        """End the engine by signal `number`, but keep its data."""
        pid = self.pid()
        if pid:
            os.kill(pid, number)
        until = time.monotonic() + _STOP_SECONDS
        while self.pid() and time.monotonic() < until:
            time.sleep(0.02)

    def stop(self) -> None:
        """End it and remove its data. Idempotent."""
        self.stop_engine()
        # The engine leaves a network namespace mounted, and after SIGKILL also containers' file systems.
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((one for one in mounts if one.startswith(f"{self.root}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], capture_output=True)
        shutil.rmtree(self.root, ignore_errors=True)


_shared: list[Dockerd] = []


def shared() -> Dockerd:
    """Return the engine shared by all tests of this process that leave it as they found it."""
    if not _shared:
        engine = Dockerd()
        atexit.register(engine.stop)
        _shared.append(engine.start())
    return _shared[0]


def archive(built: BuiltImage, present: int = 0, tags: Sequence[str] = ()) -> bytes:
    """Return the image as an archive for `docker load`, without its lowest `present` layers."""
    out = io.BytesIO()
    config = f"{built.id.removeprefix('sha256:')}.json"
    layers = [f"{number:03d}.tar" for number in range(len(built.layers))]
    manifest = [{"Config": config, "RepoTags": list(tags) or None, "Layers": layers}]
    files = [("manifest.json", json.dumps(manifest).encode()), (config, built.config.data)]
    files += [(name, blob.data) for name, blob in zip(layers, built.layers, strict=True)][present:]
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()
