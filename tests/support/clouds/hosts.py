# SPDX-License-Identifier: Apache-2.0
"""The hosts on which vCenter allows a VM to be created, which vcsim does not check.

Source: vSphere Web Services API reference, `VirtualMachineRelocateSpec.host`, and faults of `CloneVM_Task`;
vSphere Automation API reference, `host_id` of an OVF's target and `host` of a VM template's placement.
"""

from __future__ import annotations

import re
from typing import Any

from pyVmomi import vim

_REFERENCE = re.compile(r"<(pool|host|datastore|snapshot)(?: [^>]*)?>([^<]+)</\1>")
_LOCATION = re.compile(r"<location(?: [^>]*)?>.*?</location>", re.DOTALL)
_BACKING = re.compile(r"<portgroupKey>([^<]+)</portgroupKey>")


class Hosts:
    """The hosts of one vCenter, asked without faults. Methods block."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.emptying: set[str] = set()  # hosts that are entering maintenance mode, which their state hides

    def refusal_of_clone(self, source: str, body: str) -> tuple[str, str] | None:
        """Return the fault of a CloneVM_Task, with its fields; None: it may be made."""
        location = _LOCATION.search(body)
        given = dict(_REFERENCE.findall(location[0])) if location is not None else {}
        if "pool" not in given:
            return "InvalidArgument", "<invalidProperty>spec.location.pool</invalidProperty>"
        template = vim.VirtualMachine(source, self._stub)
        datastores = {given["datastore"]} if "datastore" in given else set()
        if not datastores or "<snapshot" in body:
            datastores |= {each._moId for each in template.datastore}
        why = self._refusal(given["pool"], given.get("host", ""), datastores, _BACKING.findall(body))
        if why == "host":
            return "InvalidArgument", "<invalidProperty>spec.location.host</invalidProperty>"
        return (why, "") if why else None

    def refusal_of_deployment(self, body: Any) -> str:
        """Return why an item can't be deployed; "": it can."""
        target = body.get("target") or body["spec"]["placement"]
        pool = target.get("resource_pool_id") or target["resource_pool"]
        host = target.get("host_id") or target.get("host") or ""
        spec = body.get("deployment_spec") or body["spec"]
        datastore = spec.get("default_datastore_id") or spec.get("disk_storage", {}).get("datastore")
        return self._refusal(pool, host, {datastore} if datastore else set(), [])

    def _refusal(self, pool: str, host: str, datastores: set[str], portgroups: list[str]) -> str:
        owner = vim.ResourcePool(pool, self._stub).owner
        if not host:
            is_cluster = owner._wsdlName == "ClusterComputeResource"
            return "host" if is_cluster and not owner.configurationEx.drsConfig.enabled else ""
        if host not in {each._moId for each in owner.host}:
            return "InvalidArgument"
        it = vim.HostSystem(host, self._stub)
        if it.runtime.connectionState != "connected":
            return "HostNotConnected"
        if it.runtime.inMaintenanceMode or it.name in self.emptying:
            return "InvalidState"
        if datastores - {each._moId for each in it.datastore}:
            return "InvalidDatastore"
        if set(portgroups) - {each._moId for each in it.network}:
            return "CannotAccessNetwork"
        return ""
