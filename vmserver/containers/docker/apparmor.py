"""AppArmor profiles of the node, loaded into the machine's kernel when a container asks for one.

The node sends a profile's name and, on the lines after it, the file that defines it. Such a file may include
what Debian's package apparmor has in /etc/apparmor.d. Source of the interfaces: apparmor_parser(8) and
securityfs' apparmor/profiles.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from twisted.internet.defer import DeferredLock
from twisted.internet.threads import deferToThreadPool

from infranetes_common.errors import FailedPrecondition, InvalidArgument

MAX_POLICY_BYTES = 256 * 1024

_FIELD = "security_context.apparmor"
_NAME = re.compile(r"[\x21-\x7e]{1,255}")
_SECONDS = 60.0
_PROFILES = Path("/sys/kernel/security/apparmor/profiles")


def parted(reference: str) -> tuple[str, str]:
    """A profile's name and the file that defines it.

    :raise InvalidArgument: there is no name, or no file with it."""
    name, _, policy = reference.partition("\n")
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{_FIELD}: {name[:80]!r} is no profile's name")
    if not policy:
        raise InvalidArgument(f"{_FIELD}: the node sent no profile {name}")
    if len(policy.encode()) > MAX_POLICY_BYTES:
        raise InvalidArgument(f"{_FIELD}: the file of profile {name} has over {MAX_POLICY_BYTES} bytes")
    return name, policy


class Profiles:
    """:param listed: where the kernel lists what is loaded. :param parser: the program."""

    def __init__(self, reactor: Any, listed: Path = _PROFILES, parser: str = "apparmor_parser") -> None:
        self._reactor = reactor
        self._parser = parser
        self._listed = listed
        self._lock = DeferredLock()
        self._loaded: dict[str, str] = {}  # the file, by profile

    async def load(self, reference: str) -> None:
        """Have the kernel know the profile; at once when it does.

        :raise FailedPrecondition: the machine has no AppArmor. :raise InvalidArgument: the file can't be
            loaded, or does not define the profile."""
        name, policy = parted(reference)
        await self._lock.acquire()
        try:
            if self._loaded.get(name) != policy:
                pool = self._reactor.getThreadPool()
                await deferToThreadPool(self._reactor, pool, self._load, name, policy)
                self._loaded[name] = policy
        finally:
            self._lock.release()

    def _load(self, name: str, policy: str) -> None:
        if not self._listed.exists():
            raise FailedPrecondition(
                f"{_FIELD}: the VM has no AppArmor, so the node's profile {name} can't be had; "
                "ask for RuntimeDefault or none"
            )
        command = [self._parser, "--replace"]
        try:
            done = subprocess.run(  # noqa: S603
                command, input=policy.encode(), capture_output=True, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FailedPrecondition(f"{_FIELD}: profile {name} can't be loaded: {error}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise InvalidArgument(f"{_FIELD}: profile {name} can't be loaded: {said}")
        known = self._listed.read_text(errors="replace").splitlines()
        if not any(line.rpartition(" (")[0] == name for line in known):
            raise InvalidArgument(f"{_FIELD}: the node's file defines no profile {name}")
