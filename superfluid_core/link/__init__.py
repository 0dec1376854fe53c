"""The asyncio shell of the link: TLS, dialling, listening, timers."""
