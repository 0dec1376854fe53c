"""What engines over other people's libraries have in common."""
