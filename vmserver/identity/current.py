# SPDX-License-Identifier: Apache-2.0
"""The identity that this machine has: taken on once, kept over restarts of the agent, renewed at run time."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorThreads
from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.identity import Identity, decode, decode_clock, encode
from vmserver.identity import tls
from vmserver.identity.apply import IdentityApplier, check
from vmserver.identity.delivery import save
from vmserver.identity.keys import PendingKey, key_of
from vmserver.identity.listener import Listener
from vmserver.identity.metadata import MetadataGate

IDENTITY_FILE = "identity.json"

_log = Logger()


class IClone(Protocol):
    """What a machine that was kept has to do before it is another sandbox's."""

    @property
    def leaving(self) -> bool:
        """Whether it may become another sandbox's: it is held, and kept or a clone of what was kept."""

    @property
    def departed(self) -> bool:
        """Whether it has begun to leave the sandbox that it was, and is no other one yet."""

    async def leave(self) -> None:
        """Give up all that it has of the sandbox that it was. :raise InfranetesError: it can't."""

    async def arrive(self) -> None:
        """Note that it has the new sandbox's addresses. Does nothing unless it has left one."""


class CurrentIdentity:
    """Takes identity documents on, and serves with the identity in them.

    :param directory: of `IDENTITY_FILE`, gone after a reboot.
    :param applier: applies the identity to the machine; None: it is only the agent's.
    :ivar clone: lets this machine become another sandbox's, if it is held; None: it never does.
    :ivar on_taken: called each time an identity is taken on, as soon as the agent listens with it.
    :ivar boot_id: a random id of this VM's life; the same after a restart of the agent alone.
    :ivar agent_id: a random id of this process. It is made anew with the first identity: clones of a template
        share what was made before.
    """

    def __init__(
        self,
        reactor: IReactorThreads,
        directory: Path,
        applier: IdentityApplier | None,
        gate: MetadataGate,
        listener: Listener,
    ) -> None:
        self._reactor = reactor
        self._file = directory / IDENTITY_FILE
        self._applier = applier
        self._gate = gate
        self._listener = listener
        self._identity: Identity | None = None
        self._pending_key = PendingKey()
        self._saving = DeferredLock()
        self.clone: IClone | None = None
        self.on_taken: Callable[[], None] = lambda: None
        self.boot_id = ""
        self.agent_id = secrets.token_hex(16)

    @property
    def sandbox_id(self) -> str:
        """The sandbox whose VM this is; "" until there is an identity."""
        return self._identity.sandbox_id if self._identity is not None else ""

    async def accept(self, document: bytes, *, live: bool = False) -> int:
        """Take an identity document on; return the TCP port that the agent then listens on; 0: the agent is
        called by its serial port.

        Also accepted, any number of times: the same identity, a renewed certificate for the same sandbox, and
        a line that sets the clock, though never back.

        :param live: the document was sent just now; false: it may have been kept for long.
        :raise InvalidArgument: malformed. :raise FailedPrecondition: the machine is another sandbox
            already, or can't be made this one; says what refused.
        """
        now_nanos = decode_clock(document)
        if now_nanos is not None:
            self._move_clock_forward(now_nanos)
            return self._listener.port
        identity = decode(document)
        current = self._identity
        if self._leaves(current, identity):
            return await self._become(identity, live=live)
        if current is None:
            return await self._take(identity, None, live=live)
        if identity.sandbox_id != current.sandbox_id:
            raise FailedPrecondition(
                f"this machine is sandbox {current.sandbox_id} already and keeps that identity"
            )
        if tls.valid_from(identity) < tls.valid_from(current):
            return self._listener.port  # an old document: the node has renewed the identity since
        return await self._take(identity, self.boot_id)

    async def restore(self) -> None:
        """Take on the identity that an earlier agent of this machine has kept, if there is one."""
        if self.clone is not None and self.clone.departed:
            self._file.unlink(missing_ok=True)
        kept = self._load()
        if kept is None:
            return
        try:
            await self._take(*kept)
        except InfranetesError as error:
            _log.error(
                "the identity kept in {path} can't be used: {words}", path=str(self._file), words=str(error)
            )

    def _leaves(self, current: Identity | None, identity: Identity) -> bool:
        """Return whether this machine is a clone of a kept one, whose identity this is."""
        differs = current is None or identity.sandbox_id != current.sandbox_id
        return differs and self.clone is not None and self.clone.leaving

    async def _become(self, identity: Identity, *, live: bool) -> int:
        """Become another sandbox's machine. From the second step on there is no way back."""
        assert self.clone is not None
        check(identity)
        self._listener.check(identity)
        await self.clone.leave()
        self._file.unlink(missing_ok=True)  # another agent must not go on as the one that was kept
        self._identity, self.boot_id, self._pending_key = None, "", PendingKey()
        return await self._take(identity, None, live=live)

    async def _take(self, identity: Identity, boot_id: str | None, *, live: bool = False) -> int:
        """Serve with `identity`. `boot_id` None: it was made just now, for a machine that has none."""
        context = self._listener.check(identity)
        if boot_id is None:
            await self._gate.close()
        self._apply(identity, first=boot_id is None, live=live)
        if boot_id is None:
            if self.clone is not None:
                await self.clone.arrive()
            boot_id = secrets.token_hex(16)  # after `_apply`, which brings entropy that no other clone has
        before = self._identity, self.boot_id, self.agent_id
        if self._identity is None:
            self.agent_id = secrets.token_hex(16)
        self._identity, self.boot_id = identity, boot_id
        try:
            await self._listener.open(identity, context)  # from here on the node may call
            self.on_taken()
            await self._save(identity, boot_id)
        except BaseException:
            self._identity, self.boot_id, self.agent_id = before
            raise
        return self._listener.port

    def _apply(self, identity: Identity, *, first: bool, live: bool) -> None:
        if self._applier is None:
            return
        try:
            self._applier.apply(identity, first=first, live=live)
        except OSError as error:
            raise FailedPrecondition(
                f"this VM can't become sandbox {identity.sandbox_id}: {error}; "
                "the agent has to run as root, with CAP_SYS_TIME, CAP_SYS_ADMIN and CAP_NET_ADMIN"
            ) from error

    def _move_clock_forward(self, now_nanos: int) -> None:
        self._require()
        if self._applier is not None:
            try:
                self._applier.move_clock_forward(now_nanos)
            except OSError as error:
                raise FailedPrecondition(f"the machine's clock can't be set: {error}") from error

    def _require(self) -> Identity:
        if self._identity is None:
            raise FailedPrecondition("the machine gets its identity first")
        return self._identity

    @property
    def key(self) -> str:
        """The key of the certificate that it has: the SHA-256 of its SubjectPublicKeyInfo, hex.

        :raise FailedPrecondition: it has none yet."""
        return key_of(self._require().certificate_pem)

    # Renewal, asked for by the node over the listener itself

    def request_certificate(self) -> bytes:
        """Make a key and return the PKCS #10 request for its certificate, DER."""
        return self._pending_key.request(self.sandbox_id)

    async def renew(self, certificate_pem: str) -> None:
        """Serve with the key made last and this certificate for it: kept first, used for TLS then.

        :raise InvalidArgument: not a certificate of this VM's CA.
        :raise FailedPrecondition: it is for another key, or there is no identity yet.
        """
        identity = self._require()
        if certificate_pem == identity.certificate_pem:
            return
        renewed = self._pending_key.renewed(identity, certificate_pem)
        context = self._listener.check(renewed)
        await self._save(renewed, self.boot_id)
        await self._listener.renew(renewed, context)
        self._identity = renewed
        _log.info("sandbox {sandbox} has a new certificate", sandbox=renewed.sandbox_id)

    # The identity's file

    async def _save(self, identity: Identity, boot_id: str) -> None:
        text = json.dumps({"boot_id": boot_id, "identity": encode(identity).decode()})
        async with self._saving:
            await run_in_thread(self._reactor, save, self._file, text)

    def _load(self) -> tuple[Identity, str] | None:
        try:
            kept = json.loads(self._file.read_bytes())
            return decode(kept["identity"].encode()), str(kept["boot_id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InfranetesError) as error:
            _log.error("{path} is unreadable: {kind}", path=str(self._file), kind=type(error).__name__)
            return None
