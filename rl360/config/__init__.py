"""Configuration: what a run computes (`run`) and where the services are (`services`). Imports no torch."""

from rl360.config.run import RunConfig, frozen_differences
from rl360.config.services import Services, home_dir, load_services

__all__ = ["RunConfig", "Services", "frozen_differences", "home_dir", "load_services"]
