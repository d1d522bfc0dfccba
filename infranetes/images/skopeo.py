# SPDX-License-Identifier: Apache-2.0
"""Running skopeo, one process per step.

A process that makes no progress or that nobody waits for is killed; its last message becomes an error.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Sequence

from twisted.internet.defer import TimeoutError
from twisted.internet.error import ProcessDone, ProcessExitedAlready, ProcessTerminated
from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes.images.auth import Credentials
from infranetes.images.config import ImagesConfig, default_policy
from infranetes.images.manifest import MAX_MANIFEST_BYTES
from infranetes.images.reference import Reference
from infranetes_common.concurrency import Event, until_ended
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import end_of, redacted_end

STDERR_BYTES = 16 * 1024
MOST_WORDS = 400  # characters of an error's message that are skopeo's own
WATCH_SECONDS = 1.0
INHERITED = re.compile(
    r"PATH|HOME|XDG_RUNTIME_DIR|DOCKER_CONFIG|REGISTRY_AUTH_FILE|SSL_CERT_(FILE|DIR)"
    r"|(?i:https?_proxy|no_proxy|all_proxy)"
)

#: Returns how far a step is, as any number that grows; raises to end the step.
Watch = Callable[[], Awaitable[int]]


class Skopeo:
    """Asks registries, subject to the node's registries.conf, mirrors, certificates and proxies."""

    def __init__(self, reactor: IReactor, config: ImagesConfig) -> None:
        self._reactor = reactor
        self._config = config

    async def manifest(self, reference: Reference, auth: Credentials | None, directory: str) -> bytes:
        """Return the manifest or index of a reference, byte for byte as the registry sent it."""
        arguments = ["inspect", "--raw", *self._source(reference, auth, "--tls-verify", "--authfile")]
        return await self._run(arguments, reference, auth, directory, MAX_MANIFEST_BYTES + 1, None)

    async def copy(
        self, reference: Reference, auth: Credentials | None, directory: str, blobs: str, watch: Watch
    ) -> None:
        """Fetch an image's blobs into `blobs`/sha256.

        A blob gets its name once it is whole and has the right digest; until then it is in
        `directory`/layout.
        """
        arguments = ["copy", "--quiet", "--preserve-digests", f"--dest-shared-blob-dir={blobs}"]
        arguments += self._source(reference, auth, "--src-tls-verify", "--src-authfile")
        await self._run([*arguments, "oci:layout"], reference, auth, directory, STDERR_BYTES, watch)

    def _source(self, reference: Reference, auth: Credentials | None, tls: str, auth_file: str) -> list[str]:
        arguments = []
        if reference.registry in self._config.insecure_registries:
            arguments.append(f"{tls}=false")
        if auth is not None:
            arguments.append(f"{auth_file}=/proc/self/fd/3")
        elif self._config.auth_file:
            arguments.append(f"{auth_file}={self._config.auth_file}")
        return [*arguments, f"docker://{reference}"]

    async def _run(
        self,
        arguments: Sequence[str],
        reference: Reference,
        auth: Credentials | None,
        directory: str,
        limit: int,
        watch: Watch | None,
    ) -> bytes:
        run = _Run(limit)
        # So that skopeo does not outlive a daemon that is killed.
        command = ["setpriv", "--pdeathsig", "KILL", "--", self._config.skopeo]
        if self._config.registries_conf:
            command.append(f"--registries-conf={self._config.registries_conf}")
        command += ["--policy", self._config.policy or default_policy(), *arguments]
        environment = {k: v for k, v in os.environ.items() if INHERITED.fullmatch(k)}
        environment["TMPDIR"] = directory
        fds: dict[int, int | str] = {0: "w", 1: "r", 2: "r"}
        secret = None
        try:
            if auth is not None:  # in memory only: nothing on disk, nothing in the arguments
                secret = os.memfd_create("auth", os.MFD_CLOEXEC)
                os.write(secret, auth.auth_file(reference.registry))
                fds[3] = secret
            self._reactor.spawnProcess(
                run, command[0], command, env=environment, path=directory, childFDs=fds
            )
        except OSError as e:
            raise FailedPrecondition(f"{command[0]} can't be started: {e.strerror}") from None
        finally:
            if secret is not None:
                os.close(secret)
        status = await self._watched(run, reference, watch)
        if status == 0 and len(run.out) < limit:
            return bytes(run.out)
        if len(run.out) >= limit:
            raise FailedPrecondition(f"the registry's answer for image {reference} is over {limit - 1} bytes")
        said = run.said()
        if status == 127 and "setpriv" in said:
            raise FailedPrecondition(
                f"{self._config.skopeo!r} (images.skopeo) is not installed; install Debian's skopeo"
            )
        raise classify(said, reference)

    async def _watched(self, run: _Run, reference: Reference, watch: Watch | None) -> int:
        """Wait for the exit status. However this ends, the process has ended, too."""
        seen, since = -1, self._reactor.seconds()
        try:
            while not run.ended.happened:
                with contextlib.suppress(TimeoutError):
                    await run.ended.wait().addTimeout(WATCH_SECONDS, self._reactor)
                now = await watch() if watch is not None else 0
                if now != seen:
                    seen, since = now, self._reactor.seconds()
                elif self._reactor.seconds() - since >= self._config.stall_seconds:
                    raise Unavailable(
                        f"the registry of image {reference} sent nothing for "
                        f"{self._config.stall_seconds:g} s; try again later"
                    )
        finally:
            run.kill()
            ended = run.ended.wait()
            await until_ended(ended)
        return await ended


class _Run(ProcessProtocol):
    """A process's output, within bounds.

    :ivar ended: happens with the exit status, or 128 and the signal.
    """

    transport: IProcessTransport

    def __init__(self, limit: int) -> None:
        self.out, self.err = bytearray(), bytearray()
        self.ended: Event[int] = Event()
        self._limit = limit

    def connectionMade(self) -> None:
        self.transport.closeStdin()

    def outReceived(self, data: bytes) -> None:
        self.out += data[: self._limit - len(self.out)]
        if len(self.out) >= self._limit:
            self.kill()

    def errReceived(self, data: bytes) -> None:
        self.err = (self.err + data)[-STDERR_BYTES - 1 :]  # one more shows that this is not all

    def processEnded(self, reason: Failure) -> None:
        ended = reason.value
        assert isinstance(ended, ProcessDone | ProcessTerminated)
        self.ended.succeed(ended.exitCode if ended.exitCode is not None else 128 + (ended.signal or 0))

    def said(self) -> str:
        """Return the end of its messages, in whole lines or at least words."""
        return end_of(self.err.decode("latin-1"), STDERR_BYTES).encode("latin-1").decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessExitedAlready):
            self.transport.signalProcess("KILL")


# The first match counts. The words are those of skopeo, containers/image, Go and registries.
_WORDS: tuple[tuple[str, type[InfranetesError], str], ...] = (
    (r"no space left on device|disk quota exceeded", ResourceExhausted,
     "the image store's disk is full; remove images or make room under the state directory"),
    (r"Source image rejected|Running image .* is rejected", PermissionDenied,
     "the signature policy forbids it"),
    (r"loading trust policy|invalid policy|policy.*no such file", FailedPrecondition,
     "the signature policy (images.policy) can't be read"),
    (r"server gave HTTP response to HTTPS client", FailedPrecondition,
     "the registry speaks plain http; if that is meant, list it in images.insecure_registries"),
    (r"x509:|certificate (?:is not|signed by|has expired)|tls: (?:failed|bad|unknown)", FailedPrecondition,
     "the registry's certificate is not trusted; put its CA into /etc/containers/certs.d/HOST:PORT/ca.crt"),
    (r"toomanyrequests|429 ", Unavailable, "the registry refuses more requests for now"),
    (r"invalid username/password|incorrect username or password", Unauthenticated, "wrong user or password"),
    (r"denied: |insufficient_scope|403 ", PermissionDenied,
     "the registry denies it: there is no such image, or these credentials may not read it"),
    (r"unauthorized|401 |unable to retrieve auth token|authentication required", Unauthenticated,
     "the registry does not accept these credentials"),
    (r"manifest unknown|name unknown|MANIFEST_UNKNOWN|NAME_UNKNOWN|repository name not known|404|not found\b",
     NotFound, "the registry has no such image"),
    (r"[Dd]igest did not match|does not match.*digest|manifest does not match|digest.*mismatch", Unavailable,
     "what the registry sent does not match its digest"),
    (r"connection refused|no such host|timeout|deadline exceeded|EOF|connection reset|network is unreachable"
     r"|no route to host|server misbehaving|50[0234] |unexpected HTTP status", Unavailable,
     "the registry can't be reached; try again later"),
    (r"invalid character|unmarshal|unsupported|[Uu]nrecognized|unexpected end of JSON|parsing manifest",
     FailedPrecondition, "the registry's answer can't be used"),
)  # fmt: skip


def classify(said: str, reference: Reference) -> InfranetesError:
    """Return the error that skopeo's output means."""
    fatal = re.findall(r'level=fatal msg="((?:[^"\\]|\\.)*)"', said)
    words = re.sub(r"\\(.)", lambda m: " " if m[1] in "nrt" else m[1], fatal[-1]) if fatal else said
    # The image's name must not be taken for a cause of the failure.
    stripped = words.replace(str(reference), "IMAGE").replace(reference.repository, "REPOSITORY")
    end = redacted_end(words.strip(), MOST_WORDS)
    shown = "".join(c if c.isprintable() else " " for c in end).strip() or "skopeo gave no reason"
    for pattern, kind, meaning in _WORDS:
        if re.search(pattern, stripped):
            return kind(f"image {reference}: {meaning} ({shown})")
    return Unavailable(f"image {reference} could not be fetched: {shown}")
