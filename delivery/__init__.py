# SPDX-License-Identifier: Apache-2.0
"""What is delivered to those who don't build it themselves: distributions for pip, and the node's image."""
