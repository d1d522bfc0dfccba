# SPDX-License-Identifier: Apache-2.0
"""Simulated clouds for the provider of any driver of libcloud's: VMs that have a name and user-data, no tags.

Their agents read what cloud-init keeps of the user-data.
"""

from __future__ import annotations

import ipaddress
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from infranetes.providers.cloud.any import names
from tests.support.clouds.faults import NEVER, NO_AGENT
from tests.support.clouds.simulated_cloud import QUICK, SimulatedCloud
from tests.support.clouds.vm_image_instances import RunningVM

NETWORK = ipaddress.ip_network("127.96.0.0/16")  # all of it is the loopback interface's
NEW, RUNNING, STOPPED = "new", "running", "stopped"
_ANY_OWNER = "i[0-9a-z]{9}"


@attrs.frozen
class Plan:
    """A size that is sold."""

    name: str
    cpus: int
    gib: int
    dollars: float  # per hour


PLANS = (Plan("s-1", 1, 1, 0.01), Plan("s-2", 1, 2, 0.02), Plan("s-4", 4, 8, 0.08))
PLACES = ("here-1", "there-2")
IMAGE = "image-1"


@attrs.define(eq=False)
class Vm:
    """A VM. :ivar created: seconds since 1970."""

    id: str
    name: str
    plan: Plan
    place: str
    image: str
    user_data: str
    address: str
    behaviour: str
    state: str = NEW
    created: float = attrs.field(factory=lambda: float(int(time.time())))

    @property
    def token(self) -> str:
        return (names.parse(self.name, _ANY_OWNER) or ("", ""))[0]


class SimulatedNodes(SimulatedCloud[Vm]):
    """One test's cloud. :ivar launch_seconds: how long a VM is new. :ivar driver: a name of libcloud's."""

    driver: str
    prefix = ""  # of VMs' ids

    def __init__(self, reactor: Any, directory: Path) -> None:
        super().__init__(reactor, directory, "application/json", "text/plain")
        self.launch_seconds = 0.1
        self.credentials_file = directory / "credentials.toml"
        self._last = 0

    def start(self) -> None:
        """Start a cloud with one image, two places and three sizes."""
        self._listen()
        self.write_credentials(key="secret-of-the-test")

    def write_credentials(self, **arguments: str) -> None:
        """Write the file with the driver's arguments."""
        self.credentials_file.touch(mode=0o600)
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in arguments.items()]
        self.credentials_file.write_text("".join(lines))

    def table(self) -> dict[str, Any]:
        """Return the provider's configuration for this cloud."""
        return {
            "driver": self.driver,
            "credentials_file": str(self.credentials_file),
            "image": IMAGE,
            "locations": list(PLACES),
            **QUICK,
        }

    # ---- The cloud from outside

    def running(self) -> list[str]:
        """Return the ids of VMs that have not ended."""
        return [id for id, vm in self._vms.items() if vm.state != STOPPED]

    def seen(self) -> list[RunningVM]:
        """Return VMs that have not ended."""
        vms = [self._vms[id] for id in self.running()]
        sandboxes = [(names.parse(vm.name, _ANY_OWNER) or ("", ""))[1] for vm in vms]
        return [
            RunningVM(vm.id, vm.image, vm.plan.name, sandbox, vm.address)
            for vm, sandbox in zip(vms, sandboxes, strict=True)
        ]

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token that its name has."""
        return {f"VM {id}": vm.token for id, vm in list(self._vms.items())}

    def end(self, id: str) -> None:
        """Switch a VM off, as somebody else would."""
        self._agent_processes.kill(id)
        self._vms[id].state = STOPPED

    def add_twin(self, id: str) -> None:
        """Create a second VM with the name of an existing one, as a request that is sent twice does."""
        vm = self._vms[id]
        twin = attrs.evolve(vm, id=self._next(), created=vm.created + 60)
        self._vms[twin.id] = twin

    async def machine_image(self, name: str) -> str:
        raise NotImplementedError("libcloud does not tell whose an image is")

    def deregister(self, image: str) -> None:
        raise NotImplementedError

    def _switched_off(self, id: str) -> None:
        self.end(id)

    # ---- What APIs do

    def vms(self) -> list[Vm]:
        """Return all VMs."""
        return list(self._vms.values())

    def launch(self, name: str, size: str, place: str, image: str, user_data: str) -> Vm:
        """Create a VM, which boots soon."""
        assert image == IMAGE
        plan = next(each for each in PLANS if each.name == size)
        vm = Vm(self._next(), name, plan, place, image, user_data, self._free_address(), self.behaviour)
        self._vms[vm.id] = vm
        if vm.behaviour != NEVER:
            self._timers.append(self._reactor.callLater(self.launch_seconds, partial(self._boot, vm)))
        return vm

    def destroy(self, id: str) -> bool:
        """Destroy a VM. Return whether there was one."""
        self._agent_processes.kill(id)
        return self._vms.pop(id, None) is not None

    def _next(self) -> str:
        self._last += 1
        return f"{self.prefix}{4000 + self._last}"

    def _free_address(self) -> str:
        taken = {vm.address for vm in self._vms.values()}
        while (found := str(NETWORK[random.randrange(2, NETWORK.num_addresses - 1)])) in taken:  # noqa: S311
            pass
        return found

    def _boot(self, vm: Vm) -> None:
        if self._vms.get(vm.id) is not vm or vm.state != NEW:
            return
        vm.state = RUNNING
        if vm.behaviour == NO_AGENT:
            return
        directory = self._directory / vm.id
        directory.mkdir(parents=True, exist_ok=True)
        kept = directory / "user-data.txt"
        kept.touch(mode=0o600)
        kept.write_text(vm.user_data)
        self._agent_processes.run(
            vm.id,
            {
                "provider": "fake",
                "listen": f"{vm.address}:2475",
                "run_dir": str(directory),
                "volumes_dir": str(directory / "volumes"),
                "etc_dir": str(directory),
                "identity": {"source": "cloud-init", "apply": False, "path": str(kept)},
            },
        )
