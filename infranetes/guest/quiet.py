# SPDX-License-Identifier: Apache-2.0
"""What keeps the guest's own services asleep while containers come and go. Data only, as in `recipe`.

Each clone translates the code anew that it runs for the first time, so under emulation what systemd, udevd
and journald do at each disk, mount and line of the agent's log takes a good part of a container's creation.

- udevd ends once the boot's devices are known; it comes back by itself with what systemd starts later. The
  agent finds its disks in /sys, and takes what is plugged in into use.
- The agent logs to a file, not to the journal, which reads nothing of the kernel either (dmesg does).
- Where conmon and crun run the containers, systemd does not see the agent's mounts, until a pod chooses
  another provider: see `vmserver.machine.mount_namespace`.
"""

from __future__ import annotations

from collections.abc import Mapping

LOG = "/run/vmserver/log"
UNIT_NAME = "infranetes-quiet.service"
_UDEVD = "systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udevd.service"

_UNIT = f"""\
[Unit]
Description=End udevd, once the devices of the boot are known
After=systemd-udev-trigger.service systemd-modules-load.service
Before=vmserver.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/udevadm settle
ExecStart=/usr/bin/systemctl stop {_UDEVD}

[Install]
WantedBy=multi-user.target
"""

# Files by path: mode and text.
FILES: Mapping[str, tuple[int, str]] = {
    f"etc/systemd/system/{UNIT_NAME}": (0o644, _UNIT),
    "etc/infranetes/vmserver.toml.d/guest.toml": (0o644, f'hotplug = true\nlog_file = "{LOG}"\n'),
    "etc/systemd/journald.conf.d/quiet.conf": (0o644, "[Journal]\nReadKMsg=no\nAudit=no\n"),
}

_MOUNTS = "infranetes-mounts.service"
_DIRECTORY = "/run/infranetes"
_KEPT = f"{_DIRECTORY}/mounts"

# A mount namespace is kept by a mount that is private, which therefore is not in that namespace.
_MOUNTS_UNIT = f"""\
[Unit]
Description=Make the mount namespace of Infranetes' agent
Before=vmserver.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/mkdir -p {_DIRECTORY}
ExecStart=/usr/bin/mount --bind --make-private {_DIRECTORY} {_DIRECTORY}
ExecStart=/usr/bin/touch {_KEPT}
ExecStart=/usr/bin/unshare --mount={_KEPT} --propagation=private /usr/bin/true
"""

_AGENT_UNIT = f"""\
[Unit]
Requires={_MOUNTS}
After={_MOUNTS}
"""

# Likewise, for guests in which conmon and crun run containers.
OWN_MOUNTS: Mapping[str, tuple[int, str]] = {
    f"etc/systemd/system/{_MOUNTS}": (0o644, _MOUNTS_UNIT),
    "etc/systemd/system/vmserver.service.d/mounts.conf": (0o644, _AGENT_UNIT),
    "etc/infranetes/vmserver.toml.d/mounts.toml": (0o644, f'mount_namespace = "{_KEPT}"\n'),
}

# What undoes it in a disk that is made of the guest for a cloud, whose VMs are booted: udevd names the
# volumes there, and the console, which the cloud keeps, has what is said. An empty unit is masked.
UNDONE: Mapping[str, tuple[int, str]] = dict.fromkeys((*FILES, *OWN_MOUNTS), (0o644, ""))
