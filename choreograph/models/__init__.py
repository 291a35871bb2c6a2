"""Hugging Face models, hooked through their attention interface and never forked."""
