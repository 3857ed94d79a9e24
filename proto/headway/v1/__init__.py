"""Generated messages and stubs of the wire contract. Regenerate with `python proto/generate.py`."""
