"""Engines run plans; they hold no policy (engine.md)."""
