"""Training: packing, the Megatron backend, supervised warm start, the trainer service and its checkpoints.

Importing this package imports neither torch nor Megatron; the modules which compute do.
"""
