# SPDX-License-Identifier: Apache-2.0
"""The contract of a ContainerProvider: the part of the agent that runs the pod's containers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages

if TYPE_CHECKING:
    from vmserver.containers.hooks import Hook
    from vmserver.containers.sessions import Output
    from vmserver.layers.store import LayerStore

Changed = Callable[[messages.ContainerState], None]
"""Called with a container's state after each change."""

Removed = Callable[[str], None]
"""Called with a container's id once it is removed."""


@attrs.frozen
class ExecResult:
    """The output and exit code of a finished command."""

    stdout: bytes
    stderr: bytes
    exit_code: int


@attrs.frozen
class Streams:
    """The streams of a session. With `tty`, stderr is part of stdout."""

    tty: bool = False
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False


class ISession(Interface):
    """The live streams of a process in a container.

    The output has one reader, who sets the pace: a session buffers a bounded amount and then makes the
    process wait.
    """

    output: Output = Attribute("What the process writes: see `vmserver.containers.sessions.Output`.")

    def write(data: bytes) -> Deferred[None]:
        """Write to stdin; fires when more may be written. Dropped where stdin is absent or closed."""

    def close_stdin() -> None:
        """End stdin after what was written. Idempotent.

        An exec without a terminal has its pipe closed; with one, it gets an end-of-file character (^D). An
        attached container's stdin is closed only if it was created with stdin_once and without a terminal;
        otherwise it stays open for the next client."""

    def resize(width: int, height: int) -> Deferred[None]:
        """Set the terminal's size in characters. Does nothing without a terminal or after the end."""

    def ended() -> Deferred[int]:
        """Return the exit code once the process has ended. Call it after `output` has ended.

        :raise Unavailable: the engine does not know it."""

    def close() -> None:
        """Close the session. Idempotent.

        An exec that still runs is killed together with its descendants; an attached container runs on."""


class IContainerProvider(Interface):
    """Runs containers that share the network namespace of the VM they are in.

    The caller chooses the ids. State is kept outside this process (by Docker, by systemd), so that a
    restarted agent finds every container as it was, with the limits that it was given last. No method blocks
    the reactor. Errors are those of `infranetes_common.errors`. Calls for different ids run concurrently.
    """

    name: str = Attribute("The provider's name in the configuration: docker, systemd, machine or fake.")

    def start() -> Deferred[None]:
        """Find the existing containers. Called once, before anything else but `watch`.

        :raise Unavailable: the engine does not answer."""

    def stop() -> Deferred[None]:
        """Release connections and files; containers run on. Idempotent."""

    def watch(changed: Changed, removed: Removed) -> None:
        """Report every change from now on, in the order in which they happen.

        A change that a call of this interface makes is reported before the call's Deferred fires.

        :param changed: called with a container's state after each change.
        :param removed: called with a container's id once it is removed."""

    def configure(sandbox_config: cri.PodSandboxConfig) -> Deferred[None]:
        """Take the configuration of the sandbox that containers will be created in. Idempotent."""

    def create(
        id: str, image_id: str, config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig
    ) -> Deferred[messages.ContainerState]:
        """Create a container without starting it; return its state.

        If it exists already, nothing happens and its current state is returned.

        :raise FailedPrecondition: the image is not loaded.
        :raise InvalidArgument: the configuration is invalid or not supported; names the field."""

    def start_container(id: str) -> Deferred[messages.ContainerState]:
        """Start a created container; return its state. Does nothing if it runs already.

        :raise NotFound: no such container.
        :raise FailedPrecondition: it has ended.
        :raise InvalidArgument: its command can't be executed. The container is then EXITED with the reason
            ContainerCannotRun and exit code 127 (not found) or 126."""

    def stop_container(id: str, grace_seconds: int) -> Deferred[messages.ContainerState]:
        """Send the stop signal, and SIGKILL after the grace period; return the state once it has ended.

        Does nothing if the container has ended or was never started.

        :raise NotFound: no such container."""

    def remove(id: str) -> Deferred[None]:
        """Kill the container if it runs, and delete it and its log. Does nothing if there is none."""

    def update(id: str, resources: cri.LinuxContainerResources) -> Deferred[messages.ContainerState]:
        """Apply new limits; return the state. Fields that are 0 or empty leave the limit as it is.

        :raise NotFound: no such container.
        :raise InvalidArgument: a limit is invalid or not supported; names the field."""

    def containers() -> Deferred[list[messages.ContainerState]]:
        """Return the state of every container."""

    def usage() -> Deferred[list[messages.ContainerUsage]]:
        """Measure every container's resource usage from the kernel's own files.

        Answers within about a second, however much was written, without asking the engine. A container that
        does not run has no `usage`. The caller computes rates. The size of the files that a container wrote
        over its image is counted in the background, so it may be a little old, or missing at first."""

    def exec_sync(id: str, command: Sequence[str], timeout: float, max_output: int) -> Deferred[ExecResult]:
        """Run a command in a container and wait for its end.

        If the command can't be executed, the result is the engine's message and exit code.

        :param timeout: seconds; 0 for no limit.
        :param max_output: how many bytes of each stream are returned; the rest is dropped.
        :raise NotFound: no such container.
        :raise FailedPrecondition: it does not run.
        :raise DeadlineExceeded: the timeout has passed, and the command was killed."""

    def exec_session(id: str, command: Sequence[str], streams: Streams) -> Deferred[ISession]:
        """Run a command in a container with live streams.

        If the command can't be executed, output and exit code are the engine's message and code. If the
        Deferred is cancelled, the command is killed.

        :raise NotFound: no such container.
        :raise FailedPrecondition: it does not run."""

    def attach_session(id: str, streams: Streams) -> Deferred[ISession]:
        """Attach to the streams of a container's first process, from now on.

        Whether there is a terminal depends on how the container was created; `streams.tty` is ignored.

        :raise NotFound: no such container.
        :raise FailedPrecondition: it does not run."""

    def read_log(
        id: str, cursor: str, follow: bool, text: bool = False
    ) -> AsyncGenerator[messages.LogRecord, None]:
        """Iterate over the log's records after `cursor`, oldest first, each exactly once.

        Reading again from the same cursor gives the same records, in another process too. Close the iterator
        with `aclose()`.

        :param cursor: that of the last record that was read; empty to begin with the first.
        :param follow: continue while the container writes, until it has ended and everything is read.
        :param text: give many lines as one record, with `text`.
        :raise NotFound: no such container.
        :raise InvalidArgument: not a cursor of this log."""

    def missing_layers(diff_ids: Sequence[str]) -> Deferred[int]:
        """Return how many of these layers, counted from the lowest, are present already."""

    def load_image(image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        """Load an image from a `docker load` archive, in which layers that are present may be missing.

        If the image is loaded already, the archive is read and dropped. After a failure nothing of it
        remains.

        :raise InvalidArgument: not such an archive, or not that of `image_id`.
        :raise ResourceExhausted: the disk is full."""

    def images() -> Deferred[list[str]]:
        """Return the ids of the loaded images."""

    def remove_image(image_id: str) -> Deferred[None]:
        """Remove an image. Does nothing if there is none.

        :raise FailedPrecondition: a container uses it."""


class IImageFetcher(Interface):
    """Also provided by an IContainerProvider whose VM fetches its images itself."""

    def fetch_image(image_id: str, url: str) -> Deferred[None]:
        """Download the file whose checksum is `image_id`. Does nothing if it is present already.

        After a failure nothing of it remains.

        :raise InvalidArgument: the URL is not https, or the file has another checksum.
        :raise NotFound: the server does not have it.
        :raise PermissionDenied: the server refuses.
        :raise Unavailable: the download failed; trying again may help.
        :raise ResourceExhausted: the file is too large, or the disk is full."""


class IHasUserNamespaces(Interface):
    """Also provided by an IContainerProvider whose pods may have a user namespace."""


class IHoldsContainers(Interface):
    """Also provided by an IContainerProvider whose containers can be held still while their VM is kept.

    A clone of such a VM becomes another pod's by `keep`, which is given containers by `adopt`."""

    held: bool = Attribute("Whether containers are held, or about to be: commands and starts are refused.")

    def tell(id: str, hook: Hook) -> Deferred[None]:
        """Run a hook in a running container, and wait for its end.

        :raise NotFound: no such container.
        :raise FailedPrecondition: it does not run, or the command has failed; says how.
        :raise DeadlineExceeded: the command takes too long, and was killed."""

    def hold() -> Deferred[list[str]]:
        """Stop every process of every container; return the ids of those that run. Idempotent.

        Commands and starts are refused from then on. A container that is stopped or removed goes on, so that
        it can end. After an error, and if the call is cancelled, nothing is held.

        :raise FailedPrecondition: a container can't be held. :raise Unavailable: its processes don't stop."""

    def thaw() -> Deferred[None]:
        """Let all containers go on. Idempotent. :raise Unavailable: the kernel refuses."""

    def thd_pids() -> dict[str, list[int]]:
        """Return the pids of each running container's processes, as the agent sees them. Blocks."""

    def keep() -> Deferred[None]:
        """In a clone, make another pod of the VM: no container of the pod that was kept is listed any more.

        Those that ran stay as they are, held, for `adopt`; the others are removed, and commands are killed.
        Idempotent. :raise ResourceExhausted: the disk is full."""

    def adopt(
        old_id: str,
        new_id: str,
        config: cri.ContainerConfig,
        sandbox_config: cri.PodSandboxConfig,
        hook: Hook | None,
    ) -> Deferred[messages.ContainerState]:
        """Give a kept container to the pod that the VM is now; return its state. Idempotent.

        It is CREATED, and held until it is started. Then the hook is run; if that fails, the start does, and
        the container ends. What it has written to its log before is gone.

        :raise NotFound: no such container was kept. :raise FailedPrecondition: there is one with the new id.
        :raise InvalidArgument: the configuration differs in what can't be changed; says in what."""

    def kept() -> list[str]:
        """Return the ids of containers of an earlier pod that have not been started in this one."""


class IMountsForItself(Interface):
    """Also provided by an IContainerProvider whose containers, and they alone, use what the agent mounts: no
    other service of the machine has to see it."""


class ITakesLayers(Interface):
    """Also provided by an IContainerProvider whose images are made of mounted layers.

    `missing_layers` and `load_image` of such a provider fail with Unimplemented."""

    layers: LayerStore = Attribute("The VM's layers: see `vmserver.layers.store.LayerStore`.")

    def add_image(image_id: str, configuration: bytes) -> Deferred[None]:
        """Make an image from layers that are mounted. Idempotent.

        :param configuration: whose digest is `image_id`; JSON (OCI image-spec, config.md).
        :raise InvalidArgument: not the configuration of that image.
        :raise FailedPrecondition: a layer is not mounted.
        :raise DataLoss: a layer that was uploaded before a reboot is damaged, and was deleted."""
