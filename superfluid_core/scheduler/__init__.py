"""The tick scheduler: pure, no clock, no thread, no I/O (scheduler.md)."""
