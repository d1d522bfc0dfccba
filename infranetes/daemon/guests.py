# SPDX-License-Identifier: Apache-2.0
"""How guests without our agent are reached, and how they are told of their pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infranetes.cloud_init.configuration import configuration, user_data
from infranetes.cloud_init.document import GuestDocument, GuestVolume, HostKey, Resolvers
from infranetes.identity.guest_keys import GuestSecrets
from infranetes.kubernetes.config_objects import ConfigObjects
from infranetes.machines.agentless.access import GuestFile, IGuestAccess
from infranetes.machines.agentless.configuration import GuestDisk, PodFacts
from infranetes.machines.agentless.guest_agent.access import GuestAgentAccess
from infranetes.machines.agentless.ssh.access import Login, SshAccess
from infranetes.machines.agentless.ssh.keys import KeyPair, key_of
from infranetes.providers.hypervisor import IHypervisor
from infranetes.providers.machine_annotations import GuestChoices, GuestWay
from infranetes.providers.machine_images import Cd, GuestConfiguration
from infranetes_common.identity import Network
from infranetes_common.reactors import IReactor

HOST, USER = "host key", "user key"  # the purposes of a guest's secrets
ADMINISTRATOR = "Administrator"  # of a Windows


class NodeGuests:
    """The `GuestMakers` of a node: SSH by keys made for each guest, QEMU's guest agent, cloud-init.

    :param secrets: of the guests.
    :param objects: ConfigMaps and Secrets that annotations name; None: there is no API server to ask."""

    def __init__(
        self, reactor: IReactor, secrets: GuestSecrets, objects: ConfigObjects | None = None
    ) -> None:
        self._reactor = reactor
        self._secrets = secrets
        self._objects = objects

    def ways(
        self, sandbox_id: str, host: str, hypervisor: IHypervisor, choices: GuestChoices
    ) -> Sequence[IGuestAccess]:
        name = f"sandbox {sandbox_id}"
        accesses: list[IGuestAccess] = []
        if choices.guest in (None, GuestWay.SSH):
            user = ADMINISTRATOR if choices.windows else "root"
            keys, host_keys = self._key(USER, sandbox_id), self._key(HOST, sandbox_id)
            marked = not hypervisor.drives  # a cloud's VM, to whose SSH server the node lets nobody else
            login = Login(host, user, keys.private, host_keys.public, marked=marked)
            accesses.append(SshAccess(self._reactor, login, name))
        if choices.guest in (None, GuestWay.GUEST_AGENT):
            endpoint = hypervisor.guest_agent()
            if endpoint is not None:
                accesses.append(GuestAgentAccess(self._reactor, endpoint, name))
        return accesses

    async def configuration(
        self, facts: PodFacts, files: Mapping[str, GuestFile], choices: GuestChoices
    ) -> GuestConfiguration:
        document = await self._document(facts, files, choices)
        return configuration(document) or _Nothing()

    async def user_data(self, facts: PodFacts, choices: GuestChoices) -> bytes:
        return user_data(await self._document(facts, {}, choices))

    async def _document(
        self, facts: PodFacts, files: Mapping[str, GuestFile], choices: GuestChoices
    ) -> GuestDocument:
        reached = choices.guest in (None, GuestWay.SSH)
        host_key = self._key(HOST, facts.sandbox_id)
        objects: dict[tuple[str, str], Mapping[str, bytes]] = {}
        if self._objects is not None:
            for kind, object_name in sorted(choices.objects):
                objects[kind, object_name] = await self._objects.of(facts.namespace, kind, object_name)
        return GuestDocument(
            facts.sandbox_id,
            choices,
            instance_id=facts.root or "",
            hostname=facts.hostname,
            environment=facts.environment,
            files=files,
            objects=objects,
            volumes=tuple(map(_volume, facts.disks)),
            node_key=self._key(USER, facts.sandbox_id).public if reached else "",
            host_key=HostKey(host_key.private, host_key.public) if reached else None,
            resolvers=Resolvers(facts.nameservers, facts.searches),
        )

    def _key(self, purpose: str, sandbox_id: str) -> KeyPair:
        return key_of(self._secrets.seed(purpose, sandbox_id))


class _Nothing:
    """What a guest is told that is to be told nothing."""

    def cds(self, network: Network) -> tuple[Cd, ...]:
        return ()


def _volume(disk: GuestDisk) -> GuestVolume:
    return GuestVolume(
        disk.serial,
        disk.mount_path,
        disk.filesystem,
        disk.read_only,
        block=not disk.filesystem,
        options=disk.options,
    )
