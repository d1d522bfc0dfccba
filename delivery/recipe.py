# SPDX-License-Identifier: Apache-2.0
"""What is in a node's tree: Debian's packages that its files are of, and which of their files those are."""

from __future__ import annotations

RELEASE = "bookworm"
NEWER_RELEASE = "trixie"
"""Whose nft the tree has, too: see nft.sh."""
HOME = "/opt/infranetes"
"""Where trees are on a node, each in a directory of its own."""

# Besides what debian/control says that the daemon's packages depend on.
PROGRAM_PACKAGES = (
    "conntrack",
    "dash",
    "iproute2",
    "nftables",
    "python3",
    "qemu-system-x86",
    "qemu-utils",
    "util-linux",
)
PROGRAMS = (
    "conntrack",
    "dash",
    "ip",
    "python3.11",
    "qemu-img",
    "qemu-system-x86_64",
    "setpriv",
    "setsid",
    "skopeo",
    "tc",
)
# Below usr/: taken whole, but for what EXCLUDED names.
DIRECTORIES = (
    "lib/python3.11",
    "lib/python3/dist-packages",
    "lib/ipxe/qemu",
    "lib/x86_64-linux-gnu/ossl-modules",
    "share/qemu",
    "share/seabios",
)
# QEMU's modules that its machines here use: the others are for screens and sound of a person who sits there.
QEMU_MODULES = (
    "accel-tcg-x86_64.so",
    "hw-display-virtio-gpu.so",
    "hw-display-virtio-gpu-pci.so",
    "hw-display-virtio-vga.so",
)
# Patterns of paths below usr/, as fnmatch takes them.
EXCLUDED = (
    "*/__pycache__/*",
    "*/tests/*",
    "*/test/*",
    "lib/python3.11/config-*",
    "lib/python3.11/ensurepip/*",
    "lib/python3.11/idlelib/*",
    "lib/python3.11/lib2to3/*",
    "lib/python3.11/pydoc_data/*",
    "lib/python3.11/tkinter/*",
    "lib/python3.11/turtledemo/*",
    "lib/ipxe/qemu/*e1000.rom",
    "lib/ipxe/qemu/efi-eepro100.rom",
    "lib/ipxe/qemu/efi-ne2k_pci.rom",
    "lib/ipxe/qemu/efi-pcnet.rom",
    "lib/ipxe/qemu/efi-rtl8139.rom",
    "lib/ipxe/qemu/efi-vmxnet3.rom",
    "lib/ipxe/qemu/pxe-*",
)
EXCLUDED_SUFFIXES = (".a", ".h", ".pyc", ".pyi")
