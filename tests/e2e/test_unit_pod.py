# SPDX-License-Identifier: Apache-2.0
"""A pod on a real VM, whose daemon is in the sandbox of infranetes.service, under a real systemd."""

from __future__ import annotations

from pathlib import Path

from infranetes_common.wire import cri
from tests.e2e.pod_case import TEMPLATES, PodCase
from tests.infranetes.daemon.case import DaemonCase
from tests.infranetes.daemon.unit import UnitCase

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
