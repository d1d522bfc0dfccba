# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's resources, as far as the provider uses them. No HTTP, no clock.

Source: Compute Engine API reference, v1. Answers are checked against those recorded by libcloud's tests
(tests/infranetes/providers/cloud/gcp/test_gce_simulator.py). Deletions and launches take the time that
`later` gives them; meanwhile there is an operation.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import attrs

from tests.support.clouds import gce_resources as resources
from tests.support.clouds.gce_disks import LABEL, NAME, Disks
from tests.support.clouds.gce_images import Images
from tests.support.clouds.gce_operations import Operations, Refusal, Task
from tests.support.clouds.gce_resources import HERE, NETWORK, PROJECT, REGION, ZONES, Json
from tests.support.clouds.gce_snapshots import Snapshots

IMAGE = "infranetes-guest"
# name (with ! if only the first zone has it), CPUs, MiB, GPUs
TYPES = (
    ("e2-micro", 2, 1024, 0),
    ("e2-small", 2, 2048, 0),
    ("e2-medium", 2, 4096, 0),
    ("e2-standard-2", 2, 8192, 0),
    ("e2-standard-4", 4, 16384, 0),
    ("e2-standard-8!", 8, 32768, 0),
    ("n2-standard-2", 2, 8192, 0),
    ("n2d-standard-2", 2, 8192, 0),
    ("c3-standard-4", 4, 16384, 0),
    ("c3-standard-4-lssd", 4, 16384, 0),
    ("g2-standard-4", 4, 16384, 1),
    ("t2a-standard-1", 1, 4096, 0),
)
_MOST_FILTER = 4096  # characters; it is in the URL
_TERM = re.compile(r'\(?([A-Za-z.0-9_-]+) = "([^"]*)"\)?')


class Gce:
    """One project with its images.

    :param launched: called with each instance that is created; starts its agent, and reports when it runs.
    :param ended: called with each instance that stops executing.
    :ivar start: called with each instance that is to be started, and the operation.
    :ivar changed: called with each instance whose metadata have changed.
    :ivar press: called with each instance that is to be stopped. :ivar console: returns what one has written.
    """

    def __init__(self, launched: Callable[[Json, Task], None], ended: Callable[[str], None]) -> None:
        self._launched = launched
        self._ended = ended
        self.start: Callable[[Json, Task], None] = lambda one, task: self.operations.finish(task)
        self.changed: Callable[[Json], None] = lambda one: None
        self.press: Callable[[str], None] = lambda id: self.stop(*id.split(".", 1))
        self.console: Callable[[str], str] = lambda name: "Welcome to the guest\r\n"
        self.instances: dict[tuple[str, str], Json] = {}
        self._deleted: set[tuple[str, str]] = set()
        self.operations = Operations()
        self.volumes = Disks(self.operations, self.instances, lambda name: self.snapshots.there(name))
        self.snapshots = Snapshots(self.operations, self.volumes)
        self.disks = self.volumes.disks
        self.addresses: dict[str, Json] = {}
        self.images: dict[str, Json] = {}
        self.importing = Images(self.operations, self.images)
        self.meddle = 0  # before how many requests for changes of metadata somebody else changes them
        self.unreachable = ""  # a zone that does not answer
        self.page = 500  # results per page
        self.add_image(IMAGE, family="infranetes")

    # ---- Requests

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Json:
        """Answer a request. :param path: after `/compute/v1/projects/`. :raise Refusal: an error."""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts.pop(0) != PROJECT:
            raise Refusal(404, "notFound", "The resource 'projects/…' was not found")
        match (method, *parts):
            case ("GET", "aggregated", ("instances" | "disks") as kind):
                return self._aggregated(kind, query)
            case ("GET", "global", "images"):
                return self._list("image", self.images.values(), query)
            case ("GET", "global", "images", "family", name):
                found = [one for one in self.images.values() if one.get("family") == name]
                return self._there(max(found, key=lambda one: one["creationTimestamp"], default=None), path)
            case ("POST", "global", "images"):
                return self.importing.insert(query, body)
            case ("DELETE", "global", "images", name):
                return self.importing.delete(self._there(self.images.get(name), path))
            case ("GET", "global", "images", name):
                return self._there(self.images.get(name), path)
            case ("GET", "global", "snapshots"):
                return self._list("snapshot", self.snapshots.snapshots.values(), query)
            case ("GET", "global", "snapshots", name):
                return self.snapshots.there(name)
            case ("DELETE", "global", "snapshots", name):
                return self.snapshots.delete(name)
            case ("GET", "global", "operations", name):
                return self._operation("", name)
            case ("GET", "regions", region, "addresses", name) if region == REGION:
                return self._there(self.addresses.get(name), path)
            case ("GET", "regions", region, "subnetworks", "pods") if region == REGION:
                return resources.subnetwork()
            case (_, "zones", zone, *rest) if zone in ZONES:
                return self._in_zone(method, zone, rest, query, body)
            case (_, "zones", zone, *_):
                raise Refusal(400, "invalid", f"Invalid value for field 'zone': '{zone}'. Unknown zone.")
        raise Refusal(404, "notFound", f"The resource 'projects/{path}' was not found")

    def _in_zone(self, method: str, zone: str, rest: list[str], query: Any, body: Any) -> Json:
        if zone == self.unreachable:
            raise Refusal(503, "backendError", f"Zone {zone} is not reachable")
        found = self.volumes.answer(method, zone, rest, query, body)
        if found is not None:
            return found
        match (method, *rest):
            case ("GET", "disks"):
                mine = [self.disks[key] for key in sorted(self.disks) if key[0] == zone]
                return self._list("disk", mine, query)
            case ("GET", "instances"):
                mine = [self.instances[key] for key in sorted(self.instances) if key[0] == zone]
                return self._list("instance", mine, query)
            case ("GET", "machineTypes"):
                return self._list("machineType", self._types(zone), query)
            case ("POST", "instances"):
                return self._insert(zone, body)
            case ("GET", "instances", name):
                return self._there(self.instances.get((zone, name)), name)
            case ("GET", "instances", name, "serialPort"):
                one = self._there(self.instances.get((zone, name)), name)
                return {
                    "kind": "compute#serialPortOutput",
                    "selfLink": f"{one['selfLink']}/serialPort",
                    "contents": self.console(name),
                }
            case ("POST", "instances", name, "stop"):
                one = self._there(self.instances.get((zone, name)), name)
                one["status"] = "STOPPING"
                self.press(f"{zone}.{name}")
                return self.operations.begin(zone, "stop", one).answer
            case ("POST", "instances", name, "start"):
                one = self._there(self.instances.get((zone, name)), name)
                task = self.operations.begin(zone, "start", one)
                self.start(one, task)
                return task.answer
            case ("POST", "instances", name, "setMetadata"):
                return self._set_metadata(self._there(self.instances.get((zone, name)), name), zone, body)
            case ("DELETE", "instances", name):
                return self._delete(self._there(self.instances.get((zone, name)), name), zone)
            case ("GET", "operations"):
                mine = [task.answer for task in self.operations.tasks.values() if task.zone == zone]
                return self._list("operation", mine, query)
            case ("GET", "operations", name):
                return self._operation(zone, name)
            case ("POST", "disks", name, "createSnapshot"):
                return self.snapshots.create(self.volumes.there(zone, name), zone, body)
        raise Refusal(404, "notFound", f"The resource '{'/'.join(rest)}' was not found")

    @staticmethod
    def _there(found: Json | None, name: str) -> Json:
        if found is None:
            raise Refusal(404, "notFound", f"The resource '{name}' was not found")
        return found

    def _operation(self, zone: str, name: str) -> Json:
        task = self.operations.tasks.get(name)
        return self._there(task.answer if task is not None and task.zone == zone else None, name)

    # ---- Lists

    def _list(self, kind: str, found: Any, query: dict[str, str]) -> Json:
        wanted = _filter(query.get("filter", ""))
        items, token = self._paged([one for one in found if wanted.fits(one)], query)
        plural = {"image": "images"}.get(kind, f"{kind}s")
        answer: Json = {"kind": f"compute#{kind}List", "id": f"projects/{PROJECT}/{plural}"}
        answer["selfLink"] = f"{HERE}/{plural}"
        return {**answer, **({"items": items} if items else {}), **token}

    def _aggregated(self, kind: str, query: dict[str, str]) -> Json:
        all_of = self.instances if kind == "instances" else self.disks
        wanted = _filter(query.get("filter", ""))
        keys = [key for key in sorted(all_of) if wanted.fits(all_of[key])]
        shown, token = self._paged(keys, query)
        scopes: Json = {}
        for zone in ZONES:
            mine = [all_of[key] for key in shown if key[0] == zone]
            nothing: Json = {
                "code": "NO_RESULTS_ON_PAGE",
                "data": [{"key": "scope", "value": f"zones/{zone}"}],
                "message": f"There are no results for scope 'zones/{zone}' on this page.",
            }
            if zone == self.unreachable:
                mine, nothing["code"] = [], "UNREACHABLE"
            scopes[f"zones/{zone}"] = {kind: mine} if mine else {"warning": nothing}
        return {
            "kind": f"compute#{kind[:-1]}AggregatedList",
            "id": f"projects/{PROJECT}/aggregated/{kind}",
            "selfLink": f"{HERE}/aggregated/{kind}",
            "items": scopes,
            **token,
        }

    def _paged(self, found: list[Any], query: dict[str, str]) -> tuple[list[Any], dict[str, str]]:
        start, most = int(query.get("pageToken", "0")), min(int(query.get("maxResults", "500")), self.page)
        more = {"nextPageToken": str(start + most)} if len(found) > start + most else {}
        return found[start : start + most], more

    # ---- Resources that exist from the start

    def add_image(self, name: str, **fields: Any) -> None:
        """Add an image. :param fields: other values than the usual ones."""
        self.images[name] = resources.image(name, **fields)

    def add_address(self, name: str) -> None:
        """Add a reserved address."""
        self.addresses[name] = resources.address(name)

    def add_disk(self, zone: str, name: str, labels: dict[str, str], gib: str = "10") -> Json:
        """Add an unused disk."""
        return self.volumes.add(zone, name, labels, gib)

    def _types(self, zone: str) -> list[Json]:
        return [
            resources.machine_type(zone, name.removesuffix("!"), *figures)
            for name, *figures in TYPES
            if not name.endswith("!") or zone == ZONES[0]
        ]

    # ---- Instances

    def _insert(self, zone: str, body: Json) -> Json:
        self._check(zone, body)
        name = body["name"]
        if (zone, name) in self.instances:
            link = f"projects/{PROJECT}/zones/{zone}/instances/{name}"
            raise Refusal(409, "alreadyExists", f"The resource '{link}' already exists")
        self.volumes.check_launch(zone, body)
        one = self._instance(zone, body)
        task = self.operations.begin(zone, "insert", one)
        asked = dict(task.answer)
        self.instances[zone, name] = one
        self.volumes.launched_with(zone, one, body)
        self._launched(one, task)
        return asked

    def _check(self, zone: str, body: Json) -> None:
        """Refuse what Google refuses at once."""
        kind = body["machineType"].rpartition("/")[2]
        source = body["disks"][0]["initializeParams"]["sourceImage"]
        subnetwork = body["networkInterfaces"][0].get("subnetwork", "")
        wrong = {
            "name": not NAME.fullmatch(body["name"]),
            "machineType": kind not in [one["name"] for one in self._types(zone)],
            "image": source.rpartition("/")[2] not in {*self.images, "infranetes"},
            "labels": not all(LABEL.fullmatch(each) for each in body["labels"].values()),
            "subnetwork": not subnetwork.endswith(f"regions/{REGION}/subnetworks/pods"),
            "disks": int(body["disks"][0]["initializeParams"].get("diskSizeGb", "10")) < 10,
            "tags": not all(NAME.fullmatch(each) for each in body["tags"].get("items", [])),
        }
        wrong["confidentialInstanceConfig"] = self._is_wrongly_confidential(kind, source, body)
        if wrong.pop("image"):
            field = "resource.disks[0].initializeParams.sourceImage"
            words = "The referenced image resource cannot be found."
            raise Refusal(400, "invalid", f"Invalid value for field '{field}': '{source}'. {words}")
        for field, is_wrong in wrong.items():
            if is_wrong:
                raise Refusal(400, "invalid", f"Invalid value for field 'resource.{field}'")

    def _is_wrongly_confidential(self, kind: str, source: str, body: Json) -> bool:
        """Whether Google refuses a confidential VM for its type, its platform, its image, or as it would move
        to other hosts."""
        technology = body.get("confidentialInstanceConfig", {}).get("confidentialInstanceType")
        if technology is None:
            return False
        family, platform = {"SEV_SNP": ("n2d-", "AMD Milan"), "TDX": ("c3-standard-", None)}[technology]
        features = self.images.get(source.rpartition("/")[2], {}).get("guestOsFeatures", ())
        return (
            not kind.startswith(family)
            or kind.endswith("-lssd")
            or body.get("minCpuPlatform") != platform
            or f"{technology}_CAPABLE" not in [each["type"] for each in features]
            or body["scheduling"]["onHostMaintenance"] != "TERMINATE"
        )

    def _instance(self, zone: str, body: Json) -> Json:
        taken = {one["networkInterfaces"][0].get("networkIP") for one in self.instances.values()}
        address = ""
        while not address or address in taken:
            address = str(NETWORK[256 + secrets.randbelow(60000)])
        return resources.instance(zone, body, address)

    def going(self) -> set[str]:
        """Return descriptions of the instances that are being deleted, and of the disks that go with them."""
        found = set()
        for zone, name in set(self._deleted):
            one = self.instances.get((zone, name))
            if one is not None and one["status"] == "STOPPING":
                disks = [each for each in one["disks"] if each.get("autoDelete")]
                found |= {f"instance {zone}.{name}"}
                found |= {f"disk {zone}.{each['source'].rpartition('/')[2]}" for each in disks}
        return found

    def ignore_delete(self, zone: str, name: str) -> Json:
        """Return the answer to a deletion that fails later."""
        task = self.operations.begin(zone, "delete", self._there(self.instances.get((zone, name)), name))
        asked = dict(task.answer)
        self.operations.finish(task, "INTERNAL_ERROR", "Internal error")
        return asked

    def _delete(self, one: Json, zone: str) -> Json:
        task = self.operations.begin(zone, "delete", one)
        asked = dict(task.answer)
        one["status"] = "STOPPING"
        self._deleted.add((zone, one["name"]))
        self._ended(one["name"])

        def gone() -> None:
            self.remove(zone, one["name"])
            self.operations.finish(task)

        self.operations.later(gone)
        return asked

    def _set_metadata(self, one: Json, zone: str, body: Json) -> Json:
        if self.meddle:
            self.meddle -= 1
            items = [each for each in one["metadata"]["items"] if each["key"] != "meddled"]
            items.append({"key": "meddled", "value": "yes"})
            one["metadata"] = {**one["metadata"], "fingerprint": secrets.token_hex(6), "items": items}
        if body.get("fingerprint", "") != one["metadata"]["fingerprint"]:
            raise Refusal(412, "conditionNotMet", "Supplied fingerprint does not match current metadata")

        def change() -> None:
            one["metadata"] = {
                "kind": "compute#metadata",
                "fingerprint": secrets.token_hex(6) + "==",
                "items": body["items"],
            }
            self.changed(one)

        return self.operations.run(zone, "setMetadata", one, change)

    def remove(self, zone: str, name: str) -> None:
        """Remove an instance with the disks that go with it."""
        one = self.instances.pop((zone, name), None)
        if one is not None:
            self.volumes.instance_gone(zone, one)

    def stop(self, zone: str, name: str, why: str = "stop") -> None:
        """Stop an instance, on request or as Google preempts it."""
        one = self.instances[zone, name]
        one["status"] = "TERMINATED"
        self._ended(name)
        self.operations.finish(self.operations.begin(zone, why, one))


@attrs.frozen
class _Filter:
    """A filter of equalities, of which all or any have to hold."""

    any_does: bool
    terms: tuple[tuple[str, str], ...]

    def fits(self, resource: Json) -> bool:
        labels = resource.get("labels") or {}
        has = {**resource, **{f"labels.{key}": value for key, value in labels.items()}}
        outcomes = [has.get(key) == wanted for key, wanted in self.terms]
        return any(outcomes) if self.any_does else all(outcomes)


def _filter(expression: str) -> _Filter:
    """Return a request's filter. :raise Refusal: it is more than equalities joined by AND, or by OR."""
    any_does = " OR " in expression
    terms = expression.split(" OR " if any_does else " AND ") if expression else []
    found = [_TERM.fullmatch(term) for term in terms]
    if None in found or len(expression) > _MOST_FILTER:
        raise Refusal(400, "invalid", f"Invalid value for field 'filter': '{expression}'")
    return _Filter(any_does, tuple((term[1], term[2]) for term in found if term))
