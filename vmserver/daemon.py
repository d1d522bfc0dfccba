# SPDX-License-Identifier: Apache-2.0
"""The agent in a sandbox's VM, as a Twisted service.

Start order, each state entered once:

    =========  ================================================  ==========================
    state      what happens in it                                left when
    =========  ================================================  ==========================
    STARTING   the pod's disks are mounted again after a         the provider answered, or
               reboot; the ContainerProvider is started, the     failed once, or took too
               one that the pod chose or the configured one;     long; warmed up
               a machine that may become a template is warmed
               up (`prewarm`)
    WAITING    sources look for an identity; a template is       an identity was taken on
               frozen here, so a clone has nothing to load
    SERVING    the listener answers the node                     the agent stops
    =========  ================================================  ==========================

An identity kept from before (a restart of the agent alone) leads straight to SERVING; the source then brings
renewed certificates only. A provider that fails is started again and again meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common import errors
from infranetes_common.concurrency import deferred, run_in_thread, start
from infranetes_common.hangups import Hangups, differences, refuse, report
from infranetes_common.reactors import IReactor
from txgrpc import Limits, Server
from vmserver import config as configuration
from vmserver.config import Config
from vmserver.containers import ProviderContext, create
from vmserver.containers.interface import IContainerProvider
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.identity.apply import IdentityApplier
from vmserver.identity.current import CurrentIdentity
from vmserver.identity.delivery import IdentitySource
from vmserver.identity.guard import PortGuard
from vmserver.identity.identity_file import CertificateFiles, IdentityFile
from vmserver.identity.listener import Listen, Listener
from vmserver.identity.metadata import DETECT, CloudIdentity, MetadataGate, MetadataService, detect
from vmserver.identity.virtio_serial import VirtioSerial
from vmserver.interruptions import FindNotice, find_by
from vmserver.machine.hotplug import Hotplug
from vmserver.machine.mount_namespace import thd_share
from vmserver.pod_settings import PodSettings
from vmserver.prewarm import prewarm
from vmserver.rpc.agent import AgentService
from vmserver.volumes.parts import VolumeParts
from vmserver.volumes.store import VolumeStore

DRAIN_SECONDS = 2.0
MAX_FRAME = 192 * 1024  # bytes; each message of a stream is one frame
CONNECTION_WINDOW = 4 * 1024 * 1024  # bytes in flight from the node: a layer may have gigabytes
MEMORY_VOLUMES = "volumes"  # in run_dir: a tmpfs for volumes in memory, such as secrets
DISKS = "disks"  # beside the volumes: mount points of the pod's disks
VOLUME_PARTS = "volume-parts"  # in run_dir: bind mounts of the parts of volumes that containers mount

_log = Logger()


class Vmserver(Service):
    """The agent.

    :param provider: replaces the configured one.
    :param listen: listens on a host and port with a factory; replaces TCP.
    :param sources: whether to look for an identity; if not, one only comes by `accept`.
    :param hangups: when to read the configuration again, with `read_again`.
    :param source: the configuration file, for error messages.
    :param applier: applies identities to the machine, regardless of `identity.apply`; replaces the usual one.
    """

    name = "vmserver"

    def __init__(
        self,
        reactor: IReactor,
        config: Config,
        *,
        provider: IContainerProvider | None = None,
        listen: Listen | None = None,
        sources: bool = True,
        hangups: Hangups | None = None,
        read_again: Callable[[], Config] | None = None,
        source: str = "configuration",
        applier: IdentityApplier | None = None,
    ) -> None:
        own_machine = config.identity.apply
        self._reactor = reactor
        self._config = config
        self._config_source = source
        self._hangups = hangups
        self._read_again = read_again
        self._choice = self._make_choice(provider, config)
        self._hotplug = Hotplug(reactor) if config.hotplug else None
        applies = own_machine or applier is not None
        applier = applier or IdentityApplier(config.etc_dir, config.identity.interface)
        gate = MetadataGate(reactor, own_machine and config.identity.source in configuration.CLOUDS)
        guard = PortGuard(reactor) if own_machine and config.identity.node_only else None
        self._listener = Listener(
            reactor, config.listen, config.limits, guard, listen, _agent_device(config.identity)
        )
        self._identity = CurrentIdentity(
            reactor, config.run_dir, applier if applies else None, gate, self._listener
        )
        volumes = VolumeStore(
            config.volumes_dir,
            config.run_dir / MEMORY_VOLUMES,
            config.volumes_dir.with_name(DISKS),
            mount=own_machine,
        )
        self._agent = AgentService(
            reactor,
            self._choice,
            PodSettings(applier, config.etc_dir, check_only=not own_machine),
            volumes,
            VolumeParts(volumes, config.run_dir / VOLUME_PARTS, mount=own_machine),
            self._identity,
            gate,
            limits=config.limits,
            run_dir=config.run_dir,
            own_machine=own_machine,
            find_notice=self._make_find_notice() if own_machine else None,
            guard=guard,
            port=lambda: self._listener.port,
        )
        service = self._agent.service
        limits = Limits(connection_window=CONNECTION_WINDOW, max_frame=MAX_FRAME)
        self._server = Server(reactor, [service], limits=limits, translate_error=errors.to_grpc)
        self._listener.inner = self._server.factory
        self._source = self._make_source() if sources else None
        self._starting: Deferred[None] | None = None

    @property
    def port(self) -> int:
        """The TLS listener's port; 0 while it does not listen, and where there is none."""
        return self._listener.port

    @deferred
    async def accept(self, document: bytes) -> int:
        """Take an identity document on; see `CurrentIdentity.accept`."""
        return await self._identity.accept(document)

    def startService(self) -> None:
        """Start everything in the background."""
        super().startService()  # type: ignore[no-untyped-call]
        self._starting = start(self._start())
        self._starting.addErrback(self._could_not_start)
        if self._hangups is not None:
            self._hangups.serve(self._reload)

    def stopService(self) -> Deferred[None]:
        """Stop listening, give calls in flight a moment to end, and stop the provider."""
        super().stopService()  # type: ignore[no-untyped-call]
        stopped = self._agent.stop()
        if self._hangups is not None:
            self._hangups.stop()
        return start(self._stop(stopped))

    async def _start(self) -> None:
        try:
            self._config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _log.error("run_dir {path}: {words}", path=str(self._config.run_dir), words=error.strerror)
        if self._hotplug is not None:
            self._hotplug.begin()
        await self._choice.recall()  # whose mounts the machine's services have to see, perhaps
        await self._agent.restore()
        await self._choice.start()
        await self._agent.restore_hold()
        await self._identity.restore()
        if self._source is None:
            return
        # A template has its channel from QEMU. Any other machine is booted for one pod, which waits for it.
        if self._config.identity.source == configuration.VIRTIO_SERIAL and not self._identity.sandbox_id:
            by_tls = self._listener.by_tls
            await prewarm(self._reactor, self._server.factory, self._choice.provider, by_tls=by_tls)
            await self._agent.prepare()
        self._source.start()

    def _could_not_start(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.failure("the agent could not start", failure)

    async def _stop(self, agent_stopped: Deferred[None]) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._hotplug is not None:
            self._hotplug.stop()
        if self._source is not None:
            self._source.stop()
        if self._listener.is_open:
            await self._listener.stop_listening()
            await self._server.drain(DRAIN_SECONDS)
        self._listener.abort_connections()
        await self._choice.stop()
        await agent_stopped

    # From the configuration

    def _make_choice(self, provider: IContainerProvider | None, config: Config) -> ProviderChoice:
        """Make the choice of providers. :raise ConfigError: one of them can't be created."""

        def make(name: str) -> IContainerProvider:
            context = ProviderContext(config.run_dir, config.etc_dir, self._config_source)
            return create(self._reactor, name, config.providers.get(name, {}), context)

        for name in config.choices:
            make(name)
        return ProviderChoice(
            self._reactor,
            provider or make(config.provider),
            config.choices,
            make,
            config.choice_file,
            thd_share if config.mount_namespace else None,
        )

    def _make_source(self) -> IdentitySource:
        config = self._config.identity
        accept = self._identity.accept
        if config.source == configuration.FILE:
            return IdentityFile(self._reactor, config.path, accept)
        if config.source == configuration.CERTIFICATE:
            return CertificateFiles(self._reactor, Path(config.cert), Path(config.key), accept)
        holding = self._agent.holding
        waiting = lambda: not self._identity.sandbox_id or (holding is not None and holding.leaving)  # noqa: E731
        if config.source in configuration.CLOUDS:
            kept = configuration.USER_DATA if config.path == configuration.DEFAULT_CHANNEL else config.path
            return CloudIdentity(
                self._reactor, config.source, config.endpoint, accept, waiting, None, config.vmtoolsd, kept
            )
        return VirtioSerial(self._reactor, config.path, partial(accept, live=True), waiting)

    def _make_find_notice(self) -> FindNotice | None:
        """Return the check for the cloud's notice that it takes the VM away; None if no cloud gives one."""
        config = self._config.identity
        if config.source not in configuration.CLOUDS:
            return None
        try:
            source = detect() if config.source == DETECT else config.source
        except errors.FailedPrecondition:
            return None  # logged where the identity is read
        return find_by(source, MetadataService(self._reactor, config.endpoint, marked=True), self._reactor)

    async def _reload(self) -> None:
        """Read the configuration again and apply its limits; all else needs a restart."""
        assert self._read_again is not None
        try:
            read = await run_in_thread(self._reactor, self._read_and_check, self._read_again)
        except errors.InfranetesError as error:
            refuse(_log, error)
            return
        before = self._config
        self._config = attrs.evolve(before, limits=read.limits)
        self._agent.limit(read.limits)
        self._listener.limit(read.limits)
        taken, waiting = differences(before, self._config), differences(self._config, read)
        report(_log, self._config_source, taken, waiting)

    def _read_and_check(self, read_again: Callable[[], Config]) -> Config:
        config = read_again()
        self._make_choice(None, config)
        return config


def _agent_device(config: configuration.IdentityConfig) -> Path | None:
    """Return the port that the hypervisor gives the agent, with the identity's channel."""
    private = config.source == configuration.VIRTIO_SERIAL and config.agent_device
    return Path(config.agent_device) if private else None
