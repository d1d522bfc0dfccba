# SPDX-License-Identifier: Apache-2.0
"""Interruptions of pods as a feature: Kubernetes is told when a cloud takes a pod's VM away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.providers.annotations import wants_spot
from infranetes_common.wire import cri


class PodEventReporter(Protocol):
    """The reporter of pods' events to Kubernetes: `infranetes.kubernetes.pod_events.PodEvents`."""

    def interrupted(self, pod: cri.PodSandboxMetadata, reason: str) -> None:
        """Report that the cloud will take away the VM of a pod's sandbox."""

    def moved(self, pod: cri.PodSandboxMetadata) -> None:
        """Report that a pod has a new sandbox after its former one was interrupted."""


class PodEventReports(PodFeature):
    """Reports interruptions of pods, and that an interrupted pod has another VM.

    :param handler_of: returns the handler of a sandbox's record."""

    name = "events of pods"

    def __init__(self, reporter: PodEventReporter, handler_of: Callable[[SandboxRecord], Handler]) -> None:
        self._reporter = reporter
        self._handler_of = handler_of

    def ready(self, sandbox: Sandbox) -> None:
        """Report the end of an interruption: the pod has a new VM. Others than spot VMs have none."""
        config = sandbox.config
        annotations = self._handler_of(sandbox.record).vm_annotations(config.annotations)
        if config.metadata.attempt and wants_spot(annotations):
            self._reporter.moved(config.metadata)

    def interrupted(self, sandbox: Sandbox, reason: str) -> None:
        self._reporter.interrupted(sandbox.config.metadata, reason)
