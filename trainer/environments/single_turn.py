"""One prompt, one answer: the default environment. Serves any number of sessions at once."""

from __future__ import annotations

from trainer.environment import Session
from trainer.rollout import Prompt

__all__ = ["SingleTurn"]


class SingleTurn:
    """Lets the policy answer the prompt once."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        """The prompt is already in the session; one generation ends the conversation."""
        await session.generate()
