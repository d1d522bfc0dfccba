# SPDX-License-Identifier: Apache-2.0
"""The drives of a VM that boots an image, with the CDs that configure its guest.

QEMU alone keeps which CD is in which drive, in the names of two things, and has the only open file of each.

thing       named            made by
descriptor  cd-DRIVE-KEY     add-fd        goes once the node has a descriptor of its own
node        cd-DRIVE-KEY     blockdev-add  inserted into the drive

What has such a name and is in no drive is the rest of a call that was interrupted; the next one removes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from twisted.internet.defer import DeferredLock

from infranetes.providers.machine_images import DRIVES, Cd
from infranetes.providers.qemu.host.os_errors import as_infranetes_error
from infranetes.providers.qemu.program.image_line import drive
from infranetes.providers.qemu.vm import cds as images
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import entries
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InfranetesError, InvalidArgument, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor

_NODE = re.compile(r"cd-([0-9])-[0-9a-f]{16}")
_KEY = 16  # characters


class Drives:
    """One VM's drives. :param directory: the VM's. :param monitor: returns QEMU's."""

    def __init__(
        self, reactor: IReactor, directory: Path, monitor: Callable[[], Awaitable[VmConnections]]
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._monitor = monitor
        self._turn = DeferredLock()

    async def insert(self, cds: Sequence[Cd]) -> None:
        """See `IHypervisor.insert_cds`."""
        if len(cds) > DRIVES:
            raise InvalidArgument(f"a VM has drives for {DRIVES} CDs, and not for {len(cds)}")
        async with self._turn:
            files = await self._lacking(cds)
            try:
                for number in range(DRIVES):
                    if number >= len(cds):
                        await self._exchange(number, None, -1)
                    elif number in files:
                        await self._exchange(number, _node(number, cds[number]), files[number])
            except (InvalidArgument, Unavailable):
                raise
            except InfranetesError as error:
                raise Unavailable(f"QEMU does not take a CD: {error}") from error
            finally:
                for file in files.values():
                    os.close(file)

    async def _lacking(self, cds: Sequence[Cd]) -> dict[int, int]:
        """Write the CDs that are not in their drives yet; return their open files, by drive."""
        inserted = await self._inserted(await self._monitor())
        files: dict[int, int] = {}
        try:
            for number, cd in enumerate(cds):
                if inserted.get(number) != _node(number, cd):
                    files[number] = await run_in_thread(self._reactor, images.thd_open, cd, self._directory)
        except BaseException as error:
            for file in files.values():
                os.close(file)
            if isinstance(error, OSError):
                translated = as_infranetes_error(error)
                raise (
                    translated if isinstance(translated, ResourceExhausted) else Unavailable(str(translated))
                ) from error
            raise
        return files

    async def _exchange(self, number: int, node: str | None, file: int) -> None:
        """Have this CD in a drive, or none."""
        monitor = await self._monitor()
        qmp, device = monitor.qmp, drive(number)
        before = (await self._inserted(monitor)).get(number)
        if before is None and node is None:
            await self._tidy(monitor, number)
            return
        # A guest may have locked its drive, which it is not asked to unlock.
        await qmp.execute("blockdev-open-tray", id=device, force=True)
        if before is not None:
            await qmp.execute("blockdev-remove-medium", id=device)
        await self._tidy(monitor, number)
        if node is not None:
            await self._add(monitor, node, file)
            await qmp.execute("blockdev-insert-medium", id=device, node_name=node)
            await qmp.execute("blockdev-close-tray", id=device)

    async def _add(self, monitor: VmConnections, node: str, file: int) -> None:
        set_number = await monitor.qmp.add_file(node, file)
        common = {"read-only": True, "auto-read-only": False}
        path = f"/dev/fdset/{set_number}"
        await monitor.qmp.execute(
            "blockdev-add",
            driver="raw",
            node_name=node,
            read_only=True,
            file={"driver": "file", "filename": path, "locking": "off", **common},
        )
        await monitor.qmp.execute("remove-fd", fdset_id=set_number)  # the node has a descriptor of its own

    async def _tidy(self, monitor: VmConnections, number: int) -> None:
        """Remove what is in no drive."""
        inserted = set((await self._inserted(monitor)).values())
        for entry in entries(await monitor.qmp.execute("query-named-block-nodes", flat=True)):
            name = str(entry.get("node-name"))
            if _of_drive(name) == number and name not in inserted:
                await monitor.qmp.execute("blockdev-del", node_name=name)
        for entry in entries(await monitor.qmp.execute("query-fdsets")):
            if any(_of_drive(str(file.get("opaque"))) == number for file in entries(entry.get("fds"))):
                await monitor.qmp.execute("remove-fd", fdset_id=entry.get("fdset-id"))

    async def _inserted(self, monitor: VmConnections) -> Mapping[int, str]:
        """Return the nodes in the drives, by drive."""
        drives: dict[int, str] = {}
        for entry in entries(await monitor.qmp.execute("query-block")):
            medium = entry.get("inserted")
            name = str(medium.get("node-name")) if isinstance(medium, dict) else ""
            if (number := _of_drive(name)) is not None:
                drives[number] = name
        return drives


def _node(number: int, cd: Cd) -> str:
    return f"cd-{number}-{images.key_of(cd)[:_KEY]}"


def _of_drive(name: str) -> int | None:
    match = _NODE.fullmatch(name)
    return int(match[1]) if match else None
