"""What a step optimises: filters, advantages, losses. Pure functions: no I/O, no services, no torch.distributed.

`filters` and `advantages` need numpy only; `losses` is the one module here that imports torch.
"""
