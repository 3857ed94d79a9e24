"""Headway's cluster side: scheduling, routing and the serving path."""
