# SPDX-License-Identifier: Apache-2.0
"""The machine that a simulated VM runs on."""

from __future__ import annotations

from zope.interface import Attribute, Interface

from infranetes_common.identity import Identity


class IMachine(Interface):
    """A machine with an agent, of one VM."""

    host: str = Attribute("Where its agent is reached.")
    port: int = Attribute("The agent's port; 0 until it runs.")

    async def turn_on(identity: Identity, behaviour: str) -> None:
        """Run the agent. Called once. Fails if it can't be."""

    async def turn_off() -> None:
        """Cut its power, also while it is being turned on. Idempotent."""

    def forget() -> None:
        """Forget the identity that it was turned on with, once it is off. Blocks."""

    async def behave(behaviour: str) -> None:
        """Change how its agent behaves; connections are cut."""

    def clear() -> None:
        """End what is left of it from an earlier farm."""
