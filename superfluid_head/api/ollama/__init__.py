"""The routes of Ollama's HTTP API that generate and list."""
