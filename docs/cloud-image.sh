#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A disk that a cloud's machines boot by BIOS, from the guest image that infranetes-guest built: root, for losetup and
# chroot; packages fdisk and e2fsprogs, and a source of Debian packages.
#
#     docs/cloud-image.sh SOURCE [docker|machine] [FILE] [GIB]
#
# SOURCE: where the agent has its identity from: aws, gcp, vsphere. `docker`: for pods of containers; `machine`: the
# image is the pod, and what it is for has to be put into the tree where the comment says so.
set -eu
source=${1:?aws, gcp or vsphere} provider=${2:-docker} file=${3:-pod.raw} gib=${4:-8}
guest=/var/lib/infranetes/guest/current
work=$(mktemp -d)
part='' loop=''
undo() {
    set +e
    cd /
    umount --recursive "$work/tree" "$work/guest" 2>/dev/null
    for each in $part $loop; do losetup --detach "$each"; done
    rm -rf --one-file-system "$work"
}
trap undo EXIT
mkdir "$work/tree" "$work/guest"

truncate --size 0 "$file"
truncate --size "${gib}G" "$file"
echo 'start=2048, type=83, bootable' | sfdisk --quiet "$file"
loop=$(losetup --find --show "$file")
part=$(losetup --find --show --offset 1MiB "$file")
mkfs.ext4 -q -L infranetes "$part"
mount "$part" "$work/tree"
mount -o ro,loop,noload "$guest/disk.raw" "$work/guest"
cp -a "$work/guest/." "$work/tree/"

cd "$work/tree"
cat >etc/infranetes/vmserver.toml <<END
provider = "$provider"
[identity]
source = "$source"
END
echo 'LABEL=infranetes / ext4 rw,noatime 0 1' >etc/fstab
# The guest's own initrd knows QEMU's disks only, and its network is the agent's to set up.
printf '%s\n' nvme sd_mod virtio_scsi mptspi vmw_pvscsi >>usr/share/initramfs-tools/modules.d/infranetes
printf '[Match]\nType=ether\n[Network]\nDHCP=ipv4\n[DHCPv4]\nUseMTU=yes\n' >etc/systemd/network/50-dhcp.network
rm -f etc/systemd/system/systemd-networkd.service etc/systemd/system/systemd-networkd.socket
# update-grub can't cope with a root on a loop device. Messages are read on the serial console.
mkdir -p boot/grub
version=$(basename boot/vmlinuz-* | sed 's/^vmlinuz-//')
cat >boot/grub/grub.cfg <<END
search --no-floppy --label infranetes --set root
linux /boot/vmlinuz-$version root=LABEL=infranetes rw console=tty0 console=ttyS0 net.ifnames=0
initrd /boot/initrd.img-$version
boot
END

# Here: what the image is for, such as packages and units of your own.

cp /etc/resolv.conf etc/resolv.conf
for each in dev proc sys; do
    mount --rbind "/$each" "$each"
    mount --make-rslave "$each"
done
chroot . sh -euc '
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -qy --no-install-recommends grub-pc-bin grub2-common
    systemctl --quiet enable systemd-networkd
    # It is for templates, and each of these machines boots. Guest images without Docker do not have it.
    [ ! -e /etc/systemd/system/infranetes-warm.service ] || systemctl --quiet disable infranetes-warm
    [ "$2" != docker ] || systemctl --quiet enable docker.service    # which one with both has switched off
    update-initramfs -u -k all
    grub-install --target=i386-pc --modules="part_msdos ext2" "$1"
    apt-get clean
    rm -rf /var/lib/vmserver /var/lib/apt/lists/*
    : >/etc/machine-id
    : >/etc/resolv.conf
' sh "$loop" "$provider"
