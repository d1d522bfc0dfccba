# SPDX-License-Identifier: Apache-2.0
"""The site: what docs/ says, as pages with a navigation, a search and the interfaces' reference."""
