# SPDX-License-Identifier: Apache-2.0
"""A simulated EC2: moto, with faults between it and the provider, and agents in its instances.

This module adds what moto lacks or does other than EC2:

- a client token makes RunInstances idempotent, and refuses other parameters (source: EC2 API reference,
  "Ensuring idempotency in Amazon EC2 API requests");
- an instance is pending until its agent is started, which listens at an address of its own: the VPC is a part
  of 127.0.0.0/8, where every address is the loopback interface's;
- a deregistered image can't be launched;
- an instance is stopping for a while, and pending again once it is started, when its agent finds no more than
  its disk and the user-data that it has then, which can only be changed while it is stopped;
- an instance of an image from `SimulatedAws.machine_image` is the one container of its pod, and ends when it
  powers itself off.
"""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThread

from infranetes.providers.cloud.interface import CLUSTER, SANDBOX, TOKEN
from tests.support.clouds import agent_processes, aws_policy, ec2_model, ec2_types, moto, moto_answers
from tests.support.clouds.ec2_buckets import Ec2Buckets
from tests.support.clouds.ec2_endings import Ec2Endings
from tests.support.clouds.ec2_images import Ec2Images
from tests.support.clouds.ec2_snapshots import Ec2Snapshots
from tests.support.clouds.ec2_types import Ec2Types
from tests.support.clouds.ec2_volumes import Ec2Volumes
from tests.support.clouds.ec2errors import error, refusal
from tests.support.clouds.faults import NEVER, NO_AGENT, NORMAL, FaultKind, Faults
from tests.support.clouds.guest_instances import GuestInstances
from tests.support.clouds.http_sites import Answer, Answering, ClosableSite
from tests.support.clouds.imds import Imds
from tests.support.clouds.moto_calls import MotoCalls
from tests.support.clouds.price_list import SimulatedPriceList
from tests.support.clouds.simulated_cloud import QUICK
from tests.support.clouds.vm_image_instances import RunningVM, VMImageInstances

IMAGE = "ami-785db401"
BOOT_SECONDS = ENDING_SECONDS = STOP_SECONDS = 0.1
PAGE = 1000  # instances in a page of a list: the most that EC2 has


@attrs.define
class Vm:
    id: str
    address: str
    behaviour: str
    image: str
    booted: bool = False
    stopping: bool = False
    started: bool = False  # again, after it was stopped


class SimulatedAws:
    """One test's cloud.

    :param cluster: the only one for which the manual's policy allows anything; "": that of the first launch.
    :ivar granted: further actions that are allowed, on anything. :ivar policy: the manual's policy in force.
    :ivar volumes: EC2's calls about volumes. :ivar snapshots: those about snapshots.
    :ivar images: those about images.
    :ivar types: those about instance types. :ivar price_list: the types' prices.
    :ivar faults: what goes wrong. :ivar behaviour: that of instances that are launched from now on.
    :ivar boot_seconds: for how long these are pending. :ivar stop_seconds: for how long instances stop.
    :ivar user_data: the metadata service's user data, by address. :ivar imds: that service.
    :ivar vm_images: its images of VM-image pods. :ivar guests: its instances without our agent.
    :ivar malformed: faults of requests by AWS' model of the API. :ivar endings: the ends of its instances.
    :ivar buckets: the account's token buckets, which limit all its nodes' calls; None: there is no limit.
    """

    def __init__(self, reactor: Any, directory: Path, cluster: str = "") -> None:
        self._reactor = reactor
        self.cluster = cluster
        self._directory = directory
        self._moto = moto.shared()
        self._agent_processes = agent_processes.shared()
        self._calls = MotoCalls(reactor, self._moto.url)
        self._vms: dict[str, Vm] = {}
        self._tokens: dict[str, tuple[dict[str, str], bytes]] = {}
        self._stale: dict[str, bytes] = {}
        self._timers: list[IDelayedCall] = []
        self.faults = Faults()
        self.behaviour = NORMAL
        self.boot_seconds = BOOT_SECONDS
        self.stop_seconds = STOP_SECONDS
        self.stop_refusal = ""  # likewise of stops
        self.start_refusal = ""  # the code with which EC2 refuses to start instances; "": it starts them
        self.user_data: dict[str, bytes] = {}
        self.requests: list[dict[str, str]] = []
        self.malformed: list[str] = []
        self.buckets: Ec2Buckets | None = None
        self.vm_images = VMImageInstances(reactor, self._switched_off)
        self.guests = GuestInstances(reactor, self._guest_is_off)
        self._deregistered: set[str] = set()
        self.imds = Imds(self.user_data)
        self._imds_site = ClosableSite(self.imds)
        self._proxy_site = ClosableSite(Answering(self._answer, "text/xml;charset=UTF-8"))
        self.urls: list[bytes] = []
        self.granted: set[str] = set()
        self.policy = aws_policy.POLICY
        self.volumes = Ec2Volumes(reactor, self._calls.ask_as_ec2)
        self.snapshots = Ec2Snapshots(reactor, self._calls.ask_as_ec2)
        self.images = Ec2Images(self._calls.ask_as_ec2, self.snapshots.states, IMAGE)
        self.types = Ec2Types(self._calls.ask_as_ec2)
        self.price_list = SimulatedPriceList()
        self.endings = Ec2Endings(reactor.seconds, ENDING_SECONDS)

    def start(self) -> None:
        """Start a cloud with a VPC, two subnets and a security group. Ended instances of earlier tests are
        still listed, as by EC2, so each test uses a cluster of its own."""
        self.ec2 = self._moto.client()
        self.subnets, self.group = self._make_network()
        self._imds = self._reactor.listenTCP(0, self._imds_site, interface="0.0.0.0")
        self._proxy = self._reactor.listenTCP(0, self._proxy_site, interface="127.0.0.1")
        self.vm_images.start()
        self.endpoint = f"http://127.0.0.1:{self._proxy.getHost().port}"

    async def stop(self) -> None:
        """Stop everything."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()
        self.volumes.stop()
        self.snapshots.stop()
        for id in self._vms:
            self._turn_off(id)
        await deferToThread(self._thd_end_all)
        await self.vm_images.stop()
        await self.guests.stop()
        for port in (self._imds, self._proxy):
            await port.stopListening()
        await self._calls.stop()
        for site in (self._imds_site, self._proxy_site):
            await site.close_connections()
        shutil.rmtree(self._directory, ignore_errors=True)

    def table(self) -> dict[str, Any]:
        """Return the provider's configuration for this cloud."""
        return {
            "region": moto.REGION,
            "image": IMAGE,
            "subnets": list(self.subnets),
            "security_groups": [self.group],
            "access_key": moto.KEYS[0],
            "secret_key": moto.KEYS[1],
            "endpoint": self.endpoint,
            "price_endpoint": self.endpoint,
            "sizes": ["t3.*", "m5.*"],
            **QUICK,
        }

    # ---- The cloud from outside

    def instances(self) -> list[Any]:
        """Return instances that have not ended, as EC2 describes them."""
        living = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}]
        pages = self.ec2.get_paginator("describe_instances").paginate(
            Filters=living, PaginationConfig={"PageSize": PAGE}
        )
        return [one for page in pages for each in page["Reservations"] for one in each["Instances"]]

    def running(self) -> list[str]:
        """Return the ids of instances that have not ended."""
        return [one["InstanceId"] for one in self.instances()]

    def seen(self) -> list[RunningVM]:
        """Return instances that have not ended."""
        return [
            RunningVM(
                one["InstanceId"],
                one["ImageId"],
                one["InstanceType"],
                moto_answers.tag_of(one, SANDBOX),
                one["PrivateIpAddress"],
            )
            for one in self.instances()
        ]

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token that it is tagged with."""
        found = {f"instance {one['InstanceId']}": one for one in self.instances()}
        addresses = self.ec2.describe_addresses()["Addresses"]
        found |= {f"address {one['AllocationId']}": one for one in addresses}
        found |= {f"disk {one['VolumeId']}": one for one in self.ec2.describe_volumes()["Volumes"]}
        return {words: moto_answers.tag_of(one, TOKEN) for words, one in found.items()}

    def holdings(self) -> list[str]:
        """Return descriptions of everything that costs money."""
        return list(self.held())

    def _thd_end_all(self) -> None:
        """End everything in moto, which tests share, even after a failed test."""
        left = [one["InstanceId"] for one in self.instances() if one["InstanceId"] in self._vms]
        if left:
            self.ec2.terminate_instances(InstanceIds=left)
        for image in self.vm_images.images:
            self.ec2.deregister_image(ImageId=image)

    def end(self, id: str) -> None:
        """End an instance, as somebody else would."""
        self.ec2.terminate_instances(InstanceIds=[id])
        self._turn_off(id)

    def fail(self, id: str, code: str, words: str) -> None:
        """End an instance that boots, as EC2 itself does."""
        self.endings.reasons[id] = code, words
        self.end(id)

    def add_twin(self, id: str) -> None:
        """Launch another instance with the same tags."""
        [described] = [one for one in self.instances() if one["InstanceId"] == id]
        tags = [tag for tag in described["Tags"] if not tag["Key"].startswith("aws:")]
        self.ec2.run_instances(
            ImageId=described["ImageId"],
            MinCount=1,
            MaxCount=1,
            SubnetId=self.subnets[0],
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )

    async def machine_image(self, name: str, source: str = IMAGE, **tags: str) -> str:
        """Return the id of a new image of VM-image pods, with `name` (NAME:VERSION) in its tags.

        :param tags: more tags, or other values of the usual ones."""
        made = {"infranetes": "true", "infranetes.image_name": name, **tags}
        id: str = self.ec2.copy_image(SourceImageId=source, SourceRegion=moto.REGION, Name="machine")[
            "ImageId"
        ]
        tagged = [{"Key": key, "Value": value} for key, value in made.items()]
        self.ec2.create_tags(Resources=[id], Tags=tagged)
        return await self.vm_images.add(id)

    async def guest_image(self, name: str) -> str:
        """Return the id of a new image as `machine_image` does, without our agent."""
        image = await self.machine_image(name)
        self.guests.images.add(image)
        return image

    def deregister(self, image: str) -> None:
        """Remove an image, as somebody else would."""
        self.vm_images.images.remove(image)
        self._deregistered.add(image)
        self.ec2.deregister_image(ImageId=image)

    # ---- Calls

    async def _answer(self, request: Any) -> Answer:
        self.urls.append(request.uri)
        if request.getHeader("x-amz-target"):
            return self.price_list.answer(request)
        return await self.call(dict(parse_qsl(request.content.read().decode(), keep_blank_values=True)))

    async def call(self, parameters: dict[str, str]) -> Answer:
        """Return EC2's answer. :raise ConnectionError, Silence: there is none."""
        self.requests.append(parameters)
        fault = self.faults.befalling(parameters)
        early = refusal(fault) if fault is not None else None
        if early is not None:
            return early
        if self.buckets is not None and not self.buckets.take(parameters):
            return 503, error("RequestLimitExceeded", "Request limit exceeded.")
        wrong = ec2_model.wrong(parameters)
        if wrong:
            self.malformed += wrong
            return 400, error("InvalidParameter", "; ".join(wrong))
        denied = await self._denied(parameters)
        if denied:
            return 403, error("UnauthorizedOperation", denied)
        if fault is not None and fault.kind is FaultKind.IGNORED:
            return self.endings.ignored(parameters)
        status, body = await self._served(parameters)
        if fault is not None and fault.kind is FaultKind.STALE:
            body = self._stale.get(_key(parameters), moto_answers.EMPTY_LIST)
        elif fault is not None and fault.kind is FaultKind.STALE_VOLUMES:
            body = moto_answers.EMPTY_VOLUMES
        elif status == 200:
            self._stale[_key(parameters)] = body
        if fault is not None and fault.kind is FaultKind.ACTED:
            return 500, error("InternalError", "An internal error has occurred")
        if fault is not None:
            fault.withhold_answer()
        return status, body

    async def _served(self, parameters: dict[str, str]) -> tuple[int, bytes]:
        action, token = parameters.get("Action"), parameters.get("ClientToken", "")
        if action == "RunInstances" and token in self._tokens:
            asked, answered = self._tokens[token]
            if asked != parameters:
                return 400, error("IdempotentParameterMismatch", "The client token was used before")
            return 200, answered
        if self.types.serves(action or ""):
            return await self.types.answer(parameters)
        if self.snapshots.serves(action or ""):
            return await self.snapshots.answer(parameters)
        if self.images.serves(action or ""):
            return await self.images.answer(parameters)
        if action == "CreateVolume":
            return await self.snapshots.make_volume(parameters, self.volumes.answer)
        if self.volumes.serves(action or ""):
            return await self.volumes.answer(parameters)
        image = parameters.get("ImageId", "")
        if image in self._deregistered:
            return 400, error("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
        if action == "StopInstances" and parameters["InstanceId.1"] in self.guests.consoles:
            self.guests.press(parameters["InstanceId.1"])
            return self.endings.stopping(parameters)
        if action == "GetConsoleOutput" and parameters["InstanceId"] in self.guests.consoles:
            return 200, moto_answers.console(self.guests.console(parameters["InstanceId"], None)[-65536:])
        if action == "RunInstances" and (refused := ec2_types.refusal(parameters)):
            return refused
        if action in ("StartInstances", "ModifyInstanceAttribute"):
            refused = self._refused_change(parameters)
            if refused is not None:
                return refused
        if action == "StopInstances":
            return self._stop_instance(parameters)
        if action == "ModifyInstanceAttribute":
            return self._change_user_data(parameters)
        status, body = await self._calls.ask(parameters)
        if action == "TerminateInstances":
            status, body = self.endings.answer(parameters, (status, body))
        body = moto_answers.as_ec2(status, body)
        if status != 200:
            return status, body
        body = self._as_shown(body)
        if action == "RunInstances":
            self._launched(parameters, body)
            if token:
                self._tokens[token] = (parameters, body)
        elif action == "TerminateInstances":
            for id in moto_answers.INSTANCE_ID.findall(body):
                self._turn_off(id.decode())
        elif action == "StartInstances":
            vm = self._vms[parameters["InstanceId.1"]]
            vm.booted, vm.stopping, vm.started = False, False, True
            self._boot_later(vm)
        return 200, body

    # ---- Instances that are stopped and started

    def rest_of(self, id: str) -> bytes:
        """Return what is left of a stopped instance's identity: its user-data, and the files on its disk."""
        disk = self._directory / id / agent_processes.DISK
        files = [each.read_bytes() for each in disk.rglob("*") if each.is_file()]
        return b"".join([self.user_data[self._vms[id].address], *files])

    def _stop_instance(self, parameters: dict[str, str]) -> Answer:
        vm = self._vms.get(parameters["InstanceId.1"])
        if vm is None:
            return 400, error("InvalidInstanceID.NotFound", "The instance ID does not exist")
        if self.stop_refusal:
            return 400, error(self.stop_refusal, f"The instance '{vm.id}' can't be stopped")
        if not vm.booted and not vm.stopping:
            return 400, error("IncorrectInstanceState", f"The instance '{vm.id}' is not in a state to stop")
        if not vm.stopping:
            vm.stopping = True
            self._turn_off(vm.id)
            self._timers.append(self._reactor.callLater(self.stop_seconds, self._guest_is_off, vm.id))
        return self.endings.stopping(parameters)

    def show_stopped(self, id: str) -> None:
        """Show an instance that boots, and that was stopped in moto, as stopped."""
        self._vms[id].booted = self._vms[id].stopping = True

    def _change_user_data(self, parameters: dict[str, str]) -> Answer:
        address = self._vms[parameters["InstanceId"]].address
        self.user_data[address] = base64.b64decode(parameters["UserData.Value"])
        return 200, moto_answers.CHANGED_ATTRIBUTE

    def _refused_change(self, parameters: dict[str, str]) -> Answer | None:
        """Return why a change of a stopped instance is refused; None: it isn't."""
        id = parameters.get("InstanceId") or parameters["InstanceId.1"]
        living = {one["InstanceId"]: one["State"]["Name"] for one in self.instances()}
        if id not in living:
            return 400, error("InvalidInstanceID.NotFound", f"The instance ID '{id}' does not exist")
        if living[id] != "stopped":
            return 400, error("IncorrectInstanceState", f"The instance '{id}' is not in the 'stopped' state.")
        if parameters["Action"] == "StartInstances" and self.start_refusal:
            return 500, error(self.start_refusal, "There is not enough capacity to fulfill your request")
        return None

    async def _denied(self, parameters: dict[str, str]) -> str | None:
        """Return why the manual's policy does not allow a call; None: it does."""
        if parameters["Action"] in self.granted:
            return None
        tags: dict[str, dict[str, str]] = {}
        self.cluster = self.cluster or aws_policy.asked_tags(parameters).get(CLUSTER, "")
        if aws_policy.ids(parameters):
            tags = await deferToThread(moto_answers.tags_of, self.ec2, aws_policy.ids(parameters))
        return aws_policy.refused(parameters, self.cluster, tags, self.policy)

    def _as_shown(self, body: bytes) -> bytes:
        """Show instances that have not booted as pending, and those that are ending as shutting down,
        whatever moto says."""
        pending = {vm.id.encode() for vm in self._vms.values() if not vm.booted}
        stopping = {vm.id.encode() for vm in self._vms.values() if vm.stopping}
        parts = moto_answers.each_instance(body)
        for number, part in enumerate(parts):
            found = moto_answers.INSTANCE_ID.search(part)
            if found is not None and found[1] in pending:
                parts[number] = moto_answers.as_pending(part)
            elif found is not None and found[1] in stopping:
                parts[number] = moto_answers.as_stopping(part)
            parts[number] = self.endings.shown(parts[number])
        return b"".join(parts)

    # ---- AgentProcesses

    def _launched(self, parameters: dict[str, str], body: bytes) -> None:
        found = moto_answers.INSTANCE_ID.search(body)
        address = re.search(rb"<privateIpAddress>([0-9.]+)</privateIpAddress>", body)
        assert found is not None and address is not None
        vm = Vm(found[1].decode(), address[1].decode(), self.behaviour, parameters["ImageId"])
        self._vms[vm.id] = vm
        self.user_data[vm.address] = base64.b64decode(parameters.get("UserData", ""))
        self._boot_later(vm)

    def _boot_later(self, vm: Vm) -> None:
        if vm.behaviour != NEVER:
            self._timers.append(self._reactor.callLater(self.boot_seconds, self._boot, vm))

    def _boot(self, vm: Vm) -> None:
        vm.booted = True
        if vm.image in self.guests.images:
            self.guests.boot(vm.id, vm.address, self.user_data[vm.address])
            return
        if vm.behaviour != NO_AGENT:
            self._turn_on(vm)

    # What stands for an instance; `aws_machines` overrides this

    def _make_network(self) -> tuple[tuple[str, ...], str]:
        return moto_answers.make_network(self.ec2)

    def _turn_on(self, vm: Vm) -> None:
        turn_on = self._agent_processes.reboot if vm.started else self._agent_processes.run
        turn_on(vm.id, self._agent_config(vm))

    def _turn_off(self, id: str) -> None:
        self.guests.end(id)
        self._agent_processes.kill(id)

    def reboot(self, id: str) -> None:
        """Make an instance reboot by itself, so that it keeps only what is on its disk."""
        self._agent_processes.reboot(id, self._agent_config(self._vms[id]))

    def _agent_config(self, vm: Vm) -> dict[str, Any]:
        directory = self._directory / vm.id
        disk = directory / agent_processes.DISK
        return {
            **self.vm_images.containers(vm.image, vm.id, disk),
            "listen": f"{vm.address}:2475",
            "run_dir": str(directory),
            "volumes_dir": str(disk / "volumes"),
            "etc_dir": str(directory),
            "identity": {
                "source": "aws",
                "apply": False,
                "endpoint": f"http://{vm.address}:{self._imds.getHost().port}",
            },
        }

    def _guest_is_off(self, id: str) -> None:
        """Show an instance as stopped, whose power button was pressed."""
        stopping = {"Action": "StopInstances", "InstanceId.1": id, "Version": "2016-11-15"}
        Deferred.fromCoroutine(self._calls.ask(stopping)).addErrback(lambda _: None)
        self._turn_off(id)

    def _switched_off(self, id: str) -> None:
        """End an instance that powers itself off."""
        ending = {"Action": "TerminateInstances", "InstanceId.1": id, "Version": "2016-11-15"}
        Deferred.fromCoroutine(self._calls.ask(ending)).addErrback(lambda _: None)
        self._turn_off(id)


def _key(parameters: dict[str, str]) -> str:
    return urlencode(sorted(parameters.items()))
