# SPDX-License-Identifier: Apache-2.0
"""The parts of the Engine API's answers that are used.

Source: Docker Engine API v1.41 (Docker 20.10), https://docs.docker.com/engine/api/v1.41/. `engine.Engine`
returns these types; nothing else reads JSON of the engine's.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class GraphDriverData(TypedDict, total=False):
    """Directories of the storage driver overlay2."""

    UpperDir: str
    LowerDir: str  # separated by colons


class GraphDriver(TypedDict):
    """The storage of an image or container."""

    Name: str
    Data: GraphDriverData | None


class ContainerState(TypedDict):
    """ContainerInspect's State."""

    Status: str
    Running: bool
    Pid: int
    ExitCode: int
    Error: str
    OOMKilled: bool
    StartedAt: str
    FinishedAt: str


class ContainerConfig(TypedDict):
    """ContainerInspect's Config."""

    Labels: dict[str, str]
    Tty: bool
    OpenStdin: bool
    StdinOnce: bool
    Env: NotRequired[list[str] | None]


class HostConfig(TypedDict, total=False):
    """ContainerInspect's HostConfig: the limits in force."""

    CpuPeriod: int
    CpuQuota: int
    CpuShares: int
    Memory: int
    MemorySwap: int
    CpusetCpus: str
    CpusetMems: str


class ContainerInspect(TypedDict):
    """GET /containers/NAME/json"""

    Id: str
    Created: str
    Image: str
    Config: ContainerConfig
    State: ContainerState
    HostConfig: HostConfig
    Path: NotRequired[str]
    Args: NotRequired[list[str] | None]
    LogPath: NotRequired[str]
    GraphDriver: NotRequired[GraphDriver | None]


class ContainerSummary(TypedDict):
    """An element of GET /containers/json"""

    Labels: dict[str, str]


class ExecInspect(TypedDict):
    """GET /exec/ID/json"""

    Pid: int  # 0 until the command is started
    Running: bool
    ExitCode: int | None


class RootFS(TypedDict):
    """An image's layers."""

    Layers: NotRequired[list[str] | None]  # diff ids, lowest first


class ImageConfig(TypedDict):
    """An image's configuration."""

    User: NotRequired[str | None]


class ImageInspect(TypedDict):
    """GET /images/ID/json"""

    Config: ImageConfig
    RepoTags: NotRequired[list[str] | None]
    RootFS: RootFS
    GraphDriver: GraphDriver


class ImageSummary(TypedDict):
    """An element of GET /images/json"""

    Id: str
    Labels: NotRequired[dict[str, str] | None]


class Actor(TypedDict):
    """The container that an event is about."""

    Attributes: dict[str, str]  # include the container's labels


class Event(TypedDict):
    """A line of GET /events"""

    Actor: Actor
    timeNano: int


class LoadProgress(TypedDict, total=False):
    """A line of POST /images/load"""

    error: str


Request = dict[str, object]
"""A JSON object that is sent to the engine."""
