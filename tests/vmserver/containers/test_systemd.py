# SPDX-License-Identifier: Apache-2.0
"""The systemd ContainerProvider fulfils the contract, with a real systemd and its journal."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import TestCase

from infranetes_common.config import Bytes
from infranetes_common.reactors import installed
from tests.contract.container_output import ArchiveContract, LogContract
from tests.contract.container_provider import ExecContract, LifecycleContract
from tests.contract.container_provider_case import ContainerProviderCase
from tests.contract.container_sessions import SessionContract
from tests.contract.container_usage import UsageContract
from tests.harness.durations import slow
from tests.harness.needs import needs_systemd
from tests.support.systemd import Inside, Systemd, shared
from vmserver.containers.systemd.config import SystemdConfig
from vmserver.containers.systemd.provider import SystemdProvider


@attrs.frozen
class Executable:
    """An image of this provider: a file and its checksum."""

    data: bytes
    diff_ids: tuple[str, ...] = ("sha256:" + "1" * 64, "sha256:" + "2" * 64)

    @property
    def id(self) -> str:
        return "sha256:" + hashlib.sha256(self.data).hexdigest()


@needs_systemd
class SystemdCase(ContainerProviderCase):
    """Uses a real systemd."""

    huge_pages = 0

    def build(self, extra: dict[str, bytes] | None = None) -> Any:
        rest = b"".join(name.encode() + data for name, data in (extra or {}).items())
        return Executable(b'#!/bin/sh\necho "$0 runs with $*"\nexit 0\n' + b"# image\n" * 1000 + rest)

    def archive(self, built: Any, present: int = 0) -> bytes:
        data: bytes = built.data
        return data

    def manager(self) -> Systemd:
        """Return the systemd of this test."""
        return shared()

    def config(self, **changes: Any) -> SystemdConfig:
        """Return the provider's configuration."""
        config = SystemdConfig(
            journal_dir=self.systemd.run / "log/journal",
            image_dir=self.directory / "images",
            image_max_size=Bytes(16 << 20),
        )
        return attrs.evolve(config, **changes)

    def make_provider(self) -> Any:
        return SystemdProvider(
            installed(),
            self.config(),
            self.memory,
            endpoint=Inside(self.systemd),
            own_pid=self.systemd.outside,
        )

    async def setUp(self) -> None:
        self.systemd = self.manager()
        self.directory = Path(tempfile.mkdtemp(prefix="units-"))
        self.directory.chmod(0o755)
        self.memory = Path(tempfile.mkdtemp(prefix="units-", dir="/dev/shm"))
        await super().setUp()

    async def tearDown(self) -> None:
        # trial runs cleanups first
        try:
            await super().tearDown()
        finally:
            shutil.rmtree(self.directory)
            shutil.rmtree(self.memory)


class SystemdLifecycleTests(SystemdCase, LifecycleContract, TestCase):
    """Create, start, stop, remove, update, list."""


class SystemdExecTests(SystemdCase, ExecContract, TestCase):
    """ExecSync."""


class SystemdSessionTests(SystemdCase, SessionContract, TestCase):
    """Live sessions."""


class SystemdLogTests(SystemdCase, LogContract, TestCase):
    """ReadLog."""

    @slow(10, "the journal takes and gives tens of thousands of entries")
    async def test_the_journal_drops_nothing_because_it_comes_fast(self) -> None:
        """Its limit for each unit is some ten thousand entries in 30 s."""
        id = await self.run_container("sh", "-c", "seq 1 70000")
        await self.ended(id)
        found = [record async for record in self.provider.read_log(id, "", True, text=True)]
        lines = b"".join(record.text for record in found).splitlines()
        self.assertEqual([int(line.rpartition(b" ")[2]) for line in lines], list(range(1, 70_001)))
        self.assertFalse(any(record.gap for record in found))


class SystemdImageTests(SystemdCase, ArchiveContract, TestCase):
    """Images."""

    keeps_layers = False


class SystemdUsageTests(SystemdCase, UsageContract, TestCase):
    """Stats."""

    counts_written = False
