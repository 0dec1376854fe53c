"""What heads and nodes share: nouns, protocol, scheduler, placement, engines."""
