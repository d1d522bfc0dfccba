# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl top` against a daemon as a process."""

from __future__ import annotations

from typing import Any

from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.ctl import CtlCase


@needs_registry
class TopTests(CtlCase):
    @slow(4, "each table is made of two samples, a second apart")
    async def test_what_pods_use(self) -> None:
        self.constants = {"infranetes.stats.gather.WAIT_SECONDS": 0.5}
        await self.start()
        self.assertIn("no pod has figures", await self.ctl("top"))
        sandbox = await self.run_pod("busy")
        silent = await self.run_pod("silent")
        await self.run_container(sandbox, self.box(script="while :; do :; done"))
        (vm,) = [vm for vm in await self.vms() if vm["sandbox_id"] == silent]
        await self.farm("behave", id=vm["id"], behaviour="unreachable", after=0)

        async def both() -> Any:  # Any: JSON
            while True:
                used = (await self.json("top"))["pods"]
                if used[0]["cpu"] and used[1]["cpu"] is None:
                    return used
                await self.sleep(0.1)

        first, last = await both()
        self.assertEqual((first["id"], last["id"]), (sandbox, silent))
        self.assertEqual((last["memory_bytes"], last["processes"]), (None, None))
        words = await self.ctl("top")
        self.assertLess(words.index(" busy "), words.index(" silent "))
        self.assertIn("its agent does not answer", words)
