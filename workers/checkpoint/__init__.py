"""A model folder on disk: read without pickle, checked in full before any weight is used."""
