# SPDX-License-Identifier: Apache-2.0
"""The docker ContainerProvider fulfils the contract, with a real engine."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import installed
from tests.contract.container_output import ArchiveContract, LogContract
from tests.contract.container_provider import ExecContract, LifecycleContract
from tests.contract.container_provider_case import ContainerProviderCase
from tests.contract.container_sessions import SessionContract
from tests.contract.container_usage import UsageContract
from tests.harness.needs import needs_docker
from tests.support.dockerd import Dockerd, shared
from vmserver.containers.docker.engine import Engine
from vmserver.containers.docker.provider import DockerConfig, DockerProvider


class DockerCase(ContainerProviderCase):
    """Uses a real engine."""

    def engine(self) -> Dockerd:
        """Return the engine of this test."""
        return shared()

    def make_provider(self) -> Any:
        return DockerProvider(installed(), DockerConfig(socket=self._engine.socket), self.etc, self.run_dir)

    async def setUp(self) -> None:
        self.etc = Path(os.path.abspath(self.mktemp()))
        self.etc.mkdir()
        self.run_dir = self.etc.with_name(self.etc.name + "-run")
        self._engine = self.engine()
        await super().setUp()


@needs_docker
class DockerLifecycleTests(DockerCase, LifecycleContract, TestCase):
    """Create, start, stop, remove, update, list."""

    async def test_a_late_start_does_not_run_an_ended_container_again(self) -> None:
        """Docker itself would run it again."""
        id = await self.create("sh", "-c", "echo ran")
        real, asked = Engine.call, []

        async def call(engine: Engine, method: str, path: str, *more: Any, **fields: Any) -> Any:
            if path.endswith("/start"):
                asked.append(path)
                if len(asked) > 1:
                    await self.ended(id)
            return await real(engine, method, path, *more, **fields)

        self.patch(Engine, "call", call)
        first, second = self.provider.start_container(id), self.provider.start_container(id)
        for start in (first, second):
            with contextlib.suppress(FailedPrecondition):
                await start
        await self.ended(id)
        self.assertEqual([record.line for record in await self.lines(id)], [b"ran"])


@needs_docker
class DockerExecTests(DockerCase, ExecContract, TestCase):
    """ExecSync."""


@needs_docker
class DockerSessionTests(DockerCase, SessionContract, TestCase):
    """Live sessions."""


@needs_docker
class DockerUsageTests(DockerCase, UsageContract, TestCase):
    """Stats."""

    async def test_an_engine_that_does_not_answer_holds_up_no_figures(self) -> None:
        id = await self.run_container("sleep", "600")
        os.kill(self._engine.pid(), signal.SIGSTOP)
        try:
            self.assertGreater((await self.used(id)).usage.memory.working_set, 0)
        finally:
            os.kill(self._engine.pid(), signal.SIGCONT)


@needs_docker
class DockerLogTests(DockerCase, LogContract, TestCase):
    """ReadLog."""


@needs_docker
class DockerImageTests(DockerCase, ArchiveContract, TestCase):
    """Images."""
