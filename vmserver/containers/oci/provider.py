# SPDX-License-Identifier: Apache-2.0
"""The provider of the package: it changes the containers that `index` has, by the steps of `lifecycle`."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path

from twisted.internet.defer import Deferred, TimeoutError, fail, succeed
from twisted.logger import Logger
from zope.interface import implementer

from infranetes_common.concurrency import Flight, KeyedLock, deferred, settled, shielded
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    NotFound,
    Unavailable,
    Unimplemented,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.exec_limits import check_executable
from vmserver.containers.hooks import Hook
from vmserver.containers.interface import (
    Changed,
    ExecResult,
    IContainerProvider,
    IHasUserNamespaces,
    IHoldsContainers,
    IMountsForItself,
    ISession,
    ITakesLayers,
    Removed,
    Streams,
)
from vmserver.containers.log_lines import records
from vmserver.containers.oci import cgroup
from vmserver.containers.oci.attach import attach
from vmserver.containers.oci.bundle import CGROUPS, Bundles
from vmserver.containers.oci.config import OciConfig
from vmserver.containers.oci.conmon import Conmon
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.execs import Execs
from vmserver.containers.oci.filesystems import FileSystems
from vmserver.containers.oci.hold import Freezer
from vmserver.containers.oci.index import ContainerIndex, unwritable
from vmserver.containers.oci.keeping import Keeping
from vmserver.containers.oci.lifecycle import Lifecycle
from vmserver.containers.oci.limit_changes import change_limits
from vmserver.containers.oci.limits import Spec
from vmserver.containers.oci.lock import locked
from vmserver.containers.oci.log import CriLog
from vmserver.containers.oci.pod_processes import PodProcesses
from vmserver.containers.oci.record import Phase
from vmserver.containers.oci.rotation import Rotation
from vmserver.containers.oci.runtime import Crun
from vmserver.containers.oci.spec import process_spec
from vmserver.containers.oci.user_namespaces import UserNamespaces
from vmserver.layers.images import LayerImages
from vmserver.layers.store import LayerStore
from vmserver.stats.reader import UsageReader, UsageSource

END_SECONDS = 60.0  # for a container to end once it is killed

_EXECS = "exec"
_PROGRAM = "bin/crun"  # where the read-only mount of crun is

_log = Logger()


@implementer(IContainerProvider, IHasUserNamespaces, IHoldsContainers, IMountsForItself, ITakesLayers)
class OciProvider:
    """An `IContainerProvider` whose containers are run by conmon and crun.

    :param etc_dir: has the sandbox's hosts, hostname and resolv.conf, which every container sees.
    :param run_dir: the agent's, for everything that ends with a reboot.
    """

    name = "oci"

    def __init__(self, reactor: IReactor, config: OciConfig, etc_dir: Path, run_dir: Path) -> None:
        own = self._own = run_dir / self.name
        self._reactor = reactor
        self._config = config
        self.layers = LayerStore(reactor, config.layer_dir, own / "layers")
        self._images = LayerImages(reactor, self.layers, config.directory / "images")
        namespaces = UserNamespaces(reactor, own / "users")
        self._files = FileSystems(reactor, self._images, own / "volumes", namespaces)
        self._crun = Crun(reactor, own / "crun", config.crun)
        self._conmon = Conmon(reactor, self._crun, config.conmon)
        self._execs = Execs(reactor, self._crun, own / _EXECS)
        self._index = ContainerIndex(reactor, config.directory / "containers")
        self._processes = PodProcesses(reactor, self._crun, config.directory / "init", CGROUPS)
        self._bundles = Bundles(
            reactor,
            self._index,
            self._images,
            self._files,
            namespaces,
            self._processes,
            self._crun.filters,
            etc_dir,
        )
        self._rotation = Rotation(reactor, config.log_max_size, config.log_max_files)
        freezer = Freezer(reactor, self._crun, self._bundles, self._execs)
        self._freezer = freezer
        self._lifecycle = Lifecycle(
            reactor,
            self._index,
            self._crun,
            self._conmon,
            self._files,
            self._bundles,
            self._rotation,
            freezer,
        )
        self._keeping = Keeping(
            reactor, self._index, freezer, self._lifecycle, self._bundles, self._crun, self._processes
        )
        self._usage = UsageReader(reactor)
        self._creating: KeyedLock[str] = KeyedLock()
        self._needed: Counter[str] = Counter()  # the images of containers being created
        self._image_removals: set[str] = set()
        self._lock: int | None = None  # the descriptor that locks the state directory

    # Starting and stopping

    @deferred
    async def start(self) -> None:
        if not cgroup.is_v2():
            _log.warn(
                "this VM has cgroups of version 1: processes that a command leaves behind outlive its "
                "deadline"
            )
        self._make_directories()
        if self._lock is None:
            self._lock = await locked(self._reactor, self._config.directory)
        await self._crun.mount(self._own / _PROGRAM)
        for directory in await self._index.load():
            await self._files.delete(directory)
        recovered = await settled(self._recover(container) for container in self._index.all())
        for failure in recovered:
            if failure is not None:
                _log.error("a container of an earlier agent: {error}", error=failure.value)
        await self._processes.release(self._empty)

    def _make_directories(self) -> None:
        # Users of a user namespace reach their container's root directory below the first one.
        modes = {self._config.directory: 0o711, self._own: 0o700, self._own / _EXECS: 0o700}
        for directory, mode in modes.items():
            try:
                directory.mkdir(mode=mode, parents=True, exist_ok=True)
                directory.chmod(mode)
            except OSError as error:
                raise unwritable(directory, error) from error

    async def _recover(self, container: OciContainer) -> None:
        async with container.lock:
            if not container.removed:
                await self._lifecycle.recover(container)

    @deferred
    async def stop(self) -> None:
        self._usage.stop()
        await self._lifecycle.stop()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def watch(self, changed: Changed, removed: Removed) -> None:
        self._index.watch(changed, removed)

    def configure(self, sandbox_config: cri.PodSandboxConfig) -> Deferred[None]:
        return succeed(None)

    # Containers

    @deferred
    async def create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> messages.ContainerState:
        # Finish even if the caller goes away, like `remove` and `update`: threads work on the container's
        # files.
        return await shielded(self._create(id, image_id, config, sandbox_config))

    async def _create(
        self, id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> messages.ContainerState:
        async with self._creating.held(id):
            container = self._index.get(id)
            if container is None:
                container = self._bundles.new(id, image_id, config)
                with self._needing(container.record.images):
                    try:
                        await self._bundles.make(container, sandbox_config)
                        await self._index.add(container)
                    except BaseException:
                        await self._files.delete(container.directory)
                        raise
            return container.state()

    @contextlib.contextmanager
    def _needing(self, images: set[str]) -> Iterator[None]:
        """Keep images from being removed."""
        for image_id in images & self._image_removals:
            raise FailedPrecondition(f"image {image_id} is being removed; load it again")
        self._needed.update(images)
        try:
            yield
        finally:
            self._needed.subtract(images)

    @deferred
    async def start_container(self, id: str) -> messages.ContainerState:
        container = self._index.existing(id)
        if not container.running:
            self._keeping.refuse()
        if container.starting is None:
            # A start goes on even if all of its callers are cancelled.
            starting = Flight(self._start_container(container))
            container.starting = None if starting.done else starting
            return await starting.join()
        return await container.starting.join()

    async def _start_container(self, container: OciContainer) -> messages.ContainerState:
        try:
            async with container.lock:
                state = container.record.state
                if container.removed or container.record.phase is Phase.REMOVING:
                    raise NotFound(f"there is no container {container.id} in this sandbox's VM")
                if container.over:
                    raise FailedPrecondition(
                        f"container {container.id} has ended ({state.reason}); make another one"
                    )
                if not container.running:
                    await self._lifecycle.start(container)
                return container.state()
        finally:
            container.starting = None

    @deferred
    async def stop_container(self, id: str, grace_seconds: int) -> messages.ContainerState:
        container = self._index.existing(id)
        await self._stop(container, grace_seconds)
        return container.state()

    async def _stop(self, container: OciContainer, grace: int) -> None:
        if container.starting is not None:
            with contextlib.suppress(InfranetesError):
                await container.starting.join()
        if container.record.phase is not Phase.RUNNING:
            return
        await self._keeping.let_go(container)
        status = self._crun.status(container.engine_id)
        over = container.when_over()
        if grace and status is not None:
            status.signal(container.record.stop_signal)
            over.addTimeout(grace, self._reactor)
            with contextlib.suppress(TimeoutError):
                await over
        if container.over:
            return
        over = container.when_over()
        over.addTimeout(END_SECONDS, self._reactor)
        await self._conmon.kill(container.monitored)
        try:
            await over
        except TimeoutError:
            raise Unavailable(f"container {container.id} does not end, though it was killed") from None

    @deferred
    async def remove(self, id: str) -> None:
        container = self._index.get(id)
        if container is None:
            return
        await self._stop(container, 0)
        await shielded(self._remove(container))

    async def _remove(self, container: OciContainer) -> None:
        async with container.lock:
            if not container.removed:
                await self._lifecycle.remove(container)
        await self._processes.release(self._empty)

    def _empty(self) -> bool:
        """Return whether there is no container, not even one that is being created."""
        return not self._index.all() and not any(self._needed.values())

    @deferred
    async def update(self, id: str, resources: cri.LinuxContainerResources) -> messages.ContainerState:
        container = self._index.existing(id)
        await shielded(self._update(container, resources))
        return container.state()

    async def _update(self, container: OciContainer, changes: cri.LinuxContainerResources) -> None:
        async with container.lock:
            if container.removed:
                raise NotFound(f"there is no container {container.id} in this sandbox's VM")
            await change_limits(self._index, self._bundles, self._crun, container, changes)

    @deferred
    async def containers(self) -> list[messages.ContainerState]:
        return [container.state() for container in self._index.listed()]

    @deferred
    async def usage(self) -> list[messages.ContainerUsage]:
        version2 = cgroup.is_v2()  # without version 2, processes are measured one by one
        return await self._usage.read(
            {
                each.id: (each.state(), UsageSource(each.engine_id if version2 else "", str(each.written)))
                for each in self._index.listed()
            }
        )

    # Commands and streams

    @deferred
    async def exec_sync(self, id: str, command: Sequence[str], timeout: float, max_output: int) -> ExecResult:
        with self._keeping.command():
            engine_id, process, score = await self._process(id, command, False)
            return await self._execs.exec_sync(engine_id, process, score, timeout, max_output)

    @deferred
    async def exec_session(self, id: str, command: Sequence[str], streams: Streams) -> ISession:
        self._keeping.refuse()
        engine_id, process, score = await self._process(id, command, streams.tty)
        self._keeping.refuse()
        return await self._execs.exec_session(engine_id, process, score, streams)

    async def _process(self, id: str, command: Sequence[str], tty: bool) -> tuple[str, Spec, int]:
        """Return crun's id of a running container, the process to execute in it, and its oom_score_adj."""
        container = self._index.running(id)
        spec = await self._bundles.read(container)
        check_executable(command, spec["process"]["env"])
        process = process_spec(spec, command, tty)
        return container.engine_id, process, container.record.state.resources.oom_score_adj

    @deferred
    async def attach_session(self, id: str, streams: Streams) -> ISession:
        container = self._index.running(id)
        if container.process is None or container.control is None:
            raise FailedPrecondition(f"container {id} is not running")
        session: ISession = await attach(
            self._reactor,
            container.monitored,
            container.process,
            container.control,
            streams,
            container.exit_code,
        )
        return session

    async def read_log(
        self, id: str, cursor: str, follow: bool, text: bool = False
    ) -> AsyncGenerator[messages.LogRecord, None]:
        container = self._index.existing(id)
        log = CriLog(container.log, cursor)
        if follow:
            container.reading = log
        reading = records(self._reactor, log, follow, lambda: container.over, text)
        try:
            async for record in reading:
                yield record
        finally:
            await reading.aclose()

    # Keeping the VM

    @property
    def held(self) -> bool:
        return self._keeping.held

    @deferred
    async def tell(self, id: str, hook: Hook) -> None:
        await self._freezer.tell(self._index.running(id), hook)

    @deferred
    async def hold(self) -> list[str]:
        return await self._keeping.hold()

    @deferred
    async def thaw(self) -> None:
        await self._keeping.thaw()

    def thd_pids(self) -> dict[str, list[int]]:
        return self._keeping.pids()

    @deferred
    async def keep(self) -> None:
        await self._keeping.keep()

    @deferred
    async def adopt(
        self,
        old_id: str,
        new_id: str,
        config: cri.ContainerConfig,
        sandbox_config: cri.PodSandboxConfig,
        hook: Hook | None,
    ) -> messages.ContainerState:
        return await shielded(self._adopt(old_id, new_id, config, sandbox_config, hook))

    async def _adopt(
        self,
        old_id: str,
        new_id: str,
        config: cri.ContainerConfig,
        sandbox_config: cri.PodSandboxConfig,
        hook: Hook | None,
    ) -> messages.ContainerState:
        async with self._creating.held(new_id):
            return await self._keeping.adopt(old_id, new_id, config, sandbox_config, hook)

    def kept(self) -> list[str]:
        return self._keeping.kept()

    # Images

    def missing_layers(self, diff_ids: Sequence[str]) -> Deferred[int]:
        return fail(_no_archives())

    def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        return fail(_no_archives())

    @deferred
    async def add_image(self, image_id: str, configuration: bytes) -> None:
        await self._images.add(image_id, configuration)

    @deferred
    async def images(self) -> list[str]:
        return await self._images.ids()

    @deferred
    async def remove_image(self, image_id: str) -> None:
        using = [each.id for each in self._index.all() if image_id in each.record.images]
        if using or self._needed[image_id]:
            raise FailedPrecondition(f"image {image_id} is in use; remove its containers first")
        self._image_removals.add(image_id)
        try:
            await self._files.release(image_id)
            await self._images.remove(image_id)
        finally:
            self._image_removals.discard(image_id)


def _no_archives() -> Unimplemented:
    return Unimplemented(
        "this VM's images are made of layers, not loaded from archives: show or bring the layers "
        "(MountLayers, PutLayer), then AddImage"
    )
