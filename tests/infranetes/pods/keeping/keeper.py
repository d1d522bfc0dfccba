# SPDX-License-Identifier: Apache-2.0
"""A provider that keeps VMs, and starts others from them, in name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import alsoProvides

from infranetes.providers.keeping import IStartsKeptVms, KeptVm
from infranetes_common.concurrency import start


class Keeper:
    """Keeps VMs in name, and prepares what it has kept.

    :ivar error: what it fails with; None: it does not. :ivar waits: it never ends.
    :ivar seconds: the time that each keeping may take.
    :ivar prepare_error: what preparing fails with. :ivar check_error: why no VM can start from a state.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.waits = False
        self.prepare_error: Exception | None = None
        self.check_error: Exception | None = None
        self.prepared: list[Path] = []
        self.asked: list[str] = []
        self.seconds: list[float] = []
        self.directories: list[Path] = []
        self.cancelled = 0
        self.before: Callable[[], None] = lambda: None

    def keep(self, instance_id: str, directory: Path, seconds: float) -> Deferred[KeptVm]:
        self.asked.append(instance_id)
        self.seconds.append(seconds)
        self.directories.append(directory)
        return start(self._keep(directory))

    async def _keep(self, directory: Path) -> KeptVm:
        files = {"memory": b"m" * 1000, "disk.qcow2": b"d" * 10}
        for name, content in files.items():
            (directory / name).write_bytes(content)
        self.before()
        if self.error is not None:
            raise self.error
        if self.waits:
            never: Deferred[None] = Deferred(self._count)
            await never
        sizes = {name: len(content) for name, content in files.items()}
        return KeptVm(1_699_999_999.5 + len(self.asked), 0.25, 1.5, sizes, {"hypervisor": "QEMU 7.2"})

    def prepare(self, directory: Path, seconds: float) -> Deferred[None]:
        return start(self._prepare(directory))

    async def _prepare(self, directory: Path) -> None:
        self.prepared.append(directory)
        (directory / "ram").write_bytes(b"r" * 1000)
        if self.prepare_error is not None:
            raise self.prepare_error
        (directory / "memory").unlink()

    def check(self, directory: Path) -> Deferred[None]:
        return fail(self.check_error) if self.check_error is not None else succeed(None)

    def _count(self, _: object) -> None:
        self.cancelled += 1


def keeping(provider: Any) -> Keeper:
    """Have a provider keep VMs, and start others from them. Any: it gets methods."""
    keeper = Keeper()
    provider.keep, provider.prepare, provider.check = keeper.keep, keeper.prepare, keeper.check
    alsoProvides(provider, IStartsKeptVms)
    return keeper
