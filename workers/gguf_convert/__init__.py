"""GGUF files as ordinary Hugging Face folders."""
