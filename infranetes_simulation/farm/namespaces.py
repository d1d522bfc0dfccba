# SPDX-License-Identifier: Apache-2.0
"""A VM in namespaces of its own, which its hypervisor (`infranetes_simulation.machine`) holds."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
from twisted.internet.defer import TimeoutError
from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

import infranetes_simulation
from infranetes_common.commands import ENVIRONMENT
from infranetes_common.concurrency import Event, Flight, run_in_thread, settled
from infranetes_common.errors import Unavailable
from infranetes_common.identity import Identity, encode
from infranetes_common.reactors import IReactor
from infranetes_simulation.farm.machine import IMachine
from infranetes_simulation.machine import AGENT_PORT, cgroups, guest, hypervisor, network
from infranetes_simulation.protocol import ASLEEP, NO_AGENT, UNREACHABLE, Hardware
from vmserver.identity.delivery import save

_DISK, _IDENTITY = "disk", "identity"
_LOCK = "bridge.lock"
LAYERS = "layers"
"""The directory of the layers that a VM has on its disk; in the farm's, of those that others begin with."""
_BEHAVIOURS = {NO_AGENT: guest.NO_AGENT, ASLEEP: guest.NO_AGENT, UNREACHABLE: guest.SILENT}
_END_SECONDS = hypervisor.END_SECONDS + 5.0
_MAX_WORDS = 2000


class _Hypervisor(ProcessProtocol):
    """The process.

    :ivar running: the VM runs; fails if it ends before. :ivar ended: the process has ended.
    """

    transport: IProcessTransport

    def __init__(self, hardware: bytes) -> None:
        self._hardware = hardware
        self.running: Event[None] = Event()
        self.ended: Event[None] = Event()
        self.words = ""

    def connectionMade(self) -> None:
        self.transport.write(self._hardware + b"\n")

    def outReceived(self, data: bytes) -> None:
        self.running.succeed(None)

    def errReceived(self, data: bytes) -> None:
        self.words = (self.words + data.decode(errors="replace"))[-_MAX_WORDS:]

    def processEnded(self, reason: Failure) -> None:
        self.running.fail(Unavailable(self.words.strip() or "its hypervisor has ended"))
        self.ended.succeed(None)


@implementer(IMachine)
class NamespaceMachine:
    """See `IMachine`. Its directory holds its disk.

    :param ended: called with the reason when it ends by itself.
    """

    def __init__(
        self, reactor: IReactor, directory: Path, id: str, hardware: Hardware, ended: Callable[[str], None]
    ) -> None:
        self._reactor = reactor
        self._disk = directory / _DISK
        self._farm = directory.parent
        self._id = id
        self._hardware = hardware
        self._ended = ended
        self._disk_made: Flight[None] | None = None
        self._hypervisor: _Hypervisor | None = None
        self._off = False
        self.host = hardware["address"].partition("/")[0]
        self.port = 0

    @property
    def _cgroup(self) -> str:
        return f"{self._hardware['cgroup']}/{self._id}"

    async def turn_on(self, identity: Identity, behaviour: str) -> None:
        # The clock is the whole machine's, and so is its entropy.
        document = encode(attrs.evolve(identity, now_nanos=0, entropy="", listen=f"0.0.0.0:{AGENT_PORT}"))
        self._disk_made = Flight(run_in_thread(self._reactor, self._thd_make_disk, document.decode()))
        await self._disk_made.join()
        described: hypervisor.MachineSpec = {
            "id": self._id,
            "address": self._hardware["address"],
            "gateway": self._hardware["gateway"],
            "bridge": network.bridge_of(self._farm),
            "lock": str(self._farm / _LOCK),
            "cgroup": self._cgroup,
            "behaviour": _BEHAVIOURS.get(behaviour, guest.AGENT),
        }
        self._hypervisor = started = _Hypervisor(json.dumps(described).encode())
        packages = str(Path(infranetes_simulation.__file__).parents[1])
        search = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
        compiled = {"PYTHONPYCACHEPREFIX": sys.pycache_prefix} if sys.pycache_prefix else {}
        self._reactor.spawnProcess(
            started,
            sys.executable,
            [sys.executable, "-m", hypervisor.__name__, str(self._disk)],
            env={**ENVIRONMENT, "PYTHONPATH": search, **compiled},
            path="/",
        )
        await started.running.wait()
        self.port = AGENT_PORT
        started.ended.wait().addCallback(self._has_ended)

    def _thd_make_disk(self, document: str) -> None:
        # Users of a user namespace have to reach their container's root file system below it.
        self._disk.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self._hardware["keep_layers"]:
            kept = self._farm / LAYERS
            for others in self._farm.glob(f"*/{_DISK}/{LAYERS}"):
                _thd_link(others, kept)
            _thd_link(kept, self._disk / LAYERS)
        save(self._disk / _IDENTITY, document)

    def _has_ended(self, _: None) -> None:
        if not self._off and self._hypervisor is not None:
            self._ended(f"it has ended: {self._hypervisor.words.strip() or 'its power was cut'}")

    async def turn_off(self) -> None:
        self._off = True
        self.port = 0
        if self._disk_made is not None:
            await settled([self._disk_made.join()])
        if self._hypervisor is not None and not self._hypervisor.ended.happened:
            self._hypervisor.transport.closeStdin()
            await self._over(self._hypervisor)
        if self._hardware["keep_layers"]:
            await run_in_thread(self._reactor, _thd_link, self._disk / LAYERS, self._farm / LAYERS)
        await run_in_thread(self._reactor, self._thd_clear, hypervisor.END_SECONDS)

    def _thd_clear(self, seconds: float) -> None:
        """Remove the remains of a hypervisor that was killed."""
        bridge = network.bridge_of(self._farm)
        network.unplug(self._farm / _LOCK, bridge, network.cable_of(bridge, self._id))
        cgroups.remove(self._cgroup, seconds)

    async def _over(self, running: _Hypervisor) -> None:
        try:
            await running.ended.wait().addTimeout(_END_SECONDS, self._reactor)
        except TimeoutError:
            running.transport.signalProcess("KILL")
            await running.ended.wait()

    def forget(self) -> None:
        (self._disk / _IDENTITY).unlink(missing_ok=True)

    async def behave(self, behaviour: str) -> None:
        if self._hypervisor is not None and not self._hypervisor.ended.happened:
            self._hypervisor.transport.write(_BEHAVIOURS.get(behaviour, guest.AGENT).encode() + b"\n")

    def clear(self) -> None:
        self._thd_clear(0.0)


def _thd_link(source: Path, target: Path) -> None:
    """Link the layers of one directory, whose files `vmserver.layers` names, into another.

    Users of a layer verify it first."""
    for file in source.glob("*/*"):
        if not file.suffix:  # else it has not arrived yet
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                (target / file.parent.name).mkdir(mode=0o700, parents=True, exist_ok=True)
                os.link(file, target / file.parent.name / file.name)
