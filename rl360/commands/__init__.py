"""Sub-commands of `rl360`; each module exposes `register(app)` and is imported only when its command is used."""
