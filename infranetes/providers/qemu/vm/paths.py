# SPDX-License-Identifier: Apache-2.0
"""The paths of the provider's files."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program.sockets import AGENT
from infranetes.providers.qemu.vm.consoles import tail
from infranetes.providers.qemu.vm.record import CONSOLE, DISK, OUTPUT, VmRecord
from infranetes_common.redaction import BEFORE, redacted_end

_LAST_OUTPUT = 1000


@attrs.frozen
class VmPaths:
    """The files of one VM, and the user of its QEMU."""

    directory: Path
    sockets: Path
    user: QemuUser

    @property
    def disk(self) -> Path:
        """The VM's own layer of the disk."""
        return self.directory / DISK

    @property
    def console(self) -> Path:
        """The file that the guest's console is written to."""
        return self.directory / CONSOLE

    @property
    def shown(self) -> Path:
        """The directory of links, by the names of disks, to the files that it was shown."""
        return self.directory / "shown"

    @property
    def agent_port(self) -> Path:
        """The socket of its agent's own port. There is none where the agent is called by TLS."""
        return self.sockets / AGENT

    @property
    def output(self) -> Path:
        """The file of QEMU's own output."""
        return self.directory / OUTPUT

    def last_output(self) -> str:
        """Return the end of QEMU's own output, or if it is empty the end of the console."""
        output = tail(self.output, _LAST_OUTPUT + BEFORE) or tail(self.console, _LAST_OUTPUT + BEFORE)
        return redacted_end(output, _LAST_OUTPUT)


@attrs.frozen
class ProviderPaths:
    """The provider's state directory and run directory."""

    state: Path
    run: Path

    @property
    def vms(self) -> Path:
        """The directory with one directory for each VM."""
        return self.state / "vms"

    @property
    def consoles(self) -> Path:
        """The consoles of destroyed VMs."""
        return self.state / "consoles"

    @property
    def lock(self) -> Path:
        """The file that the running daemon holds a lock on."""
        return self.state / "lock"

    @property
    def network(self) -> Path:
        """The subnet in use."""
        return self.state / "network.json"

    def kvm(self, configured: Path | None) -> Path:
        """The file with the last answer whether KVM works, kept beside the templates, which depend on it."""
        return self.templates(configured) / "kvm.json"

    def templates(self, configured: Path | None) -> Path:
        """Return the directory of templates."""
        return configured or self.state / "templates"

    def of_vm(self, record: VmRecord, user: QemuUser) -> VmPaths:
        """Return the files of one VM.

        :param user: the template's, whose supplementary groups the VM's own user gets too.
        """
        own = QemuUser(record.uid, record.uid, user.groups) if record.uid else user
        return VmPaths(self.vms / record.token, self.run / record.token, own)

    def agent_port(self, token: str) -> Path:
        """Return the socket of a VM's agent's own port, as in `VmPaths`."""
        return self.run / token / AGENT
