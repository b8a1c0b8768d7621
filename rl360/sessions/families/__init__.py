"""Chat templates by model family; see docs/templates.md."""
