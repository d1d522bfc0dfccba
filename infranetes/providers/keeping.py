# SPDX-License-Identifier: Apache-2.0
"""Providers whose VMs can be kept as they run, in files, and started from there as other VMs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import Deferred
from zope.interface import Interface

from infranetes_common.errors import FailedPrecondition

if TYPE_CHECKING:
    from infranetes.providers.interface import InstanceSpec


@attrs.frozen
class KeptVm:
    """A VM as it was at one instant, in files of one directory."""

    taken_at: float  # seconds since 1970 UTC
    pause_seconds: float  # how long the VM did not execute
    seconds: float  # how long it took in all
    files: Mapping[str, int]  # the size of each file in bytes, by its name
    # What the files need to be used again, for people and for comparisons: names of hardware and software.
    machine: Mapping[str, str]


class IKeepsVms(Interface):
    """Also provided by an IPodProvider that can keep VMs as they run.

    - A VM that is being kept executes, except for a moment. Whatever becomes of the keeping (it fails, is
      cancelled, the daemon is killed), the VM goes on, at the latest once the next daemon has started; only
      `destroy` and its own end come before that.
    - The VM is not changed by it: it can be kept as often as one likes.
    - The files have the guest's memory, and so every secret that was in it."""

    def keep(instance_id: str, directory: Path, seconds: float) -> Deferred[KeptVm]:
        """Write a running VM's state to files.

        Calls for one VM are served one after the other. Cancelling the Deferred ends the keeping, and the VM
        goes on. When it fails, the directory may hold a part of the files.

        :param directory: is there, is empty, and only the daemon can enter it.
        :param seconds: how long it may take.
        :raise NotFound: there is no such VM.
        :raise FailedPrecondition: VMs like this one can't be kept, such as one with volumes; says why.
        :raise ResourceExhausted: there is no room for the files.
        :raise Unavailable: the VM does not run, or ends meanwhile, or its hypervisor does not do it.
        :raise DeadlineExceeded: it takes longer than that.
        """


class IStartsKeptVms(IKeepsVms):
    """Also provided by an IPodProvider whose kept VMs can be started again, as other VMs.

    `InstanceSpec.kept` of such a VM is a directory for which `prepare` was called. The VM goes on where the
    kept one was, with its devices, disks and processes, and gets an identity of its own; its agent then knows
    that it is a clone: see `infranetes.machines.keeping`. It has no less memory than the kept VM.

    - `launch` refuses a directory as `check` does.
    - VMs and the provider have what they need of a directory open: once `launch` has returned, it may be
      removed, and the VMs go on, also with the next daemon. Whoever removes it waits for launches that are
      under way, or lets them fail.
    - It is of use on this node alone."""

    def prepare(directory: Path, seconds: float) -> Deferred[None]:
        """Make what `keep` wrote into a directory the state that new VMs start from. Idempotent.

        Files of `keep` may be replaced by others: those that are in the directory then are the state, and
        only root can read them. Files that the node has anyway may be linked there, and so counted twice.
        After an error, or if the daemon is killed meanwhile, it can be called again. Cancelling the Deferred
        ends the work.

        :param seconds: how long it may take.
        :raise FailedPrecondition: no VM can start from it, as in `check`.
        :raise ResourceExhausted: there is no room for the files.
        :raise Unavailable: the hypervisor does not do it.
        :raise DeadlineExceeded: it takes longer than that.
        """

    def check(directory: Path) -> Deferred[None]:
        """Check that VMs can start from a directory now.

        :raise FailedPrecondition: they can't: it was not prepared, files of it are missing or were changed,
            or the hypervisor, the guest image or the template are others now; says what.
        """


def refuse_kept(provider: str, spec: InstanceSpec) -> None:
    """Refuse a specification for providers whose VMs don't start from kept states.

    :raise FailedPrecondition: it names one."""
    if spec.kept is not None:
        raise FailedPrecondition(
            f"VMs of the provider {provider} can't start from a kept state; let the pod start without one"
        )
