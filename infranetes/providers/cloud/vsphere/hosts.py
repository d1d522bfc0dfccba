# SPDX-License-Identifier: Apache-2.0
"""The host that a VM is created on.

resource pool of           host
a host outside clusters    none is named: there is one only
a cluster with DRS         none is named: DRS chooses
a cluster without DRS      of those that can run the VM, the one with the most memory left; one that has
                           refused a VM within a minute only if all have, the longest ago first

vCenter refuses to create a VM in a cluster without DRS while no host is named (source: vSphere Web Services
API reference, `VirtualMachineRelocateSpec.host`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import cast

import attrs
from pyVmomi import vim

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.pyvmomi_types import (
    ClusterProperties,
    HostProperties,
    ManagedObject,
    PoolProperties,
)

_LOOK_SECONDS = 10.0  # how long a look is used; later a host may be in maintenance
_STATISTICS_SECONDS = 60.0  # until a new VM's memory shows in its host's statistics
# For this long, a host that has refused a VM is tried last. A host that enters maintenance mode looks fit,
# and empty.
_REFUSED_SECONDS = 60.0
_HOST = (
    "name",
    "runtime.connectionState",
    "runtime.inMaintenanceMode",
    "summary.hardware.memorySize",
    "summary.quickStats.overallMemoryUsage",
    "datastore",
    "network",
)
_CONNECTED = vim.HostSystem.ConnectionState.connected


@attrs.frozen
class Needs:
    """What a VM needs of its host.

    :ivar things: datastores and networks by what messages call them. :ivar mib: of memory."""

    things: Mapping[str, ManagedObject] = attrs.field(factory=dict)
    mib: int = 0


@attrs.frozen
class Host:
    """A host.

    :ivar unfit: why it can't run any new VM; "": it can. :ivar free: MiB of memory.
    :ivar has: the ids of its datastores and networks."""

    ref: ManagedObject
    name: str
    unfit: str
    free: int
    has: Set[str]

    def unfit_for(self, needs: Needs) -> str:
        """Return why it can't run a VM; "": it can."""
        lacking = [what for what, ref in needs.things.items() if ref._moId not in self.has]
        return self.unfit or (f"does not have {lacking[0]}" if lacking else "")


class Hosts:
    """The hosts of a vCenter's clusters. Methods are called in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By pool: the time of the look, and the hosts.
        self._looks: dict[str, tuple[float, Sequence[Host] | None]] = {}
        self._chosen: list[tuple[float, str, int]] = []  # time, host's id, MiB
        self._refused: dict[str, float] = {}  # by host id: the time of the refusal

    def forget(self) -> None:
        """Look at hosts anew, as something has changed."""
        with self._lock:
            self._looks.clear()

    def refused_by(self, host: ManagedObject) -> None:
        """Record that a host that was chosen has refused a VM."""
        with self._lock:
            self._refused[host._moId] = time.monotonic()

    def _thd_choose(self, driver: Driver, pool: ManagedObject, needs: Needs) -> ManagedObject | None:
        """Return the host of a new VM in a resource pool; None: vCenter chooses.

        :raise CloudError: no host can run the VM."""
        hosts = self._thd_of_pool(driver, pool)
        if hosts is None:
            return None
        fit = [host for host in hosts if not host.unfit_for(needs)]
        if not fit:
            why = "; ".join(f"{host.name} {host.unfit_for(needs)}" for host in hosts) or "it has none"
            raise CloudError(
                ErrorKind.CAPACITY, f"no host of the resource pool's cluster can run a VM: {why}"
            )
        return self._most_free(fit, needs.mib)

    def _thd_of_pool(self, driver: Driver, pool: ManagedObject) -> Sequence[Host] | None:
        """Return the hosts of the resource pool's cluster; None: vCenter chooses among them.

        :raise CloudError: they can't be seen."""
        with self._lock:
            since, found = self._looks.get(pool._moId, (-_LOOK_SECONDS, None))
        if time.monotonic() - since < _LOOK_SECONDS:
            return found
        now, found = time.monotonic(), _thd_hosts(driver, pool)
        with self._lock:
            self._looks[pool._moId] = now, found
        return found

    def _most_free(self, hosts: Iterable[Host], mib: int) -> ManagedObject:
        with self._lock:
            now = time.monotonic()
            self._chosen = [each for each in self._chosen if now - each[0] < _STATISTICS_SECONDS]
            self._refused = {id: at for id, at in self._refused.items() if now - at < _REFUSED_SECONDS}

            def preference(host: Host) -> tuple[float, int]:
                given = sum(each for _, id, each in self._chosen if id == host.ref._moId)
                return -self._refused.get(host.ref._moId, 0.0), host.free - given

            best = max(hosts, key=preference)
            self._chosen.append((now, best.ref._moId, mib))
        return best.ref


def _thd_hosts(driver: Driver, pool: ManagedObject) -> Sequence[Host] | None:
    [(_, of_pool)] = driver.properties([pool], "owner")
    owner = cast(PoolProperties, of_pool)["owner"]
    if not isinstance(owner, vim.ClusterComputeResource):
        return None
    try:
        [(_, of_cluster)] = driver.properties([owner], "configurationEx", "host")
        cluster = cast(ClusterProperties, of_cluster)
        if cluster["configurationEx"].drsConfig.enabled:
            return None
        found = driver.properties(cluster.get("host") or [], *_HOST)
    except CloudError as error:
        what = "the resource pool's cluster and its hosts can't be seen, and have to be"
        raise CloudError(error.kind, f"{what}: {error}") from None
    return [_host(ref, cast(HostProperties, properties)) for ref, properties in found]


def _host(ref: ManagedObject, properties: HostProperties) -> Host:
    unfit = ""
    if properties.get("runtime.connectionState") != _CONNECTED:
        unfit = "is not connected"
    elif properties.get("runtime.inMaintenanceMode"):
        unfit = "is in maintenance mode"
    used = properties.get("summary.quickStats.overallMemoryUsage") or 0
    free = (properties.get("summary.hardware.memorySize") or 0) // (1 << 20) - used
    has = [*(properties.get("datastore") or ()), *(properties.get("network") or ())]
    return Host(ref, properties.get("name") or ref._moId, unfit, free, frozenset(each._moId for each in has))
