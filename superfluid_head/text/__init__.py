"""Text to ids and ids to text."""
