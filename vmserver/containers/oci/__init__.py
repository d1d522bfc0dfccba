# SPDX-License-Identifier: Apache-2.0
"""A ContainerProvider whose containers are run by conmon and crun."""
