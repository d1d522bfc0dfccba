# SPDX-License-Identifier: Apache-2.0
"""The store's records of sandboxes and containers. Times are nanoseconds since 1970 UTC; 0: not yet."""

from __future__ import annotations

import attrs

from infranetes.machines.pool_record import PoolRecord
from infranetes.pods.states import (
    CONTAINER_TRANSITIONS,
    SANDBOX_TRANSITIONS,
    ContainerState,
    SandboxState,
)
from infranetes_common.transitions import follow


@attrs.frozen
class SandboxRecord:
    """One sandbox. No private key is kept: an interrupted launch continues with a new certificate."""

    id: str  # 32 hex digits
    token: str  # the VM's idempotency key, 32 hex digits
    state: SandboxState
    name: str  # what makes it unique: see `sandbox_name`
    config: bytes = attrs.field(repr=False)  # a serialized runtime.v1.PodSandboxConfig
    runtime_handler: str
    created_at: int
    claimed: bool = False  # whether the client knows it: it was answered with its id, or has used that
    stopped_at: int = 0
    instance_id: str = ""  # the provider's; "" until it has answered
    address: str = ""  # the pod's IP
    agent_host: str = ""
    agent_port: int = 0
    message: str = ""  # why it is LOST, for people
    certificate_until: int = 0  # when the VM's last certificate expires; 0: not known
    certificate_key: str = ""  # the key that it is for, `authority.key_id`
    image: str = ""  # what the VM boots from, as `InstanceSpec.image`; "": the provider's image for pods
    # What a handler meant when the sandbox was made. "": recorded by a release in which all meant the same.
    provider: str = ""
    kind: str = ""  # of its images
    network: str = ""
    shadow_id: str = ""  # the delegate's sandbox that holds its network namespace; "": there is none
    netns: str = ""  # the path of that namespace
    cpu_millis: int = 0  # what the VM was made for or last resized to, as `interface.Size`; 0: not known
    memory_bytes: int = 0
    more_addresses: str = ""  # the pod's further IPs, with spaces between

    def to(self, state: SandboxState, **changes: object) -> SandboxRecord:
        """This record in another state. :raise IllegalTransition: the state can't follow its own."""
        return attrs.evolve(self, state=follow(SANDBOX_TRANSITIONS, self.state, state), **changes)  # type: ignore[arg-type]


@attrs.frozen
class ContainerRecord:
    """One container, and what was last known of its process."""

    id: str  # 32 hex digits
    sandbox_id: str
    state: ContainerState
    config: bytes = attrs.field(repr=False)  # a serialized runtime.v1.ContainerConfig, as the client sent it
    image_ref: str  # what the CRI calls image_ref, as PullImage answered it
    image_id: str  # sha256:... of the image's configuration
    created_at: int
    claimed: bool = False  # as a sandbox's
    started_at: int = 0
    finished_at: int = 0
    exit_code: int = 0
    reason: str = ""
    message: str = ""

    def to(self, state: ContainerState, **changes: object) -> ContainerRecord:
        """This record in another state. :raise IllegalTransition: the state can't follow its own."""
        return attrs.evolve(self, state=follow(CONTAINER_TRANSITIONS, self.state, state), **changes)  # type: ignore[arg-type]


@attrs.frozen
class LogPosition:
    """How far a container's log is written: the agent's cursor, and the file that it belongs to."""

    cursor: str
    inode: int
    size: int
    done: bool = False  # the container has ended and all its output is in the file


@attrs.frozen
class AttachmentRecord:
    """A volume that a sandbox's VM has, or may have: written before the provider is asked to attach it, and
    deleted once it is certain that it is detached. It outlives the sandbox's own record."""

    id: str  # the volume's, as its provider calls it
    provider: str
    sandbox_id: str
    instance_id: str
    attached_at: int
    serial: str = ""  # the disk's serial number in the VM; "": not attached yet


@attrs.frozen
class Contents:
    """Everything in the store."""

    sandboxes: tuple[SandboxRecord, ...] = ()
    containers: tuple[ContainerRecord, ...] = ()
    pool: tuple[PoolRecord, ...] = ()
    logs: dict[str, LogPosition] = attrs.field(factory=dict)  # by container id
    settings: dict[str, str] = attrs.field(factory=dict)
    attachments: tuple[AttachmentRecord, ...] = ()
