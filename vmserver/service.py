"""``twistd vmserver --config FILE``: the agent in a sandbox's VM.

Start order, each state entered once:

    =========  ==========================================  =========================
    state      what happens in it                          left when
    =========  ==========================================  =========================
    STARTING   the ContainerProvider is asked for its         it answered, or failed
               containers, a call is made to the agent itself  once, or took too long
    WAITING    the channel says ``waiting``; a template is    an identity was taken on
               frozen here, so a clone has nothing to load
    SERVING    the TLS listener answers the node              the agent stops
    =========  ==========================================  =========================

An identity kept from before (a restart of the agent alone) leads straight to SERVING; the channel
then serves renewed certificates only. A provider that fails is started again and again meanwhile.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python import usage
from twisted.python.failure import Failure

from infranetes_common import errors, vmserver
from infranetes_common.identity import Identity, decode, decode_clock, encode
from txgrpc import Server
from txgrpc import Service as GrpcService
from vmserver import config as configuration
from vmserver import tls
from vmserver.agent import AgentService
from vmserver.config import Config
from vmserver.containers import ProviderContext, create
from vmserver.containers.interface import IContainerProvider
from vmserver.intake import CertificateFiles, IdentityFile, VirtioSerial, save
from vmserver.machine import Machine
from vmserver.metadata import CloudIdentity, MetadataGate
from vmserver.preload import preload
from vmserver.rehearsal import rehearse
from vmserver.sandbox import Sandbox
from vmserver.volumes.store import VolumeStore
from vmserver.warm import warm

PROVIDER_SECONDS = 10.0  # how long WAITING is put off for a provider that doesn't answer
PROVIDER_RETRY_SECONDS = (0.25, 5.0)  # the first pause, and the longest
DRAIN_SECONDS = 2.0
IDENTITY_FILE = "identity.json"
MEMORY = "volumes"  # in run_dir: a tmpfs for secrets

Listen = Callable[[str, int, Any], "Deferred[Any]"]
"""`listen(host, port, factory)`: an IListeningPort."""

_log = Logger()


# What the earlier Go version called the provider whose container is the machine.
EARLIER_PROVIDERS = {"fake": "machine"}


class Options(usage.Options):
    """The command line of ``twistd vmserver``. A flag overrides the file's key of the same name."""

    optParameters = [  # noqa: RUF012  usage.Options wants it so
        ["config", "c", None, "The configuration, a TOML file; without one, every key has its default."],
        ["provider", None, None, "The ContainerProvider: docker, systemd, machine, fake or a plug-in."],
        ["contprovider", None, None, "The same as --provider, by its earlier names: fake is machine."],
        ["listen", None, None, "HOST:PORT of the TLS listener, in place of the identity's."],
        ["cert", None, None, "The machine's certificate and its CA's, PEM (identity.cert); with --key."],
        ["key", None, None, "The certificate's private key, PEM, mode 0600 (identity.key); with --cert."],
        ["run-dir", None, None, "Where identity and sandbox files are kept until the machine's end."],
    ]

    def postOptions(self) -> None:
        """Read the file, so that its faults are told before the daemon starts.

        :raise SystemExit: with the words, status 1; after a UsageError Debian's twistd exits with 0.
        """
        try:
            flags = {
                "provider": self._provider(),
                "listen": self["listen"],
                "run_dir": self["run-dir"],
                "identity.cert": self["cert"],
                "identity.key": self["key"],
            }
            if self["cert"] is not None or self["key"] is not None:
                flags["identity.source"] = configuration.CERTIFICATE
            self.vmserver_config = configuration.load(self["config"], flags)
        except errors.ConfigError as error:
            raise SystemExit(f"vmserver: {error}") from None

    def _provider(self) -> str | None:
        earlier = self["contprovider"]
        names = {self["provider"], EARLIER_PROVIDERS.get(earlier, earlier)} - {None}
        if len(names) > 1:
            raise errors.ConfigError("command line: --provider and --contprovider mean the same; give one")
        return next(iter(names), None)


def makeService(options: Options) -> Service:
    """The agent as a Twisted service.

    :raise SystemExit: the ContainerProvider can't be made; says why.
    """
    from twisted.internet import reactor

    try:
        return Vmserver(reactor, options.vmserver_config)
    except errors.ConfigError as error:
        raise SystemExit(f"vmserver: {error}") from None


class Vmserver(Service):
    """The agent.

    :param provider: in place of the configured one. :param machine: in place of this one.
    :param listen: how to listen on a host and port with a factory, in place of TCP.
    :param intake: whether to look for an identity; without, `accept` is how one comes.
    """

    name = "vmserver"

    def __init__(
        self,
        reactor: Any,
        config: Config,
        *,
        provider: Any = None,
        machine: Machine | None = None,
        listen: Listen | None = None,
        intake: bool = True,
    ) -> None:
        self._reactor = reactor
        self._config = config
        self._machine = machine or Machine(config.etc_dir, config.identity.interface)
        self._sandbox = Sandbox(self._machine, config.etc_dir, apply=config.identity.apply)
        context = ProviderContext(run_dir=config.run_dir, etc_dir=config.etc_dir)
        self._provider: IContainerProvider = provider or create(
            reactor, config.provider, config.providers.get(config.provider, {}), context
        )
        self._listen_on: Listen = listen or self._listen_tcp
        self._intake = intake
        limits = config.limits
        self._agent = AgentService(
            reactor,
            self._provider,
            self._sandbox,
            VolumeStore(config.volumes_dir, config.run_dir / MEMORY, mount=config.identity.apply),
            execs=limits.execs,
            sessions=limits.sessions,
            forwards=limits.forwards,
            own_machine=config.identity.apply,
        )
        self._agent.rekey = self._rekey
        in_cloud = config.identity.source in configuration.CLOUDS
        self._gate = self._agent.gate = MetadataGate(reactor, in_cloud and config.identity.apply)
        service = GrpcService(vmserver.Agent, self._agent)
        self._server = Server(reactor, [service], translate_error=errors.to_grpc)
        self._door: tls.Door | None = None
        self._port: Any = None
        self._identity: Identity | None = None
        self._source: Any = None
        self._starting: Deferred[None] | None = None
        self._retrying: Deferred[None] | None = None

    @property
    def port(self) -> int:
        """The TLS listener's port; 0 while it does not listen."""
        return int(self._port.getHost().port) if self._port is not None else 0

    def startService(self) -> None:
        """Begin; nothing is waited for here."""
        super().startService()  # type: ignore[no-untyped-call]
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._could_not_start)

    def stopService(self) -> Deferred[None]:
        """Stop listening, let calls in flight end for a moment, and let go of the provider."""
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def accept(self, document: bytes) -> int:
        """Take an identity document in; the port that the TLS listener then listens on.

        The same identity again, a renewed certificate for the same sandbox, or a line that sets the
        clock: as often as one likes.

        :raise InvalidArgument: malformed. :raise FailedPrecondition: the machine is another sandbox
            already, or can't be made this one; says what refused.
        """
        now_nanos = decode_clock(document)
        if now_nanos is not None:
            self._set_clock(now_nanos)
            return self.port
        identity = decode(document)
        if self._identity is not None and identity.sandbox_id != self._identity.sandbox_id:
            raise errors.FailedPrecondition(
                f"this machine is sandbox {self._identity.sandbox_id} already and keeps that identity"
            )
        if self._identity is not None and tls.made_at(identity) < tls.made_at(self._identity):
            return self.port  # what it came with first, read once more: the node has replaced it since
        first = self._identity is None
        return await self._take(
            identity, secrets.token_hex(16) if first else self._agent.boot_id, fresh=first
        )

    async def _take(self, identity: Identity, boot_id: str, *, fresh: bool) -> int:
        made = tls.context(identity)
        if fresh and self._identity is None:
            await self._gate.close()
        if self._config.identity.apply:
            self._become(identity, fresh)
        if fresh:
            boot_id = secrets.token_hex(16)  # with entropy that no other clone has
        await self._listen(identity, made)
        self._keep(identity, boot_id)
        self._agent.begin(identity.sandbox_id, boot_id, new_agent=self._identity is None)
        self._identity = identity
        return self.port

    def _keep(self, identity: Identity, boot_id: str) -> None:
        save(self._file, json.dumps({"boot_id": boot_id, "identity": encode(identity).decode()}))

    def _rekey(self, certificate: str) -> None:
        """Put a certificate for the key that waits in force: first on the disk, then at the door."""
        if self._identity is None or self._door is None:
            raise errors.FailedPrecondition("the machine gets its identity first")
        if certificate == self._identity.certificate_pem:
            return
        identity = self._agent.keys.renewed(self._identity, certificate)
        made = tls.context(identity)
        self._keep(identity, self._agent.boot_id)
        self._door.renew(made)
        self._identity = identity
        _log.info("sandbox {sandbox} has a new certificate", sandbox=identity.sandbox_id)

    def _set_clock(self, now_nanos: int) -> None:
        if self._identity is None:
            raise errors.FailedPrecondition("the machine gets its identity first")
        if self._config.identity.apply:
            try:
                self._machine.set_clock(now_nanos)
            except OSError as error:
                raise errors.FailedPrecondition(f"the machine's clock can't be set: {error}") from error

    def _become(self, identity: Identity, fresh: bool) -> None:
        try:
            self._machine.become(identity, fresh=fresh)
        except OSError as error:
            raise errors.FailedPrecondition(
                f"the machine refuses to become sandbox {identity.sandbox_id}: {error}; "
                "the agent has to run as root, with CAP_SYS_TIME, CAP_SYS_ADMIN and CAP_NET_ADMIN"
            ) from error

    async def _listen(self, identity: Identity, made: Any) -> None:
        if self._door is not None:
            self._door.renew(made)
            return
        try:
            host, port = configuration.split_address(self._config.listen or identity.listen)
        except ValueError:
            raise errors.InvalidArgument(f"listen {identity.listen[:80]!r}: expected HOST:PORT") from None
        limits = self._config.limits
        door = tls.Door(
            self._reactor,
            made,
            self._server.factory,
            connections=limits.connections,
            handshakes=limits.handshakes,
            handshake_seconds=limits.handshake_seconds,
        )
        try:
            self._port = await self._listen_on(host, port, door)
        except (CannotListenError, OSError) as error:
            raise errors.FailedPrecondition(f"can't listen on {host}:{port}: {error}") from error
        self._door = door
        _log.info("serving sandbox {sandbox} on port {port}", sandbox=identity.sandbox_id, port=self.port)

    def _listen_tcp(self, host: str, port: int, door: Any) -> Deferred[Any]:
        endpoint = TCP4ServerEndpoint(self._reactor, port, backlog=64, interface=host)
        listening: Deferred[Any] = endpoint.listen(door)
        return listening

    @property
    def _file(self) -> Path:
        return self._config.run_dir / IDENTITY_FILE

    def _kept(self) -> tuple[Identity, str] | None:
        """The identity that an earlier agent of this machine took on, and the boot id of then."""
        try:
            kept = json.loads(self._file.read_bytes())
            return decode(kept["identity"].encode()), str(kept["boot_id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, errors.InfranetesError) as error:
            _log.error("{path} is unreadable: {kind}", path=str(self._file), kind=type(error).__name__)
            return None

    async def _stop(self) -> None:
        for under_way in (self._starting, self._retrying):
            if under_way is not None:
                under_way.cancel()
        if self._source is not None:
            self._source.stop()
        if self._port is not None:
            port, self._port = self._port, None
            await port.stopListening()
            await self._server.drain(DRAIN_SECONDS)
        if self._door is not None:
            self._door.end_all()
        await self._provider.stop()

    async def _start(self) -> None:
        try:
            self._config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _log.error("run_dir {path}: {words}", path=str(self._config.run_dir), words=error.strerror)
        await self._start_provider()
        kept = self._kept()
        if kept is not None:
            try:
                await self._take(*kept, fresh=False)
            except errors.InfranetesError as error:
                _log.error(
                    "the identity kept in {path} is of no use: {words}",
                    path=str(self._file),
                    words=str(error),
                )
        if self._intake:
            if self._identity is None:
                await warm(self._reactor, self._server.factory)
                if self._provider.name == "docker":
                    await preload(self._reactor, self._provider)
                    await rehearse(self._reactor, self._provider)
            self._source = self._make_source()
            self._source.start()

    def _could_not_start(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.failure("the agent could not start", failure)

    async def _start_provider(self) -> None:
        attempt: Deferred[None] = self._provider.start()
        try:
            await attempt.addTimeout(PROVIDER_SECONDS, self._reactor)
        except Exception as error:
            self._provider_failed(error)
            self._retrying = Deferred.fromCoroutine(self._retry_provider())
            self._retrying.addErrback(lambda failure: None)

    async def _retry_provider(self) -> None:
        pause, longest = PROVIDER_RETRY_SECONDS
        while True:
            await deferLater(self._reactor, pause, lambda: None)
            try:
                await self._provider.start()
            except errors.InfranetesError as error:
                self._provider_failed(error)
                pause = min(2 * pause, longest)
            else:
                _log.info("provider {provider} answers", provider=self._provider.name)
                return

    def _provider_failed(self, error: Exception) -> None:
        words = str(error) or type(error).__name__
        _log.error("provider {provider} does not start: {words}", provider=self._provider.name, words=words)

    def _make_source(self) -> Any:
        config = self._config.identity
        if config.source == configuration.FILE:
            return IdentityFile(self._reactor, config.path, self.accept)
        if config.source == configuration.CERTIFICATE:
            return CertificateFiles(self._reactor, Path(config.cert), Path(config.key), self.accept)
        waiting = lambda: self._identity is None  # noqa: E731
        if config.source in configuration.CLOUDS:
            return CloudIdentity(
                self._reactor, config.source, config.endpoint, self.accept, waiting, tools=config.vmtoolsd
            )
        return VirtioSerial(self._reactor, config.path, self.accept, waiting)
