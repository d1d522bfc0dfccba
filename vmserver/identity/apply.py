# SPDX-License-Identifier: Apache-2.0
"""Application of an identity to this machine: clock, entropy, names, addresses. Every step is idempotent.

Clones of one template share all of these until this is done, so it comes before anything that a peer can
see. Every sandbox's start waits for it, so it starts no child process.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import time
from pathlib import Path

from OpenSSL import rand
from twisted.logger import Logger

from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Identity
from vmserver.identity import network
from vmserver.machine.clock import MachineClock, check_time
from vmserver.machine.system_clock import KernelClock

_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207  # <linux/random.h>
_MAX_ENTROPY_BYTES = 2048
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")
_MACHINE_ID = re.compile(r"[0-9a-f]{32}")
_SANDBOX_ID = re.compile(r"[0-9a-z-]{1,64}")

_log = Logger()


def check(identity: Identity) -> bytes:
    """Check every field of `identity` and return its entropy.

    :raise InvalidArgument: a field is malformed; the message names it and never quotes a secret.
    """
    texts = (identity.sandbox_id, identity.hostname, identity.machine_id, identity.entropy, identity.listen)
    if not all(isinstance(text, str) for text in texts) or not isinstance(identity.now_nanos, int):
        raise InvalidArgument("the identity has a field of the wrong type")
    if not _SANDBOX_ID.fullmatch(identity.sandbox_id):
        raise InvalidArgument("sandbox_id: expected 1 to 64 of 0-9, a-z and -")
    if identity.hostname and not _HOSTNAME.fullmatch(identity.hostname):
        raise InvalidArgument(
            f"hostname {identity.hostname[:80]!r}: expected up to 64 letters, digits, . and -"
        )
    if identity.machine_id and not _MACHINE_ID.fullmatch(identity.machine_id):
        raise InvalidArgument("machine_id: expected 32 of 0-9 and a-f")
    if identity.now_nanos:
        check_time(identity.now_nanos, "now_nanos")
    if identity.network is not None:
        network.check(identity.network)
    try:
        entropy = bytes.fromhex(identity.entropy)
    except ValueError:
        raise InvalidArgument("entropy: expected hex digits") from None
    if len(entropy) > _MAX_ENTROPY_BYTES:
        raise InvalidArgument(f"entropy: more than {_MAX_ENTROPY_BYTES} bytes")
    return entropy


class IdentityApplier:
    """Applies identities to the machine below the agent.

    :param etc: the directory of hostname and machine-id, /etc.
    :param interface: the network card's name; "": the first one.
    """

    def __init__(
        self,
        etc: Path,
        interface: str = "",
        *,
        clock: MachineClock | None = None,
        random_device: str = "/dev/urandom",
    ) -> None:
        self._etc = etc
        self._interface = interface
        self._clock = clock or MachineClock(KernelClock())
        self._random_device = random_device

    def apply(self, identity: Identity, *, first: bool = True, live: bool = False) -> None:
        """Make this machine the one of `identity`. Synchronous; takes some milliseconds.

        :param first: the machine had none before, so its clock and entropy are used.
        :param live: the document was sent just now; false: it was kept while the machine booted.
        :raise InvalidArgument: malformed. :raise FailedPrecondition, OSError: the machine refuses.
        """
        started = time.monotonic()
        entropy = check(identity)
        if first:
            self._add_entropy(entropy)
        if first and identity.now_nanos:
            (self._clock.set if live else self._clock.move_forward)(identity.now_nanos)
        if identity.machine_id:
            write_if_changed(self._etc / "machine-id", identity.machine_id + "\n", 0o444)
        if identity.hostname:
            self.set_hostname(identity.hostname)
        if identity.network is not None:
            network.apply(identity.network, self._interface)
        _log.info(
            "the machine has the identity of sandbox {sandbox} ({seconds:.3f} s)",
            sandbox=identity.sandbox_id,
            seconds=time.monotonic() - started,
        )

    def set_hostname(self, hostname: str) -> None:
        """Set the machine's name, now and for after a reboot."""
        if socket.gethostname() != hostname:
            socket.sethostname(hostname)
        write_if_changed(self._etc / "hostname", hostname + "\n", 0o644)

    def move_clock_forward(self, nanos: int) -> None:
        """Set the clock, unless it is later already; see `MachineClock`."""
        self._clock.move_forward(nanos)

    def _add_entropy(self, entropy: bytes) -> None:
        """Add entropy to the pools of the kernel and of OpenSSL, which clones of one template share."""
        if not entropy:
            return
        padded = entropy + bytes(-len(entropy) % 4)
        pool = struct.pack("ii", len(entropy) * 8, len(padded)) + padded
        device = os.open(self._random_device, os.O_WRONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _RNDADDENTROPY, pool)
            fcntl.ioctl(device, _RNDRESEEDCRNG)
        finally:
            os.close(device)
        rand.add(entropy + os.urandom(32), len(entropy))


def write_if_changed(path: Path, text: str, mode: int) -> bool:
    """Write `text` to `path` unless it is there already. Return whether it had to be written.

    An existing file is written in place, since it may be bind-mounted; a symbolic link is replaced.
    """
    if path.is_symlink():
        path.unlink()
    try:
        if path.read_text(errors="replace") == text:
            return False
    except FileNotFoundError:
        pass
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(descriptor, "w") as file:
        file.write(text)
    return True
