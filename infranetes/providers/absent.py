# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a provider that can't be made, although there are records of its VMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from infranetes.providers.interface import Instance, InstanceSpec, IPodProvider, Progress
from infranetes_common.errors import FailedPrecondition, Unavailable

_T = TypeVar("_T")


@implementer(IPodProvider)
class AbsentProvider:
    """A provider that serves nothing: the records of its VMs stay as they are until it can be made again.

    :param why: for people.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    @property
    def why(self) -> str:
        """The reason why the provider can't be made, and what to do."""
        return (
            f"recorded sandboxes are its VMs, and it is not available: {self._why}; "
            "put its table back into the configuration"
        )

    def start(self, progress: Progress) -> Deferred[None]:
        return fail(FailedPrecondition(self.why))

    def stop(self) -> Deferred[None]:
        return succeed(None)

    def configure_network(self, pod_cidr: str) -> Deferred[None]:
        return succeed(None)

    def launch(self, spec: InstanceSpec) -> Deferred[Instance]:
        return self._fail()

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Instance]:
        return self._fail()

    def get(self, instance_id: str) -> Deferred[Instance]:
        return self._fail()

    def list(self) -> Deferred[list[Instance]]:
        return self._fail()

    def destroy(self, instance_id: str) -> Deferred[None]:
        return self._fail()

    def watch(self, ended: Callable[[Instance], None]) -> None:
        """Do nothing: nothing is known of its VMs."""

    def status(self) -> Mapping[str, str]:
        return {"trouble": self.why}

    def _fail(self) -> Deferred[_T]:
        return fail(Unavailable(f"provider {self.name}: {self.why}"))
