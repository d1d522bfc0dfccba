# SPDX-License-Identifier: Apache-2.0
"""What is in the guest image. Data only, for `build`.

The image is booted once, for a template, and every pod's VM is a clone of that. So nothing in it runs
periodically on its own, and where Docker runs `warm` has it run a container before the agent asks for its
identity: what is in memory by then is in memory in each clone. What runs containers is chosen: see
`CONTAINERS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import attrs

from infranetes.guest import quiet, runtime, shims

# Debian's release, whatever the node's own: the kernel of Debian 13 (6.12) panics at its boot in QEMU 7.2,
# Debian 12's, without KVM. This one's (6.1) boots in both releases' QEMU.
RELEASE = "bookworm"

# Debian's packages, besides the agent's with its dependencies and those of `CONTAINERS`.
PACKAGES = (
    "apparmor",  # for the container runtime's own profile, and those of the node
    "ca-certificates",
    "catatonit",  # the first process of a pod's own PID namespace
    "conmon",
    "conntrack",  # deletes flows of UDP to endpoints that are gone
    "crun",
    "e2fsprogs",  # file systems of volumes
    "iproute2",
    "iptables",
    "kmod",
    "linux-image-cloud-amd64",
    "nftables",
    "systemd-sysv",
    "udev",
    "xfsprogs",
)

# Files of packages that are not unpacked.
EXCLUDED = (
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
)

# Units that would wake an idle VM, or wait for what it does not have.
MASKED = (
    "apparmor.service",  # profiles of programs that no pod has
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "man-db.timer",
    "nftables.service",
    "systemd-journal-flush.service",
    "systemd-networkd.service",
    "systemd-networkd.socket",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "systemd-tmpfiles-clean.timer",
    "systemd-update-utmp-runlevel.service",
    "systemd-update-utmp.service",
)

# udev's rules for hardware that no VM has. Each event is matched against every rule, and a disk that is
# plugged in makes nine events: without these rules that costs an emulated processor a seventh less.
UDEV_MASKED = (
    "60-autosuspend",
    "60-cdrom_id",
    "60-drm",
    "60-evdev",
    "60-fido-id",
    "60-infiniband",
    "60-input-id",
    "60-persistent-alsa",
    "60-persistent-input",
    "60-persistent-storage-tape",
    "60-persistent-v4l",
    "60-sensor",
    "60-serial",
    "70-camera",
    "70-joystick",
    "70-mouse",
    "70-power-switch",
    "70-touchpad",
    "71-seat",
    "73-seat-late",
    "75-probe_mtd",
    "78-sound-card",
)

# The pod's network is the VM's own, so Docker manages none. The agent sends logs to the node as they grow, so
# the guest only holds what the node has not read yet. The runtime is crun, through the script in `runtime`:
# runc is started several times for each container and each command in one, which takes an emulated processor
# half a second each time. There is no D-Bus for crun to ask systemd for control groups.
_DOCKER = {
    "bridge": "none",
    "default-runtime": "crun",
    "exec-opts": ["native.cgroupdriver=cgroupfs"],
    "iptables": False,
    "ip6tables": False,
    "ip-forward": False,
    "ip-masq": False,
    "userland-proxy": False,
    "live-restore": True,
    "log-driver": "json-file",
    "runtimes": {"crun": {"path": runtime.PATH}},
    "log-opts": {"max-size": "64m", "max-file": "3"},
    "storage-driver": "overlay2",
    "shutdown-timeout": 5,
}

_WARM = '''\
#!/usr/bin/python3 -IS
"""Has Docker do once what it does for each pod: programs, modules and caches are in memory then.

By its API: each `docker` command would cost an emulated machine seconds.
"""
import http.client
import io
import json
import socket
import tarfile

NAME = "infranetes-warm"


class Docker(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("/run/docker.sock")

    def ask(self, method, path, body=None, kind="application/json"):
        if body is not None and kind == "application/json":
            body = json.dumps(body)
        self.request(method, path, body, {"Content-Type": kind})
        answer = self.getresponse()
        said = answer.read()
        if answer.status >= 400:
            raise SystemExit(f"{method} {path}: {answer.status} {said.decode()}")
        return json.loads(said) if said.startswith(b"{") and b"\\r\\n" not in said else None


archive = io.BytesIO()
with tarfile.open(fileobj=archive, mode="w") as tar:
    tar.add("/usr/bin/busybox", "busybox")
docker = Docker("localhost", timeout=250)
docker.ask("POST", f"/images/create?fromSrc=-&repo={NAME}&tag=1", archive.getvalue(), "application/x-tar")
docker.ask(
    "POST",
    f"/containers/create?name={NAME}",
    {"Image": f"{NAME}:1", "Cmd": ["/busybox", "sleep", "600"], "HostConfig": {"NetworkMode": "host"}},
)
docker.ask("POST", f"/containers/{NAME}/start")
made = docker.ask("POST", f"/containers/{NAME}/exec", {"Cmd": ["/busybox", "true"]})
docker.ask("POST", f"/exec/{made['Id']}/start", {"Detach": True})
docker.ask("DELETE", f"/containers/{NAME}?force=1")
docker.ask("DELETE", f"/images/{NAME}:1")
'''

_WARM_UNIT = """\
[Unit]
Description=Have Docker run a container, so that the first one of a pod is not its first
After=docker.service
Requires=docker.service
Before=vmserver.service

[Service]
Type=oneshot
ExecStart=/usr/lib/infranetes/warm
TimeoutStartSec=300

[Install]
WantedBy=multi-user.target
"""

# Files by path: mode and text.
FILES: Mapping[str, tuple[int, str]] = {
    "etc/fstab": (0o644, "/dev/vda / ext4 rw,noatime,x-systemd.growfs 0 0\n"),
    "etc/initramfs-tools/conf.d/infranetes": (0o644, "MODULES=list\nRESUME=none\n"),
    "usr/share/initramfs-tools/modules.d/infranetes": (0o644, "virtio_pci\nvirtio_blk\next4\n"),
    "etc/systemd/journald.conf.d/infranetes.conf": (
        0o644,
        # The console is a file on the node, which shows why a VM failed.
        "[Journal]\nStorage=volatile\nRuntimeMaxUse=16M\nForwardToConsole=yes\nMaxLevelConsole=warning\n",
    ),
    "etc/systemd/system.conf.d/infranetes.conf": (
        0o644,
        "[Manager]\nDefaultTimeoutStartSec=300s\nDefaultTimeoutStopSec=10s\n",
    ),
    "etc/sysctl.d/50-infranetes.conf": (
        0o644,
        # A VM whose kernel panics ends, which the node notices.
        "kernel.panic = -1\nkernel.panic_on_oops = 1\nnet.ipv6.conf.all.accept_ra = 0\n"
        # Where there are huge pages the kernel keeps 5 % of the memory free to make some: 45 MiB of 907.
        "vm.min_free_kbytes = 8192\n",
    ),
    "etc/modules-load.d/infranetes.conf": (
        0o644,
        # For the disks of image layers, so that plugging one into a clone loads nothing; and for the ends of
        # connections in clones of kept VMs.
        "virtio_scsi\nsd_mod\nerofs\noverlay\nloop\ntcp_diag\nudp_diag\n",
    ),
    "etc/modprobe.d/infranetes.conf": (
        0o644,
        # udev loads this for every SCSI disk, and the kernel then announces each a second time.
        "blacklist sg\n",
    ),
    "etc/udev/rules.d/10-infranetes-layers.rules": (
        0o644,
        # The agent finds the disks of layers by their places, so udev need not look for names in them.
        'SUBSYSTEM=="block", KERNEL=="sd*", ENV{UDEV_DISABLE_PERSISTENT_STORAGE_RULES_FLAG}="1"\n',
    ),
    "etc/udev/rules.d/61-infranetes-layers.rules": (
        0o644,
        # Nor need udev notice that one is closed: nothing can have written to it.
        'SUBSYSTEM=="block", KERNEL=="sd*", OPTIONS+="nowatch"\n',
    ),
    **{f"etc/udev/rules.d/{name}.rules": (0o644, "# Not in VMs\n") for name in UDEV_MASKED},
    "etc/systemd/system/vmserver.service.d/infranetes.conf": (
        0o644,
        # The console gets the last lines, since the logs of a VM whose agent does not start can't be read.
        '[Service]\nExecStopPost=-/bin/sh -c \'test "$SERVICE_RESULT" = success || '
        f"{{ journalctl --unit vmserver --lines 30 --no-pager --output cat; tail -n 30 {quiet.LOG}; }} "
        ">/dev/console'\n",
    ),
    **quiet.FILES,
}

ENABLED = ("vmserver.service", quiet.UNIT_NAME)


@attrs.frozen
class Containers:
    """What runs containers in the guest, over what every guest has.

    :ivar providers: the agent's ContainerProviders, that of pods which choose none first.
    :ivar packages: Debian's. :ivar files: by path: mode and text.
    :ivar enabled: units. :ivar disabled: units that Debian's packages enable.
    """

    name: str
    providers: tuple[str, ...]
    packages: tuple[str, ...]
    files: Mapping[str, tuple[int, str]]
    enabled: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()


_DOCKER_FILES: Mapping[str, tuple[int, str]] = {
    "etc/docker/daemon.json": (0o644, json.dumps(_DOCKER, indent=2) + "\n"),
    "etc/systemd/system/docker.service.d/infranetes.conf": (
        0o644,
        # Docker starts itself again to unpack each layer. At the same addresses an emulated CPU can reuse
        # its translations, which halves the time. Containers are not its children and keep random
        # addresses.
        "[Service]\nExecStart=\nExecStart=/usr/bin/setarch -R /usr/sbin/dockerd -H fd:// "
        "--containerd=/run/containerd/containerd.sock\n"
        # Like containerd, dockerd must not be what the OOM killer chooses. Docker 20.10 sets a score of its
        # own when it starts, with which pods of the class Guaranteed would outlive it.
        "OOMScoreAdjust=-999\nExecStartPost=-/bin/sh -c 'echo -999 >/proc/$MAINPID/oom_score_adj'\n",
    ),
    **runtime.FILES,
}

# Docker, which runs from the boot on.
DOCKER = Containers(
    "docker",
    ("docker",),
    (
        "busybox-static",  # the container that `warm` runs
        "docker.io",
    ),
    {
        **_DOCKER_FILES,
        "usr/lib/infranetes/warm": (0o755, _WARM),
        "etc/systemd/system/infranetes-warm.service": (0o644, _WARM_UNIT),
        **shims.FILES,
    },
    enabled=("docker.service", "infranetes-warm.service", shims.UNIT_NAME),
)

AGENT = "etc/infranetes/vmserver.toml"

# conmon and crun, which the agent itself starts; images come as layers. A handler's pods may instead consist
# of executables, which the VM's systemd runs.
OCI = Containers(
    "oci",
    ("oci", "systemd"),
    (),
    {AGENT: (0o644, 'provider = "oci"\nchoices = ["systemd"]\n'), **quiet.OWN_MOUNTS},
)

# Like OCI, and with Docker, which does not run before a pod wants it.
BOTH = Containers(
    "both",
    ("oci", "docker", "systemd"),
    ("docker.io",),
    {
        AGENT: (
            0o644,
            'provider = "oci"\nchoices = ["docker", "systemd"]\n\n[providers.docker]\n'
            'start_command = ["/usr/bin/systemctl", "start", "docker.service"]\n',
        ),
        **quiet.OWN_MOUNTS,
        **_DOCKER_FILES,
    },
    disabled=("docker.service", "docker.socket", "containerd.service"),
)

CONTAINERS: Mapping[str, Containers] = {each.name: each for each in (DOCKER, OCI, BOTH)}


def more_than(containers: Containers) -> Sequence[Containers]:
    """Return what has the same default ContainerProvider as `containers`, all of its others, and more."""
    default, *others = containers.providers
    return [
        each
        for each in CONTAINERS.values()
        if each.providers[0] == default and {*others} < {*each.providers[1:]}
    ]


# The name in CONTAINERS of what an image has by default. The Makefile reads this line.
DEFAULT_CONTAINERS = "both"

# Our own packages, from the directory that the builder is given.
OUR_PACKAGES = ("infranetes-common", "vmserver")
DISK_GIB = 8  # of the image; the configuration says how large the template's disk is
