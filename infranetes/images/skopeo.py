"""Runs skopeo: one process per step, watched, killed when nobody waits, its words turned into errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes.images.auth import Credentials
from infranetes.images.config import ImagesConfig, default_policy
from infranetes.images.manifest import MAX_MANIFEST_BYTES
from infranetes.images.reference import Reference
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

STDERR_BYTES = 16 * 1024
WATCH_SECONDS = 1.0
INHERITED = re.compile(
    r"PATH|HOME|XDG_RUNTIME_DIR|DOCKER_CONFIG|REGISTRY_AUTH_FILE|SSL_CERT_(FILE|DIR)"
    r"|(?i:https?_proxy|no_proxy|all_proxy)"
)

# Tells how far a step is, as any number that grows; raises to end the step.
Watch = Callable[[], Awaitable[int]]


class Skopeo:
    """Asks registries, with the node's registries.conf, mirrors, certificates and proxies in force."""

    def __init__(self, reactor: Any, config: ImagesConfig) -> None:
        self._reactor = reactor
        self._config = config

    async def manifest(self, reference: Reference, auth: Credentials | None, directory: str) -> bytes:
        """The manifest or index behind the reference, byte for byte as the registry sent it."""
        arguments = ["inspect", "--raw", *self._source(reference, auth, "--tls-verify", "--authfile")]
        return await self._run(arguments, reference, auth, directory, MAX_MANIFEST_BYTES + 1, None)

    async def copy(
        self, reference: Reference, auth: Credentials | None, directory: str, blobs: str, watch: Watch
    ) -> None:
        """Put the image's blobs into `blobs`/sha256; each has its name once it is whole and its digest
        is right, parts are in `directory`/layout."""
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
        # skopeo does not outlive a daemon that is killed.
        command = ["setpriv", "--pdeathsig", "KILL", "--", self._config.skopeo]
        if self._config.registries_conf:
            command.append(f"--registries-conf={self._config.registries_conf}")
        command += ["--policy", self._config.policy or default_policy(), *arguments]
        environment = {k: v for k, v in os.environ.items() if INHERITED.fullmatch(k)}
        environment["TMPDIR"] = directory
        fds: dict[int, Any] = {0: "w", 1: "r", 2: "r"}
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
        if status == 127 and b"setpriv" in run.err:
            raise FailedPrecondition(
                f"{self._config.skopeo!r} (images.skopeo) is not there; install Debian's skopeo"
            )
        raise classify(run.err.decode(errors="replace"), reference)

    async def _watched(self, run: _Run, reference: Reference, watch: Watch | None) -> int:
        """The exit status; however this ends, the process is gone by then."""
        seen, since = -1, self._reactor.seconds()
        try:
            while not run.ended:
                await run.wait(self._reactor, WATCH_SECONDS)
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
            while not run.ended:
                with contextlib.suppress(CancelledError):
                    await run.wait(self._reactor, WATCH_SECONDS)
        return run.status


class _Run(ProcessProtocol):
    """Keeps what a process says within bounds."""

    transport: Any

    def connectionMade(self) -> None:
        self.transport.closeStdin()

    def __init__(self, limit: int) -> None:
        self.out, self.err = bytearray(), bytearray()
        self.status = -1
        self.ended = False
        self._limit = limit
        self._waiting: Deferred[None] | None = None

    def wait(self, reactor: Any, seconds: float) -> Deferred[None]:
        """Fires when it has ended or the time is up; one wait at a time."""
        if self.ended:
            return succeed(None)
        waiting: Deferred[None] = Deferred()
        self._waiting = waiting
        timer = reactor.callLater(seconds, self._fire)

        def done(result: Any) -> Any:
            self._waiting = None
            if timer.active():
                timer.cancel()
            return result

        return waiting.addBoth(done)

    def outReceived(self, data: bytes) -> None:
        self.out += data[: self._limit - len(self.out)]
        if len(self.out) >= self._limit:
            self.kill()

    def errReceived(self, data: bytes) -> None:
        self.err = (self.err + data)[-STDERR_BYTES:]

    def processEnded(self, reason: Failure) -> None:
        value: Any = reason.value
        self.status = value.exitCode if value.exitCode is not None else 128 + (value.signal or 0)
        self.ended = True
        self._fire()

    def kill(self) -> None:
        with contextlib.suppress(ProcessExitedAlready):
            self.transport.signalProcess("KILL")

    def _fire(self) -> None:
        if self._waiting is not None:
            self._waiting.callback(None)


# The first that matches counts. Words are skopeo's, containers/image's, Go's and the registries'.
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
    (r"unauthorized|401 |unable to retrieve auth token", Unauthenticated,
     "the registry wants other credentials than these"),
    (r"manifest unknown|name unknown|MANIFEST_UNKNOWN|NAME_UNKNOWN|repository name not known|404|not found\b",
     NotFound, "the registry has no such image"),
    (r"[Dd]igest did not match|does not match.*digest|manifest does not match|digest.*mismatch", Unavailable,
     "what the registry sent is not what it promised"),
    (r"connection refused|no such host|timeout|deadline exceeded|EOF|connection reset|network is unreachable"
     r"|no route to host|server misbehaving|50[0234] |unexpected HTTP status", Unavailable,
     "the registry can't be reached; try again later"),
    (r"invalid character|unmarshal|unsupported|[Uu]nrecognized|unexpected end of JSON|parsing manifest",
     FailedPrecondition, "the registry's answer can't be used"),
)  # fmt: skip


def classify(said: str, reference: Reference) -> InfranetesError:
    """The error that skopeo's last words stand for."""
    fatal = re.findall(r'level=fatal msg="((?:[^"\\]|\\.)*)"', said)
    words = re.sub(r"\\(.)", lambda m: " " if m[1] in "nrt" else m[1], fatal[-1]) if fatal else said
    # The name itself must not be taken for an explanation of what is wrong with it.
    stripped = words.replace(str(reference), "IMAGE").replace(reference.repository, "REPOSITORY")
    shown = "".join(c if c.isprintable() else " " for c in words).strip()[-400:] or "skopeo said nothing"
    for pattern, kind, meaning in _WORDS:
        if re.search(pattern, stripped):
            return kind(f"image {reference}: {meaning} ({shown})")
    return Unavailable(f"image {reference} could not be fetched: {shown}")
