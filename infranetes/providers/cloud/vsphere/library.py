# SPDX-License-Identifier: Apache-2.0
"""A vCenter's content libraries, which only its REST interface has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from urllib.parse import quote

import attrs

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.rest import Rest, kind_of, malformed_answer, messages_in

OVF, VM_TEMPLATE = "ovf", "vm-template"  # the types of items that VMs can be deployed from

_LIBRARY = "/rest/com/vmware/content/library"
_ITEM = "/rest/com/vmware/content/library/item"
_OVF_ITEM = "/rest/com/vmware/vcenter/ovf/library-item"
_VM_TEMPLATE_ITEM = "/rest/vcenter/vm-template/library-items"
_MAX_NAMESAKES = 16
_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


@attrs.frozen
class Item:
    """One item of a library."""

    id: str
    name: str
    type: str
    modified: float  # seconds since 1970; 0: not known


@attrs.frozen
class Target:
    """Where to deploy a VM, by vCenter's ids. :ivar datastore: "": vCenter chooses. :ivar host: likewise."""

    folder: str
    pool: str
    datastore: str = ""
    host: str = ""


class Library:
    """The libraries of one vCenter."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    def _thd_find(self, name: str) -> str:
        """Return the id of the library of that name. :raise CloudError: there is none."""
        ids = self._thd_ids(_LIBRARY, {"name": name})
        if len(ids) != 1:
            what = "no library" if not ids else "more than one library"
            raise CloudError(
                ErrorKind.INVALID,
                f"content_library in providers.vsphere: there is {what} {name!r} that may be seen",
            )
        return ids[0]

    def _thd_item(self, library: str, names: Sequence[str]) -> Item | None:
        """Return the newest item with one of these names."""
        found = []
        for name in names:
            for id in self._thd_ids(_ITEM, {"library_id": library, "name": name})[:_MAX_NAMESAKES]:
                item = _item(self._rest._thd_request("GET", f"{_ITEM}/id:{quote(id)}"))
                if item.name in names:  # vCenter's filter ignores case
                    found.append(item)
        return max(found, key=lambda item: (item.modified, item.id), default=None)

    def _thd_ids(self, path: str, spec: Mapping[str, str]) -> list[str]:
        ids = self._rest._thd_request("POST", f"{path}?~action=find", {"spec": spec})
        if ids is None:
            return []
        if not isinstance(ids, list) or not all(isinstance(id, str) and _ID.fullmatch(id) for id in ids):
            raise malformed_answer()
        return ids

    def _thd_deploy(self, item: Item, name: str, target: Target) -> tuple[str, str]:
        """Deploy a VM from an item, powered off. Returns the type and id of what was created.

        :raise CloudError: nothing was created, except that after `ErrorKind.TRANSIENT` it may have been."""
        if item.type == OVF:
            return self._thd_deploy_ovf(item, name, target)
        storage = {"datastore": target.datastore}
        placement = {"folder": target.folder, "resource_pool": target.pool}
        if target.host:
            placement["host"] = target.host
        spec = {
            "name": name,
            "placement": placement,
            "powered_on": False,
            **({"disk_storage": storage, "vm_home_storage": storage} if target.datastore else {}),
        }
        path = f"{_VM_TEMPLATE_ITEM}/{quote(item.id)}?action=deploy"
        id = self._rest._thd_request("POST", path, {"spec": spec})
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise malformed_answer()
        return "VirtualMachine", id

    def _thd_deploy_ovf(self, item: Item, name: str, target: Target) -> tuple[str, str]:
        spec: dict[str, object] = {"name": name, "accept_all_EULA": False}
        if target.datastore:
            spec["default_datastore_id"] = target.datastore
        where = {"resource_pool_id": target.pool, "folder_id": target.folder}
        if target.host:
            where["host_id"] = target.host
        answer = self._rest._thd_request(
            "POST",
            f"{_OVF_ITEM}/id:{quote(item.id)}?~action=deploy",
            {"deployment_spec": spec, "target": where},
        )
        match answer:
            case {"succeeded": True, "resource_id": {"type": str(kind), "id": str(id)}} if _ID.fullmatch(id):
                return kind, id
            case {"error": {"errors": [dict(first), *_]}}:
                inner = first.get("error")
                error_kind = kind_of(inner.get("@class")) if isinstance(inner, dict) else None
                raise CloudError(
                    error_kind or ErrorKind.INVALID, messages_in(first) or "vCenter gives no reason"
                )
        raise malformed_answer()


def _item(value: object) -> Item:
    match value:
        case {"id": str(id), "name": str(name), **rest} if _ID.fullmatch(id):
            return Item(id, name, str(rest.get("type")), _seconds(rest.get("last_modified_time")))
    raise malformed_answer()


def _seconds(time: object) -> float:
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
