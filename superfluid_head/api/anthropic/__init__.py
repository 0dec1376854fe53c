"""POST /v1/messages and its count of tokens, in Anthropic's dialect."""
