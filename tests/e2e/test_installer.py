# SPDX-License-Identifier: Apache-2.0
"""The image installs on a booted Debian of another release, which has nothing that it needs but systemd."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from infranetes_common.wire import cri
from tests.e2e import cleanroot, roots
from tests.e2e.booted import Booted
from tests.e2e.node_image import NodeImage
from tests.e2e.test_units import READY, BootedCase
from tests.harness.durations import slow
from tests.harness.needs import needs_programs

KUBELET = """\
[Unit]
Description=kubelet
[Service]
ExecStart=/usr/local/bin/kubelet --config=/etc/kubelet.yaml
Restart=always
[Install]
WantedBy=multi-user.target
"""
# What is told of it is how it was started.
PROGRAM = "#!/bin/sh\nexec sleep infinity\n"
CONFIGURATION = 'node = "@NODE@"\nprovider = "simulated"\n'
# As kube-proxy has them. Debian 12's nft is killed where Debian 13's has made them.
SETS = """\
table ip kube-proxy {
    comment "rules for kube-proxy"
    set cluster-ips { type ipv4_addr; comment "Active ClusterIPs"; elements = { 10.96.0.1 }; }
    map service-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.0.1 . tcp . 443 : drop }
    }
}
"""
# As a privileged container with the node's processes and network sees it.
CONTAINER = """
set -e
image=$1
shift
mount --make-rprivate /
mkdir -p "$image/host" "$image/proc" "$image/dev" "$image/tmp"
mount --rbind / "$image/host"
mount -t proc proc "$image/proc"
mount --bind /dev "$image/dev"
exec chroot "$image" "$@"
"""
_IMAGES = "srv"  # where the containers' roots are, which are no part of the node
_CHANGING = (*cleanroot.FLEETING, _IMAGES, "var/lib/systemd")


@needs_programs("patchelf")
@slow(120, "a root is booted, and trees are copied to it")
class InstallerTests(BootedCase):
    """install, upgrade, an upgrade that fails, removal, with a pod that runs, beside a newer nft's sets."""

    timeout = 1800

    def setUp(self) -> None:
        self.root = cleanroot.CleanRoot(roots.BARE.tar())
        self.addCleanup(self.root.remove)
        top = self.root.path
        (top / "etc/systemd/system/kubelet.service").write_text(KUBELET)
        (top / "usr/local/bin/kubelet").write_text(PROGRAM)
        (top / "usr/local/bin/kubelet").chmod(0o755)
        images = top / _IMAGES
        self.first = NodeImage.unpacked(images / "first")
        self.second = self.first.another(images / "second", "9.0.0-second")
        self.broken = self.first.another(images / "broken", "9.1.0-broken")
        twistd = self.broken.root / self.broken.home.lstrip("/") / "usr/bin/twistd"
        twistd.write_text("raise SystemExit('this release does not start')\n")
        for image in (self.first, self.second, self.broken):
            (image.root / "config.toml").write_text(CONFIGURATION)
        self.system = Booted(self.root)
        self.addCleanup(self.system.end)
        self.system.path("run/containerd").mkdir()
        self.system.path("run/containerd/containerd.sock").touch()
        self.system.systemctl("enable", "kubelet")
        self.system.systemctl("start", "kubelet")
        self.newer_nft("-f", "-", script=SETS)

    def run_installer(self, image: NodeImage, command: str) -> subprocess.CompletedProcess[str]:
        container = f"/{image.root.relative_to(self.root.path)}"
        python = f"{image.home}/usr/bin/python3"
        words = (python, "-I", "-m", "infranetes.installer", command, "--root=/host", "--config=/config.toml")
        environment = ("env", f"INFRANETES_TREE={image.home}")
        enter = ("unshare", "--mount", "sh", "-c", CONTAINER, "sh")
        return self.system.run(*environment, *enter, container, *words, "--node=node-1", timeout=600)

    def newer_nft(self, *words: str, script: str = "") -> str:
        """Run Debian 13's nft on the node, from an image's root; return its output."""
        program = f"{self.first.home}/usr/libexec/nft/newer/nft"
        enter = ("nsenter", "--target", str(self.system.pid), "--net", "chroot", str(self.first.root))
        done = subprocess.run(
            [*enter, program, *words], check=True, input=script, capture_output=True, text=True
        )
        return done.stdout

    def kubelet(self) -> tuple[str, str]:
        """Return the kubelet's process and how it was started."""
        pid = self.system.systemctl("show", "--property=MainPID", "--value", "kubelet")
        shown = self.system.systemctl("show", "--property=ExecStart", "--value", "kubelet")
        return pid, shown

    def node(self) -> Mapping[str, object]:
        """Return the node's files, units, tables, links and the names of its processes."""
        found: dict[str, object] = {}
        for directory, directories, names in os.walk(self.root.path):
            inside = Path(directory).relative_to(self.root.path)
            directories[:] = [each for each in directories if str(inside / each) not in _CHANGING]
            for name in [*directories, *names]:
                path = Path(directory) / name
                content: object = "directory"
                if path.is_symlink():
                    content = os.readlink(path)
                elif path.is_file():
                    content = (path.stat().st_size, path.read_bytes() if inside.parts[:1] == ("etc",) else "")
                found[str(inside / name)] = (oct(path.lstat().st_mode), content)
        units = self.system.systemctl("list-unit-files", "--no-legend")
        found["units"] = sorted(
            line for line in units.splitlines() if "infranetes" in line or "kubelet" in line
        )
        enter = ("nsenter", "--target", str(self.system.pid), "--net", "ip", "-o", "link")
        found["links"] = subprocess.run(enter, check=True, capture_output=True, text=True).stdout
        found["tables"] = self.newer_nft("list", "ruleset")
        listed = self.system.run("sh", "-c", "cat /proc/[0-9]*/comm").stdout.split()
        found["processes"] = sorted(set(listed) - {"sh", "cat"})
        found["run"] = self.system.path("run/infranetes").exists()
        found["kubelet"] = self.kubelet()[1].partition("; start_time")[0]
        return found

    async def ready_pods(self) -> list[str]:
        listed = await self.call(
            "ListPodSandbox", cri.ListPodSandboxRequest(filter=cri.PodSandboxFilter(state=READY))
        )
        return [each.id for each in listed.items]

    def daemon(self) -> str:
        pid = self.system.systemctl("show", "--property=MainPID", "--value", "infranetes")
        return self.system.run("readlink", f"/proc/{pid}/exe").stdout

    def test_a_node_has_it_upgrades_it_and_is_as_before(self) -> Deferred[None]:
        async def scenario() -> None:
            before = self.node()
            done = await deferToThread(self.run_installer, self.first, "present")
            self.assertEqual(done.returncode, 0, done.stdout + self.journal("infranetes"))
            pid, started = self.kubelet()
            self.assertIn("--container-runtime-endpoint=unix:///run/infranetes/infranetes.sock", started)
            self.assertIn(self.first.name, self.daemon())
            sandbox = await self.run_sandbox()

            done = await deferToThread(self.run_installer, self.second, "present")
            self.assertEqual(done.returncode, 0, done.stdout + self.journal("infranetes"))
            self.assertIn(self.second.name, self.daemon())
            self.assertEqual(await self.ready_pods(), [sandbox])
            self.assertEqual(self.kubelet()[0], pid, "kubelet was restarted")

            done = await deferToThread(self.run_installer, self.broken, "present")
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertIn(f"runs {self.second.name} again", done.stdout)
            self.assertIn(self.second.name, self.daemon())
            self.assertEqual(await self.ready_pods(), [sandbox])

            done = await deferToThread(self.run_installer, self.second, "absent")
            self.assertEqual(done.returncode, 1)
            self.assertIn("1 pods of this node are VMs", done.stdout)
            await self.call("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox))
            await self.call("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
            for _ in range(2):
                done = await deferToThread(self.run_installer, self.second, "absent")
                self.assertEqual(done.returncode, 0, done.stdout)
                after = self.node()
                self.assertEqual(
                    {key for key in {*after, *before} if after.get(key) != before.get(key)}, set()
                )

        return Deferred.fromCoroutine(scenario())
