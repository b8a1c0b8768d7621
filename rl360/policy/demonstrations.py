"""Demonstrations for the warm start: whole attempts as token ids, some right and some plausibly wrong.

Parameters (words, numbers, file contents) are drawn freshly per demonstration from the same families as the builtin
tasks. The exact parameters of the 32 builtin tasks are not left out: most families have far more combinations than
demonstrations, so that a draw hits one about never; `purge` has four, so there they recur.

Tool replies are the real outputs of the commands. A wrong demonstration ends in `done` like a right one: the policy
learns to solve a chore some of the time and to believe it did the rest of the time, which leaves RL its room.
"""

from __future__ import annotations

import random

import numpy as np

from rl360.errors import BadInput
from rl360.policy.shell_batch import run_batch
from rl360.policy.template import Encodes, encode_pieces, episode_pieces
from rl360.tasksets.chores import FAMILIES, Chore, Commands, draw_chore

Example = tuple[np.ndarray, np.ndarray]


def draw_episodes(seed: int, n: int, right_share: float) -> list[tuple[Chore, Commands]]:
    """`n` (chore, commands) with families in even shares; each right with probability `right_share`, else one of its
    wrong sequences.
    """
    if not 0.0 <= right_share <= 1.0:
        raise BadInput(f"right_share {right_share} is not between 0 and 1")
    if n < 1:
        raise BadInput(f"n {n} is not positive: ask for at least one demonstration")
    rng = random.Random(f"demonstrations:{seed}")
    families = list(FAMILIES)
    episodes = []
    for index in range(n):
        if index % len(families) == 0:
            rng.shuffle(families)
        chore = draw_chore(rng, families[index % len(families)])
        episodes.append((chore, rng.choice(chore.right if rng.random() < right_share else chore.wrong)))
    return episodes


def demonstrations(seed: int, n: int, right_share: float, tokenizer: Encodes) -> list[Example]:
    """`n` examples (ids int32 [tokens], mask uint8 [tokens]); the mask is 1 on the assistant's tokens only,
    `<|im_end|>` included.
    """
    episodes = draw_episodes(seed, n, right_share)
    observations = run_batch([(chore.files, commands) for chore, commands in episodes])
    return [
        encode_pieces(tokenizer, episode_pieces(chore.instruction, list(zip(commands, replies, strict=True))))
        for (chore, commands), replies in zip(episodes, observations, strict=True)
    ]
