"""rl360: RL post-training of coding agents whose gradients can be accounted for. The library never imports prefect."""
