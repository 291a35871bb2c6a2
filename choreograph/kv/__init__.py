"""Where encodings live: pages of slots, what each encoding is, who holds it, and who sees it where."""
