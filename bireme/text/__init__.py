"""Text and tokens: tokenizer, chat template, incremental detokeniser, stop strings."""
