# SPDX-License-Identifier: Apache-2.0
"""Azure Resource Manager's resources, as far as the provider uses them. No HTTP, no clock.

Source: Azure REST API, Compute and Network. Requests and answers are held to Azure's models. Launches and
deletions take the time that `later` gives them; meanwhile there is an operation.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from tests.support.clouds import azure_resources as resources
from tests.support.clouds.azure_disks import Disks
from tests.support.clouds.azure_operations import Answer, Operations, Refusal
from tests.support.clouds.azure_resources import GROUP, LOCATION, NETWORK, SIZES, SUBNET, Json

_KINDS = {  # of resources, by the name in their ids
    "virtualMachines": "Microsoft.Compute",
    "disks": "Microsoft.Compute",
    "snapshots": "Microsoft.Compute",
    "networkInterfaces": "Microsoft.Network",
    "publicIPAddresses": "Microsoft.Network",
}


class Arm(Operations):
    """One resource group with its images.

    :param launched: called with each VM that is created, its operation and the request; starts its agent, and
        reports when it runs. :param ended: called with each VM that stops executing.
    :ivar page: the length of lists' pages. :ivar disks: those of volumes, and snapshots.
    :ivar restarted: called with each VM that runs again.
    :ivar press: called with each VM whose system is to power off; has `stop` called.
    :ivar console_link: returns the link to what a VM has written to its serial port.
    """

    def __init__(self, launched: Callable[[Json, str, Json], None], ended: Callable[[str], None]) -> None:
        super().__init__()
        self._launched = launched
        self._ended = ended
        self.page = 500
        self.endpoint = ""
        self.of: dict[str, dict[str, Json]] = {kind: {} for kind in _KINDS}  # resources, by kind and name
        self.disks = Disks(self, self.of)
        self.power: dict[str, str] = {}  # of VMs, by name
        self.user_data: dict[str, str] = {}  # of VMs
        self.full: tuple[str, str] = ("", "")  # the error with which starts fail; ("", ""): they don't
        self.restarted: Callable[[str], None] = lambda name: None
        self.press: Callable[[str], None] = self.stop
        self.console_link: Callable[[str], str] = lambda name: ""
        self._powering_off: dict[str, str] = {}  # operations, by VMs' names
        self.failures: dict[str, Json] = {}  # of VMs
        self.images: dict[str, Json] = {}  # by id, as versions
        self.versions: dict[str, Json] = {}
        self.reserved: set[str] = set()  # names of interfaces that can't be deleted yet

    # ---- Requests

    def answer(self, method: str, path: str, query: dict[str, str], body: Any, once: bool) -> Answer:
        """Serve a request. :param once: it must not change what exists. :raise Refusal: it is refused."""
        match (method, *path.strip("/").split("/")):
            case ("GET", "subscriptions", _, "providers", "Microsoft.Compute", "skus"):
                return self._list(resources.skus(), path, query)
            case ("GET", "subscriptions", _, "providers", "Microsoft.Compute", "virtualMachines"):
                return self._list(
                    [self._status(vm) for vm in self.of["virtualMachines"].values()], path, query
                )
            case (
                "GET",
                "subscriptions",
                _,
                "providers",
                _,
                "locations",
                _,
                "operations" | "DiskOperations",
                name,
            ):
                return self.shown(name, query)
            case ("GET", "subscriptions", _, "resourceGroups", group, "resources") if group == GROUP:
                return self._list(self._tagged(query), path, query)
            case (_, "subscriptions", _, "resourceGroups", group, "providers", *rest) if group == GROUP:
                return self._in_group(method, path, rest, query, body, once)
        raise Refusal(404, "ResourceGroupNotFound", f"{path} could not be found.")

    def _in_group(
        self, method: str, path: str, rest: list[str], query: dict[str, str], body: Any, once: bool
    ) -> Answer:
        match (method, *rest):
            case ("GET", "Microsoft.Compute", "galleries", _, "images"):
                return self._list(self._below(self.images, path), path, query)
            case ("GET", "Microsoft.Compute", "galleries", _, "images", _):
                return Answer(200, self._there(self.images.get(path), path))
            case ("GET", "Microsoft.Compute", "galleries", _, "images", _, "versions"):
                return self._list(self._below(self.versions, path), path, query)
            case ("GET", "Microsoft.Compute", "galleries", _, "images", _, "versions", _):
                return Answer(200, self._there(self.versions.get(path), path))
            case ("GET", "Microsoft.Network", "virtualNetworks", *_) if path == SUBNET:
                return Answer(200, resources.subnet())
            case ("POST", "Microsoft.Compute", "virtualMachines", name, "retrieveBootDiagnosticsData"):
                self._there(self.of["virtualMachines"].get(name), name)
                return Answer(200, {"serialConsoleLogBlobUri": self.console_link(name)})
            case ("GET", _, kind) if kind in self.of:
                listed = [one for name, one in self.of[kind].items() if name not in self.disks.hidden]
                return self._list(listed, path, query)
            case ("POST", _, "virtualMachines", name, ("start" | "powerOff" | "deallocate") as action):
                return self._change_power(self._there(self.of["virtualMachines"].get(name), name), action)
            case ("POST", _, "virtualMachines", name, "attachDetachDataDisks"):
                return self.disks.change_vm(self._there(self.of["virtualMachines"].get(name), name), body)
            case ("PUT", _, "disks" | "snapshots" as kind, name):
                return self.disks.put(kind, name, body)
            case ("PATCH", _, "disks", name):
                return self.disks.change(name, body)
            case ("PATCH", _, "virtualMachines", name):
                return self._change_user_data(self._there(self.of["virtualMachines"].get(name), name), body)
            case ("GET", _, "virtualMachines", name) if query.get("$expand") == "userData":
                vm = self._there(self.of["virtualMachines"].get(name), name)
                shown = {**vm["properties"], "userData": self.user_data.get(name)}
                return Answer(200, {**vm, "properties": shown})
            case ("GET", _, "virtualMachines", name):
                vm = self._there(self.of["virtualMachines"].get(name), name)
                return Answer(200, self._status(vm) if query.get("$expand") == "instanceView" else vm)
            case ("GET", _, kind, name) if kind in self.of:
                return Answer(200, self._there(self.of[kind].get(name), name))
            case ("PUT", _, "virtualMachines", name):
                return self._create_vm(name, body, once)
            case ("PUT", _, "networkInterfaces", name):
                return self._create_nic(name, body)
            case ("PUT", _, "publicIPAddresses", name):
                made = self.of["publicIPAddresses"].get(name) or resources.address(name, body, "203.0.113.5")
                self.of["publicIPAddresses"][name] = made
                return Answer(201, made)
            case ("DELETE", _, kind, name) if kind in self.of:
                return self._delete(kind, name)
        raise Refusal(404, "ResourceNotFound", f"The Resource '{path}' was not found.")

    @staticmethod
    def _there(found: Json | None, name: str) -> Json:
        if found is None:
            raise Refusal(404, "ResourceNotFound", f"The Resource '{name}' was not found.")
        return found

    @staticmethod
    def _below(found: dict[str, Json], path: str) -> list[Json]:
        return [each for id, each in found.items() if id.rpartition("/")[0] == path]

    def _tagged(self, query: dict[str, str]) -> list[Json]:
        """Return the resources with a tag, which are shown without it (source: Resources, "List By Resource
        Group")."""
        wanted = re.fullmatch(r"tagName eq '([^']+)' and tagValue eq '((?:[^']|'')+)'", query["$filter"])
        if wanted is None or query["api-version"] != "2021-04-01":
            raise Refusal(400, "InvalidFilterInQueryString", "Invalid $filter in the query string.")
        name, value = wanted[1], wanted[2].replace("''", "'")
        return [
            {key: each[key] for key in ("id", "name", "location")}
            for kind in self.of.values()
            for each in kind.values()
            if (each.get("tags") or {}).get(name) == value
        ]

    def _list(self, found: list[Json], path: str, query: dict[str, str]) -> Answer:
        begin = int(query.get("$skiptoken", "0"))
        answer: Json = {"value": found[begin : begin + self.page]}
        if len(found) > begin + self.page:
            version = query["api-version"]
            answer["nextLink"] = (
                f"{self.endpoint}{path}?api-version={version}&$skiptoken={begin + self.page}"
                + ("&statusOnly=true" if "statusOnly" in query else "")
                + (f"&$filter={quote(query['$filter'])}" if path.endswith("/resources") else "")
            )
        return Answer(200, answer)

    def _status(self, vm: Json) -> Json:
        """Return a VM with its state. Such ids are in upper case."""
        name, provisioning = vm["name"], vm["properties"]["provisioningState"]
        failure = self.failures.get(name)
        code = f"ProvisioningState/{provisioning.lower()}"
        words: Json = {"code": code, "level": "Info", "displayStatus": f"Provisioning {provisioning.lower()}"}
        if failure is not None:
            words |= {"code": f"{code}/{failure['code']}", "level": "Error", "message": failure["message"]}
        statuses = [words]
        if name in self.power:
            power = self.power[name]
            statuses.append({"code": f"PowerState/{power}", "level": "Info", "displayStatus": f"VM {power}"})
        properties = {**vm["properties"], "instanceView": {"statuses": statuses}}
        return {**vm, "id": vm["id"].replace(GROUP, GROUP.upper()), "properties": properties}

    # ---- VMs

    def _create_vm(self, name: str, body: Json, once: bool) -> Answer:
        vms = self.of["virtualMachines"]
        if name in vms and once:
            raise Refusal(412, "PreconditionFailed", "The precondition given in the request header failed.")
        if name in vms:
            raise AssertionError("a VM is changed")
        self._check(body)
        [reference] = body["properties"]["networkProfile"]["networkInterfaces"]
        nic = self.of["networkInterfaces"].get(reference["id"].rpartition("/")[2])
        if nic is None:
            raise Refusal(400, "InvalidResourceReference", f"{reference['id']} was not found.")
        vm = vms[name] = resources.vm(name, body)
        self.user_data[name] = body["properties"].get("userData", "")
        disk = body["properties"]["storageProfile"]["osDisk"]["name"]
        self.of["disks"][disk] = resources.disk(disk, dict(body["tags"]), vm["id"])
        nic["properties"]["virtualMachine"] = {"id": vm["id"]}
        operation = self.begin()
        answered = {**vm, "properties": dict(vm["properties"])}
        self._launched(vm, operation, body)
        return Answer(201, answered, operation)

    def _check(self, body: Json) -> None:
        """Refuse what Azure refuses at once."""
        properties = body["properties"]
        size, zone = properties["hardwareProfile"]["vmSize"], (body.get("zones") or [""])[0]
        if not any(size == name and zone in ("", *zones) for name, *_, zones in SIZES):
            raise Refusal(409, "SkuNotAvailable", f"{size} is not available in location '{LOCATION}'.")
        image = properties["storageProfile"]["imageReference"]["id"]
        definition = image.partition("/versions/")[0]
        if image not in {*self.images, *self.versions}:
            raise Refusal(404, "GalleryImageNotFound", f"The gallery image {image} is not available.")
        specialized = self.images[definition]["properties"]["osState"] == "Specialized"
        wants = properties.get("securityProfile", {}).get("securityType") == "ConfidentialVM"
        others = next(others for name, _, _, others, _ in SIZES if name == size)
        features = self.images[definition]["properties"].get("features", ())
        takes = any("Confidential" in each["value"] for each in features if each["name"] == "SecurityType")
        encrypted = "securityProfile" in properties["storageProfile"]["osDisk"]["managedDisk"]
        if wants is not ("ConfidentialComputingType" in others) or wants > takes or wants is not encrypted:
            raise Refusal(400, "BadRequest", f"The VM size '{size}' is not supported for this security type.")
        if specialized is ("osProfile" in properties):
            raise Refusal(400, "InvalidParameter", "Parameter 'osProfile' is not allowed, or is missing.")

    def fail(self, name: str, operation: str, code: str, message: str) -> None:
        """Make a launch fail; the VM exists all the same."""
        vm = self.of["virtualMachines"].get(name)
        if vm is not None and vm["properties"]["provisioningState"] == "Creating":
            vm["properties"]["provisioningState"] = "Failed"
            self.failures[name] = {"code": code, "message": message}
        self.finish(operation, code, message)

    def boot(self, name: str, operation: str) -> bool:
        """Make a VM run. Return whether it does."""
        vm = self.of["virtualMachines"].get(name)
        if vm is None or vm["properties"]["provisioningState"] != "Creating":
            self.finish(operation, "OperationPreempted", "The operation was preempted by a deletion.")
            return False
        vm["properties"]["provisioningState"] = "Succeeded"
        self.power[name] = "running"
        self.finish(operation)
        return True

    def _change_power(self, vm: Json, action: str) -> Answer:
        name, operation = vm["name"], self.begin()
        if vm["properties"]["provisioningState"] in ("Creating", "Deleting"):
            raise Refusal(409, "OperationNotAllowed", "The VM is being created or deleted.")
        if name in self._powering_off:
            raise Refusal(409, "AnotherOperationInProgress", "Another operation on the VM is in progress.")
        if action == "powerOff":
            return self._power_off(name, operation)
        if action == "deallocate":
            if self.power[name] not in ("deallocating", "deallocated"):
                self.stop(name, "deallocating")
            self.later(lambda: self._has_power(name, operation, "deallocated"))
        elif self.power[name] not in ("deallocated", "stopped"):
            self.finish(operation)
        elif self.full[0]:
            self.later(lambda: self.finish(operation, *self.full))
        else:
            self.power[name] = "starting"
            self.later(lambda: self._has_power(name, operation, "running"))
        return Answer(202, operation=operation)

    def _power_off(self, name: str, operation: str) -> Answer:
        if self.power[name] in ("deallocating", "deallocated"):
            raise Refusal(409, "OperationNotAllowed", "The VM is deallocated or marked for deallocation.")
        if self.power[name] == "stopped":
            self.finish(operation)
        else:
            self.power[name], self._powering_off[name] = "stopping", operation
            self.press(name)
        return Answer(202, operation=operation)

    def _has_power(self, name: str, operation: str, power: str) -> None:
        self.finish(operation)
        if (
            name in self.power
            and self.of["virtualMachines"][name]["properties"]["provisioningState"] != "Deleting"
        ):
            self.power[name] = power
            self.disks.vm_has_power(self.of["virtualMachines"][name], power)
            if power == "running":
                self.restarted(name)

    def _change_user_data(self, vm: Json, body: Json) -> Answer:
        operation = self.begin()

        def change() -> None:
            self.user_data[vm["name"]] = body["properties"]["userData"]
            self.finish(operation)

        self.later(change)
        return Answer(200, vm, operation)

    def stop(self, name: str, power: str = "stopped") -> None:
        """Stop a VM, as somebody else would, or as Azure evicts it."""
        self.power[name] = power
        self.disks.vm_has_power(self.of["virtualMachines"][name], power)
        if operation := self._powering_off.pop(name, ""):
            self.finish(operation)
        self._ended(name)

    def _create_nic(self, name: str, body: Json) -> Answer:
        nics = self.of["networkInterfaces"]
        [asked] = body["properties"]["ipConfigurations"]
        if asked["properties"]["subnet"]["id"] != SUBNET:
            raise Refusal(400, "InvalidResourceReference", "The subnet was not found.")
        reference = asked["properties"].get("publicIPAddress")
        public = self.of["publicIPAddresses"].get(reference["id"].rpartition("/")[2]) if reference else None
        if reference and public is None:
            raise Refusal(400, "InvalidResourceReference", "The public address was not found.")
        if name not in nics:
            taken = {self.address_of(each) for each in nics.values()}
            number = next(each for each in map(self._any_address, range(1000)) if each not in taken)
            nics[name] = resources.nic(name, body, number)
        if public is not None:
            [configuration] = nics[name]["properties"]["ipConfigurations"]
            public["properties"]["ipConfiguration"] = {"id": configuration["id"]}
            public["properties"]["deleteOption"] = reference["properties"]["deleteOption"]
        return Answer(201, nics[name])

    @staticmethod
    def _any_address(number: int) -> str:
        return str(NETWORK[256 + secrets.randbelow(60000)])

    @staticmethod
    def address_of(nic: Json) -> str:
        """Return a network interface's address."""
        return str(nic["properties"]["ipConfigurations"][0]["properties"]["privateIPAddress"])

    # ---- Deletions

    def _delete(self, kind: str, name: str) -> Answer:
        if kind in ("disks", "snapshots"):
            return self.disks.delete(kind, name)
        found = self.of[kind].get(name)
        if found is None:
            return Answer(204)
        if kind == "virtualMachines":
            found["properties"]["provisioningState"] = "Deleting"
            if operation := self._powering_off.pop(name, ""):
                self.finish(operation, "OperationPreempted", "The operation was preempted by a deletion.")
            self._ended(name)
            operation = self.begin()
            self.later(lambda: self._gone(name, operation))
            return Answer(202, operation=operation)
        if kind == "networkInterfaces" and (
            name in self.reserved or found["properties"].get("virtualMachine")
        ):
            raise Refusal(
                400, "NicReservedForAnotherVm", "Nic(s) is reserved for another VM for 180 seconds."
            )
        if kind == "publicIPAddresses" and found["properties"].get("ipConfiguration"):
            raise Refusal(400, "PublicIPAddressCannotBeDeleted", "The address is still allocated.")
        self._remove(kind, name)
        return Answer(202, operation=self.begin())

    def _gone(self, name: str, operation: str) -> None:
        self.finish(operation)
        self.remove_vm(name)

    def remove_vm(self, name: str) -> None:
        """Remove a VM, with the resources that are deleted with it."""
        vm = self.of["virtualMachines"].pop(name, None)
        if vm is None:
            return
        self.disks.vm_gone(vm)
        self.power.pop(name, None)
        for kind in ("disks", "networkInterfaces"):
            self._remove(kind, name)

    def _remove(self, kind: str, name: str) -> None:
        """Remove a resource; a network interface with its public address, if that is the VM's own."""
        found = self.of[kind].pop(name, None)
        if found is None or kind != "networkInterfaces":
            return
        had_vm = bool(found["properties"].get("virtualMachine"))
        reference = found["properties"]["ipConfigurations"][0]["properties"].get("publicIPAddress")
        public = reference["id"].rpartition("/")[2] if reference else ""
        if public in self.of["publicIPAddresses"]:
            properties = self.of["publicIPAddresses"][public]["properties"]
            properties.pop("ipConfiguration", None)
            if had_vm and properties["deleteOption"] == "Delete":
                del self.of["publicIPAddresses"][public]

    def going(self) -> set[str]:
        """Return the names of VMs that are being deleted."""
        vms = self.of["virtualMachines"]
        return {name for name, vm in list(vms.items()) if vm["properties"]["provisioningState"] == "Deleting"}
