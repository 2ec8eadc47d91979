"""Chat with a model: all turns share one cache, in which earlier turns stay pruned."""

from kvprune.chat.engine import Chat as Chat
from kvprune.chat.engine import Status as Status

__all__ = ["Chat", "Status"]
