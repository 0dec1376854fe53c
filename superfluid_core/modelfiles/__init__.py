"""Reading a model without torch: files, configuration, tokenizer, chat template."""
