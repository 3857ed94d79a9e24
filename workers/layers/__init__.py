"""Building blocks of a transformer, on plain tensors in inference mode."""
