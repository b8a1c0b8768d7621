"""Claims and replies (rl360.harbor.replies) of steps that are over are deleted; they would pile up in the store."""

from __future__ import annotations

import logging
import random
import re
import time

from rl360.errors import Rl360Error
from rl360.store.layout import RUN_PATTERN
from rl360.store.object_store import ObjectStore
from rl360.store.progress import next_step

log = logging.getLogger("rl360.sandbox")
EVERY_S = 600.0
_OF_A_STEP = re.compile(r"/replies/s(\d{6})-[^/]+$")


def prune(store: ObjectStore, run: str) -> int:
    """Delete those of the run's finished steps but the last, out of which somebody may still be on his way; returns how
    many. Attempts of other trainers are of no step that we know, and stay."""
    over = next_step(store, run) - 1
    gone = [key for key in store.list(f"{run}/replies/") if (of := _OF_A_STEP.search(key)) and int(of[1]) < over]
    for key in gone:
        store.delete(key)
    return len(gone)


def keep_pruned(store: ObjectStore) -> None:
    """Now and then, for ever. Every server does it, each at its own times: deleting twice is harmless."""
    while True:
        time.sleep(EVERY_S * random.uniform(0.5, 1.5))
        try:
            for run in store.list_folders(""):
                if re.fullmatch(RUN_PATTERN, run) and (count := prune(store, run)):
                    log.info("run %s: %d claims and replies of finished steps deleted", run, count)
        except Rl360Error as error:
            log.warning("claims and replies of finished steps were not deleted: %s", error)
