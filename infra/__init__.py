"""How the services start: `local` is the supervisor behind `rl360 up`, the rest are cluster manifests."""
