"""The formats that agents speak, each a `rl360.sessions.wire.Format`; the session server's routes choose one."""
