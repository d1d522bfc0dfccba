"""What the store keeps of sandboxes and containers. Times are nanoseconds since 1970 UTC, 0: not yet."""

from __future__ import annotations

import secrets

import attrs

from infranetes.pods.states import ContainerState, PoolState, SandboxState, follow


def new_id() -> str:
    """An id or token: 32 hex digits."""
    return secrets.token_hex(16)


@attrs.frozen
class SandboxRecord:
    """One sandbox. No key is kept: an interrupted launch goes on with a fresh certificate by the same CA."""

    id: str  # 32 hex digits
    token: str  # the VM's idempotency key, 32 hex digits
    state: SandboxState
    name: str  # what makes it unique: see `sandbox_name`
    config: bytes = attrs.field(repr=False)  # a serialized runtime.v1.PodSandboxConfig
    runtime_handler: str
    created_at: int
    claimed: bool = False  # whether the client was told of it, or has shown that it knows it
    stopped_at: int = 0
    instance_id: str = ""  # the provider's; "" until it has answered
    address: str = ""  # the pod's IP
    agent_host: str = ""
    agent_port: int = 0
    message: str = ""  # why it is LOST, for people
    certificate_until: int = 0  # when the VM's last certificate expires; 0: not known
    certificate_key: str = ""  # the key that it is for, `authority.key_id`
    image: str = ""  # what the VM is booted from, as `InstanceSpec.image`; "": what pods are made of

    def to(self, state: SandboxState, **changes: object) -> SandboxRecord:
        """This record in its next state. :raise IllegalTransition:"""
        return attrs.evolve(self, state=follow(self.state, state), **changes)  # type: ignore[arg-type]


@attrs.frozen
class PoolRecord:
    """One VM of the pool. Its id is that of the sandbox which it becomes: nothing is named anew then."""

    id: str  # 32 hex digits
    token: str  # the VM's idempotency key, 32 hex digits
    state: PoolState
    cpu_millis: int  # the size that it was made for, as `interface.Size` has it
    memory_bytes: int
    created_at: int
    instance_id: str = ""  # the provider's; "" until it has answered
    address: str = ""
    agent_host: str = ""
    agent_port: int = 0
    message: str = ""  # why it is ENDING, for people
    certificate_until: int = 0  # as a sandbox's
    certificate_key: str = ""

    def to(self, state: PoolState, **changes: object) -> PoolRecord:
        """This record in its next state. :raise IllegalTransition:"""
        return attrs.evolve(self, state=follow(self.state, state), **changes)  # type: ignore[arg-type]


@attrs.frozen
class ContainerRecord:
    """One container, with the last that was known of its process."""

    id: str  # 32 hex digits
    sandbox_id: str
    state: ContainerState
    config: bytes = attrs.field(repr=False)  # a serialized runtime.v1.ContainerConfig, as the client sent it
    image_ref: str  # what the CRI calls image_ref, as PullImage answered it
    image_id: str  # sha256:... of the image's configuration
    created_at: int
    claimed: bool = False
    started_at: int = 0
    finished_at: int = 0
    exit_code: int = 0
    reason: str = ""
    message: str = ""

    def to(self, state: ContainerState, **changes: object) -> ContainerRecord:
        """This record in its next state. :raise IllegalTransition:"""
        return attrs.evolve(self, state=follow(self.state, state), **changes)  # type: ignore[arg-type]


@attrs.frozen
class LogPosition:
    """How far a container's log file is written: a cursor of the agent, and the file it belongs to."""

    cursor: str
    inode: int
    size: int
    done: bool = False  # the container has ended and all it wrote is in the file


@attrs.frozen
class Contents:
    """Everything in the store."""

    sandboxes: tuple[SandboxRecord, ...] = ()
    containers: tuple[ContainerRecord, ...] = ()
    pool: tuple[PoolRecord, ...] = ()
    logs: dict[str, LogPosition] = attrs.field(factory=dict)  # by container id
    settings: dict[str, str] = attrs.field(factory=dict)
