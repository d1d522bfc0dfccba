# SPDX-License-Identifier: Apache-2.0
"""Creating, starting, stopping and removing containers."""
