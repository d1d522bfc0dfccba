# SPDX-License-Identifier: Apache-2.0
"""The assembly of the node daemon: how its parts are made, and in which order they start and stop."""
