# SPDX-License-Identifier: Apache-2.0
"""Running skopeo, one process per step.

A process that makes no progress or that nobody waits for is killed; its last message becomes an error.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence

import attrs
from twisted.internet.defer import TimeoutError

from infranetes.images.auth import RegistryCredentials
from infranetes.images.blobs import Origin, thd_credentials_in
from infranetes.images.config import ImagesConfig, default_policy
from infranetes.images.manifest import MAX_MANIFEST_BYTES
from infranetes.images.reference import Reference
from infranetes_common.commands import Command, Output, Running
from infranetes_common.concurrency import run_in_thread
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
from infranetes_common.redaction import redacted_end

STDOUT_BYTES = 16 * 1024  # of a copy, which says nothing there
MOST_WORDS = 400  # characters of an error's message that are skopeo's own
WATCH_SECONDS = 1.0
INHERITED = re.compile(
    r"PATH|HOME|XDG_RUNTIME_DIR|DOCKER_CONFIG|REGISTRY_AUTH_FILE|SSL_CERT_(FILE|DIR)"
    r"|(?i:https?_proxy|no_proxy|all_proxy)"
)

# It is said of a manifest that has come, which the policy allows.
_MIXED = "unsupported docker v2s2 media type: "
_GET = re.compile(r'level=debug msg="GET (https?://[^ "?\\]+/v2/[^ "?\\]+)/manifests/')

#: Returns how far a step is, as any number that grows; raises to end the step.
Watch = Callable[[], Awaitable[int]]


class MixedMediaTypes(FailedPrecondition):
    """The manifest is of Docker's kind, and has layers that are not, in its own words; its policy is kept."""


class Skopeo:
    """Asks registries, subject to the node's registries.conf, mirrors, certificates and proxies."""

    def __init__(self, reactor: IReactor, config: ImagesConfig) -> None:
        self._reactor = reactor
        self._config = config

    async def manifest(self, reference: Reference, auth: RegistryCredentials | None, directory: str) -> bytes:
        """Return the manifest or index of a reference, byte for byte as the registry sent it."""
        with _in_memory(reference, auth) as secret:
            source = self._source(reference, secret, "--tls-verify", "--authfile")
            words = ["inspect", "--raw", *source]
            return (await self._run(words, secret, reference, directory, MAX_MANIFEST_BYTES, None)).stdout

    async def copy(
        self, reference: Reference, auth: RegistryCredentials | None, directory: str, blobs: str, watch: Watch
    ) -> None:
        """Fetch an image's blobs into `blobs`/sha256.

        A blob gets its name once it is whole and has the right digest; until then it is in
        `directory`/layout.
        """
        with _in_memory(reference, auth) as secret:
            source = self._source(reference, secret, "--src-tls-verify", "--src-authfile")
            blobs_in = f"--dest-shared-blob-dir={blobs}"
            words = ["copy", "--quiet", "--preserve-digests", blobs_in, *source, "oci:layout"]
            await self._run(words, secret, reference, directory, STDOUT_BYTES, watch)

    async def origin(self, reference: Reference, auth: RegistryCredentials | None, directory: str) -> Origin:
        """Return where skopeo gets an image from: its registry, or a mirror.

        :raise FailedPrecondition: it does not say."""
        with _in_memory(reference, auth) as secret:
            source = self._source(reference, secret, "--tls-verify", "--authfile")
            words = ["--debug", "inspect", "--raw", *source]
            output = await self._run(words, secret, reference, directory, MAX_MANIFEST_BYTES, None)
        gets = _GET.findall(output.stderr.decode(errors="replace"))
        if not gets:
            raise FailedPrecondition(f"image {reference}: skopeo does not say from where it gets it")
        credentials = auth
        if credentials is None and self._config.auth_file:
            credentials = await run_in_thread(
                self._reactor, thd_credentials_in, self._config.auth_file, reference.registry
            )
        verified = reference.registry not in self._config.insecure_registries
        origin = Origin(gets[-1], credentials, verified)
        at_home = origin.host.removeprefix("registry-1.") == reference.registry
        return origin if at_home else attrs.evolve(origin, credentials=None)  # a mirror

    def _source(self, reference: Reference, secret: Sequence[int], tls: str, auth_file: str) -> list[str]:
        words = []
        if reference.registry in self._config.insecure_registries:
            words.append(f"{tls}=false")
        if secret:
            words.append(f"{auth_file}=/proc/self/fd/{secret[0]}")
        elif self._config.auth_file:
            words.append(f"{auth_file}={self._config.auth_file}")
        return [*words, f"docker://{reference}"]

    async def _run(
        self,
        words: Sequence[str],
        secret: Sequence[int],
        reference: Reference,
        directory: str,
        most: int,
        watch: Watch | None,
    ) -> Output:
        """Run skopeo to its end. Raises what it fails for."""
        # So that skopeo does not outlive a daemon that is killed.
        whole = ["setpriv", "--pdeathsig", "KILL", "--", self._config.skopeo]
        if self._config.registries_conf:
            whole.append(f"--registries-conf={self._config.registries_conf}")
        whole += ["--policy", self._config.policy or default_policy(), *words]
        environment = {k: v for k, v in os.environ.items() if INHERITED.fullmatch(k)}
        environment["TMPDIR"] = directory
        command = Command(
            whole, None, environment=environment, directory=directory, inherited=secret, most=most
        )
        output = await self._watched(Running(self._reactor, command), reference, watch)
        if output.cut:
            raise FailedPrecondition(f"the registry's answer for image {reference} is over {most} bytes")
        if output.code == 0:
            return output
        said = output.stderr.decode(errors="replace")
        if output.code == 127 and "setpriv" in said:
            raise FailedPrecondition(
                f"{self._config.skopeo!r} (images.skopeo) is not installed; install Debian's skopeo"
            )
        raise classify(said, reference)

    async def _watched(self, running: Running, reference: Reference, watch: Watch | None) -> Output:
        """Wait for the end. However this ends, the process has ended, too."""
        seen, since = -1, self._reactor.seconds()
        try:
            while not running.ended.happened and not running.cut:
                with contextlib.suppress(TimeoutError):
                    await running.ended.wait().addTimeout(WATCH_SECONDS, self._reactor)
                now = await watch() if watch is not None else 0
                if now != seen:
                    seen, since = now, self._reactor.seconds()
                elif self._reactor.seconds() - since >= self._config.stall_seconds:
                    raise Unavailable(
                        f"the registry of image {reference} sent nothing for "
                        f"{self._config.stall_seconds:g} s; try again later"
                    )
        finally:
            await running.stop()
        return await running.ended.wait()


@contextlib.contextmanager
def _in_memory(reference: Reference, auth: RegistryCredentials | None) -> Iterator[Sequence[int]]:
    """Yield a descriptor of the credentials: they are neither on a disk nor among the arguments."""
    if auth is None:
        yield ()
        return
    secret = os.memfd_create("auth", os.MFD_CLOEXEC)
    try:
        os.write(secret, auth.auth_file(reference.registry))
        yield (secret,)
    finally:
        os.close(secret)


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
    (r"toomanyrequests|(?<![\w:.])429\b", Unavailable, "the registry refuses more requests for now"),
    (r"invalid username/password|incorrect username or password", Unauthenticated, "wrong user or password"),
    (r"denied: |insufficient_scope|(?<![\w:.])403\b", PermissionDenied,
     "the registry denies it: there is no such image, or these credentials may not read it"),
    (r"unauthorized|(?<![\w:.])401\b|unable to retrieve auth token|authentication required", Unauthenticated,
     "the registry does not accept these credentials"),
    (r"manifest unknown|name unknown|MANIFEST_UNKNOWN|NAME_UNKNOWN|repository name not known|"
     r"(?<![\w:.])404\b|not found\b", NotFound, "the registry has no such image"),
    (r"[Dd]igest did not match|does not match.*digest|manifest does not match|digest.*mismatch", Unavailable,
     "what the registry sent does not match its digest"),
    (r"connection refused|no such host|timeout|deadline exceeded|EOF|connection reset|network is unreachable"
     r"|no route to host|server misbehaving|(?<![\w:.])50[0234]\b|unexpected HTTP status", Unavailable,
     "the registry can't be reached; try again later"),
    (r"invalid character|unmarshal|unsupported|[Uu]nrecognized|unexpected end of JSON|parsing manifest",
     FailedPrecondition, "the registry's answer can't be used"),
)  # fmt: skip


def classify(output: str, reference: Reference) -> InfranetesError:
    """Return the error that skopeo's output means."""
    fatal = re.findall(r'level=fatal msg="((?:[^"\\]|\\.)*)"', output)
    words = re.sub(r"\\(.)", lambda m: " " if m[1] in "nrt" else m[1], fatal[-1]) if fatal else output
    # The image's name must not be taken for a cause of the failure.
    stripped = words.replace(str(reference), "IMAGE").replace(reference.repository, "REPOSITORY")
    end = redacted_end(words.strip(), MOST_WORDS)
    shown = "".join(c if c.isprintable() else " " for c in end).strip() or "skopeo gave no reason"
    short = str(reference).removeprefix("docker.io/")  # as skopeo says it
    names = (str(reference), short, short.removeprefix("library/"))
    if words.startswith(tuple(f"initializing image from source docker://{name}: {_MIXED}" for name in names)):
        return MixedMediaTypes(f"image {reference}: {shown}")
    for pattern, kind, meaning in _WORDS:
        if re.search(pattern, stripped):
            return kind(f"image {reference}: {meaning} ({shown})")
    return Unavailable(f"image {reference} could not be fetched: {shown}")
