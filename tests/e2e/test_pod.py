"""A pod on a real VM, from the CRI's socket to the container and back."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.web.client import Agent, readBody

from infranetes.guest.image import DEFAULT_DIR
from infranetes.providers.qemu.network import Network
from infranetes_common import cri
from tests.infranetes.daemon.case import ROOT, DaemonCase, reactor
from txgrpc import Code

IMAGES = os.environ.get("INFRANETES_TEST_IMAGES", str(DEFAULT_DIR))
TEMPLATES = os.environ.get("INFRANETES_TEST_TEMPLATES", "/var/lib/infranetes/test-templates")
BRIDGE = "infpod0"
CRICTL = ROOT / "build" / "tools" / "crictl"


class PodTests(DaemonCase):
    """Each with the daemon as a process, QEMU, the guest image's agent and Docker in the VM."""

    timeout = 900
    patience = 10.0  # the template may have to be booted first; nothing here is quick without KVM

    def setUp(self) -> None:
        super().setUp()
        self.config["provider"] = "qemu"
        self.config["providers"] = {
            "qemu": {
                "bridge": BRIDGE,
                "pod_cidr": "10.85.0.0/24",
                "image_dir": IMAGES,
                "template_dir": TEMPLATES,
            }
        }

    async def end_everything(self) -> None:
        try:
            if self.alive:
                for sandbox in await self.sandboxes():
                    await self.stop_pod(sandbox.id)
                    await self.remove_pod(sandbox.id)
        finally:
            await super().end_everything()
            await Network(reactor, BRIDGE, 0).remove()

    def taps(self) -> str:
        """The VMs' network cards on the node: one for each QEMU, and gone with it."""
        command = ["ip", "-o", "link", "show", "master", BRIDGE]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def lines(self, name: str) -> list[str]:
        """What a container's log has, without times and tags."""
        log = (self.log_directory / "web" / f"{name}.log").read_text()
        for line in log.splitlines():
            self.assertRegex(line, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z (stdout|stderr) [PF] ")
        return [line.split(" ", 3)[3] for line in log.splitlines()]

    def has_lines(self, count: int) -> bool:
        return len(self.lines("main")) >= count

    async def execute(self, container: str, *command: str) -> Any:
        request = cri.ExecSyncRequest(container_id=container, cmd=command, timeout=60)
        return await self.runtime.ExecSync(request, timeout=90.0)

    async def crictl(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        endpoint = f"--runtime-endpoint=unix://{self.socket}"
        command = [str(CRICTL), endpoint, "--timeout=60s", *words]
        return await deferToThread(subprocess.run, command, input=stdin, capture_output=True, timeout=120)

    async def test_a_killed_daemon_changes_nothing_for_a_pod(self) -> None:
        await self.start()
        sandbox = await self.run_pod(hostname="web-0", labels={"app": "web"})
        script = "i=0; while true; do echo line $i; i=$((i+1)); sleep 0.2; done"
        container = await self.run_container(sandbox, self.box(script=script))
        before = await self.container_status(container)
        self.assertEqual(len(self.taps().splitlines()), 1)
        for _ in range(2):
            seen = len(self.lines("main"))
            await self.kill()
            await self.sleep(2.0)
            await self.start()
            await self.until(partial(self.has_lines, seen + 15), "the log goes on")
        self.assertEqual(
            [(each.id, each.state) for each in await self.sandboxes()], [(sandbox, cri.SANDBOX_READY)]
        )
        status = await self.container_status(container)
        self.assertEqual(
            (status.state, status.started_at, status.created_at),
            (cri.CONTAINER_RUNNING, before.started_at, before.created_at),
        )
        self.assertEqual((await self.execute(container, "hostname")).stdout, b"web-0\n")
        stop = cri.StopContainerRequest(container_id=container, timeout=0)
        await self.runtime.StopContainer(stop, timeout=90.0)
        lines = self.lines("main")
        self.assertEqual(lines, [f"line {number}" for number in range(len(lines))])
        self.assertEqual((await self.container_status(container)).exit_code, 137)
        await self.stop_pod(sandbox)
        self.assertEqual(self.taps(), "")
        await self.remove_pod(sandbox)
        self.assertEqual(await self.sandboxes(), [])

    async def test_files_streams_and_limits_reach_the_container(self) -> None:
        await self.start()
        files = Path(os.path.realpath(self.root)) / "kubelet"
        secret, message = files / "secret", files / "message"
        (secret / "..1").mkdir(parents=True)
        (secret / "..1" / "token").write_text("first")
        (secret / "..1" / "token").chmod(0o440)
        (secret / "..data").symlink_to("..1")
        (secret / "token").symlink_to("..data/token")
        message.write_text("")
        mounts = [
            cri.Mount(container_path="/secret", host_path=str(secret), readonly=True),
            cri.Mount(container_path="/message", host_path=str(message)),
        ]
        linux = cri.LinuxContainerConfig(
            resources=cri.LinuxContainerResources(memory_limit_in_bytes=64 << 20),
        )
        sandbox = await self.run_pod()
        script = (
            "id -u; cat /secret/token; echo; until grep -q second /secret/token; do sleep 0.1; done;"
            " echo changed; echo last words > /message; exit 5"
        )
        container = await self.run_container(sandbox, self.box(script=script, mounts=mounts, linux=linux))
        await self.until(lambda: self.lines("main") == ["0", "first"], "the secret is read")
        looked = await self.execute(container, "sh", "-c", "echo x > /secret/y; ls -lL /secret/token")
        self.assertIn(b"-r--r-----", looked.stdout)
        self.assertIn(b"Read-only file system", looked.stderr)
        (secret / "..2").mkdir()
        (secret / "..2" / "token").write_text("second")
        (secret / "..next").symlink_to("..2")
        (secret / "..next").rename(secret / "..data")
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason), (5, "Error"))
        self.assertEqual(message.read_text(), "last words\n")
        self.assertEqual(self.lines("main"), ["0", "first", "changed"])
        self.assertEqual(status.resources.linux.memory_limit_in_bytes, 64 << 20)

    async def test_streams_and_the_pods_address(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        server = "mkdir /www; echo Hello from the pod > /www/index.html; exec httpd -f -p 8080 -h /www"
        container = await self.run_container(sandbox, self.box(script=server))
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = (await self.runtime.PodSandboxStatus(request, timeout=10.0)).status
        self.assertRegex(status.network.ip, r"^10\.85\.0\.\d+$")
        page: Deferred[bytes] = Deferred.fromCoroutine(self.page(f"http://{status.network.ip}:8080/"))
        self.assertEqual(await page, b"Hello from the pod\n")
        echoed = await self.crictl(
            "exec", "-i", container, "sh", "-c", "cat; exit 3", stdin=b"through and back"
        )
        self.assertEqual(echoed.stdout, b"through and back", echoed.stderr)
        self.assertIn(b"exit code 3", echoed.stderr)
        lost = await self.execute(container, "sh", "-c", "exit 4")
        self.assertEqual(lost.exit_code, 4)
        late = cri.ExecSyncRequest(container_id=container, cmd=["sleep", "100"], timeout=1)
        await self.refused(Code.DEADLINE_EXCEEDED, self.runtime.ExecSync(late, timeout=90.0))

    async def page(self, url: str) -> bytes:
        agent = Agent(reactor, connectTimeout=10)
        response = await agent.request(b"GET", url.encode())
        return await readBody(response)
