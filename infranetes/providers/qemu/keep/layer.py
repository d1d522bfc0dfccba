# SPDX-License-Identifier: Apache-2.0
"""The layer that a VM writes to while its own disk is being copied.

While a VM is kept, its disk has to stay as it is at the instant. So the VM gets a further layer, and once the
disk is copied what the layer has is written to the disk, and the layer goes: the VM then has what it had.

thing       named      made by
file        keep.qcow2 qemu-img               in the VM's directory; the record that the rest may be there
descriptor  keep       add-fd
node        keep       blockdev-add
layer       keep       blockdev-snapshot      the VM writes to it from here on
job         keep       block-commit           running, ready: complete it, then concluded: dismiss it

What a killed daemon leaves is removed in the same order, backwards. The file goes last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from infranetes.providers.qemu.program.qmp import QmpConnection
from infranetes.providers.qemu.vm.disks import entries
from infranetes_common.commands import Command, check
from infranetes_common.concurrency import backoff, run_in_thread, sleep
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

FILE = "keep.qcow2"
LAYER, DISK = "keep", "disk"  # names of nodes
_CREATE_SECONDS = 30.0
_FIRST_LOOK, _LONGEST_LOOK = 0.01, 0.5  # seconds


def thd_remove(path: Path) -> None:
    """Remove a layer's file, which may be large. Idempotent. Blocks. :raise OSError: it can't be removed."""
    path.unlink(missing_ok=True)


class KeepLayer:
    """The layer of one VM. :param path: its file."""

    def __init__(self, reactor: IReactor, qmp: QmpConnection, path: Path, qemu_img: str) -> None:
        self._reactor = reactor
        self._qmp = qmp
        self._path = path
        self._qemu_img = qemu_img

    async def prepare(self, size: int) -> None:
        """Make the layer's file, and give it to QEMU. The VM does not use it yet.

        :param size: the disk's, in bytes.
        :raise InfranetesError: it can't be made; `remove` removes what there is of it."""
        words = [self._qemu_img, "create", "-q", "-f", "qcow2", str(self._path), str(size)]
        await check(self._reactor, Command(words, _CREATE_SECONDS))
        descriptor = await run_in_thread(self._reactor, os.open, self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            number = await self._qmp.add_file(LAYER, descriptor)
        finally:
            os.close(descriptor)
        await self._qmp.execute(
            "blockdev-add",
            driver="qcow2",
            node_name=LAYER,
            backing=None,
            discard="unmap",
            detect_zeroes="unmap",
            cache={"direct": False, "no-flush": True},  # as the disk itself, which goes with the VM
            file={"driver": "file", "filename": f"/dev/fdset/{number}", "locking": "off"},
        )

    async def insert(self) -> None:
        """Let the VM write to the layer from now on, and no more to its disk."""
        await self._qmp.execute("blockdev-snapshot", node=DISK, overlay=LAYER)

    async def remove(self) -> None:
        """Write what the layer has to the disk, and remove the layer, as far as it is there. Idempotent.

        :raise InfranetesError: it can't be removed now; the VM goes on with it."""
        if not self._path.exists():
            return
        await self._end_job()
        if await self._top() == LAYER:
            await self._qmp.execute(
                "block-commit",
                job_id=LAYER,
                device=LAYER,
                base_node=DISK,
                on_error="report",
                auto_dismiss=False,
            )
            await self._end_job()
            if await self._top() == LAYER:
                raise Unavailable("QEMU has not taken the layer of a VM that was kept out of its disk")
        if any(each.get("node-name") == LAYER for each in await self._nodes()):
            await self._qmp.execute("blockdev-del", node_name=LAYER)
        for number in await self._file_sets():
            await self._qmp.execute("remove-fd", fdset_id=number)
        await run_in_thread(self._reactor, thd_remove, self._path)

    async def _end_job(self) -> None:
        """Wait until QEMU has written the layer to the disk, if it is doing that.

        :raise Unavailable: it could not."""
        looks = backoff(_FIRST_LOOK, _LONGEST_LOOK)
        completed = False
        while (job := await self._job()) is not None:
            if job.get("status") == "ready" and not completed:
                await self._qmp.execute("job-complete", id=LAYER)
                completed = True
            if job.get("status") == "concluded":
                await self._qmp.execute("job-dismiss", id=LAYER)
                if job.get("error"):
                    raise Unavailable(
                        f"the disk of a VM that was kept can't be written: {job['error']!s:.200}"
                    )
                return
            await sleep(self._reactor, next(looks))

    async def _job(self) -> Mapping[str, object] | None:
        jobs = entries(await self._qmp.execute("query-jobs"))
        return next((job for job in jobs if job.get("id") == LAYER), None)

    async def _top(self) -> str:
        """Return the name of the node that the VM writes to."""
        for device in entries(await self._qmp.execute("query-block")):
            inserted = device.get("inserted")
            if isinstance(inserted, dict) and inserted.get("node-name") in (LAYER, DISK):
                return str(inserted["node-name"])
        raise Unavailable("QEMU does not say which disk a VM has")

    async def _nodes(self) -> list[Mapping[str, object]]:
        return entries(await self._qmp.execute("query-named-block-nodes", flat=True))

    async def _file_sets(self) -> list[int]:
        return [
            number
            for each in entries(await self._qmp.execute("query-fdsets"))
            if isinstance(number := each.get("fdset-id"), int)
            and any(file.get("opaque") == LAYER for file in entries(each.get("fds")))
        ]
