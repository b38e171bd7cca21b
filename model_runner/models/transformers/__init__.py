"""Models by transformers' own classes, with their attention on the paged KV pool."""
