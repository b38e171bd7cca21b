"""Damaged model files: every reader of the product must read one or refuse it by name, within limits."""
