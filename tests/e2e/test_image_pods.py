# SPDX-License-Identifier: Apache-2.0
"""A pod that is a guest without our agent, on real QEMU: a system of a kernel and busybox."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.e2e.image_case import ImagePodCase
from tests.guests import catalogue
from tests.harness.needs import needs_guests
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.infranetes.services import objects as written
from tests.infranetes.services.test_cluster import NODES, SERVICES, SLICES
from txgrpc import Code

reactor = installed()
STARTED = "tiny: started"


def fetched(url: str) -> str:
    """Return what is at a URL."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  it is http
        return str(answer.read().decode())


def screen_size(port: int) -> tuple[int, int]:
    """Return width and height of the screen at a port, as RFB tells them to a viewer that shares it."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as viewer, viewer.makefile("rwb") as rfb:

        def exchanged(said: bytes, size: int) -> bytes:
            rfb.write(said)
            rfb.flush()
            return rfb.read(size)

        kinds = exchanged(rfb.read(12), 1)[0]  # of authentication: none alone
        assert rfb.read(kinds) == b"\x01"
        assert exchanged(b"\x01", 4) == bytes(4)
        width, height = struct.unpack(">HH", exchanged(b"\x01", 4))
        return width, height


@needs_guests("tiny.qcow2")
class TinyGuestTests(ImagePodCase):
    """Pods of the tiny guest."""

    async def begun(self, **fields: Any) -> tuple[str, str]:
        """Start a daemon and a guest; return the ids of its sandbox and container once it has started."""
        await self.start()
        self.guest_image = await self.pulled("tiny", catalogue.path("tiny.qcow2"))
        sandbox = await self.run_pod(hostname="web-0", **fields)
        container = await self.run_container(sandbox, self.guest(self.guest_image, stdin=True, tty=True))
        await self.says(STARTED)
        return sandbox, container

    async def page(self, address: str) -> str:
        """Return the guest's page, once it shows its address."""
        for _ in range(60):
            try:
                page = await deferToThread(fetched, f"http://{address}:8080/")
            except OSError:
                page = ""
            if address in page:
                return page
            await self.sleep(1.0)
        self.fail(f"there is no page:\n{self.console()}")

    async def test_its_life_over_a_killed_daemon(self) -> None:
        sandbox, container = await self.begun()
        address = await self.address(sandbox)
        page = await self.page(address)
        self.assertIn(address, page)
        self.assertIn("web-0", page)
        await self.kill()
        await self.start()
        self.assertEqual((await self.container_status(container)).state, cri.CONTAINER_RUNNING)
        before = self.console()
        await self.type_in(container, "\necho after the daemon\n")
        await self.says("\nafter the daemon")
        self.assertTrue(self.console().startswith(before))
        stop = cri.StopContainerRequest(container_id=container, timeout=60)
        await self.runtime.StopContainer(stop, timeout=90.0)
        status = await self.container_status(container)
        self.assertEqual((status.state, status.exit_code), (cri.CONTAINER_EXITED, 0))
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        self.assertEqual(self.taps(), "")

    async def test_a_guest_that_reboots_runs_on_and_one_that_powers_off_has_ended(self) -> None:
        sandbox, container = await self.begun()
        await self.says("boot 1")
        await self.type_in(container, "\nreboot\n")
        await self.says("boot 2", seconds=120.0)
        status = await self.container_status(container)
        self.assertEqual(status.state, cri.CONTAINER_RUNNING)
        shown = await self.type_in(container, "\npoweroff\n")
        self.assertIn("tiny", shown)
        status = await self.in_state(container, cri.CONTAINER_EXITED, 60.0)
        self.assertEqual((status.exit_code, status.reason), (0, "Completed"))
        await self.until_not_ready(sandbox)

    async def test_a_crash_is_told(self) -> None:
        _, container = await self.begun()
        await self.type_in(container, "\necho c >/proc/sysrq-trigger\n")
        status = await self.in_state(container, cri.CONTAINER_EXITED, 60.0)
        self.assertEqual((status.exit_code, status.reason), (134, "GuestPanicked"))

    async def test_a_killed_qemu_is_told_and_nothing_is_left(self) -> None:
        sandbox, container = await self.begun()
        [pid] = self.qemus()
        os.kill(pid, signal.SIGKILL)
        status = await self.in_state(container, cri.CONTAINER_EXITED, 30.0)
        self.assertEqual(status.exit_code, 137)
        await self.until_not_ready(sandbox)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        self.assertEqual((self.taps(), self.qemus()), ("", []))

    async def test_a_guest_that_powers_off_while_no_daemon_runs(self) -> None:
        sandbox, container = await self.begun()
        await self.type_in(container, "\n(sleep 8; poweroff) &\n")
        await self.kill()
        await self.sleep(25.0)
        await self.start()
        status = await self.in_state(container, cri.CONTAINER_EXITED, 30.0)
        self.assertEqual((status.exit_code, status.reason), (0, "Completed"))
        await self.until_not_ready(sandbox)

    async def test_a_command_is_refused_with_what_can_be_done(self) -> None:
        _, container = await self.begun()
        request = cri.ExecSyncRequest(container_id=container, cmd=["ls"], timeout=30)
        why = await self.refused(Code.FAILED_PRECONDITION, self.runtime.ExecSync(request, timeout=60.0))
        self.assertIn("kubectl attach", why)

    async def test_its_screen_is_shown_and_used(self) -> None:
        self.config["control"] = {"enter": True}
        await self.begun()
        [pod] = (await self.asked("pods"))["pods"]
        self.assertEqual((pod["agent"], pod["way"]), ("live", "console"))
        guest = (await self.asked("describe", "web"))["guest"]
        self.assertEqual((guest["way"], guest["state"]), ("none", "running"))
        picture = self.root / "web.png"
        shown = await self.asked("screenshot", "web", "--output", str(picture))
        self.assertEqual(shown["bytes"], picture.stat().st_size)
        self.assertGreaterEqual(shown["width"], 640)
        relay = subprocess.Popen(self.ctl("vnc", "web"), stdout=subprocess.PIPE)
        self.addCleanup(relay.wait)
        self.addCleanup(relay.kill)
        assert relay.stdout is not None
        self.addCleanup(relay.stdout.close)
        at = json.loads(await deferToThread(relay.stdout.readline))
        for _ in range(2):
            self.assertEqual(await deferToThread(screen_size, at["port"]), (shown["width"], shown["height"]))
        relay.send_signal(signal.SIGTERM)

    async def test_the_node_translates_services_for_it_and_says_so(self) -> None:
        server = SimulatedApiServer(reactor)
        server.start()
        self.addCleanup(server.stop)
        server.put(NODES, {"metadata": {"name": "node", "labels": {}}})
        server.put(SERVICES, written.service("web", ("10.96.0.10",)))
        server.put(SLICES, written.endpoint_slice(written.endpoint("10.1.0.1"), service="web"))
        self.config["kubernetes"] = {"kubeconfig": str(server.kubeconfig(self.root / "kubeconfig"))}
        await self.begun()
        traced = await self.asked("services", "default/web", "--trace", "10.96.0.10:80")
        vm = traced["vm"]
        self.assertEqual((vm["by_node"], vm["current"], vm["counts"]["rules"]), (True, True, 1))
        self.assertEqual((traced["in_vm"]["endpoints"], traced["same"]), (["10.1.0.1:8080"], True))

    def ctl(self, *words: str) -> list[str]:
        """Return a command of infranetes-ctl that answers with JSON."""
        program = [sys.executable, "-m", "infranetes.ctl.cli", "--config", str(self.root / "infranetes.toml")]
        return [*program, "--json", *words]

    async def asked(self, *words: str) -> Any:  # Any: JSON
        """Return what infranetes-ctl answers."""
        done = await deferToThread(
            subprocess.run, self.ctl(*words), stdout=subprocess.PIPE, check=True, timeout=100
        )
        return json.loads(done.stdout)

    async def until_not_ready(self, sandbox: str) -> None:
        """Wait until a sandbox is not ready."""
        for _ in range(400):
            found = await self.sandboxes(id=sandbox)
            if found[0].state == cri.SANDBOX_NOTREADY:
                return
            await self.sleep(0.2)
        self.fail("it is still ready")

    def qemus(self) -> list[int]:
        """Return the process ids of this daemon's VMs."""
        found = subprocess.run(
            ["pgrep", "-f", "guest=infranetes-"], capture_output=True, text=True, check=False
        )
        vms = {path.name for path in (self.root / "state/qemu/vms").glob("*")}
        return [
            int(pid)
            for pid in found.stdout.split()
            if any(vm in Path(f"/proc/{pid}/cmdline").read_text() for vm in vms)
        ]


@needs_guests("tiny.qcow2")
class BesideContainersTests(ImagePodCase):
    """A node whose pods are of containers, and a handler whose pods are VM images."""

    def setUp(self) -> None:
        super().setUp()
        del self.config["imgprovider"]
        self.config["handlers"] = {"vm": {"images": "machine"}}

    async def test_pods_of_both_kinds_reach_each_other(self) -> None:
        await self.start()
        image = await self.pulled("tiny", catalogue.path("tiny.qcow2"))
        request = cri.RunPodSandboxRequest(config=self.pod("web", hostname="web-0"), runtime_handler="vm")
        (self.log_directory / "web").mkdir(exist_ok=True)
        guest = str((await self.runtime.RunPodSandbox(request, timeout=600.0)).pod_sandbox_id)
        await self.run_container(guest, self.guest(image, stdin=True, tty=True))
        containers = await self.run_pod("others")
        other = await self.run_container(containers, self.box(script="httpd -p 8081 -h /etc; sleep 6000"))
        await self.says(STARTED)
        address, its = await self.address(guest), await self.address(containers)
        fetch = f"wget -qO - http://{address}:8080/ | grep {address}"
        ran = await self.execute(other, "sh", "-c", f"for i in $(seq 60); do {fetch} && break; sleep 1; done")
        self.assertIn(f"address={address}", ran.stdout.decode())
        (status,) = await self.containers(pod_sandbox_id=guest)
        await self.type_in(status.id, f"\nwget -qO - http://{its}:8081/hostname; echo fetched $?\n")
        await self.says("fetched 0", seconds=90.0)
