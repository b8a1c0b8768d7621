"""One Prefect task a file. Thin: an idempotency key, a retry rule, an artifact; the work is a call into rl360."""
