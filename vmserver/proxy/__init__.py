# SPDX-License-Identifier: Apache-2.0
"""The service proxy: connections of this VM to the addresses of Kubernetes' Services, translated by nftables.

    rules      what the node says of each address, protocol and port
    placement  what the kernel has to have for a rule
    script     text for `nft` that makes the tables, or changes them from some placements to others
    listing    placements read from what `nft` lists
    kernel     runs these by the library of nftables, and the programs `nft` and `conntrack`
    verdict    what that comes to for one address
    proxy      keeps the kernel's tables as the node says

Containers share the VM's own network, so their packets are local: they are translated on their way out, and
nowhere else. Tables that containers make are left alone.
"""
