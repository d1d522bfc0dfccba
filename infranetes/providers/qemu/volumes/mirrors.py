# SPDX-License-Identifier: Apache-2.0
"""Copies of volumes that VMs write to meanwhile, made by QEMU itself.

QEMU copies the volume, and from the beginning writes to the copy too whatever the VM writes. Once both hold
the same it is told to stop that, and the copy stays as it is at that instant.

thing       named        made by
descriptor  copy-SERIAL  add-fd         goes once the node has a descriptor of its own
node        copy-SERIAL  blockdev-add
job         copy-SERIAL  blockdev-mirror

The job, as QEMU has it:

running    the volume is being copied          wait
ready      both hold the same                  end the job: the copy is complete
concluded  it has ended, or could not go on    dismiss the job, and remove the node

What a killed daemon has left of them goes before the next copy of the volume, and before it is detached.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress

from infranetes.providers.qemu.program.qmp import QmpConnection, QmpError
from infranetes.providers.qemu.vm.disks import as_unavailable, entries
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import sleep
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.reactors import IReactor

_NAME = re.compile(r"copy-([0-9a-f]{20})")
_LOOK_SECONDS = 0.1  # between looks at a job
_END_SECONDS = 10.0


async def mirror(reactor: IReactor, vm: Vm, serial: str, source: str, target: int, direct: bool) -> float:
    """Copy a volume that a VM has to a file of the same size. Return the time of the copy's content.

    Cancelling it ends the copy at once.

    :param source: the name of the volume's node. :param direct: whether the file can be used without the page
        cache.
    :raise Unavailable: the VM has ended, or QEMU can't go on; nothing of it stays in QEMU.
    """
    name = f"copy-{serial}"
    try:
        qmp = (await vm.monitor(reactor)).qmp
        await clear(reactor, qmp, serial)
        try:
            await _begin(qmp, name, source, target, direct)
            return await _finish(reactor, qmp, name)
        finally:
            await clear(reactor, (await vm.monitor(reactor)).qmp, serial)
    except InfranetesError as error:
        raise as_unavailable(vm, "can't have its volume copied", error) from error


async def clear(reactor: IReactor, qmp: QmpConnection, serial: str) -> None:
    """End the copying of a volume, if there is any, and remove what belongs to it. Idempotent.

    :raise InfranetesError: QEMU does not answer, or does not end it."""
    name = f"copy-{serial}"
    for _ in range(int(_END_SECONDS / _LOOK_SECONDS)):
        job = await _job(qmp, name)
        if job is None:
            break
        if job.get("status") == "concluded":
            await qmp.execute("job-dismiss", id=name)
            break
        with suppress(QmpError):  # the job may be about to end by itself
            await qmp.execute("block-job-cancel", device=name, force=True)
        await sleep(reactor, _LOOK_SECONDS / 10)
    else:
        raise Unavailable(f"QEMU does not end {name}")
    if await _has_node(qmp, name):
        await qmp.execute("blockdev-del", node_name=name)
    for number in _file_sets(await qmp.execute("query-fdsets"), name):
        await qmp.execute("remove-fd", fdset_id=number)


async def clear_all(reactor: IReactor, vm: Vm) -> None:
    """End the copies of a VM's volumes that an earlier daemon began. Idempotent.

    :raise Unavailable: QEMU does not answer, or does not end it."""
    if not vm.usable:
        return
    try:
        qmp = (await vm.monitor(reactor)).qmp
        nodes = entries(await qmp.execute("query-named-block-nodes", flat=True))
        for node in nodes:
            match = _NAME.fullmatch(str(node.get("node-name")))
            if match:
                await clear(reactor, qmp, match[1])
    except InfranetesError as error:
        raise as_unavailable(vm, "does not end the copying of its volumes", error) from error


async def _begin(qmp: QmpConnection, name: str, source: str, target: int, direct: bool) -> None:
    number = await qmp.add_file(name, target)
    await qmp.execute(
        "blockdev-add",
        driver="file",
        node_name=name,
        filename=f"/dev/fdset/{number}",
        locking="off",
        discard="unmap",  # so that zeros take no room
        cache={"direct": direct, "no-flush": False},
    )
    await qmp.execute("remove-fd", fdset_id=number)
    await qmp.execute(
        "blockdev-mirror",
        job_id=name,
        device=source,
        target=name,
        sync="full",
        # Otherwise the copy would never catch up with a VM that writes as fast as the disk.
        copy_mode="write-blocking",
        on_source_error="report",
        on_target_error="report",  # an error ends the copy; the VM does not notice it
        auto_dismiss=False,
    )


async def _finish(reactor: IReactor, qmp: QmpConnection, name: str) -> float:
    """Wait until the copy is complete, and end it there."""
    instant = 0.0
    while True:
        job = await _job(qmp, name)
        status = job.get("status") if job is not None else None
        if job is None or job.get("error"):
            raise Unavailable(str(job["error"]) if job is not None else "QEMU has given up the copy")
        if status == "concluded":
            if not instant:
                raise Unavailable("the copy ended before it was complete")
            return instant
        if status == "ready" and not instant:
            instant = time.time()
            await qmp.execute("block-job-cancel", device=name)
        await sleep(reactor, _LOOK_SECONDS)


async def _job(qmp: QmpConnection, name: str) -> Mapping[str, object] | None:
    found = [each for each in entries(await qmp.execute("query-jobs")) if each.get("id") == name]
    return found[0] if found else None


async def _has_node(qmp: QmpConnection, name: str) -> bool:
    nodes = entries(await qmp.execute("query-named-block-nodes", flat=True))
    return any(node.get("node-name") == name for node in nodes)


def _file_sets(answer: object, name: str) -> list[int]:
    return [
        number
        for each in entries(answer)
        if isinstance(number := each.get("fdset-id"), int)
        and any(file.get("opaque") == name for file in entries(each.get("fds")))
    ]
