"""POST /v1/responses, stateless."""
