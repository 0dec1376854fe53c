"""Traces of requests across head and node: `context` says what a span is, `options` how a program is told, `otlp` sends them.

Only `otlp` knows OpenTelemetry, and it is imported when somebody names a collector.
"""
