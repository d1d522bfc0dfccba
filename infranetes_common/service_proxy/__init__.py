# SPDX-License-Identifier: Apache-2.0
"""The service proxy: nftables translates this VM's connections to the addresses of Kubernetes' Services.

    rules      the node's rule for each address, protocol and port
    placement  the kernel's state for a rule
    script     text for `nft` that makes the tables, or changes them from some placements to others
    listing    placements read from nft's listing of a table
    kernel     runs scripts by the nftables library, and the programs `nft` and `conntrack`
    verdict    the outcome of all this for one address
    proxy      keeps the kernel's tables equal to the node's rules
    messages   the messages between it and the node, as values
    upkeep     what goes on as long as there is a proxy

Containers share the VM's own network, so their packets are local: they are translated on their way out, and
nowhere else. The proxy leaves tables that containers make alone.
"""
