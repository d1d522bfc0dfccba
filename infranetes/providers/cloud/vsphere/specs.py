# SPDX-License-Identifier: Apache-2.0
"""The specs of clones."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from pyVmomi import vim

from infranetes.providers.cloud.interface import SANDBOX, CloudError, ErrorKind, LaunchRequest
from infranetes.providers.cloud.vsphere import guest_info, sizes
from infranetes.providers.cloud.vsphere.pyvmomi_types import (
    DataObject,
    ManagedObject,
    NetworkCard,
    VirtualDevice,
)
from infranetes_common.identity import Network

IDENTITY = "guestinfo.infranetes.identity"  # the key at which vmserver's `metadata` looks
CREATED = "infranetes-created"  # seconds since 1970; vSphere 6.5 itself does not tell a VM's age
ADDRESS = "infranetes-address"  # the address that the node has given the VM
# Tells the guest that its agent sets the address, so that it does not ask DHCP for one.
STATIC = "guestinfo.infranetes.static"
NAME = "infranetes-name"  # the VM's original name: people may rename it
CONSOLE = "infranetes-console"  # "true": a file has its console
# Without it, vSphere asks what to do with a file that exists, and lets the VM wait for somebody's answer.
APPENDS = "answer.msg.serial.file.open"
WAITS = "infranetes-waits"  # "true": the VM is off, and waits to be started
DISK_UUIDS = "disk.EnableUUID"  # makes the guest see the UUIDs of its disks, by which it finds volumes
MAX_IDENTITY = 44 * 1024  # bytes: less, as base64, than the 64 KiB that open-vm-tools reads at once

_Operation = vim.vm.device.VirtualDeviceSpec.Operation
_Card = vim.vm.device.VirtualEthernetCard


@attrs.frozen
class Template:
    """A template."""

    id: str
    uuid: str
    name: str
    is_template: bool
    snapshot: ManagedObject | None = None  # its clones share the template's disks
    datastores: Sequence[ManagedObject] = ()  # where its disks are
    card: NetworkCard | None = None  # its first network card
    serial: VirtualDevice | None = None  # its first serial port


def clone(
    name: str,
    request: LaunchRequest,
    template: Template,
    pool: ManagedObject,
    datastore: ManagedObject | None,
    network: DataObject,
    created_at: float,
    host: ManagedObject | None = None,
    pod_network: Network | None = None,
    console: str = "",
) -> DataObject:
    """Return the CloneSpec of a VM that is powered on, with its tags and identity from its first moment.

    :param datastore: None: the template's. :param network: the backing of its network card.
    :param created_at: in seconds since 1970.
    :param host: None: vCenter chooses. :param pod_network: the pod's; None: DHCP gives an address.
    :param console: the path of the file that its first serial port writes to; "": none is changed.
    :raise CloudError: the identity is too large."""
    if len(request.identity) > MAX_IDENTITY:
        raise CloudError(ErrorKind.INVALID, "the VM's identity is larger than guestinfo may be")
    cpus, mib = sizes.parse(request.size)
    extra = {
        **request.tags,
        NAME: name,
        CREATED: f"{created_at:.3f}",
        DISK_UUIDS: "TRUE",
        **_extra_config(name, request, pod_network),
    }
    changes = [_card(template.card, network, pod_network.mac if pod_network is not None else "")]
    if pod_network is not None:
        extra[ADDRESS] = pod_network.address.partition("/")[0]
    if console:
        extra |= {CONSOLE: "true", APPENDS: "Append"}
        changes.append(_serial_port(template.serial, console))
    config = vim.vm.ConfigSpec(
        numCPUs=cpus,
        numCoresPerSocket=1,
        memoryMB=mib,
        annotation=f"Sandbox {request.tags.get(SANDBOX, '')} of Infranetes, which makes and ends this VM",
        extraConfig=options(extra),
        deviceChange=changes,
    )
    where = vim.vm.RelocateSpec(pool=pool)
    if datastore is not None:
        where.datastore = datastore
    if host is not None:
        where.host = host
    if template.snapshot is not None:
        where.diskMoveType = "createNewChildDiskBacking"
    return vim.vm.CloneSpec(
        location=where, config=config, template=False, powerOn=True, snapshot=template.snapshot
    )


def _extra_config(name: str, request: LaunchRequest, pod_network: Network | None) -> Mapping[str, str]:
    """Return the entries of extraConfig that the agent reads, or in its absence cloud-init."""
    if request.agentless:
        return guest_info.options(name, request.identity, pod_network)
    static = {STATIC: "true"} if pod_network is not None else {}
    return {IDENTITY: base64.b64encode(request.identity).decode(), **static}


def identity(content: bytes) -> DataObject:
    """Return the change that gives a VM which is off another identity; b"": none, as it waits to be started.

    :raise CloudError: the identity is too large."""
    if len(content) > MAX_IDENTITY:
        raise CloudError(ErrorKind.INVALID, "the VM's identity is larger than guestinfo may be")
    return vim.vm.ConfigSpec(extraConfig=options(identity_options(content)))


def identity_options(content: bytes) -> Mapping[str, str]:
    """Return the entries of extraConfig that such a change makes."""
    return {IDENTITY: base64.b64encode(content).decode(), WAITS: "" if content else "true"}


def options(values: Mapping[str, str]) -> list[DataObject]:
    """Return entries of extraConfig."""
    return [vim.option.OptionValue(key=key, value=value) for key, value in values.items()]


def _card(old: NetworkCard | None, backing: DataObject, mac: str) -> DataObject:
    """Return the change that connects the template's network card, or a new one, to a network.

    :param mac: "": vCenter gives it a hardware address of its own."""
    hardware = {"addressType": "manual", "macAddress": mac} if mac else {"addressType": "generated"}
    connected = vim.vm.device.VirtualDevice.ConnectInfo(
        startConnected=True, connected=True, allowGuestControl=False
    )
    if old is None:
        card = vim.vm.device.VirtualVmxnet3(key=-1, backing=backing, connectable=connected, **hardware)
        return vim.vm.device.VirtualDeviceSpec(operation=_Operation.add, device=card)
    card_class: Callable[..., DataObject] = type(old)
    edited = card_class(
        key=old.key,
        controllerKey=old.controllerKey,
        unitNumber=old.unitNumber,
        backing=backing,
        connectable=connected,
        **hardware,
    )
    return vim.vm.device.VirtualDeviceSpec(operation=_Operation.edit, device=edited)


def _serial_port(old: VirtualDevice | None, file: str) -> DataObject:
    """Return the change that has the template's serial port, or a new one, write to a file."""
    port = vim.vm.device.VirtualSerialPort(
        key=-2 if old is None else old.key,
        backing=vim.vm.device.VirtualSerialPort.FileBackingInfo(fileName=file),
        connectable=vim.vm.device.VirtualDevice.ConnectInfo(
            startConnected=True, connected=True, allowGuestControl=False
        ),
        yieldOnPoll=True,
    )
    operation = _Operation.add if old is None else _Operation.edit
    return vim.vm.device.VirtualDeviceSpec(operation=operation, device=port)


def backing(network: Any) -> DataObject:  # Any: one of pyVmomi's three classes of networks
    """Return a card's backing at an opaque network or a port group of a distributed or standard switch."""
    if isinstance(network, vim.dvs.DistributedVirtualPortgroup):
        switch: Any = network.config.distributedVirtualSwitch  # Any: as `network`
        port = vim.dvs.PortConnection(portgroupKey=network.key, switchUuid=switch.uuid)
        return _Card.DistributedVirtualPortBackingInfo(port=port)
    if isinstance(network, vim.OpaqueNetwork):
        summary = network.summary
        return _Card.OpaqueNetworkBackingInfo(
            opaqueNetworkId=summary.opaqueNetworkId, opaqueNetworkType=summary.opaqueNetworkType
        )
    return _Card.NetworkBackingInfo(network=network, deviceName=network.name)
