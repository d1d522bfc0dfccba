"""The docker ContainerProvider passes the contract over a real engine, and what is its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from tests.contract.container_output import ImageContract, LogContract
from tests.contract.container_provider import ContainerProviderCase, ExecContract, LifecycleContract
from tests.contract.container_sessions import SessionContract
from tests.contract.container_usage import UsageContract
from tests.support.dockerd import Dockerd, shared
from vmserver.containers.docker.provider import DockerConfig, DockerProvider


class DockerCase(ContainerProviderCase):
    """Its state is a real engine's."""

    def engine(self) -> Dockerd:
        """The engine of this test."""
        return shared()

    def make_provider(self) -> Any:
        return DockerProvider(reactor, DockerConfig(socket=self._engine.socket), self.etc, self.run_dir)

    async def setUp(self) -> None:
        self.etc = Path(os.path.abspath(self.mktemp()))
        self.etc.mkdir()
        self.run_dir = self.etc.with_name(self.etc.name + "-run")
        self._engine = self.engine()
        await super().setUp()


class DockerLifecycleTests(DockerCase, LifecycleContract, TestCase):
    """Create, start, stop, remove, update, list."""


class DockerExecTests(DockerCase, ExecContract, TestCase):
    """ExecSync."""


class DockerSessionTests(DockerCase, SessionContract, TestCase):
    """Live sessions."""


class DockerUsageTests(DockerCase, UsageContract, TestCase):
    """Stats."""

    async def test_an_engine_that_does_not_answer_holds_up_no_figures(self) -> None:
        id = await self.run_container("sleep", "600")
        os.kill(self._engine.pid(), signal.SIGSTOP)
        try:
            self.assertGreater((await self.used(id)).usage.memory.working_set, 0)
        finally:
            os.kill(self._engine.pid(), signal.SIGCONT)


class DockerLogTests(DockerCase, LogContract, TestCase):
    """ReadLog."""


class DockerImageTests(DockerCase, ImageContract, TestCase):
    """Images."""
