"""Configuration: what a run computes (`run`) and where the services are (`services`). Imports no torch."""
