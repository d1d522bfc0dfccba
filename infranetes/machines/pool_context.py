# SPDX-License-Identifier: Apache-2.0
"""The collaborators of the pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from twisted.internet.defer import Deferred

from infranetes.machines.context import MachineContext
from infranetes.machines.pod_machine import PodMachine
from infranetes.machines.pool_record import PoolRecord
from infranetes.machines.starts import Starts

Adopt = Callable[[PodMachine], Awaitable[None]]
"""Records in one write that a VM of the pool is a pod's, and takes over its PodMachine.

:raise FailedPrecondition: the pool no longer has the record: the VM was claimed before.
:raise InfranetesError: the claim could not be recorded."""


class PoolStore(Protocol):
    """The store of the pool's records. Each Deferred fires once the write is on the disk."""

    def put_pool(self, record: PoolRecord) -> Deferred[None]: ...
    def update_pool(self, record: PoolRecord) -> Deferred[None]: ...
    def delete_pool(self, id: str) -> Deferred[None]: ...
    def put_setting(self, name: str, value: str) -> Deferred[None]: ...


class PoolContext(MachineContext, Protocol):
    """The collaborators of the pool."""

    @property
    def store(self) -> PoolStore: ...

    @property
    def contprovider(self) -> str:
        """The ContainerProvider of pods that choose none; "": the first one of the VMs' image."""

    @property
    def starts(self) -> Starts:
        """The starts of pods. The pool boots no VM while one is under way or waits."""
