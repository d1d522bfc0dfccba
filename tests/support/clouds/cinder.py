# SPDX-License-Identifier: Apache-2.0
"""A simulated Cinder's volumes and snapshots, and Nova's attachments of them. No HTTP, no clock.

Sources: Block Storage API v3 and Compute API; the conditions and messages in cinder/volume/api.py and
nova/compute/api.py.

A volume's status    next
creating             available, error
available            reserved, extending, deleting
reserved             attaching                       its attachment says for which server
attaching            in-use, available: the server's host has failed to attach it
in-use               detaching, extending
detaching            available, in-use: the guest keeps it
extending            what it was before, or error_extending; of a quota: what it was before
deleting             gone, error_deleting, available: its backend finds it busy
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from tests.support.clouds import cinder_resources as resources
from tests.support.clouds.nova_resources import PROJECT, ZONES, Json, new_id
from tests.support.clouds.openstack_refusals import Refusal

DEFAULT_ZONE = ZONES[1]  # in which volumes are made without being told where
TYPES = ("__DEFAULT__", "fast", "shared")  # the last one is for several servers at once
MOST_DISKS = 26  # of a server, its root disk among them
_DELETABLE = ("available", "error", "error_restoring", "error_extending", "error_managing")
_ATTACHABLE = ("ACTIVE", "PAUSED", "SHUTOFF")  # servers' statuses


class Cinder:
    """A project's volumes.

    :param servers: Nova's. :ivar later: calls what it is given when the next step of something is due.
    :ivar appeared: calls what it is given when lists and look-ups show a new volume or snapshot.
    :ivar failing: by an action, what becomes of a volume or snapshot once: its status, and words for users.
    :ivar contents: the first bytes of volumes and snapshots, by their ids; others are all zeros.
    :ivar limits: the project's. :ivar cross_zone: Nova's cross_az_attach. :ivar page: the most in a list.
    """

    def __init__(self, servers: dict[str, Json], project: str = PROJECT) -> None:
        self._servers = servers
        self._project = project
        self.later: Callable[[Callable[[], None]], None] = lambda step: step()
        self.appeared: Callable[[Callable[[], None]], None] = lambda step: step()
        self.volumes: dict[str, Json] = {}
        self.snapshots: dict[str, Json] = {}
        self.attachments: dict[str, Json] = {}
        self.messages: list[Json] = []
        self.failing: dict[str, tuple[str, str]] = {}
        self.contents: dict[str, bytes] = {}
        self.limits = {"volumes": 1000, "snapshots": 1000, "gigabytes": 1 << 20}
        self.cross_zone = True
        self.page = 1000
        self._hidden: set[str] = set()

    # ---- From outside

    def add(self, gib: int = 20, zone: str = ZONES[0], **fields: object) -> str:
        """Make a volume, as a user would, and return its id."""
        made = resources.volume({}, gib, TYPES[0], zone, self._project) | {"status": "available"} | fields
        self.volumes[made["id"]] = made
        return str(made["id"])

    def holders(self, volume: str) -> list[str]:
        """Return the servers that have a volume."""
        return [one["instance"] for one in self._attachments(volume) if one["status"] == "attached"]

    def server_gone(self, server: str) -> None:
        """Take all volumes from a server that is being deleted."""
        for id, attachment in list(self.attachments.items()):
            if attachment["instance"] == server:
                self.later(lambda id=id: self._released(id))  # type: ignore[misc]

    # ---- Cinder

    def answer(self, method: str, path: str, query: Mapping[str, str], body: Json) -> Json | None:
        """Answer a request. :raise Refusal: an error."""
        match (method, *path.strip("/").split("/")):
            case ("GET", "volumes", "detail"):
                found = self._listed("volumes", self.volumes, query)
                return found | {"volumes": [self._shown(one) for one in found["volumes"]]}
            case ("GET", "volumes", id):
                return {"volume": self._shown(self._there("Volume", self.volumes, id))}
            case ("POST", "volumes"):
                return {"volume": self._shown(self._create(body["volume"]))}
            case ("DELETE", "volumes", id):
                self._delete(self._there("Volume", self.volumes, id))
                return None
            case ("POST", "volumes", id, "action"):
                self._extend(self._there("Volume", self.volumes, id), body["os-extend"]["new_size"])
                return None
            case ("GET", "snapshots", "detail"):
                return self._listed("snapshots", self.snapshots, query)
            case ("GET", "snapshots", id):
                return {"snapshot": dict(self._there("Snapshot", self.snapshots, id))}
            case ("POST", "snapshots"):
                return {"snapshot": self._take(body["snapshot"])}
            case ("DELETE", "snapshots", id):
                self._delete_snapshot(self._there("Snapshot", self.snapshots, id))
                return None
            case ("GET", "attachments"):
                return {"attachments": self._attachments(query["volume_id"])}
            case ("GET", "messages"):
                about = [one for one in self.messages if one["resource_uuid"] == query["resource_uuid"]]
                return {"messages": about[::-1]}
            case ("GET", "limits"):
                return {"limits": {"rate": [], "absolute": self._limits()}}
        raise Refusal(404, "The resource could not be found.")

    def _listed(self, kind: str, every: Mapping[str, Json], query: Mapping[str, str]) -> Json:
        """Return a page of a list, the latest first. Names are compared without their case, as MySQL does."""
        wanted = ast.literal_eval(query.get("metadata", "{}"))
        found = [
            one
            for id, one in reversed(list(every.items()))
            if id not in self._hidden
            and all(one["metadata"].get(key) == value for key, value in wanted.items())
            and str(one["name"]).lower() == query.get("name", str(one["name"])).lower()
            and one.get("volume_id") == query.get("volume_id", one.get("volume_id"))
        ]
        begin = [one["id"] for one in found].index(query["marker"]) + 1 if "marker" in query else 0
        page = found[begin : begin + self.page]
        more = (
            {f"{kind}_links": [{"rel": "next", "href": "unused"}]} if begin + self.page < len(found) else {}
        )
        return {kind: page, **more}

    def _there(self, kind: str, every: Mapping[str, Json], id: str) -> Json:
        if id not in every or id in self._hidden:
            raise Refusal(404, f"{kind} {id} could not be found.")
        return every[id]

    def _shown(self, volume: Json) -> Json:
        """Return a volume as Cinder shows it: with complete attachments alone."""
        attached = [
            {
                "id": volume["id"],
                "attachment_id": one["id"],
                "volume_id": volume["id"],
                "server_id": one["instance"],
                "host_name": None,
                "device": "/dev/vdb",
                "attached_at": resources.now(),
            }
            for one in self._attachments(volume["id"])
            if one["status"] == "attached"
        ]
        return volume | {"attachments": attached}

    def _attachments(self, volume: str) -> list[Json]:
        return [one for one in list(self.attachments.values()) if one["volume_id"] == volume]

    def _create(self, asked: Json) -> Json:
        size, wanted = int(asked["size"]), asked.get("volume_type") or ""
        kind = wanted or TYPES[0]
        zone = str(asked.get("availability_zone") or "")
        if kind not in TYPES:
            raise Refusal(404, f"Volume type with name {kind} could not be found.")
        origin = self._origin(asked, size)
        if origin is not None:
            of = self.volumes.get(str(origin.get("volume_id", origin["id"])), origin)
            kind, there = of.get("volume_type", kind), str(of.get("availability_zone", DEFAULT_ZONE))
            if wanted not in ("", kind):
                words = (
                    f"Invalid volume_type provided: {wanted} (requested type is not compatible; either match"
                )
                raise Refusal(400, f"Invalid input received: {words} source volume, or omit type argument).")
            if zone not in ("", there):
                words = "Volume must be in the same availability zone as the snapshot"
                raise Refusal(400, f"Invalid input received: {words}")
            zone = there
        if zone not in ("", *ZONES):
            raise Refusal(400, f"Availability zone '{zone}' is invalid.")
        self._check_room("volumes", len(self.volumes), size)
        made = resources.volume(asked, size, str(kind), zone or DEFAULT_ZONE, self._project)
        made["multiattach"] = kind == "shared"
        self._appear(self.volumes, made)
        self.contents[made["id"]] = self.contents.get(origin["id"], b"") if origin is not None else b""
        self._step("create", made, "available")
        return made

    def _origin(self, asked: Json, size: int) -> Json | None:
        """Return the snapshot or volume that a volume is made from."""
        if asked.get("snapshot_id"):
            found, ready = self._there("Snapshot", self.snapshots, asked["snapshot_id"]), ["available"]
        elif asked.get("source_volid"):
            found, ready = self._there("Volume", self.volumes, asked["source_volid"]), ["available", "in-use"]
        else:
            return None
        if found["status"] not in ready:
            raise Refusal(400, f"Invalid volume: Originating status must be one of {', '.join(ready)}")
        if size < found["size"]:
            words = f"Volume size '{size}'GB cannot be smaller than the size {found['size']}GB of its source"
            raise Refusal(400, f"Invalid input received: {words}. They must be >= original volume size.")
        return found

    def _appear(self, every: dict[str, Json], made: Json) -> None:
        every[made["id"]] = made
        self._hidden.add(made["id"])
        self.appeared(lambda: self._hidden.discard(made["id"]))

    def _step(self, action: str, one: Json, status: str, done: Callable[[], None] = lambda: None) -> None:
        """Have a volume or snapshot reach a status at the next step, or another one if the action fails."""

        def reached() -> None:
            failed, words = self.failing.pop(action, ("", ""))
            one["status"], one["updated_at"] = failed or status, resources.now()
            if not failed:
                done()
            elif words:
                self.messages.append(resources.message(one["id"], words))

        self.later(reached)

    def _check_room(self, kind: str, count: int, gib: int) -> None:
        if 0 <= self.limits[kind] <= count:
            words = f"Maximum number of {kind} allowed ({self.limits[kind]}) exceeded"
            raise Refusal(413, words + (" for quota 'volumes'." if kind == "volumes" else ""))
        used = self._limits()["totalGigabytesUsed"]
        if 0 <= self.limits["gigabytes"] < used + gib:
            raise Refusal(
                413,
                "Requested volume or snapshot exceeds allowed gigabytes quota. "
                f"Requested {gib}G, quota is {self.limits['gigabytes']}G and {used}G has been consumed.",
            )

    def _limits(self) -> Json:
        gib = sum(one["size"] for every in (self.volumes, self.snapshots) for one in every.values())
        return {
            "maxTotalVolumes": self.limits["volumes"],
            "maxTotalSnapshots": self.limits["snapshots"],
            "maxTotalVolumeGigabytes": self.limits["gigabytes"],
            "totalVolumesUsed": len(self.volumes),
            "totalSnapshotsUsed": len(self.snapshots),
            "totalGigabytesUsed": gib,
        }

    def _delete(self, volume: Json) -> None:
        snapshots = [one for one in self.snapshots.values() if one["volume_id"] == volume["id"]]
        if volume["status"] not in _DELETABLE or snapshots or self._attachments(volume["id"]):
            raise Refusal(
                400,
                f"Invalid volume: Volume status must be {' or '.join(_DELETABLE)} and must not be migrating, "
                "attached, belong to a group, have snapshots, awaiting a transfer, or be disassociated from "
                "snapshots after volume transfer.",
            )
        volume["status"] = "deleting"
        self._step("delete", volume, "deleting", lambda: self._forget(self.volumes, volume))

    @staticmethod
    def _forget(every: dict[str, Json], one: Json) -> None:
        every.pop(one["id"], None)

    def _extend(self, volume: Json, size: int) -> None:
        before, old = volume["status"], volume["size"]
        if size <= old:
            words = (
                f"New size for extend must be greater than current size. (current: {old}, extended: {size})."
            )
            raise Refusal(400, f"Invalid input received: {words}")
        if before not in ("available", "in-use"):
            words = f"Volume {volume['id']} status must be 'available' to extend, currently {before}."
            raise Refusal(400, f"Invalid volume: {words}")
        self._check_room("volumes", 0, size - old)
        volume["status"] = "extending"
        self._step("extend", volume, before, lambda: volume.update(size=size))

    # ---- Snapshots

    def _take(self, asked: Json) -> Json:
        volume = self._there("Volume", self.volumes, asked["volume_id"])
        allowed = ("available", "in-use") if asked.get("force") else ("available",)
        if volume["status"] not in allowed:
            words = f"Volume {volume['id']} status must be {', '.join(allowed)}, but current status is: "
            raise Refusal(400, f"Invalid volume: {words}{volume['status']}.")
        self._check_room("snapshots", len(self.snapshots), volume["size"])
        taken = resources.snapshot(asked, volume["size"], self._project)
        self._appear(self.snapshots, taken)
        self.contents[taken["id"]] = self.contents.get(volume["id"], b"")
        self._step("take", taken, "available")
        return dict(taken)

    def _delete_snapshot(self, snapshot: Json) -> None:
        if snapshot["status"] not in ("available", "error"):
            words = "Snapshot status must be available or error and must not be part of a group."
            raise Refusal(400, f"Invalid snapshot: {words}")
        snapshot["status"] = "deleting"
        self._step("delete snapshot", snapshot, "deleting", lambda: self._forget(self.snapshots, snapshot))

    # ---- Nova

    def attach(self, server: Json, asked: Json) -> Json:
        """Ask for a volume to be given to a server. :raise Refusal: it can't be."""
        volume = self._there("Volume", self.volumes, asked["volumeId"])
        id, status = volume["id"], volume["status"]
        _check_state(server, "attach_volume")
        has = [one for one in self.attachments.values() if one["instance"] == server["id"]]
        if any(one["volume_id"] == id for one in has):
            raise Refusal(400, f"Invalid volume: volume {id} already attached")
        if status != "available" and not (volume["multiattach"] and status == "in-use"):
            words = "status must be available or downloading to reserve, but the current status is"
            raise Refusal(400, f"Invalid volume: Volume {id} {words} {status}.")
        zone = server["OS-EXT-AZ:availability_zone"]
        if not self.cross_zone and zone != volume["availability_zone"]:
            words = f"Instance {server['id']} and volume {id} are not in the same availability_zone."
            where = f"Instance is in {zone}. Volume is in {volume['availability_zone']}"
            raise Refusal(400, f"Invalid volume: {words} {where}")
        if len(has) + 1 >= MOST_DISKS:
            words = (
                f"The maximum allowed number of disk devices ({MOST_DISKS}) to attach to a single instance"
            )
            raise Refusal(403, f"{words} has been exceeded.")
        attachment = {"id": new_id(), "instance": server["id"], "volume_id": id, "status": "reserved"}
        self.attachments[attachment["id"]] = attachment
        volume["status"] = "reserved"
        self.later(lambda: self._attaching(volume, attachment))
        return {"id": id, "volumeId": id, "serverId": server["id"], "device": "/dev/vdb"}

    def _attaching(self, volume: Json, attachment: Json) -> None:
        if attachment["id"] not in self.attachments:
            return
        attachment["status"] = volume["status"] = "attaching"
        self.later(lambda: self._attached(volume, attachment))

    def _attached(self, volume: Json, attachment: Json) -> None:
        if attachment["id"] not in self.attachments:
            return
        if "attach" in self.failing:  # the host undoes what Nova has asked Cinder for
            del self.failing["attach"]
            self._released(attachment["id"])
            return
        attachment["status"], volume["status"] = "attached", "in-use"

    def detach(self, server: Json, id: str) -> None:
        """Ask for a volume to be taken from a server. :raise Refusal: it can't be."""
        volume = self._there("Volume", self.volumes, id)
        found = [one for one in self._attachments(id) if one["instance"] == server["id"]]
        if not found:
            raise Refusal(404, f"volume_id not found: {id}")
        _check_state(server, "detach_volume")
        if volume["status"] != "in-use":
            words = (
                "Unable to detach volume. Volume status must be 'in-use' and attach_status must be 'attached'"
            )
            raise Refusal(400, f"Invalid volume: Invalid input received: Invalid volume: {words} to detach.")
        volume["status"] = "detaching"
        self.later(lambda: self._detached(volume, found[0]["id"]))

    def _detached(self, volume: Json, attachment: str) -> None:
        if "detach" in self.failing:  # the guest does not let it go
            del self.failing["detach"]
            volume["status"] = "in-use"
            return
        self._released(attachment)

    def _released(self, attachment: str) -> None:
        found = self.attachments.pop(attachment, None)
        volume = self.volumes.get(found["volume_id"]) if found is not None else None
        if volume is not None and not self._attachments(volume["id"]):
            volume["status"] = "available"


def _check_state(server: Json, method: str) -> None:
    if server["status"] not in _ATTACHABLE or server["OS-EXT-STS:task_state"]:
        state = server["OS-EXT-STS:vm_state"]
        raise Refusal(409, f"Cannot '{method}' instance {server['id']} while it is in vm_state {state}")
