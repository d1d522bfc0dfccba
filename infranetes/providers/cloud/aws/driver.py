"""libcloud's EC2 driver, with what it lacks or has wrong.

- `create_node` has no argument for the metadata service's settings or for the tags of disks:
  `_Connection.adding` puts such parameters beside its own.
- It sends everything as a GET, so user-data, which for us holds a key, would be in a URL and so in the
  logs of what is between: requests are POSTed.
- It ignores `nextToken`, so long lists end early: all pages are asked for.
- `list_nodes` also asks for addresses, naming each instance in a filter, which EC2 allows for 200 of
  them: the instances' own answer has the addresses already.
- A node lacks the reason of its state, an image its root disk's name and its disks' sizes; when it was made
  is text or a date, by libcloud's release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from libcloud.compute.drivers.ec2 import NAMESPACE, EC2Connection, EC2NodeDriver
from libcloud.utils.xml import fixxpath

_MAX_PAGES = 100
_FORM = "application/x-www-form-urlencoded; charset=utf-8"


class Connection(EC2Connection):  # type: ignore[misc]
    """Requests as forms, answers whole."""

    _additions: Mapping[str, str] = {}

    @contextmanager
    def adding(self, parameters: Mapping[str, str]) -> Iterator[None]:
        """Every request meanwhile has these parameters too."""
        self._additions = parameters
        try:
            yield
        finally:
            self._additions = {}

    def request(self, action: str, params: Any = None, **options: Any) -> Any:
        form = {**(params or {}), **self._additions}
        answer = self._post(action, form)
        token = _text(answer.object, "nextToken")
        for _ in range(_MAX_PAGES):
            if not token:
                break
            more = self._post(action, {**form, "NextToken": token}).object
            for part in more:
                if len(part):
                    mine = answer.object.find(part.tag)
                    if mine is None:
                        answer.object.append(part)
                    else:
                        mine.extend(list(part))
            token = _text(more, "nextToken")
        return answer

    def _post(self, action: str, form: Mapping[str, Any]) -> Any:
        everything = {**form, "Version": self.version}
        body = "&".join(
            f"{quote(str(key), safe='')}={quote(str(value), safe='')}" for key, value in everything.items()
        )
        return super().request(
            action, data=body, headers={"Content-Type": _FORM}, method="POST", retry_failed=False
        )


class Driver(EC2NodeDriver):  # type: ignore[misc]
    """One thread's."""

    connectionCls = Connection
    connection: Connection
    infranetes_keys: Any

    def ex_describe_addresses(self, nodes: Any) -> dict[str, list[str]]:
        return {node.id: [] for node in nodes}

    def _to_node(self, element: Any) -> Any:
        node = super()._to_node(element)
        node.extra["state_reason"] = _text(element, "stateReason/message")
        return node

    def _to_image(self, element: Any) -> Any:
        image = super()._to_image(element)
        name = image.extra["root_device_name"] = _text(element, "rootDeviceName")
        disks = {
            _text(disk, "deviceName"): int(_text(disk, "ebs/volumeSize") or 0)
            for disk in items(element, "blockDeviceMapping/item")
        }
        image.extra["root_disk_gib"] = disks.get(name, 0)
        image.extra["disks_gib"] = sum(disks.values())
        image.extra["created"] = _text(element, "creationDate")  # ISO 8601, so it sorts
        return image

    def ask(self, action: str, **parameters: str) -> Any:
        """What EC2 answers to an action that libcloud has no method for.

        :param parameters: `__` in a name stands for a point."""
        form = {"Action": action, **{key.replace("__", "."): value for key, value in parameters.items()}}
        return self.connection.request(self.path, params=form).object


def _text(element: Any, path: str) -> str:
    found = element.find(fixxpath(path, namespace=NAMESPACE)) if element is not None else None
    return (found.text or "") if found is not None else ""


def text(element: Any, path: str) -> str:
    """The text at a path of EC2's names; "" where there is none."""
    return _text(element, path)


def items(element: Any, path: str) -> list[Any]:
    """The elements at a path of EC2's names."""
    return list(element.findall(fixxpath(path, namespace=NAMESPACE)))
