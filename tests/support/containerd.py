# SPDX-License-Identifier: Apache-2.0
"""Debian's containerd with a root of its own. It serves images only: its pods have no network."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from infranetes.images.manifest import host_platform
from tests.harness.tools import need

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
# Plug-ins that are not needed, or would write outside of the root.
_WITHOUT = (
    "io.containerd.internal.v1.opt",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
)
_CONFIG = """\
version = 2
root = "{root}/root"
state = "{root}/state"
disabled_plugins = [{without}]
[grpc]
address = "{root}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
discard_unpacked_layers = {discards}
# As containerd 2 has it, whose migration of such a file leaves these out.
[plugins."io.containerd.cri.v1.images"]
snapshotter = "native"
discard_unpacked_layers = {discards}
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "{platform}"
snapshotter = "native"
"""


class Containerd:
    """A containerd process. It uses plain http for registries on loopback addresses.

    :param discards: whether it deletes the compressed layers that it has unpacked.
    """

    def __init__(self, discards: bool = False) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="containerd-"))  # short: it has sockets in it
        self.socket = self.root / "containerd.sock"
        without = ", ".join(f'"{name}"' for name in _WITHOUT)
        text = _CONFIG.format(
            root=self.root, without=without, discards=str(discards).lower(), platform=host_platform()
        )
        (self.root / "config.toml").write_text(text)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Containerd:
        """Start the process and return once it serves. After `stop_process` it has the same images."""
        need("containerd")
        with open(self.root / "log", "ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", str(self.root / "config.toml")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            )  # fmt: skip
        until = time.monotonic() + _START_SECONDS
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > until:
                said = (self.root / "log").read_text(errors="replace")[-4000:]
                self.stop()
                raise AssertionError(f"containerd does not start: {said}")
            time.sleep(0.05)
        return self

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return b"containerd successfully booted" in (self.root / "log").read_bytes()

    def stop_process(self) -> None:
        """End the process, but keep its data."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def stop(self) -> None:
        """End it and remove its data. Idempotent."""
        self.stop_process()
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((one for one in mounts if one.startswith(f"{self.root}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], capture_output=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def delete(self, digest: str) -> None:
        """Delete a blob of the CRI's images, even if something needs it."""
        client = ["ctr", "--address", str(self.socket), "--namespace", "k8s.io"]
        subprocess.run([*client, "content", "delete", digest], check=True, capture_output=True)

    def blob(self, digest: str) -> Path:
        """The file of a blob."""
        return self.root / "root/io.containerd.content.v1.content/blobs/sha256" / digest[len("sha256:") :]
