# SPDX-License-Identifier: Apache-2.0
"""The farm's VMs by their ids: the operations of `infranetes_simulation.protocol`."""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import attrs
from twisted.logger import Logger

from infranetes_common.concurrency import KeyedLock, run_in_thread
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.identity import decode
from infranetes_common.reactors import IReactor
from infranetes_simulation.farm.namespaces import LAYERS
from infranetes_simulation.farm.port import HOST
from infranetes_simulation.farm.vm import RECORD, Report, SimulatedVm
from infranetes_simulation.protocol import BEHAVIOURS, STOPPED, Hardware, Vm
from vmserver import validate

MAX_TAGS_BYTES = 16 * 1024
MAX_SECONDS = 7 * 86400.0
_CGROUP = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")

_log = Logger()


class Farm:
    """Makes, finds and ends VMs.

    :param directory: where each has a directory of its own. :param report: given each event.
    """

    def __init__(self, reactor: IReactor, directory: Path, report: Report) -> None:
        self._reactor = reactor
        self._directory = directory
        self._report = report
        self._vms: dict[str, SimulatedVm] = {}
        self._locks: KeyedLock[str] = KeyedLock()  # by VM id

    def load(self) -> None:
        """Find the VMs of an earlier farm: they have ended with it."""
        _thd_remove(self._directory / LAYERS)
        for file in self._directory.glob(f"*/{RECORD}"):
            try:
                vm = SimulatedVm.recovered(self._reactor, file.parent, self._report)
            except (ValueError, KeyError, TypeError, InvalidArgument) as error:
                _log.error("{file} is unreadable and removed: {error}", file=str(file), error=error)
                shutil.rmtree(file.parent, ignore_errors=True)
                continue
            self._vms[vm.id] = vm

    def list(self) -> list[Vm]:
        """Describe every VM."""
        return [vm.describe() for vm in self._vms.values()]

    def get(self, id: str) -> Vm:
        """Describe one VM. :raise NotFound: there is none."""
        return self._existing(id).describe()

    def _existing(self, id: str) -> SimulatedVm:
        vm = self._vms.get(id)
        if vm is None:
            raise NotFound(f"the farm has no VM {id}")
        return vm

    async def boot(
        self,
        id: str,
        identity: Mapping[str, object],
        tags: Mapping[str, str],
        delay: object,
        behaviour: object,
        after: object,
        hardware: object = None,
    ) -> Vm:
        """Start a VM, one that is stopped too, or describe the one that is there.

        :raise InvalidArgument: a field is malformed; names it.
        """
        validate.container_id(id)
        async with self._locks.held(id):
            document = attrs.evolve(decode(json.dumps(identity).encode()), listen=f"{HOST}:0")
            if id in self._vms:
                there = self._vms[id]
                if there.state == STOPPED:
                    seconds = _seconds("delay", delay)
                    await there.start_again(document, _behaviour(behaviour), _seconds("after", after))
                    there.boot(seconds)
                return there.describe()
            if len(json.dumps(tags)) > MAX_TAGS_BYTES:
                raise InvalidArgument(f"tags: over {MAX_TAGS_BYTES} bytes")
            described = _hardware(hardware)
            vm = SimulatedVm(
                self._reactor,
                self._directory / id,
                self._report,
                id=id,
                sandbox_id=document.sandbox_id,
                identity=document,
                tags=tags,
                behaviour=_behaviour(behaviour),
                after=_seconds("after", after),
                created_at=time.time(),
                hardware=described,
            )
            seconds = _seconds("delay", delay)
            self._vms[id] = vm  # at once: requests begin in order, and a later list must show it
            try:
                await vm.save()
            except BaseException:
                del self._vms[id]
                raise
            vm.boot(seconds)
            return vm.describe()

    async def behave(self, id: str, behaviour: object, after: object, why: object = "") -> Vm:
        """Change how a VM behaves. :raise NotFound: there is none. :raise InvalidArgument: malformed."""
        async with self._locks.held(id):
            vm = self._existing(id)
            await vm.behave(_behaviour(behaviour), _seconds("after", after), str(why)[:1000])
            return vm.describe()

    async def halt(self, id: str) -> Vm:
        """Turn a running VM off, so that `boot` starts it again. Idempotent.

        :raise NotFound: there is none. :raise FailedPrecondition: it does not run."""
        async with self._locks.held(id):
            vm = self._existing(id)
            await vm.halt()
            return vm.describe()

    async def end(self, id: str) -> None:
        """Cut a VM's power and forget it. Idempotent."""
        async with self._locks.held(id):
            vm = self._vms.get(id)
            if vm is None:
                return
            await vm.destroy()
            self._vms.pop(id, None)
            await run_in_thread(self._reactor, _thd_remove, self._directory / id)

    async def stop(self) -> None:
        """Cut every VM's power; their records stay."""
        for vm in [*self._vms.values()]:
            await vm.power_off()
        await run_in_thread(self._reactor, _thd_remove, self._directory / LAYERS)


def _thd_remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _hardware(value: object) -> Hardware | None:
    if value is None:
        return None
    try:
        if not isinstance(value, dict) or set(value) != Hardware.__required_keys__:
            raise ValueError(", ".join(sorted(Hardware.__required_keys__)))
        for key in ("address", "gateway"):
            ipaddress.IPv4Interface(value[key])
        if not _CGROUP.fullmatch(value["cgroup"]) or ".." in value["cgroup"].split("/"):
            raise ValueError("a cgroup's path")
        if not isinstance(value["keep_layers"], bool):
            raise ValueError("true or false for keep_layers")
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"hardware: expected {error}") from None
    return cast(Hardware, value)


def _behaviour(value: object) -> str:
    if value not in BEHAVIOURS:
        raise InvalidArgument(f"behaviour {value!r:.80}: expected one of {', '.join(BEHAVIOURS)}")
    return str(value)


def _seconds(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise InvalidArgument(f"{field} {value!r:.80}: expected 0 to {MAX_SECONDS:g} seconds")
    return float(value)
