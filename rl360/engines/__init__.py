"""Engines: the SGLang launcher and client, the fleet state machine, the gateway client."""
