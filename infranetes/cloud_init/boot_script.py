# SPDX-License-Identifier: Apache-2.0
"""A script of sh by which a guest finds its volumes, its keys, and what a kept root has not yet.

cloud-init's own modules for this run once for each instance, and mount only what udev has named by then.
udev's names end in the disk's serial number, whatever bus the disk is on (virtio-SERIAL,
scsi-0QEMU_QEMU_HARDDISK_SERIAL, ata-QEMU_HARDDISK_SERIAL, nvme-QEMU_NVMe_Ctrl_SERIAL). Where there is no
udev, the kernel tells it in /sys.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence

from infranetes.cloud_init.document import GuestDocument, GuestVolume, HostKey
from infranetes.machines.agentless.access import GuestFile

KEY_COMMENT = "infranetes-node"
"""The end of the line of the node's key, by which that of an earlier pod is found."""
_MARKER = "/var/lib/infranetes-guest/pod"
_LINE = 4096
_WAIT = 60  # seconds for all disks of volumes together

_FIND = f"""\
waited=0
find_disk() {{
  while :; do
    for disk in /dev/disk/by-id/*[-_]"$1"; do
      if [ -b "$disk" ]; then found=$disk; return 0; fi
    done
    for disk in /sys/block/*; do
      serial=$(cat "$disk/serial" "$disk/device/serial" 2>/dev/null | tr -d ' ')
      if [ -z "$serial" ] && [ -f "$disk/device/vpd_pg80" ]; then
        serial=$(tail -c +5 "$disk/device/vpd_pg80" | tr -d ' \\000')
      fi
      if [ "$serial" = "$1" ] && [ -b "/dev/${{disk##*/}}" ]; then found=/dev/${{disk##*/}}; return 0; fi
    done
    if [ "$waited" -ge {_WAIT} ]; then
      echo "infranetes: no disk has the serial number $1 after $waited seconds; $2 is not there" >&2
      return 1
    fi
    waited=$((waited + 1))
    sleep 1
  done
}}
mount_disk() {{
  find_disk "$1" "$2" || return 0
  mkdir -p "$2"
  if mountpoint -q "$2" 2>/dev/null; then return 0; fi
  # A file system is made only where nothing ever was.
  if [ -n "$3" ] && [ "${{4%%,*}}" = rw ] && command -v "mkfs.$3" >/dev/null &&
    cmp -s -n 4194304 "$found" /dev/zero; then
    "mkfs.$3" "$found" || echo "infranetes: mkfs.$3 of $2 has failed" >&2
  fi
  mount ${{3:+-t "$3"}} -o "$4" "$found" "$2" || echo "infranetes: $2 can't be mounted" >&2
}}
link_disk() {{
  find_disk "$1" "$2" || return 0
  mkdir -p "${{2%/*}}"
  ln -sfn "$found" "$2"
}}
"""
_PUT = """\
put() {
  mkdir -p "${1%/*}"
  (umask 077; base64 -d >"$1.infranetes") && chmod "$2" "$1.infranetes" && mv -f "$1.infranetes" "$1" ||
    echo "infranetes: $1 can't be written" >&2
}
"""


def _base64(content: bytes) -> str:
    """Return base64 in lines that every shell takes, one at the least."""
    text = base64.b64encode(content).decode()
    return "".join(f"{text[at : at + _LINE]}\n" for at in range(0, max(len(text), 1), _LINE))


def volumes_script(volumes: Sequence[GuestVolume]) -> str:
    """Return commands of sh that mount the volumes. They may be run again. "": there are none."""
    lines = []
    for volume in sorted(volumes, key=lambda each: each.path):
        if not volume.path:
            continue
        words = [volume.serial, volume.path]
        if not volume.block:
            words += [volume.fs_type, ",".join(["ro" if volume.read_only else "rw", *volume.options])]
        lines.append(shlex.join(["link_disk" if volume.block else "mount_disk", *words]))
    return _FIND + "\n".join(lines) + "\n" if lines else ""


def boot_script(document: GuestDocument, files: Mapping[str, GuestFile]) -> str:
    """Return what a guest's shell runs at each boot, early. "": nothing.

    :param files: those that are written for each pod where the root stays, and its cloud-init does not."""
    script = ""
    if document.node_key:
        script += _node_key(document.node_key)
    script += volumes_script(document.volumes)
    if document.root_stays:
        # After the volumes, in which some may be.
        script += _for_each_pod(document.sandbox_id, document.host_key, files)
    # In a subshell: bootcmd of the pod's own user-data is in the same script.
    return f"(\n{script})\n" if script else ""


def _node_key(key: str) -> str:
    line = " ".join([*key.split()[:2], KEY_COMMENT])
    return f"""\
home=~root
mkdir -p -m 700 "$home/.ssh"
touch "$home/.ssh/authorized_keys"
if ! grep -qxF {shlex.quote(line)} "$home/.ssh/authorized_keys"; then
  sed -i '/ {KEY_COMMENT}$/d' "$home/.ssh/authorized_keys"
  echo {shlex.quote(line)} >>"$home/.ssh/authorized_keys"
fi
chmod 600 "$home/.ssh/authorized_keys"
if command -v restorecon >/dev/null; then restorecon -R "$home/.ssh"; fi
"""


def _for_each_pod(sandbox_id: str, host_key: HostKey | None, files: Mapping[str, GuestFile]) -> str:
    wanted = dict(files)
    if host_key is not None:
        wanted["/etc/ssh/ssh_host_ed25519_key"] = GuestFile(host_key.private.encode(), 0o600)
        wanted["/etc/ssh/ssh_host_ed25519_key.pub"] = GuestFile(host_key.public.encode() + b"\n", 0o644)
    puts = ""
    for path, file in sorted(wanted.items()):
        body = _base64(file.content)
        puts += f"put {shlex.quote(path)} {file.mode & 0o7777:o} <<'END'\n{body}END\n"
    mark, pod = _MARKER, shlex.quote(sandbox_id)
    return f"""\
if [ "$(cat {mark} 2>/dev/null)" != {pod} ]; then
{_PUT}{puts}mkdir -p {mark.rpartition("/")[0]}
echo {pod} >{mark}
fi
"""
