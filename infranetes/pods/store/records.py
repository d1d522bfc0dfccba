# SPDX-License-Identifier: Apache-2.0
"""The store's records of sandboxes and containers. Times are nanoseconds since 1970 UTC; 0: not yet."""

from __future__ import annotations

import attrs

from infranetes.machines.pool_record import PoolRecord
from infranetes.pods.store.states import (
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
    name: str  # its unique name: see `sandbox_name`
    config: bytes = attrs.field(repr=False)  # a serialized runtime.v1.PodSandboxConfig
    runtime_handler: str
    created_at: int
    # The handler's settings at the sandbox's creation.
    provider: str
    kind: str  # the kind of the pod's images
    network: str = ""  # as `Handler.network_of`
    claimed: bool = False  # whether the client knows the sandbox: it has received its id, or has used it
    instance_id: str = ""  # the provider's id of the VM; "" until it has answered
    address: str = ""  # the pod's IP
    more_addresses: str = ""  # its further IPs, separated by spaces
    agent_host: str = ""
    agent_port: int = 0
    certificate_until: int = 0  # when the VM's last certificate expires; 0: not known
    certificate_key: str = ""  # the id of the certificate's key, `authority.key_id`
    image: str = ""  # what the VM boots from, as `VmRequest.image`; "": the provider's image for pods
    cpu_millis: int = 0  # the VM's size at its launch or last resize, as in `interface.Size`; 0: not known
    memory_bytes: int = 0
    shadow_id: str = ""  # the delegate's sandbox that holds its network namespace; "": there is none
    message: str = ""  # why the sandbox is LOST, for messages

    def to(self, state: SandboxState, **changes: object) -> SandboxRecord:
        """This record in another state. :raise IllegalTransition: the state can't follow its own."""
        return attrs.evolve(self, state=follow(SANDBOX_TRANSITIONS, self.state, state), **changes)  # type: ignore[arg-type]


@attrs.frozen
class ContainerRecord:
    """One container, and the last known state of its process."""

    id: str  # 32 hex digits
    sandbox_id: str
    state: ContainerState
    config: bytes = attrs.field(repr=False)  # a serialized runtime.v1.ContainerConfig, as the client sent it
    image_ref: str  # the CRI's image_ref, as PullImage returned it
    image_id: str  # sha256:... of the image's configuration
    created_at: int
    claimed: bool = False  # as in SandboxRecord
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
    """The position up to which a container's log is written: the agent's cursor, and the file's inode and
    size."""

    cursor: str
    inode: int
    size: int
    done: bool = False  # the container has ended and all its output is in the file


@attrs.frozen
class AttachmentRecord:
    """A volume that is, or may be, attached to a sandbox's VM. It is written before the provider is asked to
    attach the volume, and deleted once that is certainly detached. It outlives the sandbox's own record."""

    id: str  # the volume's id at its provider
    provider: str
    sandbox_id: str
    instance_id: str
    serial: str = ""  # the disk's serial number in the VM; "": not attached yet


POD_CIDR = "pod_cidr"  # the setting that has the subnet for pods, as kubelet has set it


@attrs.frozen
class Contents:
    """Everything in the store."""

    sandboxes: tuple[SandboxRecord, ...] = ()
    containers: tuple[ContainerRecord, ...] = ()
    pool: tuple[PoolRecord, ...] = ()
    logs: dict[str, LogPosition] = attrs.field(factory=dict)  # by container id
    settings: dict[str, str] = attrs.field(factory=dict)
    attachments: tuple[AttachmentRecord, ...] = ()
