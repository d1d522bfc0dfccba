# SPDX-License-Identifier: Apache-2.0
"""The VM's end of the tunnel to the pods' network, and connections that are marked as the agent's own."""
