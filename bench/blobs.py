# SPDX-License-Identifier: Apache-2.0
"""How fast the node converts pulled layers to the file systems that VMs mount.

Measured with the image store itself, including everything that it verifies, until the file systems are on the
disk, as MB of file system per second. The image of 83 MiB is a single layer; that of 1 GiB has several, which
the store converts concurrently.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread

from bench import content
from bench.content import SIZES
from bench.figures import Report
from infranetes.images.config import ImagesConfig
from infranetes.images.store import ImageStore
from infranetes_common.reactors import IReactor
from tests.support.registry import Registry

TARGET = 400.0
TIMES = {"83 MiB": 3, "1 GiB": 1}

prepare = content.make


async def run(reactor: IReactor, report: Report) -> None:
    with content.served() as registry:
        for size, times in TIMES.items():
            rates, layers = [], 0
            for _ in range(times):
                rate, layers = await _made(reactor, registry, SIZES[size])
                rates.append(rate)
            note = f"median of {times}; {layers} layers, gzip"
            what = f"{size}, layer to file system, {layers} side by side"
            rate = statistics.median(rates)
            report.add("blobs", what, rate, "MB/s", TARGET, note, at_least=True)


async def _made(reactor: IReactor, registry: Registry, name: str) -> tuple[float, int]:
    """Pull an image into a new store and have its file systems made. Return MB/s, and how many there are."""
    root = Path(tempfile.mkdtemp(prefix="bench-blobs-", dir="/var/tmp"))
    root.chmod(0o755)
    config = ImagesConfig(insecure_registries=(registry.host,))
    store = ImageStore(reactor, root / "images", config)
    try:
        await store.start()
        image = await store.pull(registry.reference(name, "1"))
        began = reactor.seconds()
        disks = await store.disks(image.id)
        seconds = reactor.seconds() - began
        return sum(disk.size for disk in disks) / seconds / 1e6, len(disks)
    finally:
        await store.stop()
        await deferToThread(shutil.rmtree, root, ignore_errors=True)
