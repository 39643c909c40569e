"""Token ids -> scores: the only code that sees the vocabulary."""
