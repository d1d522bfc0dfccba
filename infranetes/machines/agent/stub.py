# SPDX-License-Identifier: Apache-2.0
"""The types of the agent's service in ``proto/vmserver.proto``, as `txgrpc.Channel.stub` returns it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

from google.protobuf.message import Message
from twisted.internet.defer import Deferred

from infranetes_common.wire import vmserver as messages
from txgrpc import StreamCall

_Sent = TypeVar("_Sent", contravariant=True)
_Request = TypeVar("_Request", bound=Message)
_Received = TypeVar("_Received", bound=Message)


class Unary(Protocol[_Sent, _Received]):
    """An RPC with one request and one response."""

    def __call__(self, request: _Sent, *, timeout: float | None) -> Deferred[_Received]: ...


class Upload(Protocol[_Sent, _Received]):
    """An RPC with a stream of requests and one response."""

    def __call__(self, requests: AsyncIterator[_Sent], *, timeout: float | None) -> Deferred[_Received]: ...


class Download(Protocol[_Request, _Received]):
    """An RPC with one request and a stream of responses."""

    def __call__(self, request: _Request, *, timeout: float | None) -> StreamCall[_Request, _Received]: ...


SessionCall = StreamCall[messages.SessionInput, messages.SessionOutput]
"""The call of Exec or Attach: the streams of a command or a container."""
PortForwardCall = StreamCall[messages.PortForwardInput, messages.PortForwardOutput]
"""A connection to a port of the pod."""


ServiceRulesCall = StreamCall[messages.ServiceRulesUpdate, messages.ServiceRulesState]
"""The call of ServiceRules: updates of the service proxy's rules, and the state in force."""


class ServiceRules(Protocol):
    """The RPC for the rules of Kubernetes' Services."""

    def __call__(self, *, timeout: float | None) -> ServiceRulesCall: ...


class Session(Protocol):
    """The RPCs Exec and Attach."""

    def __call__(self, *, timeout: float | None) -> SessionCall: ...


class PortForward(Protocol):
    """A connection to a port of the pod."""

    def __call__(self, *, timeout: float | None) -> PortForwardCall: ...


class AgentStub(Protocol):
    """The agent's stub, with one attribute per RPC."""

    Info: Unary[messages.InfoRequest, messages.InfoResponse]
    ConfigureSandbox: Unary[messages.ConfigureSandboxRequest, messages.ConfigureSandboxResponse]
    WarmUp: Unary[messages.WarmUpRequest, messages.WarmUpResponse]
    ReleaseMemory: Unary[messages.ReleaseMemoryRequest, messages.ReleaseMemoryResponse]
    RestoreMemory: Unary[messages.RestoreMemoryRequest, messages.RestoreMemoryResponse]
    UseProcessors: Unary[messages.UseProcessorsRequest, messages.UseProcessorsResponse]
    CorrectClock: Unary[messages.CorrectClockRequest, messages.CorrectClockResponse]
    NewKey: Unary[messages.NewKeyRequest, messages.NewKeyResponse]
    Rekey: Unary[messages.RekeyRequest, messages.RekeyResponse]
    Watch: Download[messages.WatchRequest, messages.WatchEvent]
    CreateContainer: Unary[messages.CreateContainerRequest, messages.CreateContainerResponse]
    StartContainer: Unary[messages.StartContainerRequest, messages.StartContainerResponse]
    StopContainer: Unary[messages.StopContainerRequest, messages.StopContainerResponse]
    RemoveContainer: Unary[messages.RemoveContainerRequest, messages.RemoveContainerResponse]
    UpdateContainer: Unary[messages.UpdateContainerRequest, messages.UpdateContainerResponse]
    Stats: Unary[messages.StatsRequest, messages.StatsResponse]
    ExecSync: Unary[messages.ExecSyncRequest, messages.ExecSyncResponse]
    ReadLog: Download[messages.ReadLogRequest, messages.LogRecord]
    Exec: Session
    Attach: Session
    Shell: Session
    PortForward: PortForward
    ServiceRules: ServiceRules
    JoinPodNetwork: Unary[messages.JoinPodNetworkRequest, messages.JoinPodNetworkResponse]
    ServiceReport: Unary[messages.ServiceReportRequest, messages.ServiceReportResponse]
    SetFirewall: Unary[messages.SetFirewallRequest, messages.SetFirewallResponse]
    MissingLayers: Unary[messages.MissingLayersRequest, messages.MissingLayersResponse]
    LoadImage: Upload[messages.LoadImageRequest, messages.LoadImageResponse]
    ListLayers: Unary[messages.ListLayersRequest, messages.ListLayersResponse]
    MountLayers: Unary[messages.MountLayersRequest, messages.MountLayersResponse]
    PutLayer: Upload[messages.PutLayerRequest, messages.PutLayerResponse]
    RemoveLayers: Unary[messages.RemoveLayersRequest, messages.RemoveLayersResponse]
    AddImage: Unary[messages.AddImageRequest, messages.AddImageResponse]
    FetchImage: Unary[messages.FetchImageRequest, messages.FetchImageResponse]
    RemoveImage: Unary[messages.RemoveImageRequest, messages.RemoveImageResponse]
    ListImages: Unary[messages.ListImagesRequest, messages.ListImagesResponse]
    PutVolume: Upload[messages.PutVolumeRequest, messages.PutVolumeResponse]
    ListVolume: Download[messages.ListVolumeRequest, messages.ListVolumeResponse]
    ReadVolume: Download[messages.ReadVolumeRequest, messages.VolumeChange]
    WatchVolumes: Download[messages.WatchVolumesRequest, messages.WatchVolumesResponse]
    RemoveVolume: Unary[messages.RemoveVolumeRequest, messages.RemoveVolumeResponse]
    MountDisk: Unary[messages.MountDiskRequest, messages.MountDiskResponse]
    FindDisk: Unary[messages.FindDiskRequest, messages.FindDiskResponse]
    SyncDisk: Unary[messages.SyncDiskRequest, messages.SyncDiskResponse]
    UnmountDisk: Unary[messages.UnmountDiskRequest, messages.UnmountDiskResponse]
    DiskUsage: Unary[messages.DiskUsageRequest, messages.DiskUsageResponse]
    MountNfs: Unary[messages.MountNfsRequest, messages.MountNfsResponse]
    UnmountNfs: Unary[messages.UnmountNfsRequest, messages.UnmountNfsResponse]
    MeasureVolumes: Unary[messages.MeasureVolumesRequest, messages.MeasureVolumesResponse]
