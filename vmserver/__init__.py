# SPDX-License-Identifier: Apache-2.0
"""The agent in each VM: runs the pod's containers for the node that holds its certificate's CA."""
