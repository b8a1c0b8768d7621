"""The laptop's tiny policy: tokenizer, model initialisation, demonstrations and the warm start."""
