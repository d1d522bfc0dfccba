# SPDX-License-Identifier: Apache-2.0
"""The units, run by systemd itself, from the installed packages with simulated machines, and with a VM."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.trial import unittest

from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.e2e import cleanroot, roots
from tests.e2e.booted import Booted
from tests.e2e.pod_case import TEMPLATES, PodCase
from tests.e2e.roots import PACKAGES
from tests.e2e.test_packages import SOCKET, START_SECONDS
from tests.harness.durations import slow
from tests.infranetes.daemon.case import DaemonCase
from tests.infranetes.daemon.unit import UnitCase
from txgrpc import Channel, GrpcError


class BootedCase(unittest.TestCase):
    """A test case with a booted node.

    :cvar start_seconds: how long calls are repeated until the daemon is ready.
    :ivar system: the node.
    """

    start_seconds = START_SECONDS
    system: Booted

    def journal(self, unit: str) -> str:
        return self.system.run("journalctl", "--no-pager", "--output=cat", "--unit", unit).stdout

    async def call(self, method: str, request: Any) -> Any:
        """Make a CRI call, repeated until the daemon is ready."""
        path = str(self.system.path(SOCKET))
        until = time.monotonic() + self.start_seconds
        while True:
            channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
            try:
                return await getattr(RuntimeStub(channel), method)(request, timeout=60.0)
            except GrpcError as error:
                if time.monotonic() > until:
                    raise AssertionError(f"{error}; the journal: {self.journal('infranetes')}") from None
            finally:
                await channel.close()
            await deferLater(reactor, 0.2)

    async def run_sandbox(self) -> str:
        metadata = cri.PodSandboxMetadata(name="pod", uid="uid", namespace="default")
        config = cri.PodSandboxConfig(metadata=metadata, log_directory="/var/log/pods/pod")
        answer = await self.call("RunPodSandbox", cri.RunPodSandboxRequest(config=config))
        return str(answer.pod_sandbox_id)


@slow(10, "packages are installed in a booted root")
class UnitTests(BootedCase):
    """infranetes.service and vmserver.service."""

    timeout = 900

    def setUp(self) -> None:
        self.root = cleanroot.CleanRoot(roots.INSTALLED.tar())
        self.addCleanup(self.root.remove)
        done = self.root.install(*PACKAGES)
        self.assertEqual(done.returncode, 0, done.stdout)
        (self.root.path / "etc/infranetes/infranetes.toml").write_text('provider = "simulated"\n')
        self.system = Booted(self.root)
        self.addCleanup(self.system.end)

    async def ready(self) -> list[str]:
        listed = await self.call("ListPodSandbox", cri.ListPodSandboxRequest())
        return [item.id for item in listed.items if item.state == cri.SANDBOX_READY]

    def processes(self) -> list[str]:
        """Return the command lines of our processes, including the machines."""
        script = "cat $each/cmdline | tr '\\0' ' '; echo"
        found = self.system.run("sh", "-c", f"for each in /proc/[0-9]*; do {script}; done 2>/dev/null").stdout
        return [
            line for line in found.splitlines() if "twistd" in line or "infranetes_simulation.farm" in line
        ]

    def main_pid(self) -> str:
        return self.system.systemctl("show", "--property=MainPID", "--value", "infranetes")

    def test_a_kill_or_a_restart_of_the_daemon_leaves_its_machines_running(self) -> Deferred[None]:
        async def scenario() -> None:
            sandbox = await self.run_sandbox()
            for command in (
                ("kill", "--signal=KILL", "--kill-whom=main", "infranetes"),
                ("restart", "infranetes"),
            ):
                before = self.main_pid()
                self.system.systemctl(*command)
                self.assertEqual(await self.ready(), [sandbox])
                self.assertNotEqual(self.main_pid(), before)
            self.assertNotIn("Traceback", self.journal("infranetes"))

        return Deferred.fromCoroutine(scenario())

    def test_a_signal_from_anybody_leaves_the_node_with_its_runtime(self) -> Deferred[None]:
        """systemd counts the end by some of these signals as clean."""

        async def scenario() -> None:
            sandbox = await self.run_sandbox()
            for name in ("TERM", "INT", "HUP", "PIPE"):
                before = self.main_pid()
                self.system.systemctl("reset-failed", "infranetes")
                self.system.systemctl("kill", f"--signal={name}", "--kill-whom=main", "infranetes")
                if name in ("TERM", "INT"):
                    until = time.monotonic() + START_SECONDS
                    while self.main_pid() in ("0", before):
                        self.assertLess(time.monotonic(), until, self.journal("infranetes"))
                        await deferLater(reactor, 0.2)
                self.assertEqual(await self.ready(), [sandbox])
                if name in ("HUP", "PIPE"):
                    self.assertEqual(self.main_pid(), before)

        return Deferred.fromCoroutine(scenario())

    def test_a_reload_changes_what_can_be_changed(self) -> Deferred[None]:
        async def scenario() -> None:
            sandbox = await self.run_sandbox()
            file = self.system.path("etc/infranetes/infranetes.toml")
            for unit in ("infranetes", "vmserver"):
                before = self.system.systemctl("show", "--property=MainPID", "--value", unit)
                self.system.path(f"etc/infranetes/{unit}.toml").write_text(
                    'provider = "simulated"\n[log]\nlevel = "debug"\n'
                    if unit == "infranetes"
                    else "[limits]\nexecs = 3\n"
                )
                self.system.systemctl("reload", unit)
                await self.written(unit, "was read again: ")
                self.assertEqual(self.system.systemctl("show", "--property=MainPID", "--value", unit), before)
                self.assertEqual(self.system.systemctl("is-active", unit), "active")
            self.assertEqual(await self.ready(), [sandbox])
            file.write_text("no_such_key = 1\n")
            self.system.systemctl("reload", "infranetes")
            await self.written("infranetes", "everything stays as it was")
            self.assertIn("no_such_key", self.system.systemctl("show", "--property=StatusText", "infranetes"))
            self.assertEqual(self.system.systemctl("is-active", "infranetes"), "active")

        return Deferred.fromCoroutine(scenario())

    async def written(self, unit: str, words: str) -> None:
        until = time.monotonic() + START_SECONDS
        while words not in self.journal(unit):
            self.assertLess(time.monotonic(), until, self.journal(unit))
            await deferLater(reactor, 0.2)

    def test_purging_ends_what_runs_and_leaves_nothing(self) -> Deferred[None]:
        async def scenario() -> None:
            await self.run_sandbox()
            self.assertTrue([line for line in self.processes() if "infranetes_simulation.farm" in line])
            purged = self.system.run("dpkg", "--purge", *PACKAGES)
            self.assertEqual(purged.returncode, 0, purged.stdout)
            self.assertEqual(self.processes(), [])
            for left in ("run/infranetes", "run/vmserver", "var/lib/infranetes", "etc/infranetes"):
                self.assertFalse(self.system.path(left).exists(), left)

        return Deferred.fromCoroutine(scenario())

    def test_the_agent_runs_and_waits_for_its_identity(self) -> None:
        self.assertEqual(self.system.systemctl("is-active", "vmserver"), "active", self.journal("vmserver"))
        time.sleep(2)
        self.assertEqual(self.system.systemctl("show", "--property=NRestarts", "--value", "vmserver"), "0")

    def test_a_configuration_error_is_in_the_journal_and_systemd_gives_up(self) -> None:
        self.system.systemctl("stop", "infranetes")
        self.system.path("etc/infranetes/infranetes.toml").write_text("no_such_key = 1\n")
        self.system.systemctl("reset-failed", "infranetes")
        self.system.systemctl("start", "infranetes")
        until = time.monotonic() + 2 * START_SECONDS
        while self.system.systemctl("is-active", "infranetes") != "failed":
            self.assertLess(time.monotonic(), until, self.journal("infranetes"))
            time.sleep(0.2)
        self.assertIn("no_such_key", self.journal("infranetes"))


READY = cri.PodSandboxStateValue(state=cri.SANDBOX_READY)


class UnitPodTests(UnitCase, PodCase):
    def setUp(self) -> None:
        super().setUp()
        self.lend(Path(TEMPLATES))

    async def start(self, *flags: str, crash: tuple[str, int] | None = None) -> None:
        await DaemonCase.start(self, *flags, crash=crash)  # there are no simulated machines to keep

    async def test_a_pod_runs_and_its_vm_is_in_a_scope_of_its_own(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="echo hello; exec sleep 1000"))
        await self.until(lambda: self.has_lines(1), "it writes", 60.0)
        self.assertEqual(self.lines("main"), ["hello"])
        self.assertEqual((await self.execute(container, "echo", "here")).stdout, b"here\n")
        (vm,) = (self.root / "state" / "qemu" / "vms").iterdir()
        scope = f"infranetes-vm-{vm.name}.scope"
        self.assertEqual(self.units("infranetes-vm-*"), [scope])
        await self.stop_pod(sandbox)
        self.assertEqual(await self.sandboxes(state=READY), [])
        await self.until(lambda: not self.units("infranetes-vm-*"), "the scope goes with the VM")
