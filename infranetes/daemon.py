"""The node daemon put together: what is made of what, in which order it starts and how it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.agent.client import connector
from infranetes.agent.view import ViewTimes
from infranetes.authority import Authority
from infranetes.config import Config
from infranetes.control import SOCKET as CONTROL_SOCKET
from infranetes.control.service import ControlService
from infranetes.cri.images import ImageService
from infranetes.cri.instrument import Instrumented
from infranetes.cri.runtime import RuntimeService
from infranetes.cri.status import POD_CIDR
from infranetes.hostports.hostports import HostPorts, table_name
from infranetes.hostports.table import Table
from infranetes.images import ImageStore
from infranetes.images.preload import Preload, gather
from infranetes.imagestores import image_store
from infranetes.pods.containers import Containers
from infranetes.pods.inventory import Sandbox
from infranetes.pods.logs import Logs
from infranetes.pods.node import Node, NodeNames, Times
from infranetes.pods.pool import Pool
from infranetes.pods.reconcile import Reconciler
from infranetes.pods.renewal import Renewal
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.states import SHOWN_SANDBOXES
from infranetes.pods.store import Store
from infranetes.pods.streams import Streams
from infranetes.pods.waits import go, settle, sleep
from infranetes.providers import registry
from infranetes.providers.interface import Instance, ProviderContext
from infranetes.streaming.server import StreamingServer
from infranetes.volumes.volumes import Volumes
from infranetes_common import control, cri, errors
from infranetes_common.errors import ConfigError, FailedPrecondition, Unavailable
from txgrpc import Server, Service

SOCKET_MODE = 0o660
CONTROL_MODE = 0o600
FIRST_RETRY_SECONDS = 1.0  # after a provider that could not start; doubles up to the last
LAST_RETRY_SECONDS = 60.0
NOTIFY_MARGIN_SECONDS = 120  # what systemd gives a start that has just shown progress

_log = Logger()


class Daemon:
    """One node's runtime.

    Start: lock the state directory; load the records; serve; start the provider; reconcile. The socket
    answers before the provider has started, and Status says what it is waiting for.

    :param notify: tells the service manager (sd_notify(3) assignments).
    :param make_provider: makes the provider of the configuration.
    """

    def __init__(
        self,
        reactor: Any,
        config: Config,
        notify: Callable[[str], None] = lambda _: None,
        make_provider: Callable[..., Any] = registry.create,
    ) -> None:
        self._reactor = reactor
        self._config = config
        self._notify = notify
        context = ProviderContext(
            config.state_dir, config.run_dir, config.cluster, config.node, self._preload
        )
        table = config.providers.get(config.provider, {})
        self._provider = make_provider(reactor, config.provider, table, context)
        self._images: Any = image_store(reactor, config, self._provider)
        self._lock: int | None = None
        self._store: Store | None = None
        self._node: Node | None = None
        self._logs: Logs | None = None
        self._reconciler: Reconciler | None = None
        self._server: Server | None = None
        self._runtime: RuntimeService | None = None
        self._streaming: StreamingServer | None = None
        self._port: Any = None
        self._control: Server | None = None
        self._control_port: Any = None
        self._provider_starting: Deferred[None] | None = None

    def prepare(self) -> None:
        """What can fail at once: directories, the lock, the socket's path. Nothing is served yet.

        :raise InfranetesError: what is in the way, and what to do."""
        config = self._config
        for path, mode in ((config.state_dir, 0o711), (config.run_dir, 0o755)):
            try:
                path.mkdir(mode=mode, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{path} can't be made: {error.strerror}") from None
        self._lock = lock(config.state_dir)
        clear_socket(config.socket_path)
        clear_socket(str(config.run_dir / CONTROL_SOCKET))

    def sign_lock(self) -> None:
        """Say in the lock which process this is, for who finds it held."""
        assert self._lock is not None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    async def start(self, ready: Callable[[str], None]) -> None:
        """Serve; returns once the socket answers. `ready` is told, later, that the provider has started.

        :raise InfranetesError: what is in the way, and what to do."""
        config = self._config
        self._store = Store(self._reactor, config.state_dir)
        contents = await self._store.open()
        authority = Authority(config.state_dir, path=config.ca)
        await self._images.start()
        self._logs = Logs(self._reactor, self._store)
        node = self._node = Node(
            self._reactor,
            self._store,
            self._provider,
            self._images,
            authority,
            connector(self._reactor, authority, self._known_key),
            self._logs,
            NodeNames(config.cluster, config.node),
            times(config),
            config.parallel_agents,
            Volumes(self._reactor, config.state_dir / "volumes", config.volumes),
        )
        node.apparmor = config.apparmor_dir
        node.pool = Pool(node, config.pool)
        node.renewal = Renewal(node)
        node.hostports = HostPorts(Table(self._reactor, table_name(config.state_dir)))
        sandboxes = Sandboxes(node)
        containers = Containers(node, sandboxes)
        self._reconciler = Reconciler(node, sandboxes, containers)
        await node.volumes.load()
        node.pool.load(contents.pool, contents.settings)
        await self._reconciler.load(contents, lambda: sleep(self._reactor, 0))
        node.renewal.start()
        await node.volumes.settle(node.inventory)
        await node.hostports.restore(node.inventory)
        await self._listen(node, sandboxes, containers)
        subnet = contents.settings.get(POD_CIDR, "")
        self._provider_starting = go(self._start_provider(node, sandboxes, subnet))
        self._provider_starting.addCallback(lambda _: ready(self._ready_line()))

    @property
    def provider_started(self) -> Deferred[None]:
        """Fires when the provider has started, or fails with why it never will."""
        assert self._provider_starting is not None
        return self._provider_starting

    async def _listen(self, node: Node, sandboxes: Sandboxes, containers: Containers) -> None:
        config = self._config
        streaming = await self._serve_streams(Streams(sandboxes, containers))
        self._runtime = runtime = RuntimeService(
            node, sandboxes, containers, config.runtime_handlers, config.cgroup_driver, streaming.url
        )
        self._server = Server(
            self._reactor,
            [
                Service(cri.RuntimeService, Instrumented(self._reactor, cri.RuntimeService, runtime)),
                Service(
                    cri.ImageService,
                    Instrumented(self._reactor, cri.ImageService, ImageService(self._images)),
                ),
            ],
            translate_error=errors.to_grpc,
        )
        self._port = await self._listen_at(config.socket_path, SOCKET_MODE, self._server)
        assert self._reconciler is not None
        self._control = Server(
            self._reactor,
            [Service(control.Control, ControlService(node, self._reconciler))],
            translate_error=errors.to_grpc,
        )
        path = str(config.run_dir / CONTROL_SOCKET)
        self._control_port = await self._listen_at(path, CONTROL_MODE, self._control)

    async def _listen_at(self, path: str, mode: int, server: Server) -> Any:
        endpoint = UNIXServerEndpoint(self._reactor, path, mode=mode)
        before = os.umask(0o777 & ~mode)  # there is no moment in which others may connect
        try:
            listening = endpoint.listen(server.factory)
        finally:
            os.umask(before)
        try:
            return await listening
        except Exception as error:
            raise FailedPrecondition(f"the socket {path} can't be listened on: {error}") from None

    async def _serve_streams(self, agents: Streams) -> StreamingServer:
        where = self._config.streaming
        server = StreamingServer(
            self._reactor, agents, host=where.host, port=where.port, advertise=where.advertise
        )
        try:
            await server.start()
        except CannotListenError as error:
            raise FailedPrecondition(
                f"streaming.host, streaming.port: {where.host}:{where.port} can't be listened on: "
                f"{error.socketError}; give another port, or 0"
            ) from None
        self._streaming = server
        return server

    async def _start_provider(self, node: Node, sandboxes: Sandboxes, subnet: str) -> None:
        """Until it has started. A fault that may pass is tried again, any other ends this."""
        delay = FIRST_RETRY_SECONDS
        provider = self._provider
        while True:
            try:
                if subnet:
                    await provider.configure_network(subnet)
                await provider.start(self._progress)
                break
            except Unavailable as error:
                node.trouble = str(error)
                _log.warn(
                    "provider {provider} can't start yet: {error}; tried again in {delay:.0f} s",
                    provider=provider.name,
                    error=error,
                    delay=delay,
                )
                self._tell(f"waiting for provider {provider.name}: {error}")
            await sleep(self._reactor, delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

        def ended(instance: Instance) -> None:
            sandboxes.ended(instance)
            node.pool.ended(instance)

        provider.watch(ended)
        node.trouble = ""
        node.ready.fire()
        assert self._reconciler is not None
        node.pool.provider_ready()
        self._reconciler.provider_ready()
        self._notify("READY=1\nSTATUS=serving")

    async def _preload(self, progress: Callable[[str], None]) -> Preload | None:
        """The images that every VM has from the start, as one file."""
        if not isinstance(self._images, ImageStore):
            return None
        names, directory = self._config.images.preload, self._config.state_dir / "preload"
        return await gather(self._reactor, self._images, names, directory, progress)

    def _known_key(self, sandbox_id: str) -> str:
        """The key of the certificate that a VM was last given."""
        assert self._node is not None
        one = self._node.inventory.sandboxes.get(sandbox_id) or self._node.pool.members.get(sandbox_id)
        return one.record.certificate_key if one is not None else ""

    def _progress(self, words: str) -> None:
        assert self._node is not None
        self._node.trouble = words
        _log.info("provider {provider}: {words}", provider=self._provider.name, words=words)
        self._tell(words)

    def _tell(self, words: str) -> None:
        line = words.replace("\n", " ")[:200]
        self._notify(f"STATUS={line}\nEXTEND_TIMEOUT_USEC={NOTIFY_MARGIN_SECONDS * 1_000_000}")

    def _ready_line(self) -> str:
        assert self._node is not None
        shown = [one for one in self._sandboxes() if one.state in SHOWN_SANDBOXES]
        plural = "sandbox" if len(shown) == 1 else "sandboxes"
        return (
            f"infranetes is ready on unix://{self._config.socket_path} "
            f"(provider {self._provider.name}, {len(shown)} {plural})"
        )

    def _sandboxes(self) -> list[Sandbox]:
        assert self._node is not None
        return list(self._node.inventory)

    async def stop(self) -> None:
        """Answer what is under way for a moment, write down what is known, and leave the VMs running."""
        self._notify("STOPPING=1")
        for port in (self._port, self._control_port):
            if port is not None:
                await port.stopListening()
        if self._runtime is not None:
            self._runtime.end_events()
        if self._server is not None:
            await self._server.drain(self._config.times.shutdown)
        if self._control is not None:
            await self._control.drain(self._config.times.shutdown)
        if self._streaming is not None:
            await self._streaming.stop()
        if self._provider_starting is not None:
            self._provider_starting.addErrback(lambda _: None)
            self._provider_starting.cancel()
        if self._node is not None:
            await self._stop_node(self._node)
        steps: list[tuple[str, Callable[[], Any]]] = [
            ("provider", self._provider.stop),
            ("image store", self._images.stop),
        ]
        if self._store is not None:
            steps.append(("store", self._store.close))
        for name, step in steps:
            try:
                await step()
            except Exception:
                _log.failure("the {part} failed to stop", part=name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _stop_node(self, node: Node) -> None:
        node.stopping = True
        if self._reconciler is not None:
            self._reconciler.stop()
        node.renewal.stop()
        await node.pool.stop()
        assert self._logs is not None
        await self._logs.stop(node.inventory.containers.values())
        await node.volumes.stop()
        closing: list[Deferred[None]] = []
        for sandbox in node.inventory:
            for flight in (sandbox.launching, sandbox.stopping, sandbox.removing, sandbox.ending):
                if flight is not None and not flight.done:
                    flight.cancel()
            for container in sandbox.containers.values():
                for flight in (container.creating, container.removing):
                    if flight is not None and not flight.done:
                        flight.cancel()
            if sandbox.deserted is not None and sandbox.deserted.active():
                sandbox.deserted.cancel()
            if sandbox.view is not None:
                sandbox.view.stop()
            if sandbox.client is not None:
                closing.append(go(sandbox.client.close()))
        for result in await settle(closing):  # one that is silent takes seconds, so all at once
            if isinstance(result, Failure):
                _log.debug("an agent's connection failed to close: {error}", error=result.value)


def times(config: Config) -> Times:
    """The configured patience."""
    found = config.times
    return Times(
        launch=found.launch,
        desertion=found.desertion,
        listing=found.listing,
        drain=found.log_drain,
        sweep=found.sweep,
        certificate=found.certificate,
        view=ViewTimes(unknown_after=found.unknown_after),
    )


def lock(state_dir: Path) -> int:
    """A file descriptor that holds the state directory for this process, also after a fork.

    :raise FailedPrecondition: another daemon has it. :raise ConfigError: it can't be written."""
    path = state_dir / "lock"
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"state_dir: {path} can't be written: {error.strerror}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(held, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(held)
        raise FailedPrecondition(
            f"the state directory {state_dir} is in use by another infranetes daemon (pid {pid}): "
            "stop that one, or give this one its own state_dir"
        ) from None
    return held


def clear_socket(path: str) -> None:
    """Make the way free for a listener at `path`: what an earlier daemon left there is removed.

    :raise FailedPrecondition: somebody listens there, or it is no socket.
    :raise ConfigError: the directory can't be made or written."""
    try:
        Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise FailedPrecondition(
                f"socket: {path} is there and is no socket: move it away, or give another path"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2)
            try:
                probe.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                Path(path).unlink(missing_ok=True)
                return
            except OSError as error:  # a full backlog, say: there is a listener
                raise FailedPrecondition(f"socket: {path} is in use: {error}") from None
        raise FailedPrecondition(
            f"socket: {path} is in use: another program listens there; stop it, or give another path"
        )
    except PermissionError as error:
        raise ConfigError(f"socket: {path} can't be made: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"socket: {path}: {error.strerror}") from None
