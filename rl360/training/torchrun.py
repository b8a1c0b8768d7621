"""torchrun with its rendezvous store on its own host's address: `python -m rl360.training.torchrun`, same arguments."""

from __future__ import annotations

from torch.distributed.run import main

from rl360.training.loopback import keep_stores_on_their_host

if __name__ == "__main__":
    keep_stores_on_their_host()
    main()
