"""The sans-IO link protocol: bytes in, events out (fleet.md 3 and 4)."""
