"""rl360: reinforcement-learning post-training of coding agents whose gradients can be accounted for."""

__version__ = "0.1.0"
