# SPDX-License-Identifier: Apache-2.0
"""A system of a kernel and busybox: it asks for an address by DHCP, shows a page, and has a shell.

Its shell is on the first serial console, its page on TCP port 8080. It powers off when the power button is
pressed. It knows nothing of Infranetes, and of clouds as little.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from tests.guests import cpio, debian, modules

PORT = 8080
PROMPT = "tiny# "
BUSYBOX = Path("/bin/busybox")
#: What the kernel is told.
WORDS = "console=tty0 console=ttyS0,115200 quiet net.ifnames=0 no_timer_check"
#: The name of the partition that counts the boots.
STATE = "state"
#: Found by what the hardware says of itself.
DRIVERS = (
    *("virtio_pci", "virtio_blk", "virtio_scsi", "virtio_net", "virtio_console", "virtio_balloon"),
    *("sd_mod", "sr_mod", "ata_piix", "ata_generic", "nvme", "button", "evdev"),
    *("virtiofs", "isofs", "vfat", "nls_cp437", "nls_ascii", "ext4", "crc32c_generic"),
    *("qemu_fw_cfg", "pvpanic_pci", "pvpanic_mmio"),
)
#: Of real hardware, which kernels for clouds lack.
HARDWARE_DRIVERS = ("ahci", "e1000e", "e1000", "8139cp", "i6300esb", "iTCO_wdt", "9p", "9pnet_virtio")

_INITTAB = f"""\
::sysinit:/etc/start
::respawn:/bin/httpd -f -p {PORT} -h /www
::respawn:/etc/address
ttyS0::respawn:/bin/getty -n -l /etc/shell -L 115200 ttyS0 vt100
::ctrlaltdel:/bin/reboot
::shutdown:/etc/stop
"""
_START = """\
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
mkdir -p /dev/pts /run /tmp
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
echo /bin/modprobe >/proc/sys/kernel/modprobe
hostname tiny
ip link set lo up
# What one finds may show others: a bus, its disks.
for pass in 1 2 3; do
	find /sys/devices -name modalias -exec cat {} + 2>/dev/null | sort -u >/run/devices
	modprobe -qab $(grep -vxF -f /run/known /run/devices 2>/dev/null || cat /run/devices) 2>/dev/null
	cp /run/devices /run/known
done
modprobe -qab evdev sd_mod 2>/dev/null
acpid -c /etc/acpi -l /dev/null -p /run/acpid
/etc/boots &
/etc/page
echo 'tiny: started' >/dev/console
"""
# Its card may come late, or never.
_ADDRESS = """\
#!/bin/sh
until card=$(ls /sys/class/net | grep -m 1 ^eth); do sleep 0.2; done
ip link set "$card" up
more='-O staticroutes -O mtu -O search -O ntpsrv'
exec udhcpc -f -i "$card" -s /etc/lease -t 8 -T 1 -A 1 $more >/run/udhcpc 2>&1
"""
_LEASE = """\
#!/bin/sh
case $1 in
deconfig)
	ip addr flush dev "$interface"
	;;
bound | renew)
	[ "$1" = bound ] && ip addr flush dev "$interface"
	[ -z "$mtu" ] || ip link set dev "$interface" mtu "$mtu"
	ip addr replace "$ip/${mask:-32}" dev "$interface"
	if [ -n "$staticroutes" ]; then
		set -- $staticroutes
		while [ $# -ge 2 ]; do
			case $2 in
			0.0.0.0) ip route replace "$1" dev "$interface" ;;
			*) ip route replace "$1" via "$2" dev "$interface" onlink ;;
			esac
			shift 2
		done
	elif [ -n "$router" ]; then
		ip route replace default via "${router%% *}" dev "$interface" onlink
	fi
	[ -z "$hostname" ] || hostname "$hostname"
	{
		[ -z "$search$domain" ] || echo "search ${search:-$domain}"
		for server in $dns; do echo "nameserver $server"; done
	} >/etc/resolv.conf
	set >/run/lease
	echo "$ip" >/run/address
	/etc/page
	echo "tiny: $interface has $ip/${mask:-32}, as $(hostname)" >/dev/console
	;;
esac
"""
_PAGE = """\
#!/bin/sh
{
	echo "hostname=$(hostname)"
	echo "address=$(cat /run/address 2>/dev/null)"
	echo "boots=$(cat /run/boots 2>/dev/null)"
} >/www/index.new
mv /www/index.new /www/index.html
"""
# A disk may take its time. On a CD there is none.
_BOOTS = f"""\
#!/bin/sh
for try in 1 2 3 4 5 6 7 8 9 10; do
	partition=$(grep -lx PARTNAME={STATE} /sys/class/block/*/uevent | head -n 1)
	[ -z "$partition" ] || break
	sleep 0.5
done
[ -n "$partition" ] || exit 0
partition=/dev/$(basename "${{partition%/uevent}}")
boots=$(dd if=$partition bs=512 count=1 2>/dev/null | tr -d '\\0')
boots=$((${{boots:-0}} + 1))
echo $boots | dd of=$partition bs=512 count=1 conv=sync,fsync 2>/dev/null
echo $boots >/run/boots
/etc/page
echo "tiny: boot $boots of this disk" >/dev/console
"""
_STOP = """\
#!/bin/sh
echo "tiny: stopping" >/dev/console
umount -a -r 2>/dev/null
"""
_SHELL = f"""\
#!/bin/sh
export HOME=/ TERM=vt100 PS1='{PROMPT}'
exec /bin/sh
"""


def first_file_system(kernel: Path, *, hardware: bool) -> bytes:
    """Return what the kernel starts from, compressed.

    :param kernel: an unpacked package of it. :param hardware: with drivers of real hardware.
    """
    return gzip.compress(cpio.archive(_entries(kernel, hardware)), 9, mtime=0)


def _entries(kernel: Path, hardware: bool) -> Iterator[cpio.Entry]:
    [directory] = (kernel / "lib/modules").iterdir()
    wanted = (*DRIVERS, *(HARDWARE_DRIVERS if hardware else ()))
    yield from modules.entries(directory.name, modules.find(directory, wanted))
    for path in ("dev", "proc", "sys", "run", "tmp", "root", "www", "mnt"):
        yield cpio.directory(path)
    yield cpio.device("dev/console", 5, 1)
    yield cpio.device("dev/null", 1, 3)
    yield cpio.file("bin/busybox", BUSYBOX.read_bytes(), 0o755)
    for name in debian.said(str(BUSYBOX), "--list").split():
        if name != "busybox":
            yield cpio.link(f"bin/{name}", "busybox")
    yield cpio.link("sbin", "bin")
    yield cpio.link("usr/bin", "../bin")
    yield cpio.link("usr/sbin", "../bin")
    yield cpio.link("init", "bin/init")
    yield cpio.file("etc/inittab", _INITTAB)
    yield cpio.file("etc/passwd", "root:x:0:0:root:/:/bin/sh\n")
    yield cpio.file("etc/group", "root:x:0:\n")
    for path, script in (
        ("start", _START),
        ("address", _ADDRESS),
        ("lease", _LEASE),
        ("page", _PAGE),
        ("boots", _BOOTS),
        ("stop", _STOP),
        ("shell", _SHELL),
        ("acpi/PWRF/00000080", "#!/bin/sh\necho 'tiny: the power button' >/dev/console\npoweroff\n"),
    ):
        yield cpio.file(f"etc/{path}", script, 0o755)
