"""The local supervisor: specs of the services, process control, checks before starting, cleaning up afterwards."""
