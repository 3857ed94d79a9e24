"""Batching policies: siblings that fill one step's draft each in their own way."""
