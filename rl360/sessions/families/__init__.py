"""Chat templates by model family; see docs/templates.md."""

from rl360.sessions.families.base import ChatTemplate
from rl360.sessions.families.registry import load_template

__all__ = ["ChatTemplate", "load_template"]
