"""Scripts that run inside another engine's own environment; nothing here is imported by Headway."""
