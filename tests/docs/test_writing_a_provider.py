# SPDX-License-Identifier: Apache-2.0
"""The driver that docs/writing-a-provider.md shows makes pods' VMs."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any, ClassVar

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from tests.harness.durations import slow
from tests.infranetes.providers.cloud.any.case import VpsCase
from tests.infranetes.providers.cloud.lifecycle_case import LifecycleCase
from tests.support.clouds.agent_processes import ROOT
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.nodes import IMAGE, NEW, PLACES, PLANS, RUNNING, Vm
from tests.support.clouds.vps import Api

PAGE = ROOT / "docs" / "writing-a-provider.md"
NAME = "acme_driver"


class Acme(Api):
    """The API that the page's driver is for."""

    driver, servers = f"{NAME}:Driver", "/servers"
    paths: ClassVar[dict[str, str]] = {"/sizes": "sizes", "/images": "images", "/regions": "locations"}
    quota = 403, "the limit of servers is reached"
    capacity = 409, "the size is not available in this region"
    settings: ClassVar[dict[str, Any]] = {"user_data": "ex_userdata"}

    def asked(self, body: Any) -> dict[str, str]:
        found = {key: body[key] for key in ("name", "size", "image", "user_data")}
        return {**found, "place": body["region"]}

    def vm(self, vm: Vm) -> Any:
        state = {NEW: "booting", RUNNING: "up"}.get(vm.state, "down")
        address = "" if vm.state == NEW else vm.address
        told = {"id": vm.id, "name": vm.name, "state": state, "address": address, "size": vm.plan.name}
        return {**told, "created": f"2026-11-29T09:00:{int(vm.id) % 60:02}Z"}

    def other(self, action: str) -> list[Any]:
        if action == "sizes":
            return [
                {
                    "id": each.name,
                    "mib": each.gib << 10,
                    "gib": 25,
                    "cpus": each.cpus,
                    "dollars_per_hour": each.dollars,
                }
                for each in PLANS
            ]
        if action == "images":
            return [{"id": IMAGE, "name": "pod"}]
        return [{"id": each, "city": each} for each in PLACES]

    def error(self, status: int, message: str) -> Any:
        return {"message": message}


class WritingAProviderTests(VpsCase, LifecycleCase, TestCase):
    api = Acme

    def setUp(self) -> object:
        [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
        self.assertLessEqual(code.count("\n"), 100, "the page says so")
        module = ModuleType(NAME)
        exec(compile(code, str(PAGE), "exec"), vars(module))  # noqa: S102  our own page
        sys.modules[NAME] = module
        return super().setUp()

    async def finish(self) -> None:
        await super().finish()
        del sys.modules[NAME]

    @slow(4, "the first agent of a process of tests waits for its imports")
    async def test_a_vm_lives(self) -> None:
        await self.run_lifecycles(2)

    async def test_refusals_are_told_as_of_any_other_cloud(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.QUOTA, "launch", times=1)
        await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.world.faults.add(FaultKind.REVOKED, "list", times=1)
        await self.refused(FailedPrecondition, provider.list())
        self.world.faults.add(FaultKind.CAPACITY, "launch", times=1)
        self.world.faults.add(FaultKind.THROTTLE, share=0.3)
        await self.run_lifecycles(1)
