# SPDX-License-Identifier: Apache-2.0
"""The farm: many simulated VMs, each a real agent, in this process on loopback or in namespaces of its own.

    python -m infranetes_simulation.farm --socket PATH --state DIR

The farm is a process of its own, so its VMs outlive the daemon that asked for them. It takes any number of
control connections (`infranetes_simulation.protocol`) on the unix socket PATH, mode 0600, and is ready once
that socket accepts. When the farm itself ends, its VMs have lost power: a farm started again over DIR lists
them as ended. If another farm holds DIR, or something answers on PATH, it exits with status 1 and says so on
standard error.
"""
