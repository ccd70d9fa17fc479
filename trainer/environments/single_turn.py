"""One prompt, one answer: the default environment. Serves any number of sessions at once."""

from __future__ import annotations

from trainer.environment import Session
from trainer.errors import ToolError
from trainer.rollout import Message, Prompt

__all__ = ["SingleTurn", "content_of", "said"]


class SingleTurn:
    """Lets the policy answer the prompt once."""

    async def run(self, session: Session, prompt: Prompt) -> None:
        """One generation ends the conversation."""
        await session.generate(said(prompt))


def said(prompt: Prompt) -> str | tuple[int, ...] | tuple[Message, ...]:
    """What a conversation begins with: the prompt's tokens, messages or text."""
    content = content_of(prompt)
    if content is None:
        raise ToolError(f"prompt {prompt.uid} has neither tokens nor messages nor text")
    return content


def content_of(prompt: Prompt) -> str | tuple[int, ...] | tuple[Message, ...] | None:
    """The prompt's tokens, messages or text, whichever there is first."""
    for content in (prompt.token_ids, prompt.messages, prompt.text):
        if content is not None:
            return content
    return None
