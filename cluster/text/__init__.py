"""Text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings.

Knows nothing of gRPC, the scheduler or the model's weights; imports `tokenizers`, `jinja2` and the
errors of the core.
"""
