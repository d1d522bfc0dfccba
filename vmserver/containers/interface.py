"""What a ContainerProvider is: the thing in a VM that runs the pod's containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

# Messages are those of infranetes_common.vmserver (`ContainerState`, `LogRecord`) and
# infranetes_common.cri (`ContainerConfig`, `PodSandboxConfig`, `LinuxContainerResources`).


@attrs.frozen
class ExecResult:
    """What a command left behind."""

    stdout: bytes
    stderr: bytes
    exit_code: int


@attrs.frozen
class Streams:
    """Which streams a session has. With `tty`, stdout and stderr are one, on stdout."""

    tty: bool = False
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False


class ISession(Interface):
    """The live streams of a process in a container. Its output is read by one reader, whose pace is its own:
    a session holds a bounded amount that is not read yet, and then lets the process wait."""

    output = Attribute(
        """A `vmserver.containers.sessions.Output`: an async iterator of ("stdout" or "stderr", bytes) until
        nothing more is written."""
    )

    def write(data: bytes) -> Deferred[None]:
        """Write to stdin; fires when more may follow. Without stdin, or after its end: dropped."""

    def close_stdin() -> None:
        """stdin ends after what was written: an exec's pipe is closed, its terminal gets an end-of-file
        character (^D); attached, the container's stdin is closed where it was created with stdin_once and no
        terminal, and otherwise stays open for who attaches next. Twice is once."""

    def resize(width: int, height: int) -> Deferred[None]:
        """Give the terminal this size, in characters. Without a terminal, or after the end: nothing."""

    def ended() -> Deferred[int]:
        """The exit code, once the process has ended; asked for after the end of `output`.

        :raise Unavailable: the engine can't say."""

    def close() -> None:
        """Let go. An exec that has not ended is killed with its descendants; what is attached to goes on.
        Twice is once."""


class IContainerProvider(Interface):
    """Runs containers that share this machine's network namespace.

    Ids are the caller's. The state lives outside this process (Docker, systemd), so an agent that
    starts again finds every container as it was. All calls return Deferreds, never block the
    reactor, and fail with `infranetes_common.errors`. Calls for different ids go on side by side.
    """

    name = Attribute("docker, systemd, machine or fake (str)")

    def start() -> Deferred[None]:
        """Find the containers that are there. Called once, first.

        :raise Unavailable: the engine below does not answer."""

    def stop() -> Deferred[None]:
        """Let go of everything; containers go on. Twice is once."""

    def watch(changed: Callable[[Any], None], removed: Callable[[str], None]) -> None:
        """From now on call `changed` with a container's ContainerState after each change, and
        `removed` with its id once it is gone; in the order in which things happen. Changes made by
        calls here are told too, before the call's Deferred fires."""

    def configure(sandbox_config: Any) -> Deferred[None]:
        """Take the PodSandboxConfig that containers will be created in. Again: no change."""

    def create(id: str, image_id: str, config: Any, sandbox_config: Any) -> Deferred[Any]:
        """Make a container, not running; its ContainerState. There already: its present state.

        :raise FailedPrecondition: the image is not loaded.
        :raise InvalidArgument: the configuration can't be had; names the field."""

    def start_container(id: str) -> Deferred[Any]:
        """Run it; its state. Running already: the same.

        :raise NotFound: no such container. :raise FailedPrecondition: it has ended.
        :raise InvalidArgument: its command can't be run; the container then is EXITED with reason
            ContainerCannotRun and exit code 127 or 126."""

    def stop_container(id: str, grace_seconds: int) -> Deferred[Any]:
        """Its stop signal, then SIGKILL after the grace; its state once it has ended. Ended or
        never started: its state. :raise NotFound: no such container."""

    def remove(id: str) -> Deferred[None]:
        """End and forget it, with its log. Unknown: nothing to do."""

    def update(id: str, resources: Any) -> Deferred[Any]:
        """Put LinuxContainerResources in force, fields left 0 unchanged; its state.

        :raise NotFound: no such container. :raise InvalidArgument: can't be had; names the field."""

    def containers() -> Deferred[list[Any]]:
        """Every container's ContainerState."""

    def usage() -> Deferred[list[Any]]:
        """Every container's ContainerUsage (of vmserver.proto), measured now in the kernel's own files: what
        its processes use if it runs, else no `usage`; without rates, which are the caller's to compute. What
        it wrote over its image is counted now and then, so it may be old, or not known yet.

        Bounded: it answers in a second or so however much was written, and does not ask the engine."""

    def exec_sync(id: str, command: Sequence[str], timeout: float, max_output: int) -> Deferred[ExecResult]:
        """Run `command` in it to its end. Not found in the container: exit code 127 or 126 in the
        result's place is never made up; it is what the engine says.

        :param timeout: seconds; 0: none. :param max_output: bytes kept of each stream.
        :raise NotFound: no such container. :raise FailedPrecondition: it is not running.
        :raise DeadlineExceeded: out of time; the command has been killed."""

    def exec_session(id: str, command: Sequence[str], streams: Streams) -> Deferred[ISession]:
        """Run `command` in it with live streams. What can't be run says so in its output and exit code, as
        the engine does. Cancelled: the command is killed.

        :raise NotFound: no such container. :raise FailedPrecondition: it is not running."""

    def attach_session(id: str, streams: Streams) -> Deferred[ISession]:
        """The streams of its first process, from now on. Whether there is a terminal is the container's to
        say, not `streams`'s.

        :raise NotFound: no such container. :raise FailedPrecondition: it is not running."""

    def read_log(id: str, cursor: str, follow: bool) -> AsyncIterator[Any]:
        """Its LogRecords after `cursor` ("": from the first), oldest first, each once; with
        `follow` on as it writes, until it has ended and all is read. The same cursor always gives
        the same records with the same parts, also in another process. `aclose()` ends it.

        :raise NotFound: no such container. :raise InvalidArgument: not a cursor of this log."""

    def missing_layers(diff_ids: Sequence[str]) -> Deferred[int]:
        """How many of these layers, lowest first, are there already."""

    def load_image(image_id: str, archive: AsyncIterator[bytes]) -> Deferred[None]:
        """Take an image in: the tar of a `docker load` archive, without layers that are there. When
        it fails nothing of it stays. There already: the archive is read and dropped.

        :raise InvalidArgument: not such an archive, or not the image that `image_id` says.
        :raise ResourceExhausted: the disk is full."""

    def images() -> Deferred[list[str]]:
        """Ids of the images that are loaded."""

    def remove_image(image_id: str) -> Deferred[None]:
        """Forget an image that no container uses. Unknown: nothing to do.

        :raise FailedPrecondition: a container uses it."""


class IImageFetcher(Interface):
    """Provided beside IContainerProvider where images are fetched by the machine itself."""

    def fetch_image(image_id: str, url: str) -> Deferred[None]:
        """Bring an image here that `image_id` is the checksum of. There already: nothing to do. When it fails
        nothing of it stays.

        :raise InvalidArgument: no https URL, or another file than `image_id` says.
        :raise NotFound: :raise PermissionDenied: as the server says.
        :raise Unavailable: it can't be had now. :raise ResourceExhausted: too large, or the disk is full."""
