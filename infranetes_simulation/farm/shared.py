# SPDX-License-Identifier: Apache-2.0
"""A VM that shares the farm's machine: an agent in the farm's process, on a port of loopback."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.interfaces import IListeningPort, IProtocolFactory
from zope.interface import implementer

from infranetes_common.concurrency import deferred
from infranetes_common.identity import Identity, encode
from infranetes_common.reactors import IReactor
from infranetes_simulation.containers import create
from infranetes_simulation.containers.provider import FakeProvider
from infranetes_simulation.farm.machine import IMachine
from infranetes_simulation.farm.port import HOST, VmPort
from infranetes_simulation.protocol import ASLEEP, NO_AGENT, NORMAL, UNREACHABLE
from vmserver.config import Config, IdentityConfig
from vmserver.containers import ProviderContext
from vmserver.daemon import Vmserver
from vmserver.identity.current import IDENTITY_FILE


@implementer(IMachine)
class SharedMachine:
    """See `IMachine`. Its containers are processes of this machine.

    :param layers: whether it takes images as layers.
    """

    host = HOST

    def __init__(self, reactor: IReactor, directory: Path, layers: bool) -> None:
        self._reactor = reactor
        self._directory = directory
        self._layers = layers
        self._behaviour = NORMAL
        self._port: VmPort | None = None
        self._agent: Vmserver | None = None
        self._provider: FakeProvider | None = None

    @property
    def port(self) -> int:
        return self._port.number if self._port is not None else 0

    def _make_provider(self) -> FakeProvider:
        context = ProviderContext(run_dir=self._directory, etc_dir=self._directory)
        return create(self._reactor, {"layers": self._layers}, context)

    async def turn_on(self, identity: Identity, behaviour: str) -> None:
        config = Config(
            provider="fake",
            run_dir=self._directory,
            volumes_dir=self._directory / "disk-volumes",
            etc_dir=self._directory,
            identity=IdentityConfig(apply=False),
        )
        self._behaviour = behaviour
        self._provider = self._make_provider()
        self._agent = Vmserver(
            self._reactor, config, provider=self._provider, sources=False, listen=self._listen
        )
        self._agent.startService()
        await self._agent.accept(encode(identity))

    @deferred
    async def _listen(self, host: str, port: int, factory: IProtocolFactory) -> IListeningPort:
        self._port = await VmPort.listen(self._reactor, factory)
        await self._set_port()
        return self._port

    async def turn_off(self) -> None:
        if self._port is not None:
            self._port.factory.abort_all()
        agent, self._agent = self._agent, None
        if self._provider is not None:
            self._provider.cut_power()
        if agent is not None:
            await agent.stopService()
        self._port = self._provider = None

    def forget(self) -> None:
        (self._directory / IDENTITY_FILE).unlink(missing_ok=True)

    async def behave(self, behaviour: str) -> None:
        self._behaviour = behaviour
        if self._port is not None:
            self._port.factory.abort_all()
            await self._set_port()

    async def _set_port(self) -> None:
        assert self._port is not None
        self._port.factory.silent = self._behaviour == UNREACHABLE
        if self._behaviour in (NO_AGENT, ASLEEP):
            await self._port.refuse()
        else:
            await self._port.accept()

    def clear(self) -> None:
        self._make_provider().cut_power()
