# SPDX-License-Identifier: Apache-2.0
"""The description of the VM that a library's item is: an OVF envelope (source: DMTF DSP0243, and what vCenter
exports)."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

_CPUS, _MIB = 2, 1024  # of the template; pods' VMs have what they ask for

_ENVELOPE = """\
<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
 xmlns:vmw="http://www.vmware.com/schema/ovf"
 xmlns:vssd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData">
 <References>
  <File ovf:href={file} ovf:id="file1" ovf:size="{file_size}"/>
 </References>
 <DiskSection>
  <Info>The disk</Info>
  <Disk ovf:capacity="{capacity}" ovf:diskId="disk1" ovf:fileRef="file1"
   ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"/>
 </DiskSection>
 <VirtualSystem ovf:id={id}>
  <Info>A machine</Info>
  <Name>{name}</Name>
  <OperatingSystemSection ovf:id="96" vmw:osType="debian11_64Guest">
   <Info>Debian</Info>
  </OperatingSystemSection>
  <VirtualHardwareSection>
   <Info>Hardware</Info>
   <System>
    <vssd:ElementName>Hardware</vssd:ElementName>
    <vssd:InstanceID>0</vssd:InstanceID>
    <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>
    <vssd:VirtualSystemType>vmx-13</vssd:VirtualSystemType>
   </System>
{items}  </VirtualHardwareSection>
 </VirtualSystem>
</Envelope>
"""
# The paravirtual controller and no network card: the guest's kernel has the drivers of VMware's own devices,
# and a pod's VM gets its card when it is cloned.
_ITEMS = (
    (("ElementName", "CPUs"), ("InstanceID", "1"), ("ResourceType", "3"), ("VirtualQuantity", str(_CPUS))),
    (
        ("AllocationUnits", "byte * 2^20"),
        ("ElementName", "Memory"),
        ("InstanceID", "2"),
        ("ResourceType", "4"),
        ("VirtualQuantity", str(_MIB)),
    ),
    (
        ("Address", "0"),
        ("ElementName", "SCSI controller"),
        ("InstanceID", "3"),
        ("ResourceSubType", "VirtualSCSI"),
        ("ResourceType", "6"),
    ),
    (
        ("AddressOnParent", "0"),
        ("ElementName", "Disk"),
        ("HostResource", "ovf:/disk/disk1"),
        ("InstanceID", "4"),
        ("Parent", "3"),
        ("ResourceType", "17"),
    ),
)


def envelope(name: str, file: str, file_size: int, capacity: int) -> bytes:
    """Return the envelope of a VM with one disk.

    :param file: the disk's, beside the envelope. :param capacity: of the disk, in bytes."""
    items = "".join(
        "   <Item>" + "".join(f"<rasd:{key}>{value}</rasd:{key}>" for key, value in item) + "</Item>\n"
        for item in _ITEMS
    )
    return _ENVELOPE.format(
        file=quoteattr(file),
        file_size=file_size,
        capacity=capacity,
        id=quoteattr(name),
        name=escape(name),
        items=items,
    ).encode()
