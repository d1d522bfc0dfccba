# SPDX-License-Identifier: Apache-2.0
"""Limits on an agent's messages.

An agent runs in the pod's VM: an attacker who breaks out of a container controls it. Honest agents stay below
all of the limits (`tests.vmserver.rpc.test_limits`).
"""

from __future__ import annotations

from collections.abc import Mapping

from txgrpc import Limits

KIB = 1024
MIB = 1024 * KIB

#: Bytes of one message: a call's whole answer, or one message of a stream.
MESSAGE_BYTES: Mapping[str, int] = {
    "Info": 16 * KIB,
    "ConfigureSandbox": 4 * KIB,
    "NewKey": 64 * KIB,
    "Rekey": 4 * KIB,
    "Attest": 192 * KIB,
    "WarmUp": 4 * KIB,
    "ReleaseMemory": 4 * KIB,
    "RestoreMemory": 4 * KIB,
    "UseProcessors": 4 * KIB,
    "CorrectClock": 4 * KIB,
    "Hold": 32 * KIB,
    "Release": 4 * KIB,
    "Adopt": 1 * MIB,
    "Watch": 256 * KIB,
    "CreateContainer": 256 * KIB,
    "StartContainer": 256 * KIB,
    "StopContainer": 256 * KIB,
    "RemoveContainer": 4 * KIB,
    "UpdateContainer": 256 * KIB,
    "ListContainers": 1 * MIB,
    "Stats": 1 * MIB,
    "ExecSync": 16 * MIB,
    "ReadLog": 64 * KIB,
    "Exec": 256 * KIB + 64,
    "Attach": 256 * KIB + 64,
    "Shell": 256 * KIB + 64,
    "PortForward": 256 * KIB + 64,
    "JoinPodNetwork": 4 * KIB,
    "ServiceRules": 4 * KIB,
    "ServiceReport": 64 * KIB,
    "SetFirewall": 4 * KIB,
    "MissingLayers": 4 * KIB,
    "LoadImage": 4 * KIB,
    "ListLayers": 128 * KIB,
    "MountLayers": 4 * KIB,
    "PutLayer": 4 * KIB,
    "RemoveLayers": 4 * KIB,
    "AddImage": 4 * KIB,
    "FetchImage": 4 * KIB,
    "ListImages": 1 * MIB,
    "RemoveImage": 4 * KIB,
    "PutVolume": 4 * KIB,
    "ListVolume": 1 * MIB,
    "ReadVolume": 256 * KIB + 16 * KIB,
    "WatchVolumes": 4 * KIB,
    "RemoveVolume": 4 * KIB,
    "MountDisk": 4 * KIB,
    "FindDisk": 4 * KIB,
    "SyncDisk": 4 * KIB,
    "UnmountDisk": 4 * KIB,
    "DiskUsage": 4 * KIB,
    "MountNfs": 4 * KIB,
    "UnmountNfs": 4 * KIB,
    "MeasureVolumes": 128 * KIB,
}

#: Limits of one VM's connection. Only answers of ExecSync may exceed a MiB; one at a time is accepted.
CHANNEL = Limits(max_receive_message=1 * MIB, max_assembling=4 * MIB, max_frame=192 * KIB)
#: How far each Exec, Attach or PortForward may be ahead of its client: some messages, so that the VM
#: continues while the node forwards one.
STREAM_AHEAD_BYTES = 512 * KIB

CONTAINERS = 256  # containers in one VM, including ended ones
CHANGES = 4 * CONTAINERS  # the most events before a snapshot is complete, and in one burst afterwards
CHANGES_PER_SECOND = 20.0  # events in the long run
PURGES = 16  # containers without a record that are removed from one VM at a time

#: The most values that a repeated field may have in one message.
COUNTS: Mapping[str, int] = {
    "infranetes.vmserver.v1.HoldResponse.containers": CONTAINERS,
    "infranetes.vmserver.v1.AdoptResponse.containers": CONTAINERS,
    "infranetes.vmserver.v1.ListContainersResponse.containers": CONTAINERS,
    "infranetes.vmserver.v1.StatsResponse.containers": CONTAINERS,
    "infranetes.vmserver.v1.InfoResponse.huge_page_sizes": 16,
    "infranetes.vmserver.v1.StatsResponse.cards": 64,
    "infranetes.vmserver.v1.Usage.disks": 64,
    "infranetes.vmserver.v1.ListImagesResponse.image_ids": 4096,
    "infranetes.vmserver.v1.ListLayersResponse.layers": 512,
    "infranetes.vmserver.v1.ListVolumeResponse.entries": 1024,
    "infranetes.vmserver.v1.MeasureVolumesResponse.volumes": 1024,
    "infranetes.vmserver.v1.ServiceVerdict.endpoints": 1024,
    "runtime.v1.LinuxContainerUser.supplemental_groups": 256,
    "runtime.v1.LinuxContainerResources.hugepage_limits": 16,
    "runtime.v1.LinuxContainerResources.unified": 32,
}

#: The most fields of one message that are read to count the repeated ones: a few ms of work.
FIELDS = 10_000

TEXT = 256  # the most characters of a text that TEXTS does not name
TEXTS: Mapping[str, int] = {
    "infranetes.vmserver.v1.ContainerState.message": 4096,  # kubelet's limit of a termination message
    "infranetes.vmserver.v1.InfoResponse.version": 64,
    "infranetes.vmserver.v1.NetworkCard.name": 64,
    "infranetes.vmserver.v1.Disk.device": 64,
    "runtime.v1.LinuxContainerResources.cpuset_cpus": 1024,
    "runtime.v1.LinuxContainerResources.cpuset_mems": 1024,
    "runtime.v1.LinuxContainerResources.UnifiedEntry.key": 128,
    "runtime.v1.LinuxContainerResources.UnifiedEntry.value": 256,
}
ERROR_TEXT = 2048  # the most characters of a failed call's message

LATEST = 2**62  # nanoseconds since 1970: in the year 2116
_COUNTER = (0, 2**63 - 1)  # kubelet computes with signed numbers
_SIGNED = (-1, 2**63 - 1)  # -1: unlimited
RANGE = _COUNTER  # the range of a number that RANGES does not name
RANGES: Mapping[str, tuple[int, int]] = {
    "infranetes.vmserver.v1.ContainerState.exit_code": (-(2**31), 2**31 - 1),
    "runtime.v1.LinuxContainerUser.uid": (0, 2**32 - 1),
    "runtime.v1.LinuxContainerUser.gid": (0, 2**32 - 1),
    "runtime.v1.LinuxContainerUser.supplemental_groups": (0, 2**32 - 1),
    "runtime.v1.LinuxContainerResources.oom_score_adj": (-1000, 1000),
    "runtime.v1.LinuxContainerResources.cpu_period": _SIGNED,
    "runtime.v1.LinuxContainerResources.cpu_quota": _SIGNED,
    "runtime.v1.LinuxContainerResources.cpu_shares": _SIGNED,
    "runtime.v1.LinuxContainerResources.memory_limit_in_bytes": _SIGNED,
    "runtime.v1.LinuxContainerResources.memory_swap_limit_in_bytes": _SIGNED,
}

LINE_BYTES = 16 * KIB  # the most bytes of a log record
CURSOR = 256  # characters; agents accept no longer cursor
CHUNK_BYTES = 256 * KIB  # the most bytes of a volume's file in one message
PATH_BYTES = 512  # the most bytes of a volume's path with its target, on average
