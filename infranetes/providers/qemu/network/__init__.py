# SPDX-License-Identifier: Apache-2.0
"""The pods' network on the node: the bridge with its tables, and the namespaces of other programs."""
