"""One VM as this daemon knows it.

record      process        state, as IPodProvider says it
STARTING    there          PENDING   (also while its process is about to be started)
STARTING    gone           ENDED     an earlier daemon was killed while it made this
READY       there          RUNNING
READY       gone           ENDED
FAILED      gone           ENDED
"""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.internet.defer import Deferred

from infranetes.providers.interface import Instance, InstanceState
from infranetes.providers.qemu.boot import Connections, Place
from infranetes.providers.qemu.machine import User
from infranetes.providers.qemu.process import Watched
from infranetes.providers.qemu.record import Phase, Record
from infranetes_common.errors import Unavailable

_DETAIL_CHARACTERS = 300


class Vm:
    """A VM's record and what is open of it.

    :ivar launching: whether this daemon is making it, which ends with its phase.
    :ivar destroying: whether its end was asked for.
    """

    def __init__(self, record: Record, place: Place) -> None:
        self.record = record
        self.place = place
        self.process: Watched | None = None
        self.connections: Connections | None = None
        self.handover: Deferred[None] | None = None
        self.launching = False
        self.destroying = False
        self._changes: list[Deferred[None]] = []

    @property
    def alive(self) -> bool:
        """Whether its process executes."""
        return self.process is not None and self.process.alive

    @property
    def state(self) -> InstanceState:
        """See the table above."""
        if self.record.phase is Phase.FAILED or not (self.alive or self.launching):
            return InstanceState.ENDED
        return InstanceState.RUNNING if self.record.phase is Phase.READY else InstanceState.PENDING

    def instance(self) -> Instance:
        """As the interface shows it."""
        record = self.record
        state = self.state
        detail = record.detail
        if state is InstanceState.ENDED and not detail:
            detail = "its process was gone when the daemon started"
        return Instance(
            id=record.id,
            token=record.token,
            sandbox_id=record.sandbox_id,
            state=state,
            address=record.address,
            agent_host=record.address,
            agent_port=record.agent_port,
            created_at=record.created_at,
            detail=detail,
        )

    def end_detail(self) -> str:
        """Why it has ended, as far as can be known: QEMU's reason and the console's last line."""
        reason = self.connections.reason if self.connections is not None else ""
        why = _REASONS.get(reason, f"QEMU says {reason}" if reason else "its process ended")
        last = self.place.last_words().rpartition("\n")[2]
        return f"{why}; last words: {last}"[:_DETAIL_CHARACTERS] if last else why

    def ended_error(self) -> Unavailable:
        """For those who wait for it to run."""
        words = self.place.last_words()
        tail = f"; the end of its console:\n{words}" if words else ""
        return Unavailable(f"VM {self.record.id} has ended: {self.instance().detail}{tail}")

    def changed(self) -> None:
        """Wake those who wait for a change."""
        changes, self._changes = self._changes, []
        for waiting in changes:
            if not waiting.called:
                waiting.callback(None)

    def next_change(self) -> Deferred[None]:
        """Fires with the next change."""
        waiting: Deferred[None] = Deferred()
        self._changes.append(waiting)
        return waiting

    def let_go(self) -> None:
        """Close what is open of it; the machine goes on. Twice is once."""
        if self.handover is not None:
            self.handover.cancel()
        if self.connections is not None:
            self.connections.close()
            self.connections = None
        if self.process is not None:
            self.process.forget()


_REASONS = {
    "guest-shutdown": "the guest shut down",
    "guest-reset": "the guest asked for a restart, which ends a pod's machine",
    "guest-panic": "the guest's kernel panicked",
    "host-signal": "QEMU was ended by a signal",
}


@attrs.frozen
class Paths:
    """Where this provider's files are."""

    state: Path
    run: Path

    @property
    def vms(self) -> Path:
        """One directory for each VM."""
        return self.state / "vms"

    @property
    def lock(self) -> Path:
        """Held by the daemon that is at work here."""
        return self.state / "lock"

    @property
    def network(self) -> Path:
        """The subnet in use."""
        return self.state / "network.json"

    @property
    def kvm(self) -> Path:
        """Whether KVM works, remembered."""
        return self.state / "kvm.json"

    def templates(self, configured: Path | None) -> Path:
        """Where templates are."""
        return configured or self.state / "templates"

    def place(self, token: str, user: User) -> Place:
        """Of one VM."""
        return Place(self.vms / token, self.run / token, user)
