# SPDX-License-Identifier: Apache-2.0
"""The machine that the agent is in: its memory, processors, processes, mounts and clocks."""
