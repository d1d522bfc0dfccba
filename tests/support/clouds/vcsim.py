# SPDX-License-Identifier: Apache-2.0
"""govmomi's vcsim, a simulated vCenter, in a process of its own that ends with this one.

`tests/interop/tools` builds it. Its template is made once; each test has a folder of its own.
"""

from __future__ import annotations

import re
import subprocess
import time
from typing import Any

from pyVmomi import SoapStubAdapter, vim

from infranetes.providers.cloud.vsphere.session import VOLUMES_API
from tests.support.clouds.agent_processes import ROOT

PROGRAM = ROOT / "build" / "tools" / "vcsim"
USER, PASSWORD = "infranetes", "secret-of-the-test"
TEMPLATE, BARE = "guest", "bare"  # one with a snapshot, one without
POOLS = ("DC0_C0/Resources", "DC0_C0/Resources/second")
NETWORKS = ("DC0_DVPG0", "DC0_DVPG1")


class Vcsim:
    """The test's side, which calls vcsim directly, without faults."""

    def __init__(self) -> None:
        command = [str(PROGRAM), "-tls=false", "-l", "127.0.0.1:0", "-stdinexit", "-E", "-"]
        command += ["-username", USER, "-password", PASSWORD]
        command += ["-cluster", "1", "-host", "3", "-pg", "2", "-standalone-host", "0"]
        command += ["-vm", "2", "-autostart=false"]
        process = subprocess.Popen(
            ["setsid", "--fork", *command],
            stdin=subprocess.PIPE,  # vcsim runs until it is closed
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        process.wait()
        assert process.stdout is not None
        self._process = process
        found = None
        while found is None:
            line = process.stdout.readline().decode()
            assert line, f"{PROGRAM} does not start; tests/interop/tools builds it"
            found = re.search(r"127\.0\.0\.1:([0-9]+)", line)
        self.port = int(found[1])
        stub = SoapStubAdapter(host="127.0.0.1", port=-self.port, path="/sdk", version=VOLUMES_API)
        self.content = vim.ServiceInstance("ServiceInstance", stub).RetrieveContent()
        self.content.sessionManager.Login(USER, PASSWORD, None)
        self._prepare()

    def _prepare(self) -> None:
        first, second = sorted(self.find("vm").childEntity, key=lambda vm: vm.name)
        done(second.Rename_Task(BARE))
        done(first.CreateSnapshot_Task("base", "", False, False))
        done(first.Rename_Task(TEMPLATE))
        for vm in (first, second):
            vm.MarkAsTemplate()
        everything = vim.ResourceAllocationInfo(
            reservation=0,
            limit=-1,
            expandableReservation=True,
            shares=vim.SharesInfo(level="normal", shares=4000),
        )
        pool = vim.ResourceConfigSpec(cpuAllocation=everything, memoryAllocation=everything)
        self.find(f"host/{POOLS[0]}").CreateResourcePool("second", pool)

    def find(self, path: str) -> Any:
        """Return what is at a path below the datacenter."""
        return self.content.searchIndex.FindByInventoryPath(f"DC0/{path}")

    def reconfigure(self, vm: Any, extra: dict[str, str]) -> None:
        """Set keys of a VM's extraConfig. Keys that begin with SET. are the guest's reports."""
        options = [vim.option.OptionValue(key=key, value=value) for key, value in extra.items()]
        done(vm.ReconfigVM_Task(vim.vm.ConfigSpec(extraConfig=options)))


def extra_config(vm: Any) -> dict[str, str]:
    """Return a VM's extraConfig."""
    return {each.key: str(each.value) for each in vm.config.extraConfig}


def done(task: Any) -> Any:
    """Wait for a task, which has to succeed, and return its result. vcsim's take milliseconds."""
    until = time.monotonic() + 60
    while (info := task.info).state not in ("success", "error"):
        assert time.monotonic() < until, info
        time.sleep(0.002)
    assert info.state == "success", info.error
    return info.result


_shared: list[Vcsim] = []


def shared() -> Vcsim:
    """Return the vcsim shared by all tests of this process."""
    if not _shared:
        _shared.append(Vcsim())
    return _shared[0]
