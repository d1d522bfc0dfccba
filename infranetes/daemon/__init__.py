# SPDX-License-Identifier: Apache-2.0
"""The node daemon put together: what is made of what, and in which order it starts and stops."""
