# SPDX-License-Identifier: Apache-2.0
"""What is known of a guest before it boots."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from infranetes.machines.agentless.access import GuestFile
from infranetes.providers.machine_annotations import GuestChoices


@attrs.frozen
class GuestVolume:
    """A disk of a volume, in the guest."""

    serial: str
    path: str  # where it is mounted; of a raw block volume, what leads to it, or "": its serial alone does
    fs_type: str = "ext4"  # of one that is mounted, and made on a disk that is all zeros; "": as it is
    read_only: bool = False
    block: bool = False  # raw: not mounted
    options: tuple[str, ...] = ()  # of its mount


@attrs.frozen
class HostKey:
    """The SSH host key that the node has made for a guest, Ed25519, by which it knows the guest."""

    private: str = attrs.field(repr=False)  # OpenSSH's PEM
    public: str  # a line such as ssh-ed25519 AAAA…


@attrs.frozen
class Resolvers:
    """Where the guest asks for names."""

    servers: tuple[str, ...] = ()  # addresses
    searches: tuple[str, ...] = ()  # domains


@attrs.frozen
class GuestDocument:
    """What one guest's cloud-init CDs are built from.

    :ivar instance_id: by which cloud-init tells a first boot. It is the sandbox's id where the root is a copy
        of the image. Where the root stays when the pod goes, it is the root's: what user-data says to do once
        is then done once for each root, and only what Infranetes itself writes is written for each pod.
    :ivar files: of Secrets and ConfigMaps, by absolute path in the guest, as the container mounts them.
    :ivar objects: ConfigMaps and Secrets that `choices` names, by kind and name: their keys.
    :ivar node_key: a public key, by which the node logs in as the administrator; "": it does not."""

    sandbox_id: str
    choices: GuestChoices = attrs.field(factory=GuestChoices)
    instance_id: str = ""
    hostname: str = ""  # "": the image's own
    environment: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    files: Mapping[str, GuestFile] = attrs.field(factory=dict, repr=False)
    objects: Mapping[tuple[str, str], Mapping[str, bytes]] = attrs.field(factory=dict, repr=False)
    volumes: tuple[GuestVolume, ...] = ()
    node_key: str = ""
    host_key: HostKey | None = None
    resolvers: Resolvers = Resolvers()

    @property
    def instance(self) -> str:
        """The instance-id."""
        return self.instance_id or self.sandbox_id

    @property
    def root_stays(self) -> bool:
        """Whether another pod will boot, or has booted, this root."""
        return bool(self.instance_id)
