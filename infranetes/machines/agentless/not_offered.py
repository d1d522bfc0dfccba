# SPDX-License-Identifier: Apache-2.0
"""What only our agent can do in a VM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence

from infranetes.machines.keeping import Adoption, Hook
from infranetes.providers.interface import MemoryRange
from infranetes_common.errors import NotOffered
from infranetes_common.nfs import NfsMount
from infranetes_common.pod_firewall import PodFirewall
from infranetes_common.wire import cri, vmserver


class NotOfferedCalls:
    """The part of `IAgent` that fails with NotOffered where there is none of our agents.

    Its callers know that, as VMs of earlier releases lack some of these calls too.
    """

    def __init__(self, sandbox_id: str) -> None:
        self._sandbox_id = sandbox_id

    def _not_offered(self, what: str) -> NotOffered:
        return NotOffered(
            f"the VM of sandbox {self._sandbox_id} lacks our agent, which {what}; put infranetes-vmserver "
            "into its image, or do without"
        )

    async def new_key(self, within: float = 0) -> bytes:
        raise self._not_offered("makes its key")

    async def rekey(self, certificate: str, within: float = 0) -> None:
        raise self._not_offered("takes its certificate")

    async def attest(self, nonce: bytes) -> vmserver.AttestResponse:
        raise self._not_offered("asks the processor for a report on it")

    def reconnect(self) -> None:
        pass

    async def warm_up(self) -> None:
        raise self._not_offered("runs containers")

    async def join_pod_network(self, request: vmserver.JoinPodNetworkRequest) -> int:
        raise self._not_offered("joins the pods' network")

    async def images(self) -> set[str]:
        return set()

    async def missing_layers(self, diff_ids: Sequence[str]) -> int:
        raise self._not_offered("takes containers' images")

    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        raise self._not_offered("takes containers' images")

    async def fetch_image(self, image_id: str, url: str) -> None:
        raise self._not_offered("takes containers' images")

    async def remove_image(self, image_id: str) -> None:
        pass  # it has none

    async def layers(self, diff_ids: Sequence[str]) -> list[vmserver.LayerState]:
        raise self._not_offered("takes containers' images")

    async def mount_layers(self, disks: Sequence[vmserver.LayerDisk]) -> None:
        raise self._not_offered("takes containers' images")

    async def put_layer(self, header: vmserver.PutLayerHeader, data: AsyncIterator[bytes]) -> None:
        raise self._not_offered("takes containers' images")

    async def remove_layers(self, diff_ids: Sequence[str]) -> None:
        raise self._not_offered("takes containers' images")

    async def add_image(
        self, image_id: str, configuration: bytes, disks: Sequence[vmserver.LayerDisk] = ()
    ) -> None:
        raise self._not_offered("takes containers' images")

    async def hold(
        self,
        hooks: Mapping[str, Hook],
        volumes: Collection[str],
        *,
        keep_secrets: bool = False,
        seconds: float = 0,
    ) -> list[str]:
        raise self._not_offered("holds its containers while it is kept")

    async def release(self) -> None:
        raise self._not_offered("holds its containers while it is kept")

    async def adopt(
        self, containers: Sequence[Adoption], volumes: Mapping[str, str], sandbox: cri.PodSandboxConfig
    ) -> list[vmserver.ContainerState]:
        raise self._not_offered("takes over containers that were kept")

    async def correct_clock(self, steady: int, earliest: int, latest: int) -> None:
        raise self._not_offered("corrects its clock")

    async def release_memory(self, ranges: Sequence[MemoryRange], seconds: float) -> None:
        raise self._not_offered("takes memory out of use")

    async def restore_memory(self, ranges: Sequence[MemoryRange]) -> None:
        raise self._not_offered("takes memory into use")

    async def use_processors(self, count: int) -> None:
        raise self._not_offered("leaves processors idle")

    async def set_firewall(self, firewall: PodFirewall, tunnel_port: int = 0) -> None:
        raise self._not_offered("has a firewall")

    async def mount_nfs(self, container_id: str, mount: NfsMount) -> str:
        raise self._not_offered("mounts what NFS servers export")

    async def unmount_nfs(self, within: int) -> None:
        pass  # nothing is mounted

    async def service_rules(
        self, updates: AsyncIterator[vmserver.ServiceRulesUpdate]
    ) -> AsyncGenerator[vmserver.ServiceRulesState, None]:
        raise self._not_offered("has a service proxy")
        yield vmserver.ServiceRulesState()

    async def service_report(
        self, key: vmserver.ServiceKey | None, within: float
    ) -> vmserver.ServiceReportResponse:
        raise self._not_offered("has a service proxy")
