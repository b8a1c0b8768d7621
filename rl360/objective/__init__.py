"""What a step optimises: filters, advantages, reductions, losses. Pure functions: no I/O, no services, no
torch.distributed. docs/objective.md has every formula, its source and its config field.

`filters`, `advantages`, `gae`, `reductions` and `presets` need numpy at most; `losses`, `corrections` and `kl` torch.
"""
