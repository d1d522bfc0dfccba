# SPDX-License-Identifier: Apache-2.0
"""A whole agent in the test's process, and a channel from a node to it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from OpenSSL import SSL
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from zope.interface import implementer

from infranetes_common.identity import Identity
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.vmserver.pki import Authority, Pair, client_context
from txgrpc import Channel
from vmserver.config import Config, IdentityConfig, LimitsConfig
from vmserver.containers import ProviderContext, create
from vmserver.daemon import Vmserver

SANDBOX = "5a" * 16


def run_directory(case: Any) -> Path:
    """Make a directory in memory, as an agent's run_dir is, and remove it after the test."""
    directory = Path(tempfile.mkdtemp(prefix="vmserver-", dir="/dev/shm"))
    case.addCleanup(shutil.rmtree, directory, ignore_errors=True)
    return directory


@implementer(IOpenSSLClientConnectionCreator)
class Client:
    """Connects with a certificate, or without one."""

    def __init__(self, authority: Authority, pair: Pair | None) -> None:
        self._context = client_context(authority.pem, pair)

    def clientConnectionForTLS(self, protocol: Any) -> Any:
        connection = SSL.Connection(self._context, None)
        connection.set_connect_state()
        return connection


class Agent:
    """An agent with a directory and an identity of its own, which does not touch the machine."""

    def __init__(
        self, reactor: Any, directory: Path, *, provider: Any = "fake", limits: LimitsConfig | None = None
    ) -> None:
        self.reactor = reactor
        self.authority = Authority()
        self.directory = directory
        self.config = Config(
            provider="fake",
            run_dir=directory / "run",
            etc_dir=directory / "etc",
            volumes_dir=directory / "volumes",
            identity=IdentityConfig(source="file", path=directory / "identity.json", apply=False),
            limits=limits or LimitsConfig(),
        )
        self.config.run_dir.mkdir(exist_ok=True)
        self.config.etc_dir.mkdir(exist_ok=True)
        if provider == "fake":
            context = ProviderContext(self.config.run_dir, self.config.etc_dir)
            self.make_provider = lambda: create(reactor, "fake", {}, context)
        else:
            self.make_provider = provider
        self.channels: list[Channel] = []
        self.service: Vmserver | None = None

    async def start(self, identity: Identity | None = None) -> Vmserver:
        """Start an agent and give it its identity. Its port is open afterwards."""
        self.provider = self.make_provider()
        self.service = Vmserver(self.reactor, self.config, provider=self.provider)
        self.service.startService()
        assert self.service._starting is not None
        await self.service._starting
        if not self.service.port:
            from infranetes_common.identity import encode

            await self.service.accept(encode(identity or self.authority.identity(SANDBOX)))
        return self.service

    def channel(self, pair: Pair | None = None, port: int = 0, host: str = "127.0.0.1") -> Channel:
        """Open a channel with the node's certificate or another one. `host`: an address of this machine."""
        assert self.service is not None
        endpoint = wrapClientTLS(
            Client(self.authority, pair or self.authority.node()),
            HostnameEndpoint(self.reactor, host, port or self.service.port),
        )
        channel = Channel(self.reactor, endpoint)
        self.channels.append(channel)
        return channel

    def stub(self) -> AgentStub:
        """Return a stub of the agent's service."""
        return AgentStub(self.channel())

    async def stop(self) -> None:
        for channel in self.channels:
            await channel.close()
        self.channels.clear()
        if self.service is not None:
            await self.service.stopService()
            self.service = None
