# SPDX-License-Identifier: Apache-2.0
"""The client of a VM's agent: its calls, its Watch stream, and the checks of its messages."""
