# SPDX-License-Identifier: Apache-2.0
"""Records, states and the file that holds them."""
