# SPDX-License-Identifier: Apache-2.0
"""The volumes of a provider's tenants, each in its tenant's project and with an id that names the tenant.

A tenant's volume or snapshot is called TENANT:ID, which only that tenant's provider knows; those of no tenant
have the cloud's own ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import alsoProvides, implementer

from infranetes.providers.tenants import Tenants
from infranetes.providers.volumes import (
    FromSnapshot,
    IHasSnapshots,
    ISnapshots,
    IVolumes,
    VolumeDisk,
    VolumeSnapshot,
    VolumeSource,
)
from infranetes_common.concurrency import deferred, settled, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, NotFound

T = TypeVar("T")
F = TypeVar("F")  # what is found

SEPARATOR = ":"
PARAMETER = "tenant"  # of a StorageClass
CLAIMS_NAMESPACE = "csi.storage.k8s.io/pvc/namespace"  # which external-provisioner adds to the parameters
_OWNED = re.compile(r"([a-z0-9](?:[-a-z0-9]{0,30}[a-z0-9])?):(.+)")

_log = Logger()


def split_id(id: str) -> tuple[str, str]:
    """Return whose a volume or snapshot is, and its id at the cloud; the first is "" for nobody's."""
    found = _OWNED.fullmatch(id)
    return (found[1], found[2]) if found else ("", id)


class _Ids:
    """Translates one tenant's ids."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant

    def inner(self, id: str) -> str:
        """Return the cloud's id of the tenant's own. :raise NotFound: it is another one's; says whose."""
        tenant, inner = split_id(id)
        if tenant != self.tenant:
            whose = f"tenant {tenant}" if tenant else "no tenant"
            raise NotFound(f"{id[:80]} is of {whose}, and tenant {self.tenant} has no part in it")
        return inner

    def outer(self, id: str) -> str:
        return f"{self.tenant}{SEPARATOR}{id}"

    def source(self, source: VolumeSource | None) -> VolumeSource | None:
        return None if source is None else attrs.evolve(source, id=self.outer(source.id))

    def disk(self, disk: VolumeDisk) -> VolumeDisk:
        return attrs.evolve(disk, id=self.outer(disk.id), source=self.source(disk.source))

    def snapshot(self, taken: VolumeSnapshot) -> VolumeSnapshot:
        return attrs.evolve(taken, id=self.outer(taken.id), volume=self.outer(taken.volume))


@implementer(IVolumes)
class TenantVolumes:
    """One tenant's volumes, by ids that say so. :param volumes: by the cloud's own ids."""

    snapshots: ISnapshots

    def __init__(self, tenant: str, volumes: IVolumes) -> None:
        self._ids = _Ids(tenant)
        self._volumes = volumes
        self.unit = volumes.unit
        if IHasSnapshots.providedBy(volumes):
            self.snapshots = TenantSnapshots(self._ids, volumes.snapshots)
            alsoProvides(self, IHasSnapshots)

    @property
    def topology(self) -> Mapping[str, str]:
        return self._volumes.topology

    @deferred
    async def create(self, name: str, size: int) -> VolumeDisk:
        return self._ids.disk(await self._volumes.create(name, size))

    @deferred
    async def delete(self, volume_id: str) -> None:
        await self._volumes.delete(self._ids.inner(volume_id))

    @deferred
    async def expand(self, volume_id: str, size: int) -> VolumeDisk:
        return self._ids.disk(await self._volumes.expand(self._ids.inner(volume_id), size))

    @deferred
    async def get(self, volume_id: str) -> VolumeDisk:
        return self._ids.disk(await self._volumes.get(self._ids.inner(volume_id)))

    @deferred
    async def list(self) -> list[VolumeDisk]:
        return [self._ids.disk(each) for each in await self._volumes.list()]

    def free(self) -> Deferred[int]:
        return self._volumes.free()

    @deferred
    async def attach(self, instance_id: str, volume_id: str, read_only: bool) -> str:
        return await self._volumes.attach(instance_id, self._ids.inner(volume_id), read_only)

    @deferred
    async def detach(self, instance_id: str, volume_id: str) -> None:
        tenant, inner = split_id(volume_id)
        if tenant == self._ids.tenant:  # no VM of this tenant's has another one's
            await self._volumes.detach(instance_id, inner)


@implementer(ISnapshots)
class TenantSnapshots:
    """One tenant's snapshots, likewise."""

    def __init__(self, ids: _Ids, snapshots: ISnapshots) -> None:
        self._ids = ids
        self._snapshots = snapshots
        self.clones, self.outlive_volumes = snapshots.clones, snapshots.outlive_volumes

    @deferred
    async def create(self, name: str, volume_id: str) -> VolumeSnapshot:
        return self._ids.snapshot(await self._snapshots.create(name, self._ids.inner(volume_id)))

    @deferred
    async def delete(self, snapshot_id: str) -> None:
        await self._snapshots.delete(self._ids.inner(snapshot_id))

    @deferred
    async def get(self, snapshot_id: str) -> VolumeSnapshot:
        return self._ids.snapshot(await self._snapshots.get(self._ids.inner(snapshot_id)))

    @deferred
    async def list(self) -> list[VolumeSnapshot]:
        return [self._ids.snapshot(each) for each in await self._snapshots.list()]

    @deferred
    async def restore(self, name: str, size: int, source: VolumeSource) -> VolumeDisk:
        inner = attrs.evolve(source, id=self._ids.inner(source.id))
        return self._ids.disk(await self._snapshots.restore(name, size, inner))


class IOfTenants(IVolumes):
    """An `IVolumes` that is several tenants'."""

    def of(parameters: Mapping[str, str]) -> IVolumes:
        """Return those among which a volume with these parameters of a StorageClass is made.

        :raise InvalidArgument: the claim may not have one there."""


@implementer(IOfTenants)
class NodeVolumes:
    """The volumes of a provider and of all its tenants. Those that are made here are of no tenant: see `of`.

    :param own: the provider's. :param by_tenant: as `TenantVolumes`. :param tenants: who is which tenant."""

    snapshots: ISnapshots

    def __init__(self, own: IVolumes, by_tenant: Mapping[str, IVolumes], tenants: Tenants) -> None:
        self._all = {"": own, **by_tenant}
        self._own = own
        self._tenants = tenants
        self.unit = own.unit
        if IHasSnapshots.providedBy(own):
            its = {name: cast(IHasSnapshots, each).snapshots for name, each in self._all.items()}
            self.snapshots = NodeSnapshots(its)
            alsoProvides(self, IHasSnapshots)

    def of(self, parameters: Mapping[str, str]) -> IVolumes:
        asked, namespace = parameters.get(PARAMETER, ""), parameters.get(CLAIMS_NAMESPACE, "")
        tenant = self._tenants.choose(namespace, asked, {}) if namespace else asked
        if tenant not in self._all:
            known = ", ".join(name for name in self._all if name)
            raise InvalidArgument(
                f"parameters: {PARAMETER}: there is no tenant {tenant[:64]!r}; known: {known}"
            )
        return self._all[tenant]

    @property
    def topology(self) -> Mapping[str, str]:
        return self._own.topology

    def create(self, name: str, size: int) -> Deferred[VolumeDisk]:
        return self._own.create(name, size)

    def delete(self, volume_id: str) -> Deferred[None]:
        return self._of(volume_id).delete(volume_id)

    def expand(self, volume_id: str, size: int) -> Deferred[VolumeDisk]:
        return self._of(volume_id).expand(volume_id, size)

    def get(self, volume_id: str) -> Deferred[VolumeDisk]:
        return self._of(volume_id).get(volume_id)

    def list(self) -> Deferred[list[VolumeDisk]]:
        return _together(self._all, lambda each: each.list(), "volumes")

    def free(self) -> Deferred[int]:
        return self._own.free()

    def attach(self, instance_id: str, volume_id: str, read_only: bool) -> Deferred[str]:
        return self._of(volume_id).attach(instance_id, volume_id, read_only)

    def detach(self, instance_id: str, volume_id: str) -> Deferred[None]:
        return self._of(volume_id).detach(instance_id, volume_id)

    def _of(self, volume_id: str) -> IVolumes:
        return _whose(self._all, volume_id)


@implementer(ISnapshots)
class NodeSnapshots:
    """The snapshots of a provider and of all its tenants."""

    def __init__(self, by_tenant: Mapping[str, ISnapshots]) -> None:
        self._all = by_tenant
        self.clones, self.outlive_volumes = by_tenant[""].clones, by_tenant[""].outlive_volumes

    def create(self, name: str, volume_id: str) -> Deferred[VolumeSnapshot]:
        return _whose(self._all, volume_id).create(name, volume_id)

    def delete(self, snapshot_id: str) -> Deferred[None]:
        return _whose(self._all, snapshot_id).delete(snapshot_id)

    def get(self, snapshot_id: str) -> Deferred[VolumeSnapshot]:
        return _whose(self._all, snapshot_id).get(snapshot_id)

    def list(self) -> Deferred[list[VolumeSnapshot]]:
        return _together(self._all, lambda each: each.list(), "snapshots")

    def restore(self, name: str, size: int, source: VolumeSource) -> Deferred[VolumeDisk]:
        return _whose(self._all, source.id).restore(name, size, source)


def check_source(volumes: IVolumes, source: VolumeSource) -> None:
    """Check that a volume that is made among some others may begin with a source's content.

    :raise InvalidArgument: the source is another tenant's."""
    mine = volumes._ids.tenant if isinstance(volumes, TenantVolumes) else ""
    if split_id(source.id)[0] != mine:
        kind = "snapshot" if isinstance(source, FromSnapshot) else "volume"
        whose = f"tenant {mine}" if mine else "no tenant"
        raise InvalidArgument(
            f"volume_content_source: {kind} {source.id[:80]} is not of {whose}, as the new volume would be: "
            f"use a StorageClass with its {PARAMETER}"
        )


def check_use(volume_id: str, tenant: str) -> None:
    """Check that a tenant's pod may have a volume. :param tenant: "": the pod is of none.

    :raise FailedPrecondition: it is another one's; says whose."""
    owner = split_id(volume_id)[0]
    if owner != tenant:
        whose, mine = (f"tenant {name}" if name else "no tenant" for name in (owner, tenant))
        raise FailedPrecondition(
            f"volume {volume_id[:80]} is of {whose}, and the pod of {mine}: a pod can have its own tenant's "
            f"volumes only. Make the claim with a StorageClass whose {PARAMETER} is the pod's"
        )


def _whose(every: Mapping[str, T], id: str) -> T:
    """Return whose something is. :raise FailedPrecondition: there is no such tenant."""
    tenant, inner = split_id(id)
    if tenant in every:
        return every[tenant]
    raise FailedPrecondition(
        f"there is no tenant {tenant!r} any more, of whom {inner[:80]!r} is: configure it again"
    )


@deferred
async def _together(every: Mapping[str, T], ask: Callable[[T], Deferred[list[F]]], what: str) -> list[F]:
    """Return what all have, without those who can't be asked now."""
    found: list[F] = []
    outcomes: list[list[F] | Failure] = await settled(start(_awaited(ask(each))) for each in every.values())
    for name, outcome in zip(every, outcomes, strict=True):
        if isinstance(outcome, Failure):
            if not name or not outcome.check(InfranetesError):
                outcome.raiseException()
            _log.warn("the {what} of tenant {tenant} are in no list now: {error}", what=what, tenant=name,
                      error=outcome.value)  # fmt: skip
        else:
            found += outcome
    return found


async def _awaited(asked: Deferred[T]) -> T:
    return await asked
