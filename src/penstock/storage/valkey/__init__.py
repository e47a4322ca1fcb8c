"""The engine for fleets: a Valkey or Redis server, whose function library makes every transition."""
