# SPDX-License-Identifier: Apache-2.0
"""DHCP for VMs that know nothing of their network, each answered on its own tap alone.

packets    UDP in IPv4 in Ethernet: read and written
messages   DHCP's messages and options: read and written
packets6   UDP and ICMPv6 in IPv6 in Ethernet
lease      what one VM is told, and which of its messages is answered, and how
lease6     the same of IPv6, in a CNI's network
tap        where the daemon hears a VM's requests alone
server     answers one VM
servers    answers all of them, also those that an earlier daemon made

Nothing else is told: there is no pool, and no lease ends while its VM lives.
"""
