# SPDX-License-Identifier: Apache-2.0
"""A hostile agent: a process that takes the place of a VM's own agent, with that VM's identity.

`python -m tests.support.hostile` is the process. `agent` has its answers, `attacks` the ways in which it
lies, `corpus` messages of any shape, and `case` the test case that lets it attack a daemon.
"""
