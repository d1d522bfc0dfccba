"""A vCenter's content libraries, over its REST interface, which alone has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

import attrs

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes.providers.cloud.vsphere.rest import Rest, nonsense, trouble_of, words_in

OVF, VM_TEMPLATE = "ovf", "vm-template"  # types of items that are machines

_LIBRARY = "/rest/com/vmware/content/library"
_ITEM = "/rest/com/vmware/content/library/item"
_OVF_ITEM = "/rest/com/vmware/vcenter/ovf/library-item"
_VM_TEMPLATE_ITEM = "/rest/vcenter/vm-template/library-items"
_MAX_NAMESAKES = 16
_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


@attrs.frozen
class Item:
    """One of a library's."""

    id: str
    name: str
    type: str
    modified: float  # seconds since 1970; 0: not known


@attrs.frozen
class Target:
    """Where a VM is deployed, by vCenter's ids. :ivar datastore: "": vCenter chooses."""

    folder: str
    pool: str
    datastore: str = ""


class Library:
    """The libraries of one vCenter."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    def _thd_find(self, name: str) -> str:
        """The id of the library of that name. :raise CloudError: there is none."""
        ids = self._thd_ids(_LIBRARY, {"name": name})
        if len(ids) != 1:
            what = "no library" if not ids else "more than one library"
            raise CloudError(
                Trouble.INVALID,
                f"content_library in providers.vsphere: there is {what} {name!r} that may be seen",
            )
        return ids[0]

    def _thd_item(self, library: str, names: Sequence[str]) -> Item | None:
        """The newest item that is called one of `names`."""
        found = []
        for name in names:
            for id in self._thd_ids(_ITEM, {"library_id": library, "name": name})[:_MAX_NAMESAKES]:
                item = _item(self._rest._thd_value("GET", f"{_ITEM}/id:{quote(id)}"))
                if item.name in names:  # vCenter takes no notice of capitals
                    found.append(item)
        return max(found, key=lambda item: (item.modified, item.id), default=None)

    def _thd_ids(self, path: str, spec: Mapping[str, str]) -> list[str]:
        ids = self._rest._thd_value("POST", f"{path}?~action=find", {"spec": spec})
        if ids is None:
            return []
        if not isinstance(ids, list) or not all(isinstance(id, str) and _ID.fullmatch(id) for id in ids):
            raise nonsense()
        return ids

    def _thd_deploy(self, item: Item, name: str, target: Target) -> tuple[str, str]:
        """Make a VM of an item, and leave it off. Returns the kind and id of what was made.

        :raise CloudError: it was not, unless the answer was lost: `Trouble.PASSING`."""
        if item.type == OVF:
            return self._thd_deploy_ovf(item, name, target)
        storage = {"datastore": target.datastore}
        spec: dict[str, Any] = {
            "name": name,
            "placement": {"folder": target.folder, "resource_pool": target.pool},
            "powered_on": False,
            **({"disk_storage": storage, "vm_home_storage": storage} if target.datastore else {}),
        }
        path = f"{_VM_TEMPLATE_ITEM}/{quote(item.id)}?action=deploy"
        id = self._rest._thd_value("POST", path, {"spec": spec})
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise nonsense()
        return "VirtualMachine", id

    def _thd_deploy_ovf(self, item: Item, name: str, target: Target) -> tuple[str, str]:
        spec = {"name": name, "accept_all_EULA": False}
        if target.datastore:
            spec["default_datastore_id"] = target.datastore
        answer = self._rest._thd_value(
            "POST",
            f"{_OVF_ITEM}/id:{quote(item.id)}?~action=deploy",
            {
                "deployment_spec": spec,
                "target": {"resource_pool_id": target.pool, "folder_id": target.folder},
            },
        )
        match answer:
            case {"succeeded": True, "resource_id": {"type": str(kind), "id": str(id)}} if _ID.fullmatch(id):
                return kind, id
            case {"error": {"errors": [dict(first), *_]}}:
                inner = first.get("error")
                told = inner if isinstance(inner, dict) else {}
                trouble = trouble_of(told.get("@class")) or Trouble.INVALID
                raise CloudError(trouble, words_in(first) or "vCenter does not say why")
        raise nonsense()


def _item(value: Any) -> Item:
    match value:
        case {"id": str(id), "name": str(name)} if _ID.fullmatch(id):
            return Item(id, name, str(value.get("type")), _seconds(value.get("last_modified_time")))
    raise nonsense()


def _seconds(time: object) -> float:
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
