# SPDX-License-Identifier: Apache-2.0
"""The pods' network on the node."""
