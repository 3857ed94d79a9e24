"""Queue policies: siblings that say who is offered to admission next."""
