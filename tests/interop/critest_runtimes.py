# SPDX-License-Identifier: Apache-2.0
"""What critest judges: the daemon on QEMU and, to compare with, Debian's containerd; one process each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.infranetes.daemon.case import ROOT, DaemonCase, toml
from tests.interop.critest_images import BASE, PAUSE, REGISTRIES
from tests.support.registry import Registry

TOOLS = ROOT / "build" / "tools"
READY_SECONDS = 900.0  # the first start makes QEMU's template
END_SECONDS = 60.0
TWISTD = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()")


# critest looks whether the node's kernel has AppArmor, and loads profiles into it. Where a pod is a VM it
# is that one's kernel which matters, and a profile is there for it once it is in the daemon's directory.
_WITH_APPARMOR = """
mount -t tmpfs none /sys/module
mkdir -p /sys/module/apparmor/parameters
echo Y >/sys/module/apparmor/parameters/enabled
exec "$@"
"""
_SUDO = """\
#!/bin/sh -eu
# sudo apparmor_parser -r -W FILE
[ "$1 $2 $3" = "apparmor_parser -r -W" ]
cp "$4" "$APPARMOR_DIRECTORY/.$$"
mv "$APPARMOR_DIRECTORY/.$$" "$APPARMOR_DIRECTORY/critest"
"""


class NotReady(Exception):
    """The runtime ended or takes too long; the message has the end of its log."""


class Runtime:
    """A runtime's process in a directory of its own.

    :param root: for configuration, state and log; a short path, for sockets. :ivar socket: the CRI's.
    :ivar handler: what pods are asked for with; "": nothing."""

    name = ""
    handler = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / "cri.sock"
        self.log = root / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """Of its process, which has been started."""
        assert self._process is not None
        return self._process.pid

    def command(self, registry: Registry) -> tuple[list[str], Mapping[str, str]]:
        """Writes the configuration; what to run, and what is added to its environment."""
        raise NotImplementedError

    def start(self, registry: Registry) -> None:
        """Answers when pods can be run, in VMs too.

        :raise NotReady: it ended, or does not become ready."""
        self.root.mkdir(parents=True, exist_ok=True)
        command, environment = self.command(registry)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )
        until = time.monotonic() + READY_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                said = self.log.read_text(errors="replace")[-3000:]
                raise NotReady(f"{self.name} is not ready; its log is {self.log}:\n{said}")
            time.sleep(0.2)

    def around(self, spec: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """What critest is run by for that spec, and what is added to its environment."""
        return (), {}

    def _ready(self) -> bool:
        done = self.crictl("info")
        if done.returncode:
            return False
        conditions = json.loads(done.stdout)["status"]["conditions"]
        needed = [each for each in conditions if each["type"] not in DaemonCase.unneeded]
        return bool(needed) and all(each["status"] for each in needed)

    def crictl_command(self, *words: str) -> list[str]:
        endpoints = ("--runtime-endpoint", self.endpoint, "--image-endpoint", self.endpoint)
        return [str(TOOLS / "crictl"), "--config", os.devnull, *endpoints, "--timeout", "60s", *words]

    def crictl(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """`timeout`: seconds."""
        return subprocess.run(self.crictl_command(*words), capture_output=True, text=True, timeout=timeout)

    def end(self) -> None:
        """End every pod, then the process. Twice is once."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.crictl("rmp", "-fa")
        for number in (signal.SIGTERM, signal.SIGKILL):
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
                return


class Infranetes(Runtime):
    """The daemon of this tree.

    :param table: keys of ``providers.qemu`` besides the network's."""

    name = "infranetes"

    def __init__(self, root: Path, table: Mapping[str, Any]) -> None:
        super().__init__(root)
        self._table = table

    def config(self, registry: Registry) -> dict[str, Any]:
        """Its configuration."""
        network = {"bridge": "infraconf0", "pod_cidr": "10.84.0.0/24", "mtu": 1400}
        return {
            "socket": self.endpoint,
            "state_dir": str(self.root / "state"),
            "run_dir": str(self.root / "run"),
            "node": "conformance",
            "provider": "qemu",
            "log": {"level": "debug"},
            "apparmor_dir": str(self._apparmor()),
            "images": {"registries_conf": str(self._registries(registry)), "preload": [BASE]},
            "providers": {"qemu": {**network, **self._table}},
        }

    def command(self, registry: Registry) -> tuple[list[str], Mapping[str, str]]:
        path = self.root / "infranetes.toml"
        path.write_text(toml(self.config(registry)))
        command = [*TWISTD, "--nodaemon", "--pidfile=", "infranetes", "--config", str(path)]
        return command, {}

    def _registries(self, registry: Registry) -> Path:
        """critest's names stay as they are; where they lead is containers-registries.conf(5)'s to say."""
        path = self.root / "registries.conf"
        path.write_text(
            "\n".join(
                f"[[registry]]\nprefix = {name!r}\nlocation = {registry.host!r}\ninsecure = true"
                for name in REGISTRIES
            )
        )
        return path

    def _apparmor(self) -> Path:
        """The node's AppArmor profiles: none, and a `sudo` for critest that puts one there."""
        programs, profiles = self.root / "programs", self.root / "apparmor.d"
        for directory in (programs, profiles):
            directory.mkdir()
        sudo = programs / "sudo"
        sudo.write_text(_SUDO)
        sudo.chmod(0o755)
        return profiles

    def around(self, spec: str) -> tuple[Sequence[str], Mapping[str, str]]:
        if not spec.startswith("AppArmor "):
            return (), {}
        path = f"{self.root / 'programs'}:{os.environ.get('PATH', '')}"
        command = ("unshare", "--mount", "sh", "-euc", _WITH_APPARMOR, "sh")
        return command, {"PATH": path, "APPARMOR_DIRECTORY": str(self.root / "apparmor.d")}


class Containerd(Runtime):
    """Debian's containerd, with runc and the reference plug-ins of CNI. `subnet`: its pods'."""

    name = "containerd"
    subnet = "10.83.0.0/24"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.state = root / "state"

    def command(self, registry: Registry) -> tuple[list[str], Mapping[str, str]]:
        hosts = self.root / "hosts"
        for name in REGISTRIES:
            (hosts / name).mkdir(parents=True)
            (hosts / name / "hosts.toml").write_text(
                f'[host."http://{registry.host}"]\ncapabilities = ["pull", "resolve"]\n'
            )
        networks = self.root / "net.d"
        networks.mkdir()
        (networks / "10-conformance.conflist").write_text(json.dumps(self.network()))
        plugin = {
            "sandbox_image": f"{REGISTRIES[0]}/{PAUSE[0]}:{PAUSE[1]}",
            "restrict_oom_score_adj": True,  # may not be lowered without CAP_SYS_RESOURCE
            "stream_server_address": "127.0.0.1",
            "cni": {"bin_dir": "/usr/lib/cni", "conf_dir": str(networks)},
            "registry": {"config_path": str(hosts)},
        }
        config = {
            "version": 2,
            "root": str(self.root / "root"),
            "state": str(self.state),
            "grpc": {"address": str(self.socket)},
            "plugins": {'"io.containerd.grpc.v1.cri"': plugin},
        }
        path = self.root / "config.toml"
        path.write_text(toml(config))
        return ["containerd", "--config", str(path)], {}

    def network(self) -> dict[str, Any]:
        """Return the configuration of the CNI's network."""
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": self.subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(self.root / "addresses"),
        }
        bridge = {
            "type": "bridge",
            "bridge": "cniconf0",
            "isGateway": True,
            "ipMasq": True,
            "ipam": addresses,
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "conformance", "plugins": [bridge, ports]}


class Before(Infranetes):
    """The daemon before a containerd of its own: pods are VMs that ask for that."""

    handler = "infranetes"

    def __init__(self, root: Path, table: Mapping[str, Any]) -> None:
        super().__init__(root, table)
        self.delegate = Containerd(root / "c")

    def config(self, registry: Registry) -> dict[str, Any]:
        config = super().config(registry)
        config["images"] = {"preload": config["images"]["preload"]}  # containerd's registries
        return {**config, "delegate": {"socket": str(self.delegate.socket)}}

    def start(self, registry: Registry) -> None:
        self.delegate.start(registry)
        super().start(registry)

    def end(self) -> None:
        super().end()
        self.delegate.end()


class Through(Before):
    """A containerd's own pods, by the daemon before it; of its own it would have simulated VMs."""

    name = "containerd through infranetes"
    handler = ""

    def __init__(self, root: Path) -> None:
        super().__init__(root, {})

    def config(self, registry: Registry) -> dict[str, Any]:
        return {**super().config(registry), "provider": "simulated", "providers": {}, "images": {}}

    def around(self, spec: str) -> tuple[Sequence[str], Mapping[str, str]]:
        return self.delegate.around(spec)


def removed(directory: Path) -> None:
    """Take a directory away with whatever is mounted below it."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in reversed(mounts):
        if Path(mount).is_relative_to(directory):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
    shutil.rmtree(directory, ignore_errors=True)
